"""Amounts as people write them: memory, times, counts."""

from __future__ import annotations

import re

from tfdist.errors import UsageError

_MIB = {"M": 1, "Mi": 1, "MB": 1, "G": 1024, "Gi": 1024, "GB": 1024, "T": 1024**2, "Ti": 1024**2}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MOST = 10**9


def count(text: str, *, flag: str, least: int = 1, most: int = _MOST) -> int:
    """Returns an integer from `least` to `most`; `UsageError` names the flag."""
    if re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= most:
        return int(text)
    expected = f"an integer from {least} to {most}"
    fix = f"write --{flag} {least}, for example"
    raise UsageError(f"--{flag}", received=repr(text), expected=expected, fix=fix)


def mebibytes(text: str, *, flag: str = "memory") -> int:
    """Returns the MiB of ``16G``, ``16Gi``, ``512M``: G is 1024 M, as Slurm has it."""
    match = re.fullmatch("([0-9]{1,9})([A-Za-z]{1,2})", text)
    if match and match[2] in _MIB and int(match[1]):
        return int(match[1]) * _MIB[match[2]]
    expected = "a number and M, G or T"
    fix = f"write --{flag} 16G, for example"
    raise UsageError(f"--{flag}", received=repr(text), expected=expected, fix=fix)


def seconds(text: str, *, flag: str = "time") -> int:
    """Returns the seconds of ``90m``, ``4h``, ``2d``, ``HH:MM:SS`` or ``D-HH:MM:SS``."""
    if (match := re.fullmatch("([0-9]{1,6})([smhd])", text)) and int(match[1]):
        return int(match[1]) * _SECONDS[match[2]]
    clock = re.fullmatch("(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5]?[0-9]):([0-5]?[0-9])", text)
    if clock:
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        total = 86_400 * days + 3600 * hours + 60 * minutes + rest
        if total:
            return total
    expected, fix = "30m, 4h, 2d, HH:MM:SS or D-HH:MM:SS", f"write --{flag} 4h, for example"
    raise UsageError(f"--{flag}", received=repr(text), expected=expected, fix=fix)


def clock_text(total_s: int) -> str:
    """Returns ``D-HH:MM:SS``, which Slurm cannot misread, as it does a number alone."""
    days, rest = divmod(total_s, 86_400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
