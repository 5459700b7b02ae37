"""Requests and replicas: histories without a socket."""

import dataclasses

import pytest

from tfdist.serving.dispatch import Dispatcher, Outcome, QueueLimits, Ticket
from tfdist.serving.front import ModelRoute
from tfdist.serving.protocol import Code, Frame, Kind, RequestError


@dataclasses.dataclass
class FakeReplica:
    """The frames that a replica was sent."""

    frames: list[Frame] = dataclasses.field(default_factory=list)

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)

    def close(self) -> None:
        pass


class Bench:
    """A dispatcher, its clock, replicas and outcomes."""

    def __init__(self, *replicas: int, **limits: float) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(QueueLimits(**limits), lambda: self.now)  # type: ignore[arg-type]
        self.replicas = dict[int, FakeReplica]()
        self.outcomes = dict[bytes, Outcome]()
        for id in replicas:
            self.connect(id)

    def connect(self, id: int, version: int = 1) -> None:
        self.replicas[id] = FakeReplica()
        self.dispatcher.connected(id, self.replicas[id], version=version)

    def ask(self, payload: bytes, deadline: float = 60.0, version: int | None = None) -> Ticket:
        def answer(outcome: Outcome) -> None:
            assert payload not in self.outcomes, "answered twice"
            self.outcomes[payload] = outcome

        ticket = Ticket(
            kind=Kind.REST_PREDICT,
            payload=payload,
            deadline=deadline,
            answer=answer,
            version=version,
        )
        self.dispatcher.submit(ticket)
        return ticket

    def has(self, id: int) -> list[bytes]:
        return [frame.payload for frame in self.replicas[id].frames]

    def answer(self, id: int) -> None:
        """Have a replica answer all that it has."""
        frames, self.replicas[id].frames = self.replicas[id].frames, []
        for frame in frames:
            done = Frame(frame.id, Kind.ANSWER, b"re:" + frame.payload)
            self.dispatcher.received(id, done)


def code_of(outcome: Outcome) -> Code:
    assert isinstance(outcome, RequestError)
    return outcome.code


def test_requests_go_to_the_replica_that_has_the_fewest():
    bench = Bench(1, 2)
    for payload in (b"a", b"b", b"c", b"d"):
        bench.ask(payload)
    assert (bench.has(1), bench.has(2)) == ([b"a", b"c"], [b"b", b"d"])


def test_requests_wait_for_the_first_replica():
    bench = Bench()
    bench.ask(b"a")
    bench.connect(1)
    bench.answer(1)
    assert bench.outcomes == {b"a": b"re:a"}


def test_bytes_are_bounded_until_they_are_answered():
    bench = Bench(1, size_bytes=10)
    bench.ask(b"12345678")
    with pytest.raises(RequestError):
        bench.ask(b"abc")
    bench.answer(1)
    bench.ask(b"1234567890")


def test_what_is_tried_again_has_a_replica_for_itself():
    bench = Bench(1, 2)
    for payload in (b"a", b"b", b"c"):
        bench.ask(payload)
    bench.dispatcher.lost(1)  # with a and c
    bench.answer(2)
    bench.ask(b"d")
    assert bench.has(2) == [b"a"]
    bench.answer(2)
    assert bench.has(2) == [b"c"]
    bench.answer(2)
    assert bench.has(2) == [b"d"]


def test_while_one_is_tried_again_the_other_replicas_work():
    bench = Bench(1, 2, 3)
    bench.ask(b"a")
    bench.dispatcher.lost(1)
    assert bench.has(2) == [b"a"]
    for payload in (b"b", b"c"):
        bench.ask(payload)
    assert (bench.has(2), bench.has(3)) == ([b"a"], [b"b", b"c"])


def test_a_request_that_kills_two_replicas_is_answered_and_its_neighbours_live():
    bench = Bench(1)
    for payload in (b"a", b"poison", b"c"):
        bench.ask(payload)
    for replica in range(2, 9):
        bench.dispatcher.lost(replica - 1)
        bench.connect(replica)
        while bench.has(replica) and b"poison" not in bench.has(replica):
            bench.answer(replica)
        if len(bench.outcomes) == 3:
            break
    assert code_of(bench.outcomes.pop(b"poison")) is Code.INTERNAL
    assert bench.outcomes == {b"a": b"re:a", b"c": b"re:c"}
    assert replica == 3, "two replicas, no more"


def test_a_deadline_ends_the_wait_in_the_queue_and_at_a_replica():
    bench = Bench(1, window=1)
    bench.ask(b"a", deadline=5.0)
    bench.ask(b"b", deadline=5.0)
    bench.ask(b"c", deadline=50.0)
    bench.now = 6.0
    bench.dispatcher.expire()
    assert code_of(bench.outcomes[b"a"]) is Code.DEADLINE_EXCEEDED
    assert code_of(bench.outcomes[b"b"]) is Code.DEADLINE_EXCEEDED
    bench.answer(1)
    assert bench.has(1) == [b"c"]


