"""Requests and replicas: histories without a socket."""

from collections import Counter

import pytest

from tfdist.serving.dispatch import Dispatcher, ModelRoute, Outcome, QueueLimits, Ticket
from tfdist.serving.protocol import Code, Frame, Kind, RequestError


class Bench:
    """A dispatcher, its clock, the frames that replicas were sent, and outcomes."""

    def __init__(self, *replicas: int, of: Dispatcher | None = None, **limits: float) -> None:
        self.now = 0.0
        bounds = QueueLimits(**limits)
        counts, batches = Counter[str](), Counter[int]()
        self.dispatcher = of or Dispatcher(
            bounds, lambda: self.now, counts=counts, batches=batches
        )
        self.replicas = dict[int, list[Frame]]()
        self.outcomes = dict[bytes, Outcome]()
        for id in replicas:
            self.connect(id)

    def connect(self, id: int) -> None:
        self.replicas[id] = []
        self.dispatcher.connected(id, lambda frame: self.replicas[id].append(frame))

    def ask(self, *payloads: bytes, deadline: float = 60.0, version: int | None = None) -> Ticket:
        for payload in payloads:

            def answer(outcome: Outcome, payload: bytes = payload) -> None:
                assert payload not in self.outcomes, "answered twice"
                self.outcomes[payload] = outcome

            same = {"kind": Kind.REST_PREDICT, "deadline": deadline, "version": version}
            ticket = Ticket(payload=payload, answer=answer, **same)
            self.dispatcher.submit(ticket)
        return ticket

    def has(self, *ids: int) -> list[list[bytes]]:
        return [[frame.payload for frame in self.replicas[id]] for id in ids]

    def answer(self, id: int) -> None:
        """Have a replica answer all that it has."""
        frames, self.replicas[id] = self.replicas[id], []
        for frame in frames:
            done = Frame(frame.id, Kind.ANSWER, b"re:" + frame.payload)
            self.dispatcher.received(id, done)


def test_requests_go_to_the_replica_that_has_the_fewest():
    bench = Bench(1, 2)
    bench.ask(b"a", b"b", b"c", b"d")
    assert bench.has(1, 2) == [[b"a", b"c"], [b"b", b"d"]]


def test_bytes_are_bounded_until_they_are_answered():
    bench = Bench(1, size_bytes=10)
    bench.ask(b"12345678")
    with pytest.raises(RequestError):
        bench.ask(b"abc")
    bench.answer(1)
    bench.ask(b"1234567890")


def test_what_is_tried_again_has_a_replica_for_itself_and_the_others_work():
    bench = Bench(1, 2, 3)
    bench.ask(b"a", b"b", b"c", b"d")
    bench.dispatcher.lost(1)  # with a and d
    bench.answer(2)
    bench.ask(b"e", b"f")
    assert bench.has(2, 3) == [[b"a"], [b"c", b"e", b"f"]]
    bench.answer(2)
    assert bench.has(2) == [[b"d"]]
    bench.answer(2)
    bench.ask(b"g")
    assert bench.has(2) == [[b"g"]]


def test_a_request_whose_client_or_deadline_has_gone_is_not_sent():
    bench = Bench(window=1)
    bench.ask(b"gone").abandoned = True
    bench.ask(b"a", b"b", deadline=5.0)
    bench.ask(b"c")
    bench.connect(1)
    assert bench.has(1) == [[b"a"]]
    bench.now = 6.0
    bench.dispatcher.expire()
    codes = {bench.outcomes.pop(payload).code for payload in (b"a", b"b")}
    assert codes == {Code.DEADLINE_EXCEEDED}
    bench.answer(1)
    assert bench.has(1) == [[b"c"]]


def test_a_replica_hangs_that_has_requests_and_answers_none_for_too_long():
    bench = Bench(1, 2, hang_s=10.0)
    bench.ask(b"a", b"b", b"c")
    bench.now = 9.0
    bench.answer(2)
    bench.ask(b"d")
    assert bench.dispatcher.hanging() == []
    bench.now = 11.0
    assert bench.dispatcher.hanging() == [1]


class Route(Bench):
    """A model of version 1 with a replica, and the supervisor's tables of it."""

    def __init__(self, **limits: int) -> None:
        self.model, self.limits = ModelRoute(), QueueLimits(**limits)
        self.update()
        super().__init__(1, of=self.model.dispatchers[1])

    def update(self, **changes: list[int]) -> None:
        table = {"served": [1], "labels": {}, "states": [], "draining": []}
        self.model.update({**table, "replicas": [[1, "p", 1]], **changes}, self.limits)

    def replace(self, *served: int) -> None:
        """Version 2 has come, the replica of version 1 is draining."""
        self.update(served=[*served], replicas=[], draining=[1])


def test_a_model_is_healthy_while_its_newest_version_has_a_replica():
    route = Route()
    assert route.model.is_healthy
    for changes in ({"replicas": []}, {"served": [1, 2]}, {"served": []}):
        route.update(**changes)
        assert not route.model.is_healthy


def test_a_version_that_goes_answers_first_what_waits_for_it():
    route = Route(window=1)
    route.ask(b"a", b"b")
    route.replace(2)
    for payload in (b"a", b"b"):
        assert (route.model.route(), route.has(1)) == (set(), [[payload]])
        route.answer(1)
    assert (len(route.outcomes), route.model.route()) == (2, {1})
    route.dispatcher.lost(1)
    assert (route.model.route(), set(route.model.dispatchers)) == ({1}, {2})


def test_what_waits_where_no_replica_takes_requests_any_more_goes_to_the_version_served():
    """A version that went comes back, and goes before a new replica of it is there.

    A request of this version alone, which no other one ever answers, is answered with an error.
    """
    route = Route()
    route.ask(b"a")
    for served in ([2], [1, 2]):
        route.replace(*served)
        assert route.model.route() == set()
    route.ask(b"b")
    route.ask(b"c", version=1)
    route.replace(2)
    assert (route.model.route(), route.dispatcher.waiting) == (set(), 0)
    assert route.outcomes.pop(b"c").code is Code.NOT_FOUND
    new = Bench(2, of=route.model.dispatchers[2])
    assert new.has(2) == [[b"b"]]
    for bench, id in ((route, 1), (new, 2)):
        bench.answer(id)
    assert (route.outcomes, route.model.route()) == ({b"a": b"re:a", b"b": b"re:b"}, {1})
