"""Node lists of every form, with `scontrol show hostnames` as the judge."""

import random

import pytest

from tests.slurm.cluster import Cluster
from tfdist.cluster.address import expand_hosts

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
def test_lists_are_expanded_as_slurm_expands_them(kind, cluster):
    lists = Lists(kind)
    for _ in range(LISTS):
        text = lists.text()
        if kind != "written at random":
            text = shown(cluster, "hostlist", ",".join(expand_hosts(text, where=kind)))[0]
        names = shown(cluster, "hostnames", text)
        assert expand_hosts(text, where=kind) == names, text


def shown(cluster: Cluster, what: str, text: str) -> list[str]:
    done = cluster.ask("scontrol", "show", what, text)
    assert done.returncode == 0, (text, done.stderr)
    return done.stdout.split()
