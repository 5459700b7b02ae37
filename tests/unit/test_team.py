"""Host 0's view of the tasks of others, without a network: what counts, and what does not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import Task
from tfdist.errors import EXIT_PEER_MISSING
from tfdist.launch.events import Beat, Ended, Raised, Started, StopRequest
from tfdist.launch.multihost.hub import Lost, MessageReceived
from tfdist.launch.multihost.leader import TeamProcesses
from tfdist.launch.options import Program
from tfdist.launch.plan import ProcessSpec

W0, W1, W2 = (Task("worker", index) for index in range(3))
NOW_S = 100.0


class World:
    """A hub, the processes of host 0, a screen and a team at once. W1 and W2 are on host 1."""

    def __init__(self) -> None:
        self.host_of = {W0: 0, W1: 1, W2: 1}
        self.present = frozenset({1, 2})
        self.next_s = NOW_S + 0.5
        self.hub = self
        self.news: list[Any] = []
        self.sent: list[tuple[int, Any]] = []
        self.here: list[Any] = []
        self.signals_here: list[tuple[Task, int]] = []
        self.lines: dict[Task, tuple[str, ...]] = {}
        self.ready_ranks: list[int] = []
        self.waited_s: list[float] = []
        self.processes = TeamProcesses(self, self, screen=self, clock=lambda: NOW_S)  # type: ignore[arg-type]

    def starts(self, task: Task) -> None:
        spec = ProcessSpec(
            task=task, program=Program(), argv=(), env={}, added=(), title="",
            log_path=Path(f"{task}.log"),
        )  # fmt: skip
        self.processes.start(spec)

    def hears(self, message: Any, *, rank: int = 1) -> list[Any]:
        self.news.append(MessageReceived(rank=rank, message=message))
        return list(self.processes.wait(None))

    # the hub and the team

    def fileno(self) -> int:
        return 0

    def turn(self) -> None: ...

    def take_news(self) -> list[Any]:
        news, self.news = self.news, []
        return news

    def send(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))

    def name(self, rank: int) -> str:
        return f"host{rank}"

    def lost(self, rank: int) -> None: ...

    def ready(self, rank: int, message: Any) -> None:
        self.ready_ranks.append(rank)

    # the processes of host 0

    def watch(self, fd: int) -> None: ...

    def wait(self, timeout_s: float) -> list[Any]:
        self.waited_s.append(timeout_s)
        here, self.here = self.here, []
        return here

    def signal(self, task: Task, signum: int) -> None:
        self.signals_here.append((task, signum))

    def state_of(self, task: Task) -> str:
        return "R"

    # the screen

    def told(self, task: Task, lines: tuple[str, ...]) -> None:
        self.lines[task] = lines

    def say(self, text: str) -> None: ...


@pytest.fixture
def world() -> World:
    made = World()
    made.starts(W1)
    return made


def ended(task: Task = W1, **more: Any) -> dict[str, Any]:
    known = {"event": "ended", "task": str(task), "at_s": 2.0, "status": 3, "cause": ""}
    return {**known, "lines": ["last"], **more}


def test_a_task_is_started_signalled_and_ended_where_it_is(world: World) -> None:
    assert world.sent == [(1, {"start": "worker-1", "log": "worker-1.log"})]
    world.processes.signal(W1, signal.SIGTERM)
    world.processes.signal(W0, signal.SIGTERM)
    assert world.sent[1:] == [(1, {"signal": "worker-1", "number": 15})]
    assert world.signals_here == [(W0, 15)]
    assert world.hears(ended()) == [Ended(task=W1, status=3, at_s=NOW_S - 2)]
    assert world.lines[W1] == ("last",)
    world.processes.signal(W1, signal.SIGTERM)  # it is over: its number may be another's
    assert len(world.sent) == 2


def test_what_a_host_says_of_the_tasks_of_others_is_left_out(world: World) -> None:
    assert world.hears(ended(), rank=2) == []
    assert world.hears(ended(W0), rank=2) == []
    assert world.hears(ended(W2)) == []  # not started
    assert world.hears({"states": {"worker-1": "T"}, "mute": []}, rank=2) == []
    assert world.processes.state_of(W1) == "S"


def test_a_host_that_is_gone_is_the_end_of_its_tasks_and_starts_none(world: World) -> None:
    world.news.append(Lost(rank=1, cause="no word for 5 s"))
    gone = Ended(
        task=W1, status=EXIT_PEER_MISSING, at_s=NOW_S,
        cause="host host1 is gone: no word for 5 s",
    )  # fmt: skip
    assert world.processes.wait(None) == [gone]
    assert not world.processes.can_start(W1)
    assert world.processes.can_start(W0)
    world.starts(W2)  # while it has come back, to be ready for the next attempt
    (end,) = world.processes.wait(None)
    assert (end.task, end.status) == (W2, EXIT_PEER_MISSING)


def test_requests_to_stop_that_come_together_count_once(world: World) -> None:
    world.here = [StopRequest(signum=15)]
    world.news.append(MessageReceived(rank=1, message={"asked": 15}))
    assert world.processes.wait(None) == [StopRequest(signum=15)]
    assert world.hears({"asked": 15}, rank=2) == []
    assert world.hears({"asked": 15}, rank=2) == [StopRequest(signum=15)]  # it means it


def test_it_wakes_in_time_for_the_beats_of_the_hosts(world: World) -> None:
    world.processes.wait(None)
    world.processes.wait(0.2)
    world.processes.wait(100)
    assert world.waited_s == [0.5, 0.2, 0.5]


def test_a_host_that_is_ready_is_taken_down(world: World) -> None:
    world.hears({"ready": [1]}, rank=2)
    assert world.ready_ranks == [2]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(["event", "asked", "states", "mute", "lines", "task", "at_s", "status"]),
        JSON | st.sampled_from(["ended", "started", "beat", "raised", "worker-1", 15]),
    )
)
def test_what_makes_no_sense_changes_nothing(message: dict[str, Any]) -> None:
    world = World()
    world.starts(W1)
    for event in world.hears(message):
        assert isinstance(event, Started | Beat | Raised | Ended | StopRequest)
