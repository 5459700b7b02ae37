"""The ports that a firewall lets through, as a user writes them: ``20000-20100``."""

from __future__ import annotations

import re

from tfdist.cluster.address import shown
from tfdist.errors import UsageError

_FORM = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


def parse_ports(value: str, *, where: str) -> range:
    """Returns the ports of ``first-last``, both of them included.

    Raises:
        UsageError: no such range; the message begins with `where`.
    """
    found = _FORM.fullmatch(value.strip())
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if 1 <= first <= last <= 65_535:
        return range(first, last + 1)
    expected, fix = "first-last, ports from 1 to 65535", "write 20000-20100, for example"
    raise UsageError(where, received=shown(value), expected=expected, fix=fix)


def as_text(ports: range) -> str:
    """Returns a range as `parse_ports` reads it."""
    return f"{ports.start}-{ports.stop - 1}"
