"""Random histories of an elastic job: members that die, restart and join, in any order of messages.

The members are a model of `tfdist.elastic.mesh` without sockets. A seed gives the history.
"""

import contextlib
import errno
import json
import math
import os
import random
import resource
import selectors
import socket
from collections import deque
from concurrent import futures
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.unit.histories import job_state
from tfdist.cluster import Task
from tfdist.launch.diagnosis import Watchdog
from tfdist.launch.events import (
    NOT_STEADY,
    Awakening,
    Begin,
    Ended,
    KillOne,
    Leave,
    MemberSaid,
    Resize,
    Start,
)
from tfdist.launch.members import MemberLinks
from tfdist.launch.membership import MOST_BREAKS, Fence, Go, Knock, Membership, View, Welcome
from tfdist.launch.state import RestartPolicy
from tfdist.launch.supervisor import decide
from tfdist.workers import main

OPERATIONS, DECIDES_EVERY = 12, 2
HISTORIES = 10_000
MOST_EVENTS, KILL_RATE = 4000, 0.1


class Member:
    """A member's place in the operations. A joining task has no state until it is admitted."""

    def __init__(self, number, *, joins):
        self.number = number
        self.done = -1 if joins else 0
        self.epoch = 0
        self.go = None
        self.inbox = deque()
        self.outbox = deque([("ready",)])
        self.is_out = True
        self.has_state = False
        self.has_last = False
        self.waits_after = None
        self.is_taught = False
        self.knocking = set()
        self.results = []


