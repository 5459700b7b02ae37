"""Host 0 and those who come to it, over loopback and in one process."""

import contextlib
import dataclasses
import os
import resource
import socket
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist.cluster import hold_ports
from tfdist.errors import StartupTimeout, UsageError
from tfdist.launch.multihost.rendezvous import (
    Hub,
    Joining,
    Member,
    MessageReceived,
    PeerJoined,
    listen,
)

TOKEN = b"correct horse battery staple"
TERMS = {"python": "3.11"}
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
DEADLINE_S = 60.0


class Clock:
    """The real time, and what a test adds to it."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._source() + self.ahead_s


class Rendezvous:
    """A hub, and members that come to it from threads."""

    def __init__(self, hosts: tuple[str, ...] = HOSTS, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        listener = listen(hosts[0], 0)
        self.port = listener.getsockname()[1]
        self.hub = Hub(
            listener, token=TOKEN, terms=TERMS, num_ranks=len(hosts), timeout_s=5, clock=self.clock
        )
        self.news: list[object] = []
        self.members: list[Member] = []

    def joining(self, rank: int, **other: object) -> Joining:
        settings = {"token": TOKEN, "terms": TERMS, "host": HOSTS[0], **other}
        return Joining(port=self.port, rank=rank, timeout_s=5, clock=self.clock, **settings)  # type: ignore[arg-type]

    def join(self, rank: int, *, within_s: float = DEADLINE_S, **other: object) -> Member:
        """Has a member come; raises what it raises."""
        result: list[Member | BaseException | None] = []

        def come() -> None:
            try:
                joining = self.joining(rank, **other)
                result.append(joining.join(within_s=within_s, is_over=lambda: False))
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=come)
        thread.start()
        self.until(lambda: not thread.is_alive())
        thread.join()
        if isinstance(result[0], BaseException):
            raise result[0]
        assert result[0] is not None
        self.members.append(result[0])
        return result[0]

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline_s, self.news
            self.turn()
            time.sleep(0.001)

    def first_word_to(self, member: Member) -> object:
        said: list[object] = []
        self.until(lambda: bool(said.extend(member.take_messages()) or said))
        return said[0]

    def turn(self) -> None:
        self.hub.turn()
        self.news += self.hub.take_news()
        for member in self.members:
            member.turn()

    def raw(self) -> socket.socket:
        sock = socket.create_connection((HOSTS[0], self.port), timeout=60)
        sock.settimeout(60)
        return sock


@pytest.fixture
def meeting():
    made = Rendezvous()
    yield made
    for member in made.members:
        member.close()
    made.hub.close()


def test_those_who_come_are_in_and_both_sides_hear_each_other(meeting):
    member = meeting.join(2, source="127.0.0.3")
    assert meeting.news == [PeerJoined(rank=2)]
    assert meeting.hub.present == {2}
    assert meeting.hub.address_of(2) == "127.0.0.3"
    member.send({"ready": [1, 2]})
    meeting.hub.send(2, {"start": "worker-1"})
    meeting.until(lambda: len(meeting.news) == 2)
    assert meeting.news[1] == MessageReceived(rank=2, message={"ready": [1, 2]})
    assert meeting.first_word_to(member) == {"start": "worker-1"}


def test_what_host_0_says_right_after_the_welcome_is_not_lost(meeting):
    greet = meeting.hub._greet

    def and_at_once(client, message):  # type: ignore[no-untyped-def]
        greet(client, message)
        meeting.hub.send(1, {"first": True})

    meeting.hub._greet = and_at_once  # type: ignore[method-assign]
    member = meeting.join(1)
    assert meeting.first_word_to(member) == {"first": True}


def test_a_member_misses_a_silent_host_0(meeting):
    member = meeting.join(1)
    for _ in range(100):  # where this thread is held up between two looks, it begins anew
        meeting.clock.ahead_s += 1
        member.turn()
        if member.lost:
            break
    assert member.lost == "no word for 5 s"


def test_time_in_which_nobody_looked_is_not_silence(meeting):
    member = meeting.join(1)
    meeting.clock.ahead_s += 100  # we were stopped
    member.turn()
    assert not member.lost
    meeting.until(lambda: meeting.clock() > 0)
    assert meeting.hub.present == {1}


def test_a_rank_that_is_not_in_the_list_differs(meeting):
    with pytest.raises(UsageError, match="rank 3 there, 0 to 2 here"):
        meeting.join(3)


def test_a_second_one_of_a_rank_waits_and_gives_up(meeting):
    meeting.join(1, source="127.0.0.2")
    with pytest.raises(StartupTimeout, match=r"rank 1 is that of 127\.0\.0\.2 already"):
        meeting.join(1, within_s=1)
    assert meeting.hub.present == {1}


def test_a_host_0_that_is_not_there_is_named_with_its_port():
    (held,) = hold_ports(1)  # nobody listens there
    joining = Joining("127.0.0.1", held.port, token=TOKEN, rank=1, terms={}, timeout_s=5)
    with (
        held,
        pytest.raises(StartupTimeout, match=rf"^127\.0\.0\.1:{held.port}: .*Connection refused"),
    ):
        joining.join(within_s=0.1, is_over=lambda: False)
    joining = dataclasses.replace(joining, host="no-such-host.invalid")
    with pytest.raises(StartupTimeout, match=rf"^no-such-host\.invalid:{held.port}: .*not known"):
        joining.join(within_s=0.1, is_over=lambda: False)
    assert joining.join(within_s=100, is_over=lambda: True) is None


def test_what_is_no_launcher_is_said_to_be_none():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        joining = Joining(*server.getsockname(), token=TOKEN, rank=1, terms={}, timeout_s=5)
        with pytest.raises(StartupTimeout, match="no launcher of this version"):
            joining.join(within_s=0.0, is_over=lambda: False)
        thread.join()


def test_unauthenticated_peers_neither_stay_nor_pile_up(meeting):
    meeting.hub._max_unauthenticated = len(HOSTS) + 7
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(meeting.raw()) for _ in range(25)]
        meeting.until(lambda: bool(meeting.hub.turned_away))
        for _ in range(5):
            meeting.turn()
        assert len(meeting.hub._clients) == len(HOSTS) + 7
        assert strangers[0].recv(1000).startswith(b"tfdist rendezvous")
        assert strangers[0].recv(1000) == b""  # the oldest had to go
        meeting.join(1)  # and one of ours gets in
        meeting.clock.ahead_s += 11
        meeting.until(lambda: len(meeting.hub._clients) <= 1)


def test_a_job_with_many_files_open_ends_as_any_other():
    """The tasks of a host take five each, and `select` knows no number from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack, open("/dev/null") as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.dup(file.fileno()))
        many = Rendezvous()
        stack.callback(many.hub.close)
        assert many.hub.fileno() > 1024
        many.join(1).close()
        many.hub.end({"end": 0})
        assert not many.hub.present


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.binary(min_size=1, max_size=2000), max_size=5))
def test_random_bytes_end_only_their_own_connection(meeting, chunks):
    if not meeting.members:
        meeting.join(1)
    with meeting.raw() as sock:
        for chunk in chunks:
            with contextlib.suppress(OSError):
                sock.sendall(chunk)
            meeting.turn()
    meeting.until(lambda: len(meeting.hub._clients) == 1)
    assert meeting.hub.present == {1}
    assert meeting.news == [PeerJoined(rank=1)]
    assert len(meeting.hub.turned_away) <= 16
