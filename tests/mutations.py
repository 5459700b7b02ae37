"""Requests and checkpoints that are almost right, for fuzz tests."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

from tfdist.checkpoint import format as format_module

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 64, 1 << 31, 1 << 63, 10**30, 1e308, float("nan")])
    | st.sampled_from(["", ".", "../p", "weights/0", "object"])
    | st.integers()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


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


def forged(directory: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest of a checkpoint as somebody does who computes its checksum."""
    file = directory / "manifest.json"
    body = json.loads(file.read_text())
    del body["manifest_sha256"]
    change(body)
    body["manifest_sha256"] = format_module._checksum(body)
    file.write_text(json.dumps(body))


def replacing_at(path: Sequence[int], value: Any) -> Callable[[Any], None]:
    """Return a function that puts `value` somewhere into a tree of JSON, as `path` chooses."""

    def change(body: Any) -> None:
        for number in path:
            keys = list(body) if isinstance(body, dict) else list(range(len(body)))
            key = keys[number % len(keys)]
            if number == path[-1] or not (isinstance(body[key], dict | list) and body[key]):
                break
            body = body[key]
        else:
            key = next(iter(body))
        body[key] = value

    return change
