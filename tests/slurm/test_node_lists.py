"""Node lists of every form, with `scontrol show hostnames` as the judge."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.slurm.cluster import Cluster
from tfdist.cluster.hostlist import compress, expand

LISTS = 300


class Lists:
    """Lists at random, the same in each run."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def text(self) -> str:
        return ",".join(self._element() for _ in range(self.random.randint(1, 4)))

    def _element(self) -> str:
        """A name, or one with up to three brackets; Slurm refuses text after the last."""
        word = self.random.choice(("n", "rack", "gpu-", "a1b", "x0", "node.", ""))
        brackets = self.random.choice((0, 1, 1, 1, 2, 3))
        if not brackets:
            return f"{word or 'login'}{self.random.choice(('', self._number()))}"
        between = self.random.choice(("", "n", "-", "c0"))
        return word + between.join(self._bracket(4 // brackets) for _ in range(brackets))

    def _bracket(self, parts: int) -> str:
        """Numbers and ranges, the ends of which need not be equally long."""
        made = []
        for _ in range(self.random.randint(1, parts)):
            low = self._number()
            high = str(int(low) + self.random.randint(0, 3 * parts))
            high = high.zfill(self.random.choice((1, len(low), 4)))
            made.append(self.random.choice((low, f"{low}-{high}")))
        return f"[{','.join(made)}]"

    def _number(self) -> str:
        """A number as it may stand in brackets, with zeros before it or not."""
        number = self.random.choice((0, 7, 9, 10, 98, 99, 100, self.random.randrange(1200)))
        return str(number).zfill(self.random.randint(1, 5))


@pytest.mark.parametrize("kind", ["written at random", "as Slurm writes them"])
def test_lists_are_expanded_as_slurm_expands_them(kind: str, cluster: Cluster) -> None:
    lists = Lists(kind)
    for _ in range(LISTS):
        text = lists.text()
        if kind != "written at random":
            text = shown(cluster, "hostlist", ",".join(expand(text, where=kind)))[0]
        names = shown(cluster, "hostnames", text)
        assert expand(text, where=kind) == names, text
        assert shown(cluster, "hostnames", compress(names)) == names, text


@pytest.mark.alone
def test_a_list_of_forty_thousand_brackets_takes_less_than_50_ms() -> None:
    """As many nodes as the largest machine of the TOP500, four in each chassis."""
    text = ",".join(f"r{number}n[{4 * number}-{4 * number + 3}]" for number in range(39_744))
    count = 158_976
    least_s, writing_s = took_s(
        lambda: expand(text, where="X"), lambda: [f"n{n:06}" for n in range(count)]
    )
    # On a slow machine: twice what it takes to write the names.
    assert least_s < 0.05 or least_s < 2 * writing_s
    assert len(expand(text, where="X")) == count


def took_s(*works: Callable[[], object]) -> list[float]:
    """The least of some times of each: other work on the machine only ever makes it longer.

    One after the other in turn, so that they meet the same machine.
    """
    times_s: list[list[float]] = [[] for _ in works]
    for _ in range(20):
        for work, found_s in zip(works, times_s, strict=True):
            start_s = time.process_time()
            work()
            found_s.append(time.process_time() - start_s)
    return [min(found_s) for found_s in times_s]


def shown(cluster: Cluster, what: str, text: str) -> list[str]:
    done = cluster.ask("scontrol", "show", what, text)
    assert done.returncode == 0, (text, done.stderr)
    return done.stdout.split()
