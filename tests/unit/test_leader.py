"""Host 0 without a network: who it begins with, and what counts of what the others tell it."""

import json
import signal
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, PropertyMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mutations import JSON
from tests.refusals import refusal
from tfdist.cluster import KINDS, Task
from tfdist.errors import EXIT_FAILED, EXIT_PEER_MISSING, EXIT_USAGE, UsageError
from tfdist.launch import job_run
from tfdist.launch.events import (
    AskForStacks,
    Beat,
    Ended,
    KillOne,
    MemberSaid,
    Raised,
    Resize,
    ShowFailure,
    Signal,
    Start,
    Started,
    StopRequest,
    decode_action,
    encode_action,
    encode_event,
)
from tfdist.launch.membership import Go, Knock, View, Welcome
from tfdist.launch.multihost.hosts import decided_group
from tfdist.launch.multihost.leader import Team
from tfdist.launch.multihost.node import Node
from tfdist.launch.options import parse
from tfdist.launch.run_dir import RunDir
from tfdist.phases import PendingWork

W0, W1, W2 = (Task("worker", index) for index in range(3))
NOW_S = 100.0
STOP = {"event": "stoprequest", "signum": 15}


class World:
    """Host 0 with its processes, a hub with news, and a screen. W1 and W2 are on host 1."""

    def __init__(self, now_s=NOW_S):
        self.news, self.here = [], []
        self.hub = Mock(present=frozenset({1, 2}), next_s=NOW_S + 0.5)
        self.hub.take_news.side_effect = lambda: [self.news.pop(0) for _ in list(self.news)]
        self.local, self.screen = Mock(), Mock()
        self.local.wait.side_effect = lambda limit_s: [self.here.pop(0) for _ in list(self.here)]
        group = Mock(hosts=("host0", "host1", "host2"))
        part = Mock(group=group, screen=self.screen, processes=self.local)
        self.processes = Team(part, self.hub, clock=lambda: now_s)
        self.processes.host_of = {W0: 0, W1: 1, W2: 1}
        self.starts(W1)

    @property
    def sent(self):
        return [call.args for call in self.hub.send.call_args_list]

    def starts(self, task):
        assert self.processes.perform(Start(task)) is None

    def hears(self, message, *, rank=1):
        self.news.append((rank, json.loads(json.dumps(message))))
        return list(self.processes.wait(None))


@pytest.fixture
def world():
    return World()


def ended(task=W1):
    known = {"event": "ended", "task": str(task), "at_s": 2.0, "status": 3, "cause": ""}
    return {**known, "lines": ["last"]}


def test_a_task_is_started_and_ended_on_its_host(world):
    assert world.sent == [(1, {"action": "start", "task": "worker-1", "restart": 0})]
    world.processes.perform(Signal(W1, signal.SIGTERM))
    world.processes.perform(Signal(W0, signal.SIGTERM))
    assert world.sent[1:] == [(1, {"action": "signal", "task": "worker-1", "signum": 15})]
    world.local.perform.assert_called_once_with(Signal(W0, 15))
    assert world.hears(ended()) == [Ended(task=W1, status=3, at_s=NOW_S - 2)]
    world.screen.keep_last_lines.assert_called_once_with(W1, ("last",))


def test_a_view_is_sent_to_members_on_all_hosts(world):
    for action in (View(1, (0, 1)), Go(1, (0, 1), 0, 0, ()), Welcome(2, 0), Knock(2, 0)):
        world.processes.perform(action)
        assert sorted(rank for rank, _ in world.sent[-2:]) == [1, 2]
        assert decode_action(world.sent[-1][1]) == action
        world.local.perform.assert_called_with(action)
    said = MemberSaid(task=W1, message={"ack": 1, "done": 0, "has_state": False})
    assert world.hears(encode_event(said)) == [said]
    world.here.append(Resize(workers=3))
    assert list(world.processes.wait(None)) == []


@pytest.mark.parametrize(
    "action",
    [
        *(Start(W1, restart=2), Signal(W1, signal.SIGTERM), KillOne(W1), AskForStacks(W1)),
        ShowFailure(W1, "exit code 3", (W1, W2)),
    ],
)
def test_an_action_arrives_as_it_was_sent(action):
    assert decode_action(json.loads(json.dumps(encode_action(action)))) == action


