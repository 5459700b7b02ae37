"""No trial is lost, run twice or counted twice, whoever dies, hangs or is cut off."""

import os
from collections import Counter
from collections.abc import Callable

import pytest

from tests.unit.sweep_world import (
    FAILS,
    LENGTH,
    TRIALS,
    Mishaps,
    World,
)
from tfdist.outputs.sweep_journal import read
from tfdist.tuning.chief import Chief

SEEDS = range(40)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def require_all_once(world: World, chief: Chief) -> None:
    """Each trial has ended once, as it was to, and no step of any was done twice."""
    lines = read(world.path / "journal.jsonl")
    names = [str(number) for number in range(world.trials)]
    for event in ("asked", "ended"):
        told = Counter(one["trial"] for one in lines if one["event"] == event and one["trial"])
        assert told == Counter(names), event
    for name in names:
        trial = chief.state.trials[name]
        if name == FAILS:
            assert (trial.status, trial.reason) == ("failed", "ValueError")
        else:
            assert (trial.status, trial.score) == ("completed", 1 / (1 + int(name))), trial.reason
            assert world.done[name] == LENGTH, f"trial {name} was trained on after its end"


def once(world: World, when: Callable[[], object], then: Callable[[], object]) -> list[bool]:
    """Has something happen the first time that something holds; returns whether it has."""
    had: list[bool] = []

    def events() -> None:
        if not had and when():
            had.append(True)
            then()

    world.events = events
    return had


@pytest.mark.parametrize("how", ["before", "within", "after"])
def test_a_chief_that_dies_at_any_write_costs_its_runners_nothing(tmp_path, how):
    """The runners go on, and what ended meanwhile they keep: a failed trial fails once, too."""
    for at in range(3 * TRIALS):
        path = tmp_path / str(at)
        path.mkdir()
        world = World(path, seed=at)
        world.add_host()
        world.add_host()
        require_all_once(world, world.run(at=at, how=how))
        assert world.chiefs == 2
        assert world.failures == 1, f"write {at}"
        assert world.started == Counter(map(str, range(TRIALS))), f"write {at}"


@pytest.mark.parametrize("happens", ["held_up", "cut", "asleep"])
@pytest.mark.parametrize("ticks", [18, 19, 20, 21, 22, 30])
def test_a_runner_that_lives_on_and_reports_after_its_lease_is_not_heard(tmp_path, happens, ticks):
    """Around the lease's end, and long after it."""
    world = World(tmp_path, seed=0, trials=2)
    late = world.add_host()
    world.add_host()

    had = once(
        world,
        lambda: world.done["0"] == 5 and world.started["0"] == 1,
        lambda: setattr(late, happens, ticks),
    )
    require_all_once(world, world.run())
    assert had
    if ticks == 30:
        assert world.started["0"] == 2, "the lease was not given to another"


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_no_trial_is_lost_run_twice_or_counted_twice(tmp_path, seed, monkeypatch):
    monkeypatch.setattr("tfdist.tuning.chief.KILLS_AT_MOST", 99)  # which is another test's
    world = World(tmp_path, seed=seed)
    world.add_host()
    world.add_host()
    world.events = Mishaps(world, count=30)
    require_all_once(world, world.run(pause=60))


def test_a_runner_that_hears_of_a_trial_too_late_does_not_start_it(tmp_path):
    """It hung with the message in its socket; the trial is with another when it reads it."""
    world = World(tmp_path, seed=0, trials=1)
    late = world.add_host()

    def is_started() -> bool:
        assert world.chief is not None
        trial = world.chief.state.trials.get("0")
        return trial is not None and trial.starts > 0

    def hang() -> None:
        late.held_up = 26
        world.add_host()

    once(world, is_started, hang)
    require_all_once(world, world.run())
    assert world.started["0"] == 1
    assert world.processes[1].host is world.hosts[2]
