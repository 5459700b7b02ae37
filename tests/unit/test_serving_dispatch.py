"""Requests and replicas: histories without a socket."""

from tfdist.serving.dispatch import Dispatcher, Outcome, QueueLimits, Ticket
from tfdist.serving.protocol import Code, Frame, FrameKind


class Bench:
    """A dispatcher, its clock, the frames that replicas were sent, and outcomes."""

    def __init__(self, *replicas: int, **limits: float) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(QueueLimits(**limits), lambda: self.now)
        self.replicas = dict[int, list[Frame]]()
        self.outcomes = dict[bytes, Outcome]()
        self.update(1, *replicas)
        for id in replicas:
            self.connect(id)

    def update(self, served: int | None, *replicas: int, draining: tuple[int, ...] = ()) -> None:
        """Send a table of the supervisor."""
        paths = [[id, "p"] for id in replicas]
        table = {"served": served, "states": [], "replicas": paths, "draining": [*draining]}
        self.dispatcher.update(table)

    def connect(self, id: int) -> None:
        self.replicas[id] = []
        self.dispatcher.connected(id, lambda frame: self.replicas[id].append(frame))

    def ask(self, *payloads: bytes, deadline: float = 60.0, version: int | None = None) -> Ticket:
        for payload in payloads:

            def answer(outcome: Outcome, payload: bytes = payload) -> None:
                assert payload not in self.outcomes, "answered twice"
                self.outcomes[payload] = outcome

            same = {"kind": FrameKind.REST_PREDICT, "deadline": deadline, "version": version}
            ticket = Ticket(payload=payload, answer=answer, **same)
            self.dispatcher.submit(ticket)
        return ticket

    def has(self, *ids: int) -> list[list[bytes]]:
        return [[frame.payload for frame in self.replicas[id]] for id in ids]

    def answer(self, id: int) -> None:
        """Have a replica answer all that it has."""
        frames, self.replicas[id] = self.replicas[id], []
        for frame in frames:
            done = Frame(frame.id, FrameKind.ANSWER, b"re:" + frame.payload)
            self.dispatcher.received(id, done)


def test_requests_are_sent_to_the_least_busy_replica():
    bench = Bench(1, 2)
    bench.ask(b"a", b"b", b"c", b"d")
    assert bench.has(1, 2) == [[b"a", b"c"], [b"b", b"d"]]


def test_a_retried_request_has_a_replica_for_itself():
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


def test_a_request_that_kills_two_replicas_is_rejected():
    bench = Bench(1, 2, 3)
    bench.ask(b"a")
    bench.dispatcher.lost(1)
    bench.dispatcher.lost(2)
    assert bench.has(3) == [[]]
    assert str(bench.outcomes[b"a"]) == "2 replicas exited while computing this request"


def test_expired_and_abandoned_requests_are_not_sent():
    bench = Bench(window=1)
    bench.ask(b"gone").abandoned = True
    bench.ask(b"a", b"b", deadline=5.0)
    bench.ask(b"c")
    bench.update(1, 1)
    bench.connect(1)
    assert bench.has(1) == [[b"a"]]
    bench.now = 6.0
    bench.dispatcher.expire()
    codes = {bench.outcomes.pop(payload).code for payload in (b"a", b"b")}
    assert codes == {Code.DEADLINE_EXCEEDED}
    bench.answer(1)
    assert bench.has(1) == [[b"c"]]


def test_a_replica_without_answers_for_too_long_hangs():
    bench = Bench(1, 2, hang_s=10.0)
    bench.ask(b"a", b"b", b"c")
    bench.now = 9.0
    bench.answer(2)
    bench.ask(b"d")
    assert bench.dispatcher.hanging() == []
    bench.now = 11.0
    assert bench.dispatcher.hanging() == [1]


def test_a_new_version_answers_the_waiting_requests():
    """A request for the old version alone gets an error if no replica has it yet."""
    bench = Bench(1, window=1)
    bench.ask(b"a", b"b")
    bench.ask(b"c", version=1)
    bench.update(2, 2, draining=(1,))
    assert (bench.has(1), bench.dispatcher.drained()) == ([[b"a"]], set())
    bench.connect(2)
    assert bench.has(2) == [[b"b"]]
    bench.answer(1)
    assert (bench.has(1), bench.dispatcher.drained()) == ([[]], {1})
    bench.answer(2)
    assert bench.outcomes.pop(b"c").code is Code.NOT_FOUND
    assert bench.outcomes == {b"a": b"re:a", b"b": b"re:b"}


def test_a_replica_draining_before_it_connects_gets_no_request():
    bench = Bench()
    bench.update(1, 1)
    bench.update(2, 2, draining=(1,))
    bench.connect(1)
    bench.ask(b"a")
    bench.connect(2)
    assert bench.has(1, 2) == [[], [b"a"]]


def test_a_request_for_one_version_stays_with_it():
    bench = Bench(1)
    bench.ask(b"a", version=1)
    bench.update(2, 2, draining=(1,))
    bench.connect(2)
    bench.dispatcher.lost(1)
    assert bench.has(2) == [[]]
    assert bench.outcomes[b"a"].code is Code.NOT_FOUND
