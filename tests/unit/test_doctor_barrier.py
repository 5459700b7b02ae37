"""The hosts' meeting: who is let in, who is named as missing, and what nobody can do to it."""

import contextlib
import random
import resource
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tfdist.cluster import HeldPort, hold_ports
from tfdist.launch.multihost.rendezvous import Member
from tfdist.ops.doctor.barrier import (
    BarrierFailed,
    HostBarrier,
    PortListener,
    connected,
    greeting,
    join_barrier,
    run_steps,
)
from tfdist.ops.doctor.facts import Host, PreflightJob

SOON_S = 0.3
LONG_S = 60.0


@pytest.fixture
def held():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(port) for port in hold_ports(3)]


def job(
    held: list[HeldPort], index: int, *, hosts: int = 2, token: bytes = b"secret"
) -> PreflightJob:
    names = ("127.0.0.1", "127.0.0.2", "127.0.0.3")[:hosts]
    listed = (Host(name=name, ports=(port.port,)) for name, port in zip(names, held, strict=False))
    return PreflightJob(hosts=tuple(listed), index=index, token=token)


@contextlib.contextmanager
def opened(first: PreflightJob) -> Iterator[HostBarrier]:
    line = greeting(0, first.fingerprint)
    with PortListener(line, first.host.ports, spare=True) as entry:
        barrier = HostBarrier(first, entry)
        yield barrier
        barrier.end(0)


