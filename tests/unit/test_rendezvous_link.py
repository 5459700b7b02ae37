"""The wire between two hosts: greeting, seals and frames, and the messages in them."""

import contextlib
import hmac
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.cluster import Task
from tfdist.launch.events import Beat, Ended, Raised, Started, task_of
from tfdist.launch.messages import NO_SENSE, Message, decode_event, encode_event
from tfdist.launch.multihost.connection import MAX_FRAME_BYTES, Link, Violation, WrongToken
from tfdist.phases import PendingWork

TOKEN = b"correct horse battery staple"


def pair(*, host: bytes = TOKEN, client: bytes = TOKEN) -> tuple[Link, Link]:
    return Link(host, accepts=True), Link(client, accepts=False)


def carry(one: Link, other: Link) -> tuple[list[Message], bytes]:
    """Passes on what `one` has to send; returns what `other` made of it, and the bytes."""
    data = bytes(one.outgoing)
    one.outgoing.clear()
    return other.receive(data), data


def greeted(**tokens: bytes) -> tuple[Link, Link]:
    host, client = pair(**tokens)
    for one, other in ((host, client), (client, host), (host, client)):
        carry(one, other)
    assert host.is_open
    assert client.is_open
    return host, client


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_messages_go_both_ways_once_both_have_shown_the_token(token):
    host, client = greeted(host=token, client=token)
    for message in ({"a": 1}, {"b": ["ü", None]}):
        host.send(message)
        assert carry(host, client)[0] == [message]
        client.send(message)
        assert carry(client, host)[0] == [message]


def test_the_token_never_goes_over_the_wire():
    host, client = pair()
    sent = b"".join(
        carry(*ends)[1] for ends in ((host, client), (client, host), (host, client), (client, host))
    )
    host.send({"a": 1})
    assert TOKEN not in sent + carry(host, client)[1]


@settings(max_examples=50)
@given(st.data())
def test_messages_arrive_whole_however_the_network_cuts_them(data):
    host, client = greeted()
    messages: list[Message] = [{"n": n, "text": "x" * n} for n in range(5)]
    for message in messages:
        host.send(message)
    stream, arrived = bytes(host.outgoing), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        arrived += client.receive(stream[:cut])
        stream = stream[cut:]
    assert arrived == messages


def test_a_client_with_another_token_is_refused_and_told_so():
    host, client = pair(client=b"another")
    carry(host, client)
    with pytest.raises(WrongToken):
        carry(client, host)
    assert not host.is_open
    with pytest.raises(WrongToken):
        carry(host, client)


def test_what_shows_the_token_is_compared_in_constant_time_and_by_nothing_else(monkeypatch):
    compared: list[tuple[bytes, bytes]] = []

    def equal(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return True

    monkeypatch.setattr(hmac, "compare_digest", equal)
    host, client = greeted(host=TOKEN, client=b"another")  # any token is right now
    host.send({"a": 1})
    assert carry(host, client)[0] == [{"a": 1}]
    assert len(compared) == 3
    assert all(one != other for one, other in compared)


def test_a_host_that_does_not_know_the_token_is_found_out_by_its_guest():
    host, client = pair()
    carry(host, client)
    with pytest.raises(WrongToken):
        client.receive(b"\x01" * 32)
    assert not client.is_open


def test_a_greeting_that_was_overheard_opens_nothing():
    host, client = pair()
    carry(host, client)
    _, overheard = carry(client, host)
    other, _ = pair()
    with pytest.raises(WrongToken):
        other.receive(overheard)


def test_what_is_no_launcher_is_seen_by_its_first_byte():
    with pytest.raises(Violation, match="no launcher"):
        Link(TOKEN, accepts=False).receive(b"HTTP")


def test_a_message_that_is_sent_back_or_comes_twice_is_refused():
    host, client = greeted()
    host.send({"stop": 1})
    _, data = carry(host, client)
    for end in (host, client):
        with pytest.raises(Violation, match="changed on its way"):
            end.receive(data)


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_message_that_was_changed_is_refused_or_never_comes(place, change):
    host, client = greeted()
    host.send({"signal": "worker-1", "number": 15})
    data = bytearray(host.outgoing)
    data[place % len(data)] ^= change
    with contextlib.suppress(Violation):
        assert client.receive(bytes(data)) == []  # its size was changed: the rest is awaited


def test_a_message_without_end_is_refused_by_its_first_bytes():
    host, _ = greeted()
    with pytest.raises(Violation, match="a message of"):
        host.receive((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


def test_a_message_that_is_too_long_is_not_sent():
    host, _ = greeted()
    with pytest.raises(ValueError, match="a message of"):
        host.send({"text": "x" * MAX_FRAME_BYTES})


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=300), max_size=8))
def test_random_bytes_open_nothing_and_are_not_kept(chunks):
    host = Link(TOKEN, accepts=True)
    answer = len(host.outgoing)
    for chunk in chunks:
        try:
            assert host.receive(chunk) == []
        except Violation:
            break
        assert len(host._incoming) <= 64
    assert not host.is_open
    assert len(host.outgoing) <= answer + 32


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=300), max_size=8))
def test_random_bytes_after_the_greeting_say_nothing(chunks):
    host, _ = greeted()
    for chunk in chunks:
        try:
            assert host.receive(chunk) == []
        except Violation:
            break


# What happens on another host arrives as it was, by this host's clock; and nothing else does.

W1 = Task("worker", 1)
EVENTS = [
    Started(task=W1, pid=4711, at_s=90),
    Raised(task=W1, exit_code=3, cause="ValueError: ü", at_s=90, step=7),
    Raised(task=W1, exit_code=3, cause="", at_s=90),
    Beat(task=W1, phase="step", step=12, since_s=80, first_step_s=50, at_s=90),
    Beat(task=W1, phase="import", step=None, since_s=80, first_step_s=None, at_s=90, rest_s=85),
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
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_arrives_by_the_clock_of_who_hears_it(event):
    message = json.loads(json.dumps(encode_event(event, now_s=100)))
    assert decode_event(message, now_s=100) == event
    later = decode_event(message, now_s=1100)
    assert later.at_s == event.at_s + 1000
    if isinstance(event, Beat):
        assert later.since_s == event.since_s + 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)
KEYS = ("task", "at_s", "pid", "exit_code", "cause", "step", "status", "phase", "since_s")


@given(
    st.fixed_dictionaries(
        {"event": st.sampled_from(["started", "raised", "ended", "beat", "x"]) | JSON},
        optional={key: JSON | st.just("worker-1") | st.just(1.5) for key in KEYS},
    )
)
def test_what_is_no_event_is_refused_without_another_error(message):
    try:
        event = decode_event(message, now_s=100)
    except NO_SENSE:
        return
    assert isinstance(event, Started | Raised | Ended | Beat)


@pytest.mark.parametrize("name", ["worker", "worker-", "worker--1", "wörker-1", "boss-0", 3, None])
def test_what_is_no_task_is_refused(name):
    with pytest.raises(ValueError, match="task"):
        task_of(name)
