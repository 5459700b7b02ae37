"""Which kind of file is what, and the checks of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfdist.lint.findings import Finding, Place
from tfdist.lint.tf_config import check_tf_config
from tfdist.lint.variables import check_environment

KINDS = ("tf_config", "config", "manifest", "script", "environ")
"""What ``--kind`` may be."""

_BY_ENDING = {
    "py": "config",
    "yaml": "manifest",
    "yml": "manifest",
    "sh": "script",
    "bash": "script",
    "sbatch": "script",
    "slurm": "script",
    "env": "environ",
}
_BY_TEXT = (
    (r"#!.*python|.*^def get_config\b", "config"),
    (r"#!|.*^#SBATCH\b", "script"),
    (r".*(^|[{,])\s*['\"]?apiVersion['\"]?\s*:", "manifest"),
    (r"\s*['\"]?\\?[{\[]", "tf_config"),
    (r"\w+=", "environ"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A text to check: `data` as it is on disk; a `kind` of `KINDS`, or what it looks like."""

    name: str
    data: bytes
    kind: str | None = None


def lint(
    sources: Sequence[Source],
    *,
    environ: Mapping[str, str] | None = None,
    replicas: int | None = None,
) -> list[Finding]:
    """Returns what is wrong with files, and with an environment if one is given.

    Manifests are checked together, as one may have the Service that another needs. `replicas` is
    how many the job will have, where that is known.
    """
    found: list[Finding] = []
    manifests: list[tuple[str, str]] = []
    if environ is not None:
        found += check_environment(environ, lambda name: Place(file="environment", path=name))
    for source in sources:
        text, refused = _text(source)
        kind = source.kind or (kind_of(source.name, text) if text is not None else None)
        if text is None or kind is None:
            found.append(refused or _unknown(source))
        elif kind == "manifest":
            manifests.append((text, source.name))
        else:
            found += _check(kind, text, source.name, replicas)
    if manifests:
        from tfdist.lint.manifests import check_manifests

        found += check_manifests(manifests)
    return sorted(dict.fromkeys(found), key=lambda f: (f.place.file, f.place.line or 0))


def kind_of(name: str, text: str) -> str | None:
    """Returns what a file is by its name, and where that says nothing by its text."""
    ending = name.rpartition(".")[2].lower() if "." in name else ""
    if ending in _BY_ENDING:
        return _BY_ENDING[ending]
    if ending == "json":
        return "manifest" if re.search(r'"apiVersion"\s*:', text) else "tf_config"
    if name != "-" and ending not in ("", "txt"):
        return None
    for pattern, kind in _BY_TEXT:
        if re.match(pattern, text, re.DOTALL | re.MULTILINE):
            return kind
    return None


def _check(kind: str, text: str, name: str, replicas: int | None) -> Iterator[Finding]:
    if kind == "tf_config":
        yield from check_tf_config(text.removesuffix("\n"), Place(file=name))
    elif kind == "environ":
        values, lines = read_environ(text)
        yield from check_environment(values, lambda n: Place(file=name, line=lines.get(n), path=n))
    elif kind == "config":
        from tfdist.lint.config_file import check_config_file

        yield from check_config_file(text, name, replicas=replicas)
    else:
        from tfdist.lint.script import check_script

        yield from check_script(text, name)


def read_environ(text: str) -> tuple[dict[str, str], dict[str, int]]:
    """Returns the variables of ``NAME=value`` lines, as ``env`` prints them, and their lines."""
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            values[name], lines[name] = value, number
    return values, lines


def _text(source: Source) -> tuple[str | None, Finding | None]:
    try:
        text = source.data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        received = f"byte {source.data[error.start]:#04x} at position {error.start}"
        return None, _unreadable(source.name, received, "text in UTF-8")
    if "\0" in text:
        received = f"a zero byte at position {text.index(chr(0))}"
        return None, _unreadable(source.name, received, "text in UTF-8")
    return text, None


def _unreadable(name: str, received: str, expected: str) -> Finding:
    return Finding(
        code="LNT001",
        place=Place(file=name),
        received=received,
        expected=expected,
        fix="save it as UTF-8, or name another file",
    )


def _unknown(source: Source) -> Finding:
    return Finding(
        code="LNT002",
        place=Place(file=source.name),
        received="neither a name nor a text that is known",
        expected="TF_CONFIG, a config file, a manifest, a script or an environment",
        fix=f"say what it is: --kind {'|'.join(KINDS)}",
    )