@pytest.mark.parametrize(
    "event",
    [
        Started(task=W1, pid=4711, at_s=90),
        Raised(task=W1, exit_code=3, cause="ValueError: ü", at_s=90, step=7),
        Raised(task=W1, exit_code=3, cause="", at_s=90),
        Beat(task=W1, phase="step", step=12, since_s=80, first_step_s=50, at_s=90),
        Beat(task=W1, phase="import", step=None, since_s=80, first_step_s=None, at_s=90),
        Beat(
            task=W1,
            phase="step",
            step=12,
            since_s=80,
            first_step_s=50,
            at_s=90,
            awaited=PendingWork(task="worker-1", since_s=70, is_first=True),
        ),
        Ended(task=W1, status=-9, at_s=90, cause="out of memory"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_event_times_use_the_clock_of_the_receiver(event, world):
    message = {**encode_event(event, now_s=NOW_S), "lines": []}
    assert world.hears(message) == [event]
    (later,) = World(now_s=NOW_S + 1000).hears(message)
    assert later.at_s == event.at_s + 1000
    if isinstance(event, Beat):
        assert later.since_s == event.since_s + 1000


def test_messages_about_foreign_tasks_are_ignored(world):
    assert world.hears(ended(), rank=2) == []
    assert world.hears(ended(W0), rank=2) == []
    assert world.hears(ended(W2)) == []  # not started
    assert world.hears({"states": {"worker-1": "T"}}, rank=2) == []
    for name in ("worker", "worker-", "worker--1", "wörker-1", "boss-0", 3, None):
        assert world.hears({**ended(), "task": name}) == []
    assert world.processes.state_of(W1) == "S"


def test_states_and_last_lines_of_tasks_are_kept(world):
    assert world.hears({"states": {"worker-1": "T"}}) == []
    assert world.processes.state_of(W1) == "T"
    assert world.hears({"lines": ["last"], "task": "worker-1"}) == []
    world.screen.keep_last_lines.assert_called_once_with(W1, ("last",))


def test_a_lost_host_ends_its_tasks_and_starts_none(world):
    world.news.append((1, "no word for 5 s"))
    gone = Ended(
        task=W1, status=EXIT_PEER_MISSING, at_s=NOW_S,
        cause="lost host host1: no word for 5 s",
    )  # fmt: skip
    assert world.processes.wait(None) == [gone]
    assert not world.processes.can_start(W1)
    assert world.processes.can_start(W0)
    world.starts(W2)  # while it has come back, to be ready for the next attempt
    (end,) = world.processes.wait(None)
    assert (end.task, end.status) == (W2, EXIT_PEER_MISSING)


def test_simultaneous_stop_requests_count_once(world):
    world.here = [StopRequest(signum=15)]
    world.news.append((1, STOP))
    assert world.processes.wait(None) == [StopRequest(signum=15)]
    assert world.hears(STOP, rank=2) == []
    assert world.hears(STOP, rank=2) == [StopRequest(signum=15)]  # it means it


def test_waits_end_in_time_for_heartbeats_of_hosts(world):
    for timeout_s in (None, 0.2, 100):
        world.processes.wait(timeout_s)
    assert [call.args for call in world.local.wait.call_args_list] == [(0.5,), (0.2,), (0.5,)]


@pytest.fixture
def lead(monkeypatch, tmp_path):
    """Leads a job on several hosts with a given team."""
    monkeypatch.setattr(job_run, "_hub", Mock())

    def lead(team, run_dir=tmp_path / "run"):
        monkeypatch.setattr(job_run, "Team", Mock(return_value=team))
        job_run._lead(Mock(job=Mock(run_dir=run_dir)))

    return lead


@pytest.mark.parametrize("name", ["", "new"])
def test_a_launcher_locks_its_run_directory_while_agents_start(lead, tmp_path, name):
    run_dir = tmp_path / name
    team = Mock(gather=lambda: RunDir(run_dir).__enter__())
    with pytest.raises(UsageError, match="another job"):
        lead(team, run_dir)
    assert run_dir.exists() == (not name)  # no job has started in the new directory


def test_a_failing_launcher_ends_its_agents(lead):
    team = Mock(gather=Mock(return_value=None), roll_call=Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="full"):
        lead(team)
    team.end.assert_called_once_with(EXIT_FAILED)


def test_a_host_without_the_launcher_ends_its_tasks():
    part = MagicMock()
    part.job.options = Mock(grace_s=60, max_restarts=0)
    request, ended = StopRequest(signum=signal.SIGTERM), Ended(task=W1, status=-15, at_s=NOW_S)
    part.processes.wait.side_effect = [[request], [ended]]
    type(part.processes).running = PropertyMock(side_effect=[[W1], [W1], [W1], [], [], []])
    host = Node(part, Mock())
    host._is_in_attempt = True
    host._end_attempt()
    part.processes.perform.assert_called_once_with(Signal(W1, signal.SIGTERM))
    part.processes.finish.assert_called_once_with()


def test_a_host_reports_failed_starts_and_missing_ports():
    host = Node(MagicMock(), Mock())
    host._cause = "/logs: read-only"
    ended = host._perform(Start(W1))
    assert (ended.task, ended.status, ended.cause) == (W1, EXIT_USAGE, "/logs: read-only")
    error = UsageError("ports", "all are taken", fix="", code="port-taken")
    part, pipe = MagicMock(), Mock(lost="")
    part.ports.renewed.side_effect = [[], error]
    pipe.take_messages.side_effect = [[{"finish": True}]]
    with pytest.raises(UsageError) as caught:
        Node(part, pipe).run()
    assert caught.value is error


KEYS = (
    *("event", "signum", "states", "lines", "task", "at_s", "status", "pid", "exit_code"),
    *("cause", "step", "phase", "since_s"),
)
WORDS = ("ended", "started", "beat", "raised", "stoprequest", "worker-1", 15, 1.5)


@given(st.dictionaries(st.sampled_from(KEYS), JSON | st.sampled_from(WORDS)))
def test_invalid_messages_are_ignored(message):
    world = World()
    heard = {type(event) for event in world.hears(message)}
    assert heard <= {Started, Beat, Raised, Ended, StopRequest}
    assert (Ended in heard) != bool(world.hears(ended()))  # its end still counts, once


# While the other hosts come.


def gather(*parts):
    """Gathers the hosts a to e while the hub has these news; returns how long it took."""
    options, group = decided_group(parse(["--on", "local", "--hosts", "a,b,c,d,e", "x.py"]), {})
    hub, clock, coming = Mock(turned_away=(), next_s=0.0, present=frozenset()), Mock(), list(parts)
    clock.now_s = 0.0

    def wait(timeout_s):
        clock.now_s += 1.0
        return []

    def take_news():
        return coming.pop(0) if coming else []

    hub.take_news = take_news
    job = SimpleNamespace(options=options, kind=KINDS["ps"])
    part = SimpleNamespace(job=job, group=group, screen=Mock(), processes=Mock(wait=wait))
    Team(part, hub, clock=lambda: clock.now_s).gather()
    return clock.now_s


def ready(*ranks):
    return [(rank, {"ready": [1]}) for rank in ranks]


def test_an_elastic_job_refuses_two_names_of_one_host():
    hub = Mock(present=frozenset({1, 2}), address_of={1: "10.0.0.1", 2: "10.0.0.1"}.get)
    group = Mock(hosts=("launcher", "alpha", "alpha.lan"), slots=(0, 1, 1))
    group.num_tasks = group.slots.__getitem__
    options = Mock(startup_timeout_s=60)
    job = SimpleNamespace(options=options, kind=KINDS["elastic"])
    team = Team(SimpleNamespace(job=job, group=group, screen=Mock(), processes=Mock()), hub)
    team._ports = {1: [1], 2: [1]}
    error = refusal(team.gather)
    assert "alpha (rank 1), alpha.lan (rank 2) have one address, 10.0.0.1" in str(error)


def test_all_hosts_that_are_there_may_begin():
    assert gather(ready(2), ready(1, 3), ready(4)) == 2.0


def test_the_first_refused_host_ends_the_job():
    errors = [UsageError("x", name, fix="z", code="cannot-start-agent") for name in "ab"]
    news = [*zip((3, 1), errors, strict=True)]
    assert refusal(lambda: gather(ready(2), news)) is errors[0]
