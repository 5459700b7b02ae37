"""Reading the text of TF_CONFIG as JSON, and saying what is wrong when it is not JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable

from tfdist.cluster.address import shown, shown_json
from tfdist.errors import UsageError

_MAX_SHOWN_CHARS = 1000
_AROUND_CHARS = 30
_SINGLE_QUOTES = "names in single quotes, which is Python and not JSON"
_DOUBLE_QUOTES = "JSON, which has double quotes"
_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
_PYTHON_WORD = re.compile(r"\b(?:None|True|False)\b")


def parse_object(text: str | bytes, *, where: str) -> dict[str, object]:
    """Returns the JSON object in `text`; `UsageError` names the mistake if there is none."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    try:
        value = _loads(text)
    except RecursionError:
        fix = "write the object that TensorFlow documents, three levels deep"
        expected = "a JSON object of a few levels"
        raise UsageError(
            where, received="deep nesting", expected=expected, fix=fix, code="TFC004"
        ) from None
    except _DuplicateKeyError as error:
        received = f"the key {shown(error.key)} twice in one object"
        fix = "join the two, or take one out"
        raise UsageError(
            where, received=received, expected="each key once", fix=fix, code="TFC003"
        ) from None
    except ValueError as error:
        raise _not_json(text, error, where=where) from None
    if isinstance(value, dict):
        return value
    raise _repaired(text, where=where) or UsageError(
        where,
        received=shown_json(value),
        expected="a JSON object",
        fix='write {"cluster": {...}, "task": {...}}',
        code="TFC004",
    )


class _DuplicateKeyError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Makes an object of `pairs`, where json itself would drop all but the last of a key."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return made


def _loads(text: str) -> object:
    return json.loads(text, object_pairs_hook=_unique)


def _not_json(text: str, error: ValueError, *, where: str) -> UsageError:
    repaired = _repaired(text, where=where)
    if repaired is not None:
        return repaired
    if isinstance(error, json.JSONDecodeError):
        start = max(0, error.pos - _AROUND_CHARS)
        around = shown(text[start : error.pos + _AROUND_CHARS])
        received = f"{around} ({error.msg} at character {error.pos + 1})"
    else:
        received = shown(text)
    fix = "correct it there; json.dumps in Python or jq on the command line write valid JSON"
    return UsageError(where, received=received, expected="a JSON object", fix=fix, code="TFC001")


def _repaired(text: str, *, where: str) -> UsageError | None:
    """Returns the error with the right text in it, when the mistake is a usual one of quoting."""
    for received, expected, repair in _REPAIRS:
        try:
            value = _loads(repair(text.strip()))
        except (ValueError, RecursionError, _DuplicateKeyError):
            continue
        if isinstance(value, dict):
            right = json.dumps(value)
            if len(right) > _MAX_SHOWN_CHARS:
                right = right[:_MAX_SHOWN_CHARS] + "..."
            fix = f"{where}={shlex.quote(right)}"
            return UsageError(where, received=received, expected=expected, fix=fix, code="TFC002")
    return None


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _from_python(text: str) -> str:
    return _PYTHON_WORD.sub(lambda word: _JSON_WORDS[word[0]], text.replace("'", '"'))


_REPAIRS: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    (
        "an object in one more pair of quotes, which belong to the value",
        "the JSON object itself",
        _unquoted,
    ),
    (_SINGLE_QUOTES, _DOUBLE_QUOTES, lambda text: text.replace("'", '"')),
    (_SINGLE_QUOTES, _DOUBLE_QUOTES, _from_python),
    (
        "quotes with backslashes before them",
        "JSON, whose quotes have none",
        lambda text: _unquoted(text).replace('\\"', '"'),
    ),
)
