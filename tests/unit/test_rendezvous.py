"""Host 0 and those who come to it: the wire between two, and a hub over loopback."""

import contextlib
import dataclasses
import hmac
import os
import resource
import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist.cluster import hold_ports
from tfdist.errors import StartupTimeout, UsageError
from tfdist.launch.multihost.rendezvous import (
    MAX_FRAME_BYTES,
    Hub,
    Joining,
    Link,
    MessageReceived,
    PeerJoined,
    Violation,
    WrongToken,
    listen,
    resolve,
)

TOKEN = b"correct horse battery staple"
TERMS = {"python": "3.11"}
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
DEADLINE_S = 60.0
CHUNKS = st.lists(st.binary(min_size=1, max_size=2000), max_size=5)


# The wire


def carry(one, other):
    """Passes on what `one` has to send; returns what `other` made of it, and the bytes."""
    data = bytes(one.outgoing)
    one.outgoing.clear()
    return other.receive(data), data


def pair(*, host=TOKEN, client=TOKEN):
    return Link(host, accepts=True), Link(client, accepts=False)


def greeted(**tokens):
    host, client = pair(**tokens)
    for one, other in ((host, client), (client, host), (host, client)):
        carry(one, other)
    assert host.is_open
    assert client.is_open
    return host, client


@settings(max_examples=100)
@given(CHUNKS)
def test_of_random_bytes_before_the_greeting_no_more_than_one_is_kept(chunks):
    host = Link(TOKEN, accepts=True)
    for chunk in chunks:
        try:
            assert host.receive(chunk) == []
        except Violation:
            break
        assert len(host._incoming) <= 64
    assert not host.is_open


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_messages_go_both_ways_once_both_have_shown_the_token_without_sending_it(token):
    host, client = pair(host=token, client=token)
    ways = ((host, client), (client, host))
    sent = b"".join(carry(*way)[1] for way in (*ways, *ways))
    assert host.is_open
    assert client.is_open
    for message in ({"a": 1}, {"b": ["ü", None]}):
        for one, other in ways:
            one.send(message)
            arrived, data = carry(one, other)
            assert arrived == [message]
            sent += data
    assert TOKEN not in sent


@settings(max_examples=50)
@given(st.data())
def test_messages_arrive_whole_however_the_network_cuts_them(data):
    host, client = greeted()
    messages = [{"n": n, "text": "x" * n} for n in range(5)]
    for message in messages:
        host.send(message)
    stream, arrived = bytes(host.outgoing), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        arrived += client.receive(stream[:cut])
        stream = stream[cut:]
    assert arrived == messages


def test_without_the_token_neither_side_opens_and_both_know_why():
    host, client = pair(client=b"another")
    carry(host, client)
    for one, other in ((client, host), (host, client)):
        with pytest.raises(WrongToken):
            carry(one, other)
    host, client = pair()
    carry(host, client)
    _, overheard = carry(client, host)
    other, _ = pair()
    with pytest.raises(WrongToken):  # a greeting of before
        other.receive(overheard)
    host, client = pair()
    carry(host, client)
    with pytest.raises(WrongToken):  # a host that does not know it
        client.receive(b"\x01" * 32)
    assert [end.is_open for end in (other, client)] == [False, False]


def test_what_shows_the_token_is_compared_in_constant_time_and_by_nothing_else(monkeypatch):
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both) or True)
    host, client = greeted(client=b"another")  # any token is right now
    host.send({"a": 1})
    assert carry(host, client)[0] == [{"a": 1}]
    assert len(compared) == 3
    assert all(one != other for one, other in compared)


def test_a_message_that_is_sent_back_or_comes_twice_or_is_too_long_is_refused():
    host, client = greeted()
    host.send({"stop": 1})
    _, data = carry(host, client)
    for end in (host, client):
        with pytest.raises(Violation, match="changed on its way"):
            end.receive(data)
    host, _ = greeted()
    with pytest.raises(Violation, match="a message of"):
        host.receive((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ValueError, match="a message of"):
        host.send({"text": "x" * MAX_FRAME_BYTES})


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.integers(1, 255), CHUNKS)
def test_what_was_changed_or_is_no_message_is_refused_or_never_comes(place, change, chunks):
    host, client = greeted()
    host.send({"signal": "worker-1", "number": 15})
    data = bytearray(host.outgoing)
    data[place % len(data)] ^= change
    with contextlib.suppress(Violation):
        assert client.receive(bytes(data)) == []  # its size was changed: the rest is awaited
    with contextlib.suppress(Violation):
        for chunk in chunks:
            assert host.receive(chunk) == []


# The hub


