"""KerasTuner's bayesian and hyperband with runners that die, hang and are cut off."""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.integration.test_tune import LINE, search_of, space_of
from tests.unit.sweep_world import EPOCHS, FAILS, LENGTH, Mishaps, World
from tfdist.outputs.sweep_journal import Trial, fold, read


def world_of(tuner: str, path: Path, *, seed: int) -> World:
    """A sweep of the tuner, of which every chief has an oracle of its own."""
    path.mkdir()
    return World(path, seed=seed, search_of=partial(search_of, tuner, space_of(path, LINE), path))


def trials_of(world: World) -> dict[str, Trial]:
    return fold(read(world.path / "journal.jsonl")).trials


@pytest.mark.parametrize("tuner", ["bayesian", "hyperband"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_trials_with_runners_are_those_of_the_oracle_each_once(
    tuner, seed, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("tfdist.tuning.chief.KILLS_AT_MOST", 99)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    whole = world_of(tuner, tmp_path / "whole", seed=0)
    whole.add_host()
    whole.run()
    torn = world_of(tuner, tmp_path / "torn", seed=seed)
    torn.add_host()
    torn.events = Mishaps(torn, count=25)
    torn.run(pause=30)
    assert torn.chiefs > 1
    assert "is kept as it was" not in caplog.text, "a new chief's oracle is not where it was"
    trials = trials_of(torn)
    assert len(trials) == len(trials_of(whole))
    lines = read(torn.path / "journal.jsonl")
    ended = [line["trial"] for line in lines if line["event"] == "ended"]
    assert sorted(ended) == sorted(trials)
    failed = {trial.id for trial in trials.values() if trial.status == "failed"}
    assert failed == ({FAILS} if tuner == "bayesian" else set())
    for run in {trial.run for trial in trials.values()} - failed:
        furthest = max(trial.until or EPOCHS for trial in trials.values() if trial.run == run)
        assert torn.done[run] * EPOCHS == LENGTH * furthest, f"{run} was trained twice, or on"