class World:
    """The launcher, its members and the messages under way."""

    def __init__(self, seed, bad_link=frozenset()):
        self.draws = random.Random(seed)
        self.bad_link = bad_link
        self.count = self.draws.choice([2, 3, 3, 4])
        self.membership = Membership(expected=self.count)
        self.members = {n: Member(n, joins=False) for n in range(self.count)}
        self.dead = deque()
        self.parts = {}
        self.kills, self.restarts, self.breaks = (self.draws.randrange(9) for _ in range(3))

    def run(self):
        for _ in range(MOST_EVENTS):
            if all(m.done >= OPERATIONS for m in self.members.values() if m.done >= 0):
                # Tasks that came too late to join are ended by the supervisor. If all tasks with
                # the state have died, the job starts again.
                return
            choices = self.choices()
            assert choices, "nobody can go on"
            self.draws.choice(choices)()
        raise AssertionError("the members go on without an end")

    def choices(self):
        found = []
        for member in self.members.values():
            if member.inbox:
                found.append(lambda m=member: self.hear(m))
            if member.outbox:
                found.append(lambda m=member: self.tell(m))
            if self.can_contribute(member):
                found.append(lambda m=member: self.contribute(m))
            if self.can_finish(member):
                found.append(lambda m=member: self.finish(m))
            if member.number in self.bad_link and self.is_broken(member):
                found.append(lambda m=member: self.cut(m))
            if self.breaks and member.epoch and self.draws.random() < KILL_RATE:
                found.append(lambda m=member: self.cut(m))
        if self.dead:
            found.append(self.bury)
        is_time = self.draws.random() < KILL_RATE
        if self.kills and self.members and self.membership.epoch and is_time:
            found.append(lambda: self.kill(self.draws.choice(list(self.members))))
        return found

    def is_broken(self, member):
        """Return whether a member of the bad link notices that it has broken in this view."""
        is_in = not member.is_out and member.go is not None
        return is_in and self.bad_link.issubset(member.go.members) and not member.outbox

    # members

    def hear(self, member):
        message = member.inbox.popleft()
        match message:
            case View(epoch=epoch):
                member.is_out, member.go = True, None
                member.outbox.append(("ack", epoch, member.done, member.has_state))
            case Go(epoch=epoch) if member.is_out:
                member.is_out, member.go, member.epoch = False, message, epoch
                self.enter(member)
            case Knock(joining=joining):
                member.knocking.add(joining)
            case Welcome() if not member.is_taught:
                member.is_taught = True
                member.outbox.append(("knock",))

    def enter(self, member):
        go, source = member.go, self.members.get(member.go.source)
        if member.number in (*go.joining, *go.behind):
            if source is None or source.done < go.done:
                member.go = None  # the source has died: the next view follows
                return
            if member.number in go.joining:
                assert source.has_state or source.done > go.done
            assert source.has_last, "the source has not the last result"
            member.has_last = True
            member.results = source.results[: go.done]
            member.done = go.done
            member.has_state = False
        if member.waits_after is not None and member.epoch > member.waits_after:
            member.waits_after = None

    def can_contribute(self, member):
        is_in = not member.is_out and member.go is not None and member.waits_after is None
        key = (member.epoch, member.done, member.number)
        return is_in and 0 <= member.done < OPERATIONS and key not in self.parts

    def contribute(self, member):
        joins = None
        is_first = member.number == member.go.members[0]
        if is_first and member.done % DECIDES_EVERY == 0 and member.knocking:
            joins = min(member.knocking)
        self.parts[member.epoch, member.done, member.number] = joins

    def can_finish(self, member):
        if member.is_out or member.go is None or not 0 <= member.done < OPERATIONS:
            return False
        if self.bad_link.issubset(member.go.members) and self.bad_link:
            return False
        return all((member.epoch, member.done, n) in self.parts for n in member.go.members)

    def finish(self, member):
        joins = self.parts[member.epoch, member.done, member.go.members[0]]
        member.results.append((member.done, joins))
        member.done += 1
        member.has_state, member.has_last = False, True
        if joins is not None:
            member.has_state = True
            member.knocking.discard(joins)
            member.waits_after = member.epoch
            member.outbox.append(("admit", joins, member.epoch))

    # the launcher

    def tell(self, member):
        match member.outbox.popleft():
            case ("ready",):
                steps = self.membership.ready(member.number)
            case ("ack", epoch, done, has_state):
                steps = self.membership.acked(member.number, epoch, done, has_state=has_state)
            case ("knock",):
                steps = self.membership.knocked(member.number)
            case ("broken", epoch):
                steps = self.membership.broken(member.number, epoch)
            case ("admit", joins, epoch):
                steps = self.membership.admitted(joins, epoch)
        self.do(steps)

    def do(self, steps):
        for step in steps:
            if isinstance(step, Fence) and "broken connections" in step.reason:
                self.kill(step.member)
                continue
            if isinstance(step, Fence):
                assert all(member.done < 0 for member in self.members.values()), step
                continue
            to = getattr(step, "members", None) or [getattr(step, "first", None)]
            if isinstance(step, Welcome):
                to = [step.joining]
            for number in to:
                if number in self.members:
                    self.members[number].inbox.append(step)

    def kill(self, number):
        self.kills -= 1
        del self.members[number]
        self.dead.append(number)

    def cut(self, member):
        self.breaks -= 1
        member.outbox.append(("broken", member.epoch))

    def bury(self):
        number = self.dead.popleft()
        self.do(self.membership.lost(number))
        if self.restarts:
            self.restarts -= 1
            self.members[number] = Member(number, joins=True)


