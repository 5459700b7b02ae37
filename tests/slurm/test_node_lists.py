"""Node lists of every form, with `scontrol show hostnames` as the judge."""

from __future__ import annotations

import random

import pytest

from tests.slurm.cluster import Cluster
from tfdist.cluster.hostlist import compress, expand

LISTS = 300
RNG = random.Random(6)


def number() -> str:
    """A number as it may stand in brackets, with zeros before it or not."""
    return str(RNG.choice((0, 7, 9, 10, 98, 99, 100, RNG.randrange(1200)))).zfill(RNG.randint(1, 5))


def bracket() -> str:
    """Numbers and ranges, the ends of which need not be equally long."""
    parts = []
    for _ in range(RNG.randint(1, 4)):
        low = number()
        high = str(int(low) + RNG.randint(0, 12)).zfill(RNG.choice((1, len(low), 4)))
        parts.append(RNG.choice((low, f"{low}-{high}")))
    return f"[{','.join(parts)}]"


def element() -> str:
    """A name, or one with up to three brackets; Slurm refuses text after the last."""
    word = RNG.choice(("n", "rack", "gpu-", "a1b", "x0", "node.", ""))
    brackets = RNG.choice((0, 1, 1, 1, 2, 3))
    if not brackets:
        return f"{word or 'login'}{RNG.choice(('', number()))}"
    between = RNG.choice(("", "n", "-", "c0"))
    return word + between.join(bracket() for _ in range(brackets))


@pytest.mark.parametrize("kind", ["written at random", "as Slurm writes them"])
def test_lists_are_expanded_as_slurm_expands_them(kind: str, cluster: Cluster) -> None:
    for _ in range(LISTS):
        text = ",".join(element() for _ in range(RNG.randint(1, 4)))
        if kind != "written at random":
            text = shown(cluster, "hostlist", ",".join(expand(text, where=kind)))[0]
        names = shown(cluster, "hostnames", text)
        assert expand(text, where=kind) == names, text
        assert shown(cluster, "hostnames", compress(names)) == names, text


def shown(cluster: Cluster, what: str, text: str) -> list[str]:
    done = cluster.ask("scontrol", "show", what, text)
    assert done.returncode == 0, (text, done.stderr)
    return done.stdout.split()