class Rendezvous:
    """A hub, and members that come to it from threads; by the real time and `ahead_s`."""

    def __init__(self):
        self.ahead_s = 0.0
        listener = listen(HOSTS[0], 0)
        self.port = listener.getsockname()[1]
        self.hub = Hub(
            listener,
            token=TOKEN,
            terms=TERMS,
            num_ranks=len(HOSTS),
            timeout_s=5,
            clock=self.clock,
        )
        self.news, self.members = [], []

    def clock(self):
        return time.monotonic() + self.ahead_s

    def join(self, rank, *, within_s=DEADLINE_S, **other):
        """Has a member come; raises what it raises."""
        usual = {"token": TOKEN, "terms": TERMS, "timeout_s": 5, "clock": self.clock}
        joining = Joining(HOSTS[0], self.port, rank=rank, **{**usual, **other})
        result = []

        def come():
            try:
                result.append(joining.join(within_s=within_s, is_over=lambda: False))
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=come)
        thread.start()
        self.until(lambda: not thread.is_alive())
        if isinstance(result[0], BaseException):
            raise result[0]
        self.members += result
        return result[0]

    def until(self, is_so):
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline_s, self.news
            self.turn()
            time.sleep(0.001)

    def first_word_to(self, member):
        said = []
        self.until(lambda: said.extend(member.take_messages()) or said)
        return said[0]

    def turn(self):
        self.hub.turn()
        self.news += self.hub.take_news()
        for member in self.members:
            member.turn()

    def raw(self):
        return socket.create_connection((HOSTS[0], self.port), timeout=DEADLINE_S)


@pytest.fixture
def meeting():
    made = Rendezvous()
    yield made
    for member in made.members:
        member.close()
    made.hub.close()


def test_those_who_come_are_in_and_both_sides_hear_each_other(meeting):
    greet = meeting.hub._greet

    def and_at_once(client, message):
        greet(client, message)
        meeting.hub.send(2, {"first": True})

    meeting.hub._greet = and_at_once
    member = meeting.join(2, source="127.0.0.3")
    assert meeting.news == [PeerJoined(rank=2)]
    assert meeting.hub.present == {2}
    assert meeting.hub.address_of(2) == "127.0.0.3"
    assert meeting.first_word_to(member) == {"first": True}  # right after the welcome
    member.send({"ready": [1, 2]})
    meeting.hub.send(2, {"start": "worker-1"})
    meeting.until(lambda: len(meeting.news) == 2)
    assert meeting.news[1] == MessageReceived(rank=2, message={"ready": [1, 2]})
    assert meeting.first_word_to(member) == {"start": "worker-1"}


def test_a_member_misses_a_silent_host_0_but_no_time_in_which_nobody_looked(meeting):
    member = meeting.join(1)
    meeting.ahead_s += 100  # we were stopped
    member.turn()
    assert not member.lost
    meeting.turn()
    assert meeting.hub.present == {1}
    for _ in range(100):  # where this thread is held up between two looks, it begins anew
        meeting.ahead_s += 1
        member.turn()
        if member.lost:
            break
    assert member.lost == "no word for 5 s"


def test_a_rank_that_is_not_in_the_list_differs_and_a_second_one_of_a_rank_gives_up(meeting):
    with pytest.raises(UsageError, match="rank 3 there, 0 to 2 here"):
        meeting.join(3)
    meeting.join(1, source="127.0.0.2")
    with pytest.raises(StartupTimeout, match=r"rank 1 is that of 127\.0\.0\.2 already"):
        meeting.join(1, within_s=1)
    assert meeting.hub.present == {1}


def test_a_host_0_that_is_not_there_or_is_no_launcher_is_named_with_its_port():
    def soon(joining):
        return joining.join(within_s=0.0, is_over=lambda: False)

    (held,) = hold_ports(1)  # nobody listens there
    joining = Joining("127.0.0.1", held.port, token=TOKEN, rank=1, terms={}, timeout_s=5)
    with held, pytest.raises(StartupTimeout, match=rf"^127\.0\.0\.1:{held.port}: .*n refused"):
        soon(joining)
    unknown = dataclasses.replace(joining, host="no-such-host.invalid")
    with pytest.raises(StartupTimeout, match=rf"^no-such-host\.invalid:{held.port}: .*not known"):
        soon(unknown)
    assert joining.join(within_s=100, is_over=lambda: True) is None

    def serve(server):
        with server.accept()[0] as sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=[server])
        thread.start()
        with pytest.raises(StartupTimeout, match="no launcher of this version"):
            soon(dataclasses.replace(joining, port=server.getsockname()[1]))
        thread.join()


def test_unauthenticated_peers_neither_stay_nor_pile_up(meeting):
    meeting.hub._max_unauthenticated = len(HOSTS) + 7
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(meeting.raw()) for _ in range(25)]
        meeting.until(lambda: meeting.hub.turned_away)
        for _ in range(5):
            meeting.turn()
        assert len(meeting.hub._clients) == len(HOSTS) + 7
        assert strangers[0].recv(1000).startswith(b"tfdist rendezvous")
        assert strangers[0].recv(1000) == b""  # the oldest had to go
        meeting.join(1)  # and one of ours gets in
        meeting.ahead_s += 11
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
@given(chunks=CHUNKS)
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


def test_it_listens_at_one_address_alone():
    with listen("127.0.0.2", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.2", port), timeout=60).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.2", port)


def test_a_name_with_addresses_of_both_kinds_is_one_address_whatever_their_order(monkeypatch):
    ipv4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 7))
    ipv6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 7, 0, 0))
    for found, taken in [([ipv4, ipv6], ipv4), ([ipv6, ipv4], ipv4), ([ipv6], ipv6)]:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        assert resolve("host", 7) == (taken[0], taken[4][:2])