@pytest.mark.parametrize("first", range(0, HISTORIES, HISTORIES // 4))
def test_members_end_with_the_same_results_in_every_history(first):
    for seed in range(first, first + HISTORIES // 4):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        results = {tuple(m.results) for m in world.members.values() if m.done >= 0}
        assert len(results) <= 1, f"seed {seed}"


def test_a_connection_that_always_breaks_costs_a_member_and_not_the_job():
    for seed in range(300):
        world = World(seed, bad_link=frozenset({0, 1}))
        world.restarts = 0
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert not world.bad_link.issubset(world.members), f"seed {seed}"


def test_a_finished_operation_resets_the_count_of_broken_connections():
    membership, steps = Membership(expected=2), []
    for member in (0, 1):
        steps = membership.ready(member)
    for done in range(3 * MOST_BREAKS):
        for member in (0, 1):
            membership.acked(member, membership.epoch, done)
        steps = membership.broken(1, membership.epoch)
        assert isinstance(steps[0], View)
    for _ in range(MOST_BREAKS):
        for member in (0, 1):
            membership.acked(member, membership.epoch, done)
        steps = membership.broken(1, membership.epoch)
    reason = f"{MOST_BREAKS + 1} broken connections since the last operation"
    assert steps == [Fence(1, reason)]


def test_a_joining_task_knocks_again_if_the_source_of_its_state_is_lost():
    membership = Membership(expected=3)
    for member in range(3):
        membership.ready(member)
    for member in range(3):
        membership.acked(member, 1, 0)
    membership.ready(3)
    membership.knocked(3)
    membership.admitted(3, 1)
    for member in (1, 2, 3):
        membership.acked(member, 2, 6 if member < 3 else -1)
    (go,) = membership.acked(0, 2, 6, has_state=True)
    assert (go.source, go.joining) == (0, (3,))
    membership.lost(0)  # before it has sent the state
    for member in (1, 2):
        membership.acked(member, 3, 6)
    assert membership.acked(3, 3, -1) == [View(4, (1, 2))]
    membership.acked(1, 4, 6)
    _, knock = membership.acked(2, 4, 6)
    assert knock == Knock(3, 1)
    assert membership.admitted(3, 4) == [View(5, (1, 2, 3))]


WORKERS = [Task("worker", index) for index in range(3)]


def elastic_job(max_restarts=0):
    """Return the state of a job in which all workers have connected."""
    watchdog = Watchdog(
        hang_timeout_s=300,
        startup_timeout_s=60,
        has_servers=False,
        chief=WORKERS[0],
        state_of=lambda task: "R",
        is_held_up=lambda: False,
    )
    policy = RestartPolicy(max_restarts=max_restarts, window_s=3600)
    membership = Membership(expected=3)
    state = job_state(WORKERS, membership=membership, policy=policy, watchdog=watchdog)
    happen(state, *(Begin(task=task) for task in WORKERS))
    happen(state, *(said(task, ready=True) for task in WORKERS))
    return state


def happen(state, *events):
    return decide(state, Awakening(at_s=state.now_s + 1, events=events))


def said(task, **message):
    return MemberSaid(task=task, message=message)


def ended(index, status):
    return Ended(task=WORKERS[index], status=status, at_s=0.0)


def test_a_worker_whose_connections_always_break_is_killed_and_restarted_alone():
    state = elastic_job(max_restarts=1)
    actions = []
    for epoch in range(1, MOST_BREAKS + 2):
        acks = [said(w, ack=epoch, done=7, has_state=False) for w in WORKERS]
        actions = happen(state, *acks, said(WORKERS[2], broken=epoch))
    assert [a.task for a in actions if isinstance(a, KillOne)] == [WORKERS[2]]
    happen(state, ended(2, -9))
    assert [failure.cause for failure in state.restarts] == [
        f"{MOST_BREAKS + 1} broken connections since the last operation"
    ]
    assert not state.is_ending


def test_a_worker_that_cannot_join_leaves_the_job_running():
    state = elastic_job(max_restarts=1)
    happen(state, ended(1, -9))
    happen(state, said(WORKERS[1], ready=True))
    happen(state, ended(1, 2))
    happen(state)
    assert [lost.exit_code for lost in state.lost] == [2]
    assert not state.is_ending


@pytest.mark.parametrize(("index", "status"), [(0, -9), (1, 2)])
def test_early_chief_losses_and_usage_errors_end_the_attempt(index, status):
    state = elastic_job()
    happen(state, ended(index, status))
    happen(state)
    assert state.is_ending


def test_the_chief_is_replaced_only_while_marked_replaceable():
    state = elastic_job(max_restarts=1)
    for worker in WORKERS:
        happen(state, said(worker, is_replaceable=True))
    actions = happen(state, ended(0, -9))
    assert View(2, (1, 2)) in actions
    assert state.chief == WORKERS[1]
    happen(state)
    assert not state.is_ending
    state.step = 7
    happen(state, *(said(WORKERS[i], ack=2, done=1, has_state=False) for i in (1, 2)))
    assert [(v.members, v.step) for v in state.views] == [((WORKERS[1], WORKERS[2]), 7)]
    happen(state, said(WORKERS[1], is_replaceable=False))
    happen(state, ended(1, -9))
    happen(state)
    assert state.is_ending


def test_a_task_that_joins_is_the_last_in_line():
    members = Membership(expected=2)
    for number in (0, 1):
        members.ready(number)
    members.lost(0)
    assert members.ready(0) == [Welcome(0, 1)]
    members.acked(1, 2, 5)
    members.knocked(0)
    assert members.admitted(0, 2) == [View(3, (1, 0))]


def test_losing_the_last_member_with_state_ends_the_job():
    members = Membership(expected=2)
    for number in (0, 1):
        members.ready(number)
    members.lost(1)
    members.ready(1)
    members.knocked(1)
    members.admitted(1, 2)
    members.lost(0)
    (fence,) = members.acked(1, 4, -1)
    assert isinstance(fence, Fence)


def test_a_joining_member_gets_another_source():
    members = Membership(expected=3)
    for number in (0, 1, 2):
        members.ready(number)
    members.lost(2)
    assert members.ready(2) == [Welcome(2, 0)]
    assert members.lost(0) == [View(3, (1,)), Welcome(2, 1)]


def test_shrinking_a_job_ends_its_last_workers():
    state = elastic_job(max_restarts=1)
    actions = happen(state, Resize(workers=2))
    assert Leave(WORKERS[2]) in actions
    assert View(2, (0, 1)) in actions
    happen(state, Resize(workers=4))  # worker-2 gets its number again after its exit
    actions = happen(state, ended(2, 0))
    assert [a.task for a in actions if isinstance(a, Start)] == [WORKERS[2], Task("worker", 3)]
    assert (state.restarts, state.lost, state.is_ending) == ([], [], False)


def test_a_leaving_worker_is_killed_after_the_grace_period():
    state = elastic_job()
    happen(state, Resize(workers=2))
    happen(state, Resize(workers=3))
    due_s = state.now_s - 1 + state.grace_s
    state.watchdog.next_check_s = lambda: math.inf
    assert state.next_s == due_s
    assert KillOne(WORKERS[2]) not in decide(state, Awakening(at_s=due_s - 0.1))
    assert KillOne(WORKERS[2]) in decide(state, Awakening(at_s=due_s))
    assert state.next_s > due_s
    actions = happen(state, ended(2, -9))
    assert [a.task for a in actions if isinstance(a, Start)] == [WORKERS[2]]
    assert (state.restarts, state.lost, state.is_ending) == ([], [], False)


def test_stragglers_are_late_after_the_chief_that_finished():
    state = elastic_job()
    happen(state, ended(0, 0))
    happen(state, ended(2, 0))
    decide(state, Awakening(at_s=state.straggler_deadline_s))
    assert state.hang.failure.cause == "still running 90 s after worker-0 exited: worker-1"


def test_the_chief_stays_in_a_job_of_one_worker():
    state = elastic_job(max_restarts=2)
    for worker in WORKERS:
        happen(state, said(worker, is_replaceable=True))
    for index in (0, 1):
        happen(state, ended(index, -9))
        happen(state)
    happen(state, Resize(workers=1))
    assert [t for t in WORKERS if state.tasks[t].is_leaving] == WORKERS[:2]


def links_that(watch, unwatch, tell=None, most=4):
    return MemberLinks(
        f"test-{os.getpid()}",
        most=most,
        task_of=lambda pid: None,
        is_here=lambda task: True,
        watch=watch,
        unwatch=unwatch,
        tell=tell,
    )


@pytest.mark.parametrize(
    ("workers", "code", "says"),
    [
        (2, 0, "run: the job changes to 2 workers"),
        (1, 2, "N: the launcher refuses 1 workers: the job needs 2 workers. Fix: "),
        (5, 2, "N: the launcher refuses 5 workers: the job can have 1 to 4 workers. Fix: "),
        (0, 2, "N: the launcher refuses 0 workers: the job can have 1 to 4 workers. Fix: "),
        (3, 2, "N: the launcher refuses 3 workers: the job is starting or ending. Fix: "),
    ],
)
def test_a_request_for_workers_prints_the_launchers_decision(
    workers, code, says, monkeypatch, tmp_path, capsys
):
    state = elastic_job(max_restarts=1)
    state.min_workers, state.done = 2, WORKERS[0] if workers == 3 else None
    selector, told = selectors.DefaultSelector(), []
    read = selectors.EVENT_READ
    watch = lambda fd, handler, *args: selector.register(fd, read, (handler, args))  # noqa: E731
    links = links_that(watch, selector.unregister, told.append)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tfdist.workers.is_running", lambda run_dir: True)
    Path("run").mkdir()
    Path("run/report.json").write_text(json.dumps({"control": links.name}))
    with futures.ThreadPoolExecutor() as threads:
        program = threads.submit(main, ["run", str(workers)])
        for _ in range(2):  # the connection, then the request
            for key, _ in selector.select():
                handler, args = key.data
                handler(*args)
        for action in happen(state, *told):
            links.perform(action)
        assert program.result() == code
    links.close()
    assert says in "".join(capsys.readouterr())


def test_32_workers_connect_under_the_usual_limit_of_files():
    count, limits = 32, resource.getrlimit(resource.RLIMIT_NOFILE)
    links = links_that(Mock(), Mock(), most=count)
    with contextlib.ExitStack() as stack:
        stack.callback(links.close)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[0]), limits[1]))
        members = []
        for member in range(count):
            links._ends[Task("worker", member)], end = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            members.append(stack.enter_context(end))
        links.perform(Go(1, tuple(range(count)), 0, 0, ()))
        peers = {}
        for member, end in enumerate(members):
            end.settimeout(10)
            others = [other for other in range(count) if other != member]
            _, fds, _, _ = socket.recv_fds(end, 1 << 16, 64)
            for other, fd in zip(others, fds, strict=True):
                with socket.socket(fileno=fd) as peer:
                    if member == 0:
                        peers[other] = stack.enter_context(peer.dup())
                        peers[other].settimeout(10)
                    elif other == 0:
                        peer.send(bytes([member]))
                        assert peers[member].recv(9) == bytes([member])


