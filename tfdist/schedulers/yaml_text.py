"""Manifests as YAML that every reader takes alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

# Everything else is quoted: readers differ in what they take for a number or a truth value, as
# 1e3, 0o17, 12:30 or y.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]+( [A-Za-z0-9_./-]+)*")
_WORDS = {"yes", "no", "on", "off", "true", "false", "null"}


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True  # labels occur in several places, and are written out in each


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"'
    if "\n" in text:
        style = "|"
    elif _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        style = ""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def text_of(documents: Sequence[Mapping[str, Any]], *, comments: Sequence[str] = ()) -> str:
    """Returns the documents in one file, in their order, after lines of comment."""
    made = [
        yaml.dump(dict(d), Dumper=_Dumper, sort_keys=False, width=1_000_000, allow_unicode=False)
        for d in documents
    ]
    return "".join(f"# {line}\n" for line in comments) + "---\n".join(made)