def test_a_request_whose_client_has_gone_is_not_sent():
    bench = Bench()
    bench.ask(b"a").abandoned = True
    bench.ask(b"b")
    bench.connect(1)
    assert bench.has(1) == [b"b"]


def test_a_replica_hangs_that_has_requests_and_answers_none_for_too_long():
    bench = Bench(1, 2, hang_s=10.0)
    for payload in (b"a", b"b", b"c"):
        bench.ask(payload)
    bench.now = 9.0
    bench.answer(2)
    bench.ask(b"d")
    assert bench.dispatcher.hanging() == []
    bench.now = 11.0
    assert bench.dispatcher.hanging() == [1]


def test_a_replica_that_is_not_routed_to_ends_what_it_has():
    bench = Bench(1, 2)
    bench.ask(b"a")
    assert bench.dispatcher.route([2]) == []
    bench.ask(b"b")
    assert (bench.has(1), bench.has(2)) == ([b"a"], [b"b"])
    bench.answer(1)
    assert bench.dispatcher.route([2]) == [1]


def test_a_request_for_a_version_is_never_answered_by_another():
    bench = Bench(1)
    bench.ask(b"a", version=1)
    bench.ask(b"b")
    bench.dispatcher.lost(1)
    bench.connect(2, version=2)
    bench.answer(2)
    assert code_of(bench.outcomes.pop(b"a")) is Code.NOT_FOUND
    assert bench.outcomes == {b"b": b"re:b"}


def test_what_waits_for_a_version_that_has_no_replica_left_moves_to_another():
    old, new = Bench(), Bench(1)
    old.ask(b"a")
    old.ask(b"b", version=1)
    assert (old.dispatcher.waiting, old.dispatcher.has_links) == (2, False)
    new.connect(2, version=2)
    new.dispatcher.lost(1)
    old.dispatcher.move_to(new.dispatcher)
    assert (old.dispatcher.waiting, new.has(2)) == (0, [b"a"])
    assert code_of(old.outcomes[b"b"]) is Code.NOT_FOUND
    new.answer(2)
    assert old.outcomes[b"a"] == b"re:a"


def test_a_version_that_goes_answers_first_what_waits_for_it():
    told = {"serving": 1, "served": [1], "labels": {}, "states": [], "draining": []}
    model, limits, outcomes = ModelRoute(), QueueLimits(window=1), list[Outcome]()
    model.take({**told, "replicas": [[1, "path", 1]]}, limits)
    old, replica = model.dispatchers[1], FakeReplica()
    old.connected(1, replica, version=1)
    for payload in (b"a", b"b"):
        old.submit(
            Ticket(kind=Kind.REST_PREDICT, payload=payload, deadline=60.0, answer=outcomes.append)
        )
    gone = {**told, "serving": 2, "served": [2], "replicas": [], "draining": [1]}
    model.take(gone, limits)
    for payload in (b"a", b"b"):
        assert model.route() == set()
        assert replica.frames[-1].payload == payload
        old.received(1, Frame(replica.frames[-1].id, Kind.ANSWER, payload))
    assert (outcomes, model.route()) == ([b"a", b"b"], {1})
    old.lost(1)
    assert (model.route(), set(model.dispatchers)) == (set(), {2})


def test_what_waits_where_no_replica_takes_requests_any_more_goes_to_the_version_served():
    """A version that went comes back, and goes before a new replica of it is there."""
    told = {"serving": 1, "served": [1], "labels": {}, "states": [], "draining": []}
    model, limits, outcomes = ModelRoute(), QueueLimits(), list[Outcome]()
    model.take({**told, "replicas": [[1, "path", 1]]}, limits)
    old, replica = model.dispatchers[1], FakeReplica()
    old.connected(1, replica, version=1)

    def ask(payload: bytes) -> None:
        old.submit(
            Ticket(kind=Kind.REST_PREDICT, payload=payload, deadline=60.0, answer=outcomes.append)
        )

    ask(b"a")
    gone = {**told, "serving": 2, "served": [2], "replicas": [], "draining": [1]}
    back = {**gone, "served": [1, 2]}
    for table in (gone, back):
        model.take(table, limits)
        assert model.route() == set()
    ask(b"b")
    model.take(gone, limits)
    assert (model.route(), old.waiting, model.dispatchers[2].waiting) == (set(), 0, 1)
    old.received(1, Frame(replica.frames[0].id, Kind.ANSWER, b"a"))
    assert (outcomes, model.route()) == ([b"a"], {1})
