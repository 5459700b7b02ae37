"""Host 0 without a network: who it begins with, and what counts of what the others tell it."""

import json
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, PropertyMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusal
from tfdist.cluster import Task
from tfdist.errors import EXIT_FAILED, EXIT_PEER_MISSING, EXIT_USAGE, UsageError
from tfdist.launch import job
from tfdist.launch.events import (
    AskForStacks,
    Beat,
    Ended,
    Event,
    KillOne,
    Raised,
    ShowFailure,
    Signal,
    Start,
    Started,
    StopRequest,
)
from tfdist.launch.messages import decode_action, encode_action
from tfdist.launch.multihost.hosts import decided_group
from tfdist.launch.multihost.leader import Team
from tfdist.launch.multihost.node import Node
from tfdist.launch.multihost.rendezvous import Differs, Lost, MessageReceived, News, PeerJoined
from tfdist.launch.options import parse

W0, W1, W2 = (Task("worker", index) for index in range(3))
NOW_S = 100.0
STOP = {"event": "stoprequest", "signum": 15}


class World:
    """Host 0 with its processes, a hub with news, and a screen. W1 and W2 are on host 1."""

    def __init__(self) -> None:
        self.news: list[Any] = []
        self.here: list[Any] = []
        self.hub = Mock(present=frozenset({1, 2}), next_s=NOW_S + 0.5)
        self.hub.take_news.side_effect = lambda: [self.news.pop(0) for _ in list(self.news)]
        self.local, self.screen = Mock(), Mock()
        self.local.wait.side_effect = lambda limit_s: [self.here.pop(0) for _ in list(self.here)]
        group = Mock(hosts=("host0", "host1", "host2"))
        part = Mock(group=group, screen=self.screen, processes=self.local)
        self.processes = Team(part, self.hub, clock=lambda: NOW_S)
        self.processes.host_of = {W0: 0, W1: 1, W2: 1}

    @property
    def sent(self) -> list[tuple[int, Any]]:
        return [call.args for call in self.hub.send.call_args_list]

    def starts(self, task: Task) -> None:
        assert self.processes.perform(Start(task)) is None

    def hears(self, message: Any, *, rank: int = 1) -> list[Any]:
        self.news.append(MessageReceived(rank=rank, message=message))
        return list(self.processes.wait(None))


@pytest.fixture
def world():
    made = World()
    made.starts(W1)
    return made


def ended(task: Task = W1, **more: Any) -> dict[str, Any]:
    known = {"event": "ended", "task": str(task), "at_s": 2.0, "status": 3, "cause": ""}
    return {**known, "lines": ["last"], **more}


def test_a_task_is_started_signalled_and_ended_where_it_is(world):
    assert world.sent == [(1, {"action": "start", "task": "worker-1", "restart": 0})]
    world.processes.perform(Signal(W1, signal.SIGTERM))
    world.processes.perform(Signal(W0, signal.SIGTERM))
    assert world.sent[1:] == [(1, {"action": "signal", "task": "worker-1", "signum": 15})]
    world.local.perform.assert_called_once_with(Signal(W0, 15))
    assert world.hears(ended()) == [Ended(task=W1, status=3, at_s=NOW_S - 2)]
    world.screen.keep_last_lines.assert_called_once_with(W1, ("last",))


@pytest.mark.parametrize(
    "action",
    [
        Start(W1, restart=2),
        Signal(W1, signal.SIGTERM),
        KillOne(W1),
        AskForStacks(W1),
        ShowFailure(W1, "exit code 3", (W1, W2)),
    ],
)
def test_an_action_arrives_as_it_was_sent(action):
    assert decode_action(json.loads(json.dumps(encode_action(action)))) == action


def test_what_a_host_says_of_the_tasks_of_others_is_left_out(world):
    assert world.hears(ended(), rank=2) == []
    assert world.hears(ended(W0), rank=2) == []
    assert world.hears(ended(W2)) == []  # not started
    assert world.hears({"states": {"worker-1": "T"}}, rank=2) == []
    assert world.processes.state_of(W1) == "S"


def test_a_host_that_is_gone_is_the_end_of_its_tasks_and_starts_none(world):
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


def test_requests_to_stop_that_come_together_count_once(world):
    world.here = [StopRequest(signum=15)]
    world.news.append(MessageReceived(rank=1, message=STOP))
    assert world.processes.wait(None) == [StopRequest(signum=15)]
    assert world.hears(STOP, rank=2) == []
    assert world.hears(STOP, rank=2) == [StopRequest(signum=15)]  # it means it


def test_it_wakes_in_time_for_the_beats_of_the_hosts(world):
    world.processes.wait(None)
    world.processes.wait(0.2)
    world.processes.wait(100)
    assert [call.args for call in world.local.wait.call_args_list] == [(0.5,), (0.2,), (0.5,)]


def test_the_other_hosts_are_told_that_the_launcher_of_host_0_has_failed(monkeypatch):
    team = Mock()
    team.gather.return_value = None
    team.roll_call.side_effect = OSError("a disk that is full")
    monkeypatch.setattr(job, "Team", Mock(return_value=team))
    monkeypatch.setattr(job, "_hub", Mock())
    with pytest.raises(OSError, match="full"):
        job._lead(Mock())
    team.end.assert_called_once_with(EXIT_FAILED, why="the launcher of host 0 has failed")


