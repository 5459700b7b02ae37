"""Parser of schedulers' node lists: ``n[001-010,12],login,rack[1-2]node[3-4]-ib``.

What Slurm expands, `expand` expands to the same names in the same order; text after a bracket,
as in ``n[1-2]-ib``, which Slurm refuses and Intel MPI and DNS names have, is taken too.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from tfdist.cluster.address import shown
from tfdist.errors import UsageError

MAX_HOSTS = 1 << 20
"""More names than this are taken for a mistake, before any memory goes to them."""

_ELEMENT = re.compile(r"(?:[^,\[\]]++|\[[^\[\]]*+\])++")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGES = re.compile(r"[0-9]{1,18}(?:-[0-9]{1,18})?(?:,[0-9]{1,18}(?:-[0-9]{1,18})?)*+")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_NUMBERS = "numbers and ranges, as in [1-3,7]"
_FEWER = f"at most {MAX_HOSTS} names in all"


def expand(text: str, *, where: str) -> list[str]:
    """Return the names in a node list, in its order; repeated names stay.

    The numbers of a range have at least as many digits as its first one. Of several brackets
    in one name the last varies fastest and the first next, as Slurm has it: ``[a][b][c]``
    loops over b, in it a, in it c.

    Raises:
        UsageError: `text` is no node list; the message begins with `where`.
    """
    text = text.strip()
    if re.search(r"[\s()]", text):
        raise _mistake(text, where, "names without spaces or parentheses")
    names: list[str] = []
    for element in split(text, where=where):
        names += _names(element, where) if "[" in element else [element]
        if len(names) > MAX_HOSTS:
            raise _mistake(text, where, _FEWER)
    return names


def split(text: str, *, where: str) -> Iterator[str]:
    """Yield the parts of a list between the commas that are outside brackets."""
    end = -1
    for match in _ELEMENT.finditer(text):
        if match.start() != end + 1 or (end >= 0 and text[end] != ","):
            break
        yield match[0]
        end = match.end()
    if end != len(text):
        raise _mistake(text, where, "brackets in pairs, and a name before and after each comma")


def expand_counts(text: str, *, where: str) -> list[int]:
    """Return the number for each node of a list like ``2(x3),1``, which is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _COUNT.fullmatch(part)
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= times <= MAX_HOSTS - len(counts):
            raise UsageError(
                where,
                received=shown(text),
                expected="a number for each node, as in 2(x3),1",
                fix=f"correct {shown(part)}, or start the job again",
                code="bad-node-list",
            )
        counts += [int(match[1])] * times
    return counts


def _names(element: str, where: str) -> list[str]:
    """Return the names of one element with brackets, as ``rack[1-2]node[3-4]-ib``."""
    begin, *parts = _BRACKETS.split(element)
    brackets = [_numbers(inside, where) for inside in parts[::2]]
    if math.prod(map(len, brackets)) > MAX_HOSTS:
        raise _mistake(element, where, _FEWER)
    *outer, last = zip(brackets, parts[1::2], strict=True)
    begins = [begin]
    for numbers, after in outer:
        begins = [f"{begin}{number}{after}" for number in numbers for begin in begins]
    numbers, end = last
    return [f"{begin}{number}{end}" for begin, number in itertools.product(begins, numbers)]


def _numbers(inside: str, where: str) -> list[str]:
    """Return the numbers of one bracket, such as ``1-3,07``, as they are to be written."""
    if not _RANGES.fullmatch(inside):
        raise _mistake(f"[{inside}]", where, _NUMBERS)
    made: list[str] = []
    for part in inside.split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if first > last:
            raise _mistake(f"[{inside}]", where, _NUMBERS)
        if last - first >= MAX_HOSTS - len(made):
            raise _mistake(f"[{inside}]", where, _FEWER)
        made += [str(number).zfill(len(low)) for number in range(first, last + 1)]
    return made


def _mistake(text: str, where: str, expected: str) -> UsageError:
    return UsageError(
        where,
        received=shown(text),
        expected=f"a node list with {expected}",
        fix="write it as in n[001-010,12],login",
        code="bad-node-list",
    )