@contextlib.contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(LONG_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def met(
    held: list[HeldPort], others: Callable[[], None], *, hosts: int = 2
) -> Iterator[HostBarrier]:
    """The first host's barrier, to which the others have come."""
    with beside(others), opened(job(held, 0, hosts=hosts)) as barrier:
        barrier.gather(within_s=LONG_S)
        yield barrier


@contextlib.contextmanager
def member_of(first: PreflightJob) -> Iterator[Member]:
    with contextlib.closing(join_barrier(first, within_s=LONG_S)) as member:
        yield member


def test_hosts_come_together_answer_and_are_let_go(held):
    codes: list[int] = []
    steps = {"look": lambda present: {"saw": list(present)}}

    def second() -> None:
        with member_of(job(held, 1)) as member:
            codes.append(run_steps(member, steps, hosts=2))

    with met(held, second) as barrier:
        assert (barrier.present, barrier.absent) == ([0, 1], [])
        answers = barrier.ask("look", within_s=LONG_S, own=lambda: {"saw": "own"})
        assert answers == {0: {"saw": "own"}, 1: {"saw": [0, 1]}}
        clock = barrier.clocks()[1]
        assert abs(clock.ahead_s) <= clock.error_s + 0.1
        barrier.end(2)
    assert codes == [2]


def test_who_does_not_come_is_named(held):
    with opened(job(held, 0, hosts=3)) as barrier:
        barrier.gather(within_s=SOON_S)
        assert [(a.index, a.is_other_job) for a in barrier.absent] == [(1, False), (2, False)]
        assert "did not come" in barrier.absent[0].why


def test_a_host_of_another_job_is_told_so_and_named(held):
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(BarrierFailed) as error:
            join_barrier(job(held, 1, hosts=3), within_s=LONG_S)
        refused.append(str(error.value))

    with met(held, second) as barrier:
        (absence,) = barrier.absent
    assert absence.is_other_job
    assert "127.0.0.3" in absence.why
    assert "another job" in refused[0]


def test_a_host_that_finds_nobody_says_where_it_looked(held):
    with pytest.raises(BarrierFailed, match=f"port {held[0].port}: connection refused, for 0 s"):
        join_barrier(job(held, 1), within_s=SOON_S)


@pytest.mark.parametrize(
    ("line", "who"),
    [("tfdist doctor 1 0 abc", "a doctor of another version"), ("SSH-2.0", "something else")],
)
def test_what_is_no_doctor_of_this_version_is_named(line, who, held):
    with (
        PortListener(line, [held[0].port]),
        pytest.raises(BarrierFailed, match=f"port {held[0].port}: {who} answers"),
    ):
        join_barrier(job(held, 1), within_s=0.0)


def test_they_meet_at_the_next_port_where_the_first_is_taken(held):
    with socket.create_server(("", held[0].port)), opened(job(held, 0)) as barrier:

        def second() -> None:
            join_barrier(job(held, 1), within_s=LONG_S).close()

        with beside(second):
            barrier.gather(within_s=LONG_S)
        assert barrier.present == [0, 1]


@pytest.mark.parametrize("answered", [["look"], []])
def test_a_host_that_goes_is_named_with_the_step_that_it_did_not_do(answered, held):
    def second() -> None:
        with member_of(job(held, 1)) as member:
            first_word(member)
            if answered:
                member.send({"saw": 1})

    with met(held, second) as barrier:
        for step in answered:
            assert set(barrier.ask(step, within_s=LONG_S, own=dict)) == {0, 1}
        assert set(barrier.ask("wire", within_s=LONG_S, own=dict)) == {0}
        assert [(a.index, a.during) for a in barrier.absent] == [(1, "wire")]
        assert barrier.clocks() == {}


def test_a_host_that_never_answers_is_given_up_on(held):
    done = threading.Event()

    def second() -> None:
        with member_of(job(held, 1)):
            done.wait(LONG_S)

    with met(held, second) as barrier:
        barrier.ask("look", within_s=SOON_S, own=dict)
        done.set()
    assert [(a.index, a.why) for a in barrier.absent] == [(1, "no answer in time")]


def test_whoever_has_another_token_is_turned_away_and_counted(held):
    def second() -> None:
        with pytest.raises(BarrierFailed, match="another token"):
            join_barrier(job(held, 1, token=b"guessed"), within_s=LONG_S)

    with opened(job(held, 0)) as barrier:
        with beside(second):
            barrier.gather(within_s=1.0)
        assert "(turned away: 127.0.0.1: a wrong token)" in barrier.absent[0].why


def test_random_bytes_neither_end_it_nor_keep_others_out(held):
    source = random.Random(1)

    def second() -> None:
        join_barrier(job(held, 1), within_s=LONG_S).close()

    with opened(job(held, 0)) as barrier:
        for count in range(100):
            with connected("127.0.0.1", held[0].port) as (sock, _):
                start = b"meet\n" if count % 2 else b""
                sock.sendall(start + source.randbytes(source.randrange(1, 200)))
        with beside(second):
            barrier.gather(within_s=LONG_S)
        assert barrier.present == [0, 1]


class Noticed(threading.Event):
    """What a listener waits for in vain after each connection that it could not accept."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


def test_who_comes_while_no_descriptor_is_free_is_answered_when_there_is_one(held):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with PortListener("hello", [held[0].port]) as entry, contextlib.ExitStack() as stack:
        entry._is_closed = noticed = Noticed()
        early, late = (stack.enter_context(socket.socket()) for _ in range(2))
        late.settimeout(LONG_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # what is open stays
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for client in (early, late):  # accept has its descriptor before the first one comes
            client.connect(("127.0.0.1", held[0].port))
        assert noticed.is_waited_for.wait(LONG_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert late.recv(6) == b"hello\n"


@pytest.mark.parametrize(
    ("does", "refusal"),
    [
        (lambda barrier: barrier.ask("remove", within_s=LONG_S, own=dict), "the step 'remove'"),
        (lambda barrier: barrier.lose(1, "as if it had ended", step=""), "closed the connection"),
    ],
    ids=["asks for another", "goes"],
)
def test_a_host_takes_no_steps_but_its_own_and_notices_that_the_first_has_gone(does, refusal, held):
    def second() -> None:
        with member_of(job(held, 1)) as member, pytest.raises(BarrierFailed, match=refusal):
            run_steps(member, {}, hosts=2)

    with met(held, second) as barrier:
        does(barrier)
        assert barrier.present == [0]


def test_nobody_has_the_rank_of_another(held):
    def others() -> None:
        with member_of(job(held, 1, hosts=3)):
            with pytest.raises(BarrierFailed, match=r"rank 1 is that of 127\.0\.0\.1 already"):
                join_barrier(job(held, 1, hosts=3), within_s=0.0)
            join_barrier(job(held, 2, hosts=3), within_s=LONG_S).close()

    with met(held, others, hosts=3) as barrier:
        assert barrier.absent == []


def first_word(member: Member) -> object:
    """What the first host says first."""
    while not member.lost:
        select.select([member], [], [], LONG_S)
        member.turn()
        for message in member.take_messages():
            return message
    raise AssertionError(member.lost)
