"""Worker pool of a ps job with workers that are not there: which worker gets what."""

import itertools
import threading
import time
from concurrent.futures import as_completed

import pytest
import tensorflow as tf

from tfdist import phases
from tfdist.errors import PeerLost
from tfdist.ps import workers as workers_module
from tfdist.ps.workers import WorkerPool

DEADLINE_S = 30.0


class Members:
    """Three workers and a ps that are there, or not, as the test says."""

    num_workers = 3

    def __init__(self):
        self.connected = frozenset(range(3))
        self.silent = set()
        self.gone = []
        self.alone = threading.Event()
        """Worker 0 is the only one that is connected to."""

    def answers(self, worker):
        return worker not in self.silent

    def admit(self, worker):
        if worker in self.silent:
            return False
        self.connected |= {worker}
        return True

    def lost(self, worker):
        self.connected -= {worker}
        if self.connected == {0}:
            self.alone.set()

    def missing(self):
        return self.gone


@pytest.fixture
def members(monkeypatch):
    monkeypatch.setattr(workers_module, "_PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(workers_module, "_GONE_S", 0.2)
    return Members()


@pytest.fixture
def pool(members):
    made = WorkerPool(members, patience_s=DEADLINE_S)
    yield made
    made._fail(PeerLost("the test is over"))


class Stuck:
    """Work that does not end on worker 1, until it is let go."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, incarnation):
        if incarnation.worker_index == 1:
            self.begun.set()
            assert self.go_on.wait(DEADLINE_S)
        assert self.begun.wait(DEADLINE_S)  # the others do not take all of it before
        return incarnation.worker_index


def submit_until_stuck(pool, stuck):
    """Returns the futures of some pieces, of which worker 1 has one."""
    futures = [pool.submit(stuck, steps=1) for _ in range(6)]
    assert stuck.begun.wait(DEADLINE_S)
    return futures


def test_the_work_of_a_worker_that_is_gone_is_done_by_another_though_its_call_never_ends(
    pool, members
):
    stuck = Stuck()
    futures = submit_until_stuck(pool, stuck)
    members.silent.add(1)
    done = [future.result(DEADLINE_S) for future in futures]
    assert {one.worker_index for one in done} <= {0, 2}
    assert sorted(one.times for one in done)[-2:] in ([1, 2], [2])
    assert pool.shares[1].losses == 1
    assert phases.awaited() is None

    stuck.go_on.set()  # what the call returns after all is nobody's
    members.silent.clear()
    again = Stuck()
    again.go_on.set()
    submit_until_stuck(pool, again)  # it takes work again
    assert sum(share.losses for share in pool.shares.values()) == 1
    assert all(future.result(0).worker_index != 1 for future in futures)


@pytest.mark.parametrize("misses", [0, 1])
def test_a_worker_that_answers_keeps_its_work_however_long_it_takes(pool, members, misses):
    """Also one that misses every second question."""
    stuck = Stuck()
    futures = submit_until_stuck(pool, stuck)
    answers = itertools.cycle([False] * misses + [True])
    members.answers = lambda worker: worker != 1 or next(answers)
    assert not threading.Event().wait(0.5)  # longer than a silent one is given
    stuck.go_on.set()
    assert 1 in {future.result(DEADLINE_S).worker_index for future in futures}
    assert pool.shares[1].losses == 0


def test_a_ps_that_falls_silent_while_workers_wait_for_it_ends_the_work_with_its_name(
    pool, members
):
    stuck = Stuck()  # as a call that reads of a host which has lost its power
    futures = submit_until_stuck(pool, stuck)
    members.gone = ["ps-1"]
    failed = [future.exception(DEADLINE_S) for future in futures]
    assert "ps-1 does not answer any more" in map(str, failed)
    stuck.go_on.set()


def test_a_piece_is_not_blamed_for_idle_workers_that_are_gone(pool, members):
    release, begun = [threading.Event() for _ in range(3)], threading.Barrier(4)

    def wait(incarnation):
        begun.wait(DEADLINE_S)
        return release[incarnation.worker_index].wait(DEADLINE_S)

    busy = [pool.submit(wait) for _ in release]
    begun.wait(DEADLINE_S)
    release[1].set()
    release[2].set()
    # Two of them, or it would be taken back from those.
    assert len(list(itertools.islice(as_completed(busy, DEADLINE_S), 2))) == 2

    def work(incarnation):
        if incarnation.worker_index:
            raise tf.errors.UnavailableError(None, None, "Socket closed")

    members.silent.update((1, 2))
    unit = pool.submit(work)
    assert members.alone.wait(DEADLINE_S)
    release[0].set()
    assert unit.result(DEADLINE_S).times == 2  # begun by one of them, and not by the other
    assert all(future.result(DEADLINE_S) for future in busy)


def cannot_reach(ps, *workers):
    """Work that some workers cannot do, as they do not reach a ps that the chief does."""

    def work(incarnation):
        if incarnation.worker_index in workers:
            raise tf.errors.UnavailableError(None, None, f"{ps}: No route to host\nand more")
        return incarnation.worker_index

    return work


def test_a_worker_that_answers_and_gets_nothing_done_is_left_out_with_the_reason(pool, caplog):
    end_s = time.monotonic() + DEADLINE_S
    while "going on without it" not in caplog.text:
        assert time.monotonic() < end_s
        assert pool.submit(cannot_reach("ps-0", 1)).result(DEADLINE_S).worker_index != 1
    (line,) = [r.message for r in caplog.records if "going on" in r.message]
    assert line == (
        "worker-1 answers, but none of 3 work units got done: ps-0: No route to host; "
        "going on without it"
    )
    losses = pool.shares[1].losses
    assert losses == 3
    for _ in range(20):
        assert pool.submit(cannot_reach("ps-0", 1)).result(DEADLINE_S).times == 1
    assert pool.shares[1].losses == losses


@pytest.mark.parametrize("workers", [1, 3])
def test_when_no_worker_reaches_a_ps_the_chief_says_so_and_waits_for_nobody(members, workers):
    """A piece that is alone is tried no more often than one that ends its workers."""
    members.num_workers, members.connected = workers, frozenset(range(workers))
    found = WorkerPool(members, patience_s=DEADLINE_S)
    with pytest.raises(PeerLost, match=r"worker-\d answers, .*: ps-0: No route to host$"):
        found.submit(cannot_reach("ps-0", 0, 1, 2)).result(DEADLINE_S)
    found._fail(PeerLost("the test is over"))


def test_a_piece_that_ends_its_workers_is_not_begun_for_ever(pool, members):
    def end(incarnation):
        members.silent.add(incarnation.worker_index)
        raise tf.errors.UnavailableError(None, None, "Socket closed")

    def start_again(worker):
        members.silent.discard(worker)
        members.connected |= {worker}
        return True

    members.admit = start_again
    with pytest.raises(PeerLost, match=r"begun 5 times and never done; worker-\d is gone"):
        pool.submit(end).result(DEADLINE_S)
