"""Schedules of a pipeline: every one ends, whatever the number of stages and micro-batches."""

import itertools

import pytest

from tests.refusals import refusal
from tfdist.pipeline.balance import balanced
from tfdist.pipeline.schedule import SCHEDULES, Pass, micro_sizes, most_kept, passes, timeline

SHAPES = list(itertools.product(range(1, 6), range(1, 9)))


def orders(kind, stages, micros):
    return [passes(kind, stage=stage, stages=stages, micros=micros) for stage in range(stages)]


def of_equal_stages(kind, stages, micros, *, backward_s=1.0):
    all_s, back_s = [1.0] * stages, [backward_s] * stages
    return timeline(orders(kind, stages, micros), forward_s=all_s, backward_s=back_s)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_each_micro_batch_goes_forward_and_back_once_and_nobody_waits_for_ever(kind):
    for stages, micros in SHAPES:
        of_equal_stages(kind, stages, micros, backward_s=2.0)
        for order in orders(kind, stages, micros):
            assert sorted(order) == [Pass(f, m) for f in (False, True) for m in range(micros)]
            assert [one.micro for one in order if not one.forward] == list(range(micros))


def test_1f1b_keeps_activations_by_the_stages_and_gpipe_of_all_micro_batches():
    kept = {kind: list(map(most_kept, orders(kind, 4, 20))) for kind in SCHEDULES}
    assert kept == {"1f1b": [6, 5, 4, 1], "gpipe": [20] * 4, "serial": [1] * 4}


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_the_bubble_of_equal_stages_is_that_of_the_papers(kind):
    for stages, micros in SHAPES:
        expected = (stages - 1) / (micros + stages - 1)
        assert of_equal_stages(kind, stages, micros).bubble == pytest.approx(expected)


def test_one_micro_batch_at_a_time_computes_on_one_stage_at_a_time():
    assert of_equal_stages("serial", 4, 3).bubble == pytest.approx(3 / 4)


def test_micro_batches_differ_by_one_example_at_the_most():
    for batch, size in itertools.product(range(1, 40), range(1, 45)):
        sizes = micro_sizes(batch, split_size=size)
        assert sum(sizes) == batch
        assert max(sizes) <= size
        assert max(sizes) - min(sizes) <= 1


def slowest(seconds, cuts):
    bounds = [0, *(cut + 1 for cut in cuts), len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_other_cut_has_a_faster_slowest_stage(stages):
    seconds = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    chosen = balanced(seconds, [1] * 7, stages=stages)
    every = itertools.combinations(range(7), stages - 1)
    assert slowest(seconds, chosen) == min(slowest(seconds, cuts) for cuts in every)


def test_the_first_stages_may_have_more_where_the_others_wait_for_them():
    seconds = [1.0] * 21
    assert balanced(seconds, [1] * 20, stages=2) in ((9,), (10,))
    assert balanced(seconds, [1] * 20, stages=2, lead=0.1) == (10,)
    orders = [passes("1f1b", stage=k, stages=2, micros=10) for k in (0, 1)]
    times = [
        timeline(orders, forward_s=each, backward_s=[2 * s for s in each]).makespan_s
        for each in ((10, 11), (11, 10))
    ]
    assert times[1] < 0.96 * times[0]


def test_of_cuts_that_are_as_fast_the_one_that_fewest_bytes_cross():
    assert balanced([1.0, 0.01, 1.0], [100, 10], stages=2) == (1,)
    assert balanced([1.0, 0.01, 1.0], [10, 100], stages=2) == (0,)
    assert balanced([1.0, 0.03, 1.01], [10, 10], stages=2) == (1,)  # the faster of two as small


def test_each_stage_has_weights_to_train():
    assert balanced([9.0, 0.1, 5.0], [1, 1], stages=2) == (0,)
    assert balanced([9.0, 0.1, 5.0], [1, 1], stages=2, trainable=[False, True, True]) == (1,)


@pytest.mark.parametrize(
    ("seconds", "trainable"), [([1.0, 1.0], None), ([1.0, 1.0, 1.0], [True, False, True])]
)
def test_more_stages_than_places_are_refused(seconds, trainable):
    caught = refusal(lambda: balanced(seconds, [1, 1], stages=3, trainable=trainable))
    assert caught.code == "too-many-stages"
