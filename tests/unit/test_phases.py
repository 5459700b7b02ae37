"""What a process says that it is doing."""

import pytest

from tfdist import phases


@pytest.fixture(autouse=True)
def _as_new(monkeypatch):
    monkeypatch.setattr(phases, "_state", phases.PhaseState(since_s=1.0))


@pytest.fixture
def clock(monkeypatch):
    times = iter(range(100, 200))
    monkeypatch.setattr(phases.time, "monotonic", lambda: float(next(times)))


def test_the_first_step_belongs_to_this_process(clock):
    phases.enter("step", step=500)  # from a checkpoint
    phases.enter("validate", step=500)
    assert phases.current().first_step_s is None
    phases.enter("step", step=510)
    phases.enter("step", step=520)  # which begins its time again
    assert (phases.current().first_step_s, phases.current().since_s) == (102.0, 103.0)
    phases.enter("save")
    assert (phases.current().phase, phases.current().step) == ("save", 520)


def test_a_thread_only_renews_the_current_phase(clock):
    phases.enter("trace", step=10)
    phases.go_on()
    assert phases.current() == phases.PhaseState(phase="trace", step=10, since_s=101.0)


def test_a_delayed_sum_is_reported_during_training_phases():
    phases.set_at_sum(True)
    for phase in phases.PHASES:
        phases.enter(phase)
        is_training = phase in ("trace", "step", "save", "validate")
        assert phases.reported() == ("sum" if is_training else phase)
    phases.set_at_sum(False)
    assert phases.reported() == phases.current().phase


def test_waiting_for_all_is_a_phase_outside_training(clock):
    for phase in phases.PHASES:
        phases.enter(phase)
        with phases.waiting_for_all():
            now = phases.current().phase
        assert now == ("barrier" if phase in ("import", "done") else phase)
        assert phases.current().phase == phase


def test_an_outer_phase_continues_after_an_inner_one(clock):
    phases.enter("step", step=10)
    with phases.entered("save"):
        assert phases.current().phase == "save"
    with pytest.raises(OSError, match="full"), phases.entered("callback"):
        raise OSError("full")
    assert phases.current() == phases.PhaseState(phase="step", step=10, since_s=104.0)
    assert phases.current().phase in phases.PHASES
