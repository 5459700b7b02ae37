"""Parser of schedulers' node lists: ``n[001-010,12],login,rack[1-2]node[3-4]-ib``.

What Slurm expands, `expand` expands to the same names in the same order; text after a bracket,
as in ``n[1-2]-ib``, which Slurm refuses and Intel MPI and DNS names have, is taken too.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence

from tfdist.cluster.address import shown
from tfdist.errors import UsageError

MAX_HOSTS = 1 << 20
"""More names than this are taken for a mistake, before any memory goes to them."""

_FEW = 1000  # more are made into text once, for all names that have them
_MAX_DIGITS = 18
_ELEMENT = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_WITHOUT_RANGES = re.compile(r"[^\[\]]*+(?:\[[0-9]{1,18}\][^\[\]]*+)*+")  # n1,n[2]
_ONE_NUMBER = re.compile(r"\[([0-9]{1,18})\](?=[^\[\],]*+\[)")  # not in the last bracket of a name
_RANGES = re.compile(r"[0-9]{1,18}(?:-[0-9]{1,18})?(?:,[0-9]{1,18}(?:-[0-9]{1,18})?)*+")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_DIGITS = "0123456789"
_Numbers = Sequence[str] | range
_NUMBERS = "numbers and ranges, as in [1-3,7]"
_PAIRS = "brackets in pairs, and a name before and after each comma"
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
    if len(text.split()) > 1 or "(" in text or ")" in text:
        raise _mistake(text, where, "names without spaces or parentheses")
    if _WITHOUT_RANGES.fullmatch(text):
        names = text.replace("[", "").replace("]", "").split(",")
        if "" in names:
            raise _mistake(text, where, "a name before and after each comma")
        return names
    plainer = text if text.count("-") >= text.count("[") else _ONE_NUMBER.sub(r"\1", text)
    *gaps, last = _BRACKETS.split(plainer)  # text, bracket, text, ..., text
    return _all_names(gaps[::2], gaps[1::2], last, text=text, where=where)


def compress(names: Iterable[str]) -> str:
    """Return a short node list that `expand` turns into `names` again, in the same order."""
    parts: list[str] = []
    for prefix, group in itertools.groupby(names, lambda name: name.rstrip(_DIGITS)):
        numbers = [name[len(prefix) :] for name in group]
        if all(0 < len(digits) <= _MAX_DIGITS for digits in numbers):
            parts.append(_compressed(prefix, numbers))
        else:
            parts += [prefix + digits for digits in numbers]
    return ",".join(parts)


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
            )
        counts += [int(match[1])] * times
    return counts


def split(text: str, *, where: str) -> Iterator[str]:
    """Yield the parts of a list between the commas that are outside brackets."""
    end = -1
    for match in _ELEMENT.finditer(text):
        if match.start() != end + 1 or (end >= 0 and text[end] != ","):
            break
        yield match[0]
        end = match.end()
    if end != len(text):
        raise _mistake(text, where, _PAIRS)


def _all_names(
    before: Sequence[str], brackets: Sequence[str], last: str, *, text: str, where: str
) -> list[str]:
    """Return the names of a list from the text before each of its brackets, and the last one."""
    outside = ",".join([*before, last])
    if "[" in outside or "]" in outside:
        raise _mistake(text, where, _PAIRS)
    _check_brackets(brackets, where)
    are_at_ends = text.count("],") + text.endswith("]") == len(brackets)
    are_many = are_at_ends and len(brackets) > 1  # one with many numbers is made sooner by itself
    make = _with_brackets_at_the_end if are_many else _with_brackets_anywhere
    names = make(before, brackets, last, text=text, where=where)
    if "" in names:
        raise _mistake(text, where, _PAIRS)
    return names


def _with_brackets_at_the_end(
    before: Sequence[str], brackets: Sequence[str], last: str, *, text: str, where: str
) -> list[str]:
    """Return the names of a list like ``a[1-3,7],b,c[01-04]``.

    One of a large machine has a bracket for each chassis, tens of thousands: what is done for each
    of them is done for all in one go.
    """
    beginnings = ("".join(before) + last).split(",")  # of names with a bracket, and other names
    insides = list(brackets)
    if len(beginnings) > len(brackets):
        insides = [""] * len(beginnings)
        places = itertools.accumulate(gap.count(",") for gap in before)
        for place, inside in zip(places, brackets, strict=True):
            insides[place] = inside
    parts, joined = insides, ",".join(insides)
    if joined.count(",") >= len(insides):  # a[1-3,7] is a[1-3],a[7]
        counts = [inside.count(",") + 1 for inside in insides]
        beginnings = [*itertools.chain.from_iterable(map(itertools.repeat, beginnings, counts))]
        parts = joined.split(",")
    if joined.count("-") == len(parts):
        names = _all_of_ranges(beginnings, joined)
        if names is not None:
            return names
    ends = map(str.partition, parts, itertools.repeat("-"))
    ranges = [range(int(low), int(high) + 1) if high else (low,) for low, _, high in ends]
    if not all(ranges):
        raise _mistake(f"[{parts[ranges.index(range(0))]}]", where, _NUMBERS)
    if sum(map(len, ranges)) > MAX_HOSTS:
        raise _mistake(text, where, _FEWER)
    widths = map(str.find, parts, itertools.repeat("-"))  # that of the first number of a range
    return [
        begin + str(number).zfill(width)
        for begin, those, width in zip(beginnings, ranges, widths, strict=True)
        for number in those
    ]


def _all_of_ranges(beginnings: Sequence[str], joined: str) -> list[str] | None:
    """Return the names of ``a[1-3],b[7-9]``.

    None where a number has zeros before it, some range has no number, or all have too many.
    """
    try:
        numbers = json.loads(f"[{joined.replace('-', ',')}]")  # what reads numbers fastest
    except ValueError:  # JSON knows no 007
        return None
    lows, highs = numbers[::2], numbers[1::2]
    if any(map(operator.gt, lows, highs)) or sum(highs) - sum(lows) + len(lows) > MAX_HOSTS:
        return None
    ranges = zip(beginnings, lows, highs, strict=True)
    return [f"{begin}{number}" for begin, low, high in ranges for number in range(low, high + 1)]


def _with_brackets_anywhere(
    before: Sequence[str], brackets: Sequence[str], last: str, *, text: str, where: str
) -> list[str]:
    """Return the names of a list like ``a[1-3]-ib,r[1-4]n[1-8]``."""
    *names, prefix = before[0].split(",")
    known: dict[str, _Numbers] = {}  # thousands of racks have the same numbers
    pieces: list[str] = []  # of a name with several brackets, those that have been seen
    insides: list[str] = []
    ends: list[str] = []  # of such names
    ends_of: list[str] = []  # what they were made of, which racks in a row often share
    for inside, gap in zip(brackets, [*before[1:], last + ","], strict=True):
        numbers = known.get(inside)
        if numbers is None:
            numbers = known[inside] = _numbers(inside, where)
        rest, comma, following = gap.rpartition(",")
        if comma and not insides and "," not in rest:
            names += [f"{prefix}{number}{rest}" for number in numbers]
        else:
            pieces.append(prefix)
            insides.append(inside)
            if comma:
                suffix, *plain = rest.split(",")
                begin, *after = *pieces, suffix
                if (made_of := after + insides) != ends_of:
                    ends, ends_of = _ends(after, [known[i] for i in insides], where=where), made_of
                names += [begin + end for end in ends]
                names += plain
                pieces, insides = [], []
        prefix = following if comma else gap
        if len(names) > MAX_HOSTS:
            raise _mistake(text, where, _FEWER)
    return names


def _check_brackets(brackets: Sequence[str], where: str) -> None:
    """Refuse what is in brackets and no list of numbers; one look is enough for all of them."""
    if not _RANGES.fullmatch(",".join(brackets)):
        wrong = next((inside for inside in brackets if not _RANGES.fullmatch(inside)), "")
        raise _mistake(f"[{wrong}]", where, _NUMBERS)


def _ends(after: Sequence[str], values: Sequence[_Numbers], *, where: str) -> list[str]:
    """Return what may follow a name's beginning: a number of each bracket, and the text after it.

    The last bracket varies fastest and the first next.
    """
    if math.prod(map(len, values)) > MAX_HOSTS:
        raise _mistake("][".join(after), where, _FEWER)
    *outer, innermost = values
    begins = [""]
    for numbers, following in zip(outer, after[:-1], strict=True):
        begins = [f"{begin}{number}{following}" for number in numbers for begin in begins]
    return [f"{begin}{number}{after[-1]}" for begin in begins for number in innermost]


def _numbers(inside: str, where: str) -> _Numbers:
    """Return the numbers of one bracket, such as ``1-3,07``, as they are to be written."""
    low, _, high = inside.partition("-")
    if low[0] != "0" and high.isdecimal() and "," not in low:  # as most of them are
        first, last = int(low), int(high)
        if 0 <= last - first < _FEW:
            return range(first, last + 1)
    if not high:
        return inside.split(",")
    parts = inside.split(",")
    made: list[str] = []
    for part in parts:
        low, dash, high = part.partition("-")
        made.append(low)
        if not dash:
            continue
        first, last = int(low), int(high)
        if first > last:
            raise _mistake(f"[{inside}]", where, _NUMBERS)
        if last - first > MAX_HOSTS - len(made):
            raise _mistake(f"[{inside}]", where, _FEWER)
        if last - first > 1:
            _add_range(made, first + 1, last - 1, len(low))
        if last > first:
            made.append(str(last).zfill(len(low)))
    return made


def _add_range(made: list[str], low: int, high: int, width: int) -> None:
    """Add the numbers of a range, those of the same length at once: their zeros are the same."""
    while low <= high:
        digits = len(str(low))
        until = min(high, 10**digits - 1)
        zeros = "0" * (width - digits)
        numbers = map(str, range(low, until + 1))
        made += [zeros + number for number in numbers] if zeros else numbers
        low = until + 1


def _compressed(prefix: str, numbers: Iterable[str]) -> str:
    runs: list[tuple[str, int]] = []  # how each run begins, and its last number
    for digits in numbers:
        if runs and digits == str(runs[-1][1] + 1).zfill(len(runs[-1][0])):
            runs[-1] = (runs[-1][0], int(digits))
        else:
            runs.append((digits, int(digits)))
    ranges = [
        low if int(low) == high else f"{low}-{str(high).zfill(len(low))}" for low, high in runs
    ]
    if len(runs) == 1 and ranges[0] == runs[0][0]:
        return prefix + ranges[0]
    return f"{prefix}[{','.join(ranges)}]"


def _mistake(text: str, where: str, expected: str) -> UsageError:
    return UsageError(
        where,
        received=shown(text),
        expected=f"a node list with {expected}",
        fix="write it as in n[001-010,12],login",
    )
