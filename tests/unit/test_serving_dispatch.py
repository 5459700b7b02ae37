"""Requests and replicas: histories without a socket."""

from collections import Counter

import pytest

from tfdist.serving.dispatch import Dispatcher, Outcome, QueueLimits, Ticket
from tfdist.serving.front import ModelRoute
from tfdist.serving.protocol import Code, Frame, Kind, RequestError


class Bench:
    """A dispatcher, its clock, the frames that replicas were sent, and outcomes."""

    def __init__(self, *replicas: int, **limits: float) -> None:
        self.now = 0.0
        bounds = QueueLimits(**limits)  # type: ignore[arg-type]
        self.dispatcher = Dispatcher(
            bounds, lambda: self.now, counts=Counter[str](), batches=Counter[int]()
        )
        self.replicas = dict[int, list[Frame]]()
        self.outcomes = dict[bytes, Outcome]()
        for id in replicas:
            self.connect(id)

    def connect(self, id: int) -> None:
        self.replicas[id] = []
        self.dispatcher.connected(id, lambda frame: self.replicas[id].append(frame))

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
        return [frame.payload for frame in self.replicas[id]]

    def answer(self, id: int) -> None:
        """Have a replica answer all that it has."""
        frames, self.replicas[id] = self.replicas[id], []
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
    bench.dispatcher.route([2])
    bench.ask(b"b")
    assert (bench.has(1), bench.has(2)) == ([b"a"], [b"b"])
    bench.answer(1)
    assert bench.outcomes == {b"a": b"re:a"}


def test_what_waits_for_a_version_that_has_no_replica_left_moves_to_another():
    """But for a request of this version alone, which no other one ever answers."""
    old, new = Bench(1), Bench(2)
    old.ask(b"a")
    old.ask(b"b", version=1)
    old.dispatcher.lost(1)
    old.ask(b"c")
    assert (old.dispatcher.waiting, old.dispatcher.links) == (3, {})
    old.dispatcher.move_to(new.dispatcher)
    assert (old.dispatcher.waiting, new.has(2)) == (0, [b"a"])
    assert code_of(old.outcomes.pop(b"b")) is Code.NOT_FOUND
    new.answer(2)
    new.answer(2)
    assert old.outcomes == {b"a": b"re:a", b"c": b"re:c"}


class Route:
    """A model of version 1 with a replica, and the supervisor's tables of it."""

    TABLE = {"served": [1], "labels": {}, "states": [], "replicas": [[1, "p", 1]], "draining": []}  # noqa: RUF012

    def __init__(self, **limits: int) -> None:
        self.model, self.limits = ModelRoute(), QueueLimits(**limits)
        self.frames, self.outcomes = list[Frame](), list[Outcome]()
        self.update()
        self.old = self.model.dispatchers[1]
        self.old.connected(1, self.frames.append)

    def update(self, **changes: list[int]) -> None:
        self.model.update({**self.TABLE, **changes}, self.limits)

    def replace(self, *served: int) -> None:
        """Version 2 has come, the replica of version 1 is draining."""
        self.update(served=[*served], replicas=[], draining=[1])

    def ask(self, payload: bytes) -> None:
        kind, answer = Kind.REST_PREDICT, self.outcomes.append
        self.old.submit(Ticket(kind=kind, payload=payload, deadline=60.0, answer=answer))

    def answer(self) -> None:
        """Have the replica answer the last request that it got."""
        frame = self.frames[-1]
        self.old.received(1, Frame(frame.id, Kind.ANSWER, frame.payload))


def test_a_model_is_healthy_while_its_newest_version_has_a_replica():
    route = Route()
    assert route.model.is_healthy
    route.update(replicas=[])
    assert not route.model.is_healthy
    route.update(served=[1, 2])
    assert not route.model.is_healthy
    route.update(served=[])
    assert not route.model.is_healthy


def test_a_version_that_goes_answers_first_what_waits_for_it():
    route = Route(window=1)
    route.ask(b"a")
    route.ask(b"b")
    route.replace(2)
    for payload in (b"a", b"b"):
        assert route.model.route() == set()
        assert route.frames[-1].payload == payload
        route.answer()
    assert (route.outcomes, route.model.route()) == ([b"a", b"b"], {1})
    route.old.lost(1)
    assert (route.model.route(), set(route.model.dispatchers)) == ({1}, {2})


def test_what_waits_where_no_replica_takes_requests_any_more_goes_to_the_version_served():
    """A version that went comes back, and goes before a new replica of it is there."""
    route = Route()
    route.ask(b"a")
    for served in ([2], [1, 2]):
        route.replace(*served)
        assert route.model.route() == set()
    route.ask(b"b")
    route.replace(2)
    assert (route.model.route(), route.old.waiting) == (set(), 0)
    assert route.model.dispatchers[2].waiting == 1
    route.answer()
    assert (route.outcomes, route.model.route()) == ([b"a"], {1})
