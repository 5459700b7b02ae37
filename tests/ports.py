"""Ports for tests that need some that follow each other, whatever other tests hold meanwhile."""

import contextlib
import random

from tfdist.cluster import HeldPort, hold_ports
from tfdist.errors import UsageError

_BAND = range(20_000, 30_000)  # of which `hold_ports` itself takes the last


def in_a_row(count: int) -> list[HeldPort]:
    """Hold free ports that follow each other."""
    for first in random.sample(_BAND[:-count], 100):
        with contextlib.suppress(UsageError):
            return hold_ports(count, among=range(first, first + count))
    raise AssertionError(f"no {count} ports in a row are free")
