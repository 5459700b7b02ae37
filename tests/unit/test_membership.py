"""Random histories of an elastic job: members that die, restart and join, in any order of messages.

The members are a model of `tfdist.elastic.mesh` without sockets. A seed gives the history.

A written history is a job and its events, and then the supervisor's actions after each event (or a
dash) and the end of the job. `x 11` repeats an event, and only the actions of the last time count.
"""

import contextlib
import errno
import json
import os
import random
import resource
import selectors
import signal
import socket
from collections import deque
from concurrent import futures
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.unit.histories import JOBS, job_state, parsed, recorded, short, tasks
from tfdist.cluster import Task
from tfdist.launch.diagnosis import Watchdog
from tfdist.launch.events import (
    NOT_STEADY,
    AskForStacks,
    Awakening,
    Beat,
    Begin,
    Ended,
    KillOne,
    Leave,
    MemberSaid,
    Resize,
    Signal,
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


OF_JOBS = """
# a lost worker
3 min_workers=2: w1 ends KILL
> view 2 of w0 w2, kill w1; without w1: killed by SIGKILL, not by the launcher
# too few workers are left
3 min_workers=3 max_restarts=2: w1 ends KILL
> view 2 of w0 w2, signal w0, signal w2; ending after killed by SIGKILL, not by the launcher, then
> again
# a worker whose connections always break
3 max_restarts=1: w2 breaks x 11; w2 ends KILL
> go 11 from w0, kill w2; view 12 of w0 w1, kill w2, start w2; w2: 11 broken connections since the
> last operation
# a worker that cannot join
3 max_restarts=1: w1 ends KILL; w1 ready; w1 ends 2
> view 2 of w0 w2, kill w1, start w1; w0 teaches w1; kill w1; without w1: exit code 2
# an early loss of the chief
3: w0 ends KILL
> signal w1, signal w2; ending after killed by SIGKILL, not by the launcher
# a usage error
3: w1 ends 2
> view 2 of w0 w2, signal w0, signal w2; ending after exit code 2
# a chief is replaced only while it is replaceable
3 max_restarts=1: all replaceable; w0 ends KILL; w1 step 7; w1,w2 acks 1; w1 irreplaceable; w1 ends
KILL
> -; view 2 of w1 w2, kill w0, start w0; -; go 2 from w1 at step 7; -; signal w0, signal w2; ending
> after killed by SIGKILL, not by the launcher
# a task that joins is the last in line
2 max_restarts=1: all replaceable; w0 ends KILL; w0 ready; w1 acks 5; w0 knocks; w1 admits w0
> -; view 2 of w1, kill w0, start w0; w1 teaches w0; go 2 from w1; w0 knocks at w1; view 3 of w1 w0
# a joining member gets another source
3 max_restarts=2: all replaceable; w2 ends KILL; w2 ready; w0 ends KILL
> -; view 2 of w0 w1, kill w2, start w2; w0 teaches w2; view 3 of w1, w1 teaches w2, kill w0, start
> w0
# a joining task knocks again if the source of its state is lost
3 max_restarts=2: all replaceable; all acks 0; w2 ends KILL; w2 ready; w0,w1 acks 3; w2 knocks; w0
admits w2; w1 acks 6; w2 acks -1; w0 acks 6 state; w0 ends KILL; w1 acks 6; w2 acks -1; w1 acks 6;
w1 admits w2
> -; go 1 from w0; view 2 of w0 w1, kill w2, start w2; w0 teaches w2; go 2 from w0; w2 knocks at w0;
> view 3 of w0 w1 w2; -; -; go 3 from w0 joining w2; view 4 of w1 w2, kill w0, start w0; -; view 5
> of w1; go 5 from w1, w2 knocks at w1; view 6 of w1 w2
# the last member with state
2 max_restarts=2: all replaceable; w1 ends KILL; w1 ready; w1 knocks; w0 admits w1; w0 ends KILL; w1
acks -1
> -; view 2 of w0, kill w1, start w1; w0 teaches w1; w1 knocks at w0; view 3 of w0 w1; view 4 of w1,
> kill w0, start w0; signal w0, signal w1; ending after no worker has the state of the job
# a smaller job ends its last workers
3 max_restarts=1: resize 2; resize 4; w2 ends 0
> leave w2, view 2 of w0 w1; -; start w2, start w3
# a leaving worker that does not exit
3: resize 2; resize 3; wait 15; w2 ends KILL
> leave w2, view 2 of w0 w1; -; 9 s: kill w2; start w2
# stragglers after the chief that finished
3: w0 ends 0; w2 ends 0; wait 90
> view 2 of w1 w2; view 3 of w1; 89 s: askforstacks w1, 89.5 s: signal w1; ending after still
> running 90 s after w0 exited: w1
# the chief stays in a job of one worker
3 max_restarts=2: all replaceable; w0 ends KILL; w1 ends KILL; resize 1
> -; view 2 of w1 w2, kill w0, start w0; view 3 of w2, kill w1, start w1; kill w1, kill w0
"""


def elastic_job(job="3", *, max_restarts=0, min_workers=None):
    """Return the state of a job in which all workers have connected."""
    workers = tasks(JOBS[job])
    watchdog = Watchdog(
        hang_timeout_s=300,
        startup_timeout_s=60,
        has_servers=False,
        chief=workers[0],
        state_of=lambda task: "R",
        is_held_up=lambda: False,
    )
    state = job_state(
        workers,
        min_workers=min_workers,
        membership=Membership(expected=len(workers)),
        policy=RestartPolicy(max_restarts=max_restarts, window_s=3600),
        watchdog=watchdog,
    )
    happen(state, *(Begin(task=task) for task in workers))
    happen(state, *(MemberSaid(task=task, message={"ready": True}) for task in workers))
    return state


def happen(state, *events, after_s=1.0):
    return decide(state, Awakening(at_s=state.now_s + after_s, events=events))


def happening(state, text):
    """Yield what a part of a history says that happens."""
    names, what, *more = text.split(" ")
    if names == "resize":
        yield Resize(workers=int(what))
        return
    epoch = state.membership.epoch
    for task in state.running if names == "all" else tasks(names):
        match what:
            case "ends":
                status = -signal.Signals[f"SIG{more[0]}"] if more[0].isalpha() else int(more[0])
                yield Ended(task=task, status=status, at_s=0.0)
                continue
            case "step":
                beat = {"phase": "step", "step": int(more[0]), "since_s": 0.0, "first_step_s": None}
                yield Beat(task=task, **beat, at_s=0.0)
                continue
            case "breaks":
                yield from happening(state, "all acks 7")
                said = {"broken": epoch}
            case "acks":
                said = {"ack": epoch, "done": int(more[0]), "has_state": more[1:] == ["state"]}
            case "admits":
                said = {"admit": tasks(more[0])[0].index, "epoch": epoch}
            case "replaceable" | "irreplaceable":
                said = {"is_replaceable": what == "replaceable"}
            case "ready" | "knocks":
                said = {what.removesuffix("s"): True}
        yield MemberSaid(task=task, message=said)


def written(state, actions):
    """Return the text of actions, without those that only say something."""
    return ", ".join(filter(None, (text_of(action, state.step) for action in actions)))


def text_of(action, step):
    match action:
        case View(epoch=epoch, members=members):
            return f"view {epoch} of {' '.join(f'w{member}' for member in members)}"
        case Go(epoch=epoch, source=source, joining=joining):
            ends = [f" at step {step}" * bool(step), *(f" joining w{member}" for member in joining)]
            return f"go {epoch} from w{source}" + "".join(ends)
        case Welcome(joining=joining, teacher=teacher):
            return f"w{teacher} teaches w{joining}"
        case Knock(joining=joining, first=first):
            return f"w{joining} knocks at w{first}"
        case KillOne(task=task):
            return short(f"kill {task}")
        case Start(task=task) | Leave(task=task) | Signal(task=task) | AskForStacks(task=task):
            return short(f"{type(action).__name__.lower()} {task}")
    return ""


def play(history):
    """Return what is done about each part of a history, and what has become of the job."""
    job, options, parts = parsed(history)
    state = elastic_job(job, **{name: int(value) for name, value in options.items()})
    done = []
    for part in parts:
        if part.startswith("wait"):
            done.append(wait(state, float(part.split(" ")[1])))
        else:
            what, _, times = part.partition(" x ")  # the last time counts
            for _ in range(int(times or 1)):
                actions = happen(state, *happening(state, what)) + happen(state, after_s=0.0)
            done.append(written(state, actions) or "-")
    done += [f"{short(f.task)}: {f.cause}" for f in state.restarts if "SIGKILL" not in f.cause]
    done += [f"without {short(lost.task)}: {lost.cause}" for lost in state.lost]
    if state.is_ending:
        again = ", then again" * state.verdict.restart
        done.append(short(f"ending after {state.failure.cause}{again}"))
    return "; ".join(done)


def wait(state, seconds):
    """Let the supervisor awake when it wants to; return what it does, and after how long."""
    began_s, texts = state.now_s, []
    while (at_s := state.next_s) <= began_s + seconds:
        assert at_s > state.now_s, "it does not sleep"
        if text := written(state, happen(state, after_s=at_s - state.now_s)):
            texts.append(f"{at_s - began_s:g} s: {text}")
    return ", ".join(texts)


@recorded(OF_JOBS)
def test_history(history, outcome):
    assert play(history) == outcome


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
    state.min_workers, state.done = 2, Task("worker", 0) if workers == 3 else None
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