def test_a_limit_of_descriptors_in_messages_is_no_lost_worker(monkeypatch):
    sent = Mock(side_effect=[BrokenPipeError(), OSError(errno.ETOOMANYREFS, "too many")])
    monkeypatch.setattr(socket, "send_fds", sent)
    with contextlib.closing(links_that(Mock(), Mock())) as links:
        links._ends[Task("worker", 0)] = Mock()
        links._send(Task("worker", 0), {})
        with pytest.raises(OSError, match="too many"):
            links._send(Task("worker", 0), {})


def test_a_request_between_two_starts_is_refused():
    selector, ends = selectors.DefaultSelector(), socket.socketpair()
    read = selectors.EVENT_READ
    links = links_that(lambda fd, *_: selector.register(fd, read), selector.unregister, Mock())
    ends[0].send(json.dumps({"workers": 2}).encode())
    selector.register(ends[1].fileno(), selectors.EVENT_READ)
    links._read_request(ends[1])
    links.forget()
    assert json.loads(ends[0].recv(1000)) == {"refusal": NOT_STEADY}
    ends[0].close()
    links.close()


def test_another_user_gets_no_answer(monkeypatch):
    handlers = {}
    links = links_that(
        watch=lambda fd, handler, *args: handlers.update({fd: (handler, args)}),
        unwatch=lambda fd: handlers.pop(fd, None),
    )
    user = os.getuid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect(f"\0{links.name}")
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        handler, args = list(handlers.values())[-1]
        handler(*args)
        assert end.recv(1000) == b""
    links.close()


@pytest.mark.parametrize(("min_workers", "ends"), [(2, False), (3, True)])
def test_a_job_restarts_if_too_few_workers_are_left(min_workers, ends):
    state = elastic_job(max_restarts=2)
    state.min_workers = min_workers
    actions = happen(state, ended(1, -9))
    assert ends or View(2, (0, 2)) in actions
    happen(state)
    assert state.is_ending == ends
    assert state.verdict.restart == ends
