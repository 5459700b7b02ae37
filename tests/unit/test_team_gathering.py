"""Host 0 while the other hosts come: who is not like it, told once and in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tfdist.errors import UsageError
from tfdist.launch.multihost.hosts import decided_group
from tfdist.launch.multihost.hub import Differs, MessageReceived, News, PeerJoined
from tfdist.launch.multihost.leader import Team
from tfdist.launch.options import parse

WITH_TOKEN = {"TFDIST_RENDEZVOUS_TOKEN": "a secret that nobody must see"}
OLD_NUMPY = (
    "numpy 1.0 there, 2.4 here",
    "argument 1 --a there, --b here",
    "--grace_s 1 there, 2 here",
)
RESTARTS = ("--max_restarts 2 there, 1 here",)


class Arrivals:
    """A hub that has news in parts, the signals, the screen and the clock of host 0 at once."""

    turned_away = ()
    next_s = 0.0

    def __init__(self, fd: int, *parts: list[News]) -> None:
        self.fd = fd
        self.parts = list(parts)
        self.present: frozenset[int] = frozenset()
        self.now_s = 0.0
        self.said: list[str] = []

    def fileno(self) -> int:
        return self.fd

    def turn(self) -> None:
        self.now_s += 1.0

    def take_news(self) -> list[News]:
        news = self.parts.pop(0) if self.parts else []
        self.present |= {event.rank for event in news if isinstance(event, PeerJoined)}
        return news

    def read(self) -> list[int]:
        return []

    def say(self, text: str) -> None:
        self.said.append(text)

    def flush(self) -> None: ...


Gather = Callable[..., Arrivals]


@pytest.fixture
def gather() -> Iterator[Gather]:
    """Gathers the hosts a to e while these news come in."""
    readable, other_end = os.pipe()
    os.close(other_end)  # what is watched is ready at once

    def run(*parts: list[News]) -> Arrivals:
        options, group = decided_group(
            parse(["--hosts", "a,b,c,d,e", "--node_rank", "0", "x.py"]), WITH_TOKEN
        )
        world = Arrivals(readable, *parts)
        team = Team(
            group, world, options=options, strategy="multiworker", screen=world,  # type: ignore[arg-type]
            signals=world, clock=lambda: world.now_s,  # type: ignore[arg-type]
        )  # fmt: skip
        team.gather()
        return world

    yield run
    os.close(readable)


def told(gather: Gather, *parts: list[News]) -> str:
    with pytest.raises(UsageError) as error:
        gather(*parts)
    return str(error.value)


def ready(*ranks: int) -> list[News]:
    return [MessageReceived(rank=rank, message={"ready": [1]}) for rank in ranks]


def test_all_hosts_that_are_there_may_begin(gather: Gather) -> None:
    assert gather(ready(2), ready(1, 3), ready(4)).now_s == 3.0


def test_every_host_that_differs_is_named_with_what_it_differs_in(gather: Gather) -> None:
    unlike = [Differs(rank=3, what=OLD_NUMPY)], [Differs(rank=1, what=RESTARTS)]
    more = [Differs(rank=4, what=OLD_NUMPY)]
    assert told(gather, *unlike, [*more, PeerJoined(rank=2)]).startswith(
        "hosts b (rank 1), d (rank 3), e (rank 4): received b: "
        "--max_restarts 2 there, 1 here; d, e: numpy 1.0 there, 2.4 here; "
        "argument 1 --a there, --b here; and 1 more; expected the same as on a (rank 0). Fix: "
    )


def test_where_all_differ_in_the_same_it_is_said_once(gather: Gather) -> None:
    every = [Differs(rank=rank, what=RESTARTS) for rank in (4, 3, 2, 1)]
    assert told(gather, every).startswith(
        "hosts b (rank 1), c (rank 2), d (rank 3), e (rank 4): received "
        "--max_restarts 2 there, 1 here; expected "
    )


def test_a_rank_that_no_host_has_is_named_as_one(gather: Gather) -> None:
    strange = Differs(rank=7, what=("rank 7 there, 0 to 4 here",))
    alike: list[News] = [PeerJoined(rank=rank) for rank in (1, 2, 3, 4)]
    assert told(gather, [strange, *alike]).startswith("rank 7: received rank 7 there, 0 to 4 here;")


def test_who_is_late_is_not_waited_for_where_another_differs(gather: Gather) -> None:
    said = told(gather, [Differs(rank=1, what=RESTARTS)], [], [PeerJoined(rank=2)])
    assert said.startswith("host b (rank 1): received --max_restarts 2 there, 1 here; expected ")