def test_a_request_to_stop_counts_while_a_host_that_has_lost_host_0_ends_its_tasks():
    part = MagicMock()
    part.job.options = Mock(grace_s=60, max_restarts=0)
    request, ended = StopRequest(signum=signal.SIGTERM), Ended(task=W1, status=-15, at_s=NOW_S)
    part.processes.wait.side_effect = [[request], [ended]]
    type(part.processes).running = PropertyMock(side_effect=[[W1], [W1], [W1], [], [], []])
    host = Node(part)
    host._is_in_attempt = True
    host._end_attempt()
    assert host._stop_signal == signal.SIGTERM
    part.processes.finish.assert_called_once_with()


def test_a_host_that_cannot_make_its_tasks_says_why_at_their_start():
    host = Node(MagicMock())
    host._cause = "/logs: read-only"
    ended = host._perform(Start(W1))
    assert ended is not None
    assert (ended.task, ended.status, ended.cause) == (W1, EXIT_USAGE, "/logs: read-only")


def test_a_host_that_has_no_port_for_the_next_attempt_says_so():
    error = UsageError("ports", received="", expected="", fix="", code="no-free-port")
    part = MagicMock()
    part.ports.renewed.side_effect = [[], error]
    member = Mock(lost="")
    member.take_messages.side_effect = [[{"finish": True}]]
    with pytest.raises(UsageError) as caught:
        Node(part)._serve(member)
    assert caught.value is error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(["event", "signum", "states", "lines", "task", "at_s", "status"]),
        JSON
        | st.sampled_from(["ended", "started", "beat", "raised", "stoprequest", "worker-1", 15]),
    )
)
def test_what_makes_no_sense_changes_nothing(message):
    world = World()
    world.starts(W1)
    for event in world.hears(message):
        assert isinstance(event, Started | Beat | Raised | Ended | StopRequest)


# While the other hosts come: who is not like host 0 is told so once, and in one line.

WITH_TOKEN = {"TFDIST_RENDEZVOUS_TOKEN": "a secret that nobody must see"}
OLD_NUMPY = (
    "numpy 1.0 there, 2.4 here",
    "argument 1 --a there, --b here",
)
RESTARTS = ("--max_restarts 2 there, 1 here",)


class Arrivals:
    """A hub that has news in parts, the processes, the screen and the clock of host 0 at once."""

    turned_away = ()
    next_s = 0.0

    def __init__(self, *parts: list[News]) -> None:
        self.parts = list(parts)
        self.present: frozenset[int] = frozenset()
        self.now_s = 0.0
        self.said: list[str] = []

    def fileno(self) -> int:
        return 0

    def watch(self, fd: int) -> None: ...

    def wait(self, timeout_s: float) -> list[Event]:
        self.now_s += 1.0
        return []

    def turn(self) -> None: ...

    def take_news(self) -> list[News]:
        news = self.parts.pop(0) if self.parts else []
        self.present |= {event.rank for event in news if isinstance(event, PeerJoined)}
        return news

    def say(self, text: str) -> None:
        self.said.append(text)


Gather = Callable[..., Arrivals]


@pytest.fixture
def gather():
    """Gathers the hosts a to e while these news come in."""

    def run(*parts: list[News]) -> Arrivals:
        options, group = decided_group(
            parse(["--hosts", "a,b,c,d,e", "--node_rank", "0", "x.py"]), WITH_TOKEN
        )
        world, job = Arrivals(*parts), SimpleNamespace(options=options, strategy="ps")
        part = SimpleNamespace(job=job, group=group, screen=world, processes=world)
        team = Team(part, world, clock=lambda: world.now_s)  # type: ignore[arg-type]
        team.gather()
        return world

    return run


def told(gather: Gather, *parts: list[News]) -> str:
    return str(refusal(lambda: gather(*parts)))


def ready(*ranks: int) -> list[News]:
    return [MessageReceived(rank=rank, message={"ready": [1]}) for rank in ranks]


def test_all_hosts_that_are_there_may_begin(gather):
    assert gather(ready(2), ready(1, 3), ready(4)).now_s == 2.0


def test_every_host_that_differs_is_named_with_what_it_differs_in(gather):
    unlike = [Differs(rank=3, what=OLD_NUMPY)], [Differs(rank=1, what=RESTARTS)]
    more = [Differs(rank=4, what=OLD_NUMPY)]
    assert told(gather, *unlike, [*more, PeerJoined(rank=2)]).startswith(
        "hosts: received b (rank 1) with --max_restarts 2 there, 1 here; d (rank 3) with "
        "numpy 1.0 there, 2.4 here; argument 1 --a there, --b here; "
        "e (rank 4) with numpy 1.0 there, 2.4 here; argument 1 --a there, --b here; "
        "expected the same as on a (rank 0). Fix: "
    )


def test_a_rank_that_no_host_has_is_named_as_one(gather):
    strange = Differs(rank=7, what=("rank 7 there, 0 to 4 here",))
    alike: list[News] = [PeerJoined(rank=rank) for rank in (1, 2, 3, 4)]
    said = told(gather, [strange, *alike])
    assert said.startswith("hosts: received a host (rank 7) with rank 7 there, 0 to 4 here;")


def test_who_is_late_is_not_waited_for_where_another_differs(gather):
    said = told(gather, [Differs(rank=1, what=RESTARTS)], [], [PeerJoined(rank=2)])
    assert said.startswith("hosts: received b (rank 1) with --max_restarts 2 there, 1 here; exp")
