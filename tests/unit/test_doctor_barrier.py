"""The hosts' meeting: who is let in, who is named as missing, and what nobody can do to it."""

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from tfdist.cluster import hold_ports
from tfdist.errors import PeerLost, StartupTimeout, UsageError
from tfdist.launch.multihost.rendezvous import Member
from tfdist.ops.doctor import barrier as barrier_module
from tfdist.ops.doctor.barrier import HostBarrier, join_barrier, run_steps
from tfdist.ops.doctor.facts import Host, PreflightJob

SOON_S = 0.3
LONG_S = 60.0


@pytest.fixture
def port():
    """The port at which the hosts meet."""
    with hold_ports(1)[0] as held:
        yield held.port


def job(port: int, index: int, *, hosts: int = 2, token: bytes = b"secret") -> PreflightJob:
    names = ("127.0.0.1", "127.0.0.2", "127.0.0.3")[:hosts]
    listed = tuple(Host(name=name, ports=(port - 1,)) for name in names)
    return PreflightJob(hosts=listed, index=index, token=token)


@contextlib.contextmanager
def opened(first: PreflightJob) -> Iterator[HostBarrier]:
    barrier = HostBarrier(first)
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
def met(port: int, other: Callable[[], None]) -> Iterator[HostBarrier]:
    """The first host's barrier, to which the other one has come."""
    with beside(other), opened(job(port, 0)) as barrier:
        barrier.gather(within_s=LONG_S)
        yield barrier


@contextlib.contextmanager
def member_of(first: PreflightJob) -> Iterator[Member]:
    with contextlib.closing(join_barrier(first, within_s=LONG_S)) as member:
        yield member


def test_hosts_come_together_answer_and_are_let_go(port):
    codes: list[int] = []
    steps = {"look": lambda present: {"saw": list(present)}}

    def second() -> None:
        with member_of(job(port, 1)) as member:
            codes.append(run_steps(member, steps, hosts=2))

    with met(port, second) as barrier:
        assert (barrier.present, barrier.absent) == ([0, 1], [])
        answers = barrier.ask("look", lambda present: {"saw": "own"})
        assert answers == {0: {"saw": "own"}, 1: {"saw": [0, 1]}}
        barrier.end(2)
    assert codes == [2]


def test_who_does_not_come_is_named(port):
    with opened(job(port, 0, hosts=3)) as barrier:
        barrier.gather(within_s=SOON_S)
        assert [(a.index, a.is_other_job) for a in barrier.absent] == [(1, False), (2, False)]
        assert "did not come" in barrier.absent[0].why


def test_a_host_of_another_job_is_told_so_and_named(port):
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(UsageError) as error:
            join_barrier(job(port, 1, hosts=3), within_s=LONG_S)
        refused.append(str(error.value))

    with met(port, second) as barrier:
        (absence,) = barrier.absent
    assert absence.is_other_job
    assert "127.0.0.3" in absence.why
    assert "127.0.0.3" in refused[0]


def test_a_host_that_finds_nobody_says_where_it_looked(port):
    with pytest.raises(StartupTimeout, match=rf"127\.0\.0\.1:{port}: .* refused"):
        join_barrier(job(port, 1), within_s=SOON_S)


def test_a_meeting_port_that_is_taken_is_one_line(port):
    with (
        socket.create_server(("", port)),
        pytest.raises(UsageError, match=f"at which the hosts meet: received {port}"),
    ):
        HostBarrier(job(port, 0))


@pytest.mark.parametrize("answered", [["look"], []])
def test_a_host_that_goes_is_named_with_the_step_that_it_did_not_do(answered, port):
    def second() -> None:
        with member_of(job(port, 1)) as member:
            first_word(member)
            if answered:
                member.send({"saw": 1})

    with met(port, second) as barrier:
        for step in answered:
            assert set(barrier.ask(step, nothing)) == {0, 1}
        assert set(barrier.ask("wire", nothing)) == {0}
        assert [(a.index, a.during) for a in barrier.absent] == [(1, "wire")]


def test_a_host_that_never_answers_is_given_up_on(port, monkeypatch):
    monkeypatch.setattr(barrier_module, "_STEP_S", SOON_S)
    done = threading.Event()

    def second() -> None:
        with member_of(job(port, 1)):
            done.wait(LONG_S)

    with met(port, second) as barrier:
        barrier.ask("look", nothing)
        done.set()
    assert [(a.index, a.why) for a in barrier.absent] == [(1, "no answer in time")]


def test_whoever_has_another_token_is_turned_away_and_counted(port):
    def second() -> None:
        with pytest.raises(UsageError, match=r"token: received one that .* does not have"):
            join_barrier(job(port, 1, token=b"guessed"), within_s=LONG_S)

    with opened(job(port, 0)) as barrier:
        with beside(second):
            barrier.gather(within_s=1.0)
        assert "127.0.0.1: a wrong token)" in barrier.absent[0].why


@pytest.mark.parametrize(
    ("does", "refusal"),
    [
        (lambda barrier: barrier.ask("remove", nothing), "it asks for .*'remove'"),
        (lambda barrier: barrier.lose(1, "as if it had ended"), "closed the connection"),
    ],
    ids=["asks for another", "goes"],
)
def test_a_host_takes_no_steps_but_its_own_and_notices_that_the_first_has_gone(does, refusal, port):
    def second() -> None:
        with member_of(job(port, 1)) as member, pytest.raises(PeerLost, match=refusal):
            run_steps(member, {}, hosts=2)

    with met(port, second) as barrier:
        does(barrier)
        assert barrier.present == [0]


def nothing(present: Sequence[int]) -> None:
    """A step of the first host itself."""


def first_word(member: Member) -> object:
    """What the first host says first."""
    while not member.lost:
        select.select([member], [], [], LONG_S)
        member.turn()
        for message in member.take_messages():
            return message
    raise AssertionError(member.lost)
