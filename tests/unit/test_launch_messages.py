"""What happens on another host arrives as it was, by this host's clock; and nothing else does."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import Task
from tfdist.launch.events import Beat, Ended, Raised, Started, TaskPendingWork, task_of
from tfdist.launch.multihost.connection import NO_SENSE, decode_event, encode_event

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
        awaited=TaskPendingWork(task=W1, since_s=70, is_first=True),
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
