"""Requests and files that are almost right, for fuzz tests."""

from collections.abc import Sequence
from random import Random


def mutated(valid: bytes, random: Random, inserts: Sequence[bytes]) -> bytes:
    """Bytes with some of them changed, removed, repeated, or `inserts` between."""
    data = bytearray(valid)
    for _ in range(random.randrange(1, 8)):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.randrange(30))
        what = random.choice(["change", "remove", "repeat", "insert"])
        if what == "change" and at < len(data):
            data[at] = random.choice([0, 10, 13, 32, 58, 127, 255, random.randrange(256)])
        elif what == "remove":
            del data[at:end]
        elif what == "repeat":
            data[at:at] = data[at:end] * random.randrange(1, 5)
        elif what == "insert":
            data[at:at] = random.choice(inserts)
    return bytes(data)
