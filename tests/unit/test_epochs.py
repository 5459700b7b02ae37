"""Steps, examples and epochs: every example once, whatever the sizes."""

import itertools

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.training.epochs import EpochPlan, VirtualEpochs, share_of
from tfdist.training.feed import graph_span

BATCHES = st.integers(1, 64)


@st.composite
def virtual_epochs(draw):
    total = draw(st.integers(1, 500))
    return VirtualEpochs(total_examples=total, checkpoints=draw(st.integers(1, min(total, 40))))


@st.composite
def plans(draw):
    """Uniform epochs, virtual epochs, and epochs of any sizes."""
    batch = draw(BATCHES)
    kind = draw(st.sampled_from(["uniform", "virtual", "any"]))
    if kind == "uniform":
        epochs, examples = draw(st.integers(1, 8)), draw(st.integers(1, 200))
        return EpochPlan.uniform(epochs=epochs, examples=examples, global_batch_size=batch)
    if kind == "virtual":
        boundaries = draw(virtual_epochs()).boundaries()
    else:
        sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=8))
        boundaries = tuple(itertools.accumulate(sizes, initial=0))
    return EpochPlan.from_boundaries(boundaries, global_batch_size=batch)


@given(virtual_epochs(), BATCHES)
def test_virtual_epochs_have_equal_size_for_any_batch(epochs, batch):
    boundaries = epochs.boundaries()
    sizes = {b - a for a, b in itertools.pairwise(boundaries)}
    assert (boundaries[0], boundaries[-1]) == (0, epochs.total_examples)
    assert len(boundaries) == epochs.checkpoints + 1
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
    plan = EpochPlan.from_boundaries(boundaries, global_batch_size=batch)
    lasts = [plan.span(plan.steps(epoch)[-1]).stop for epoch in range(epochs.checkpoints)]
    assert lasts == list(boundaries[1:])


@given(plans())
def test_steps_take_every_example_once_and_in_order(plan):
    spans = [plan.span(step) for step in range(plan.total_steps)]
    sizes, lasts = [len(span) for span in spans], {end - 1 for end in plan.step_starts[1:]}
    assert [i for span in spans for i in span] == list(range(plan.example_starts[-1]))
    assert all(n == plan.global_batch_size for i, n in enumerate(sizes) if i not in lasts)
    assert (plan.smallest_step, max(sizes) <= plan.global_batch_size) == (min(sizes), True)
    assert plan.all_full == (set(sizes) == {plan.global_batch_size})
    before = list(itertools.accumulate(sizes, initial=0))
    assert [plan.examples_before(step) for step in range(plan.total_steps + 1)] == before
    assert plan.examples_before(plan.total_steps + 7) == before[-1]


@given(plans())
def test_a_step_belongs_to_the_epoch_that_lists_it(plan):
    listed = [(epoch, step) for epoch in range(plan.num_epochs) for step in plan.steps(epoch)]
    assert [step for _, step in listed] == list(range(plan.total_steps))
    for epoch, step in listed:
        assert plan.epoch_of(step) == epoch
        span, starts = plan.span(step), plan.example_starts
        assert starts[epoch] <= span.start <= span.stop <= starts[epoch + 1]


@settings(max_examples=40)
@given(plans(), st.data())
def test_tensorflow_computes_the_same_spans(plan, data):
    drawn = data.draw(st.integers(0, plan.total_steps - 1))
    ends = {step - 1 for step in plan.step_starts[1:4]}
    for step in {0, drawn, *ends, plan.total_steps - 1}:
        first, last = graph_span(plan, tf.constant(step, tf.int64))
        span = plan.span(step)
        assert (int(first), int(last)) == (span.start, span.stop)


@given(st.integers(0, 400), st.integers(1, 40))
def test_the_parts_of_a_batch_cover_it_without_overlap(size, parts):
    shares = [share_of(i, parts=parts, size=size) for i in range(parts)]
    assert [low for low, _ in shares] == [0] + [high for _, high in shares[:-1]]
    assert shares[-1][1] == size
    sizes = {high - low for low, high in shares}
    assert max(sizes) - min(sizes) <= 1
    assert (0 in sizes) == (size < parts)


def test_a_run_of_no_epochs_has_no_steps():
    plan = EpochPlan.uniform(epochs=0, examples=10, global_batch_size=4)
    assert (plan.num_epochs, plan.total_steps, plan.examples_before(0)) == (0, 0, 0)
