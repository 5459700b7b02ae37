"""KerasTuner's own oracles under the chief, with trials that are cheap: what survives a crash."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras_tuner
import pytest

from tests.refusals import refused
from tests.unit import sweep_world
from tests.unit.sweep_world import Disk, crashes_to_the_end
from tfdist.configs import base
from tfdist.errors import TfdistError, UsageError
from tfdist.outputs.sweep_journal import Journal, fold, read
from tfdist.tuning import sweep
from tfdist.tuning.chief import Chief
from tfdist.tuning.config_sweep import ConfigSweep
from tfdist.tuning.directory import chief_lock
from tfdist.tuning.options import RunOptions, SweepOptions
from tfdist.tuning.oracle import Search, SearchSpace, make_oracle
from tfdist.tuning.sweep import launch_flags
from tfdist.tuning.trial_job import Completed, Failed, TrialJob

pytestmark = pytest.mark.slow

CHECKPOINTS = 9
SPACE = """
def space(hp, config):
    config.optimizer = hp.Choice("optimizer", ["adam", "sgd"])
    config.learning_rate = hp.Float("learning_rate", 1e-4, 1e-1, sampling="log")
    with hp.conditional_scope("optimizer", ["sgd"]):
        if config.optimizer == "sgd":
            config.momentum = hp.Choice("momentum", [0.0, 0.5, 0.9])
            with hp.conditional_scope("momentum", [0.9]):
                if config.momentum == 0.9:
                    config.clip_norm = hp.Float("clip_norm", 0.5, 2.0)
"""
LINE = """
def space(hp, config):
    config.learning_rate = hp.Float("learning_rate", 1e-4, 1e-1, sampling="log")
"""
MOST = {"random": 20, "grid": 20, "bayesian": 7, "hyperband": None}
"""Trials: an answer of bayesian's model takes seconds; with one dimension it begins at the 4th."""
TUNERS = {
    "random": keras_tuner.RandomSearch,
    "grid": keras_tuner.GridSearch,
    "bayesian": keras_tuner.BayesianOptimization,
    "hyperband": keras_tuner.Hyperband,
}


def value_of(flags: Sequence[str], name: str, default: float) -> float:
    for flag in flags:
        if flag.startswith(f"--config.{name}="):
            return float(flag.partition("=")[2])
    return default


def by_flags(job: TrialJob) -> Completed:
    until = job.goal.until or CHECKPOINTS
    rate = value_of(job.flags, "learning_rate", 1e-3)
    top = 1 / (1 + abs(rate - 0.01) + value_of(job.flags, "momentum", 0.3) / 10)
    history = tuple(
        {"virtual_epoch": i, "val_accuracy": top * i / CHECKPOINTS, "loss": 1 - top}
        for i in range(1, until + 1)
    )
    return Completed(history=history, score=top * until / CHECKPOINTS, best_virtual_epoch=until)


def new_disk(length: int = CHECKPOINTS) -> Disk:
    """Every fifth trial fails."""
    failed = Failed(reason="ValueError: no")
    return Disk(length, by_flags, fate_of=lambda name: failed if int(name) % 5 == 4 else None)


@pytest.fixture
def space(tmp_path):
    return space_of(tmp_path, SPACE)


def space_for(tuner: str, tmp_path: Path) -> SearchSpace:
    return space_of(tmp_path, LINE if tuner == "bayesian" else SPACE)


def space_of(tmp_path: Path, source: str) -> SearchSpace:
    path = tmp_path / "config.py"
    path.write_text(source)
    return SearchSpace(str(path), base())


def search_of(
    tuner: str,
    space: SearchSpace,
    sweep_dir: Path,
    lines: Sequence[Mapping[str, Any]],
    *,
    max_trials: int | None = None,
) -> Search:
    """A new oracle, where the one before was."""
    oracle = make_oracle(
        tuner,
        hyperparameters=space.hyperparameters,
        objective="val_accuracy",
        direction="max",
        seed=3,
        max_trials=max_trials or MOST[tuner],
        max_epochs=CHECKPOINTS,
        factor=3,
    )
    search = Search(oracle, sweep_dir=sweep_dir)
    search.replay(lines)
    search.publish()
    return search


def make_chief(
    tuner: str,
    space: SearchSpace,
    sweep_dir: Path,
    disk: Disk,
    *,
    max_trials: int | None = None,
    **how: Any,
) -> Chief:
    sweep_dir.mkdir(exist_ok=True)
    return sweep_world.make_chief(
        sweep_dir,
        disk,
        search_of=partial(search_of, tuner, space, sweep_dir, max_trials=max_trials),
        how="within",
        flags_of=lambda trial: space.flags(trial.values),
        **how,
    )


def result(sweep_dir: Path) -> list[tuple[Any, ...]]:
    trials = fold(read(sweep_dir / "journal.jsonl")).trials.values()
    return [(t.id, t.run, dict(t.values), t.status, t.score) for t in trials]


def opened(tuner: str, sweep_dir: Path) -> Any:
    """The results as a user of KerasTuner opens them."""
    options = {} if tuner == "hyperband" else {"max_trials": MOST[tuner]}
    return TUNERS[tuner](
        lambda hp: None,
        objective=keras_tuner.Objective("val_accuracy", "max"),
        directory=str(sweep_dir),
        project_name="keras_tuner",
        **options,
    )


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_chief_killed_at_every_seventh_write_finds_the_same_trials(tuner, tmp_path):
    space = space_for(tuner, tmp_path)
    assert make_chief(tuner, space, tmp_path / "whole", new_disk()).run() == 0
    trials = new_disk()
    torn = partial(make_chief, tuner, space, tmp_path / "torn", trials, at=7)
    assert crashes_to_the_end(torn) >= 2
    assert result(tmp_path / "torn") == result(tmp_path / "whole")


@pytest.mark.parametrize("tuner", ["random", "grid"])
def test_several_at_once_find_the_same_set(tuner, space, tmp_path):
    def values(name: str, **options: Any) -> set[str]:
        trials = new_disk()
        crashes_to_the_end(lambda: make_chief(tuner, space, tmp_path / name, trials, **options))
        return {json.dumps(row[2], sort_keys=True) for row in result(tmp_path / name)}

    one = values("one")
    assert values("three", parallel=3, at=9) == one
    assert len(one) == 20


def test_a_grid_is_searched_in_its_order_in_all_places_at_once(space, tmp_path):
    at_once: list[int] = []
    disk = new_disk(length=1)
    chief = make_chief("grid", space, tmp_path / "three", disk, parallel=3)
    disk.on_wait = lambda: at_once.append(len(disk.running))
    chief.run()
    assert at_once == [3] * 6 + [2]
    make_chief("grid", space, tmp_path / "one", new_disk()).run()
    values = [row[2] for row in result(tmp_path / "three")]
    assert values == [row[2] for row in result(tmp_path / "one")]


@pytest.mark.parametrize("tuner", TUNERS)
def test_keras_tuner_opens_what_was_written(tuner, tmp_path, capsys):
    chief = make_chief(tuner, space_for(tuner, tmp_path), tmp_path / "sweep", new_disk())
    chief.run()
    best = chief.state.ranked()[0]
    there = opened(tuner, tmp_path / "sweep")
    assert there.get_best_hyperparameters()[0].values == dict(best.values)
    assert there.oracle.get_best_trials()[0].score == pytest.approx(best.score)
    assert len(there.oracle.trials) == len(chief.state.trials)
    there.results_summary(1)
    assert f"Trial {best.id} summary" in capsys.readouterr().out


def test_a_metric_that_keras_tuner_cannot_make_is_written_down_as_others_are(space, tmp_path):
    """KerasTuner makes a MeanIoU to see which way is better, and does not know its classes."""
    chief = make_chief("random", space, tmp_path, new_disk())
    search = chief._search
    name = search.ask().trial
    assert name is not None
    history = [{"virtual_epoch": n, "val_accuracy": 0.5, "mean_io_u": n / 4} for n in (1, 2)]
    search.tell(name, status="COMPLETED", history=history, reason="")
    search.publish()
    trial = opened("random", tmp_path).oracle.get_best_trials()[0]
    assert trial.score == 0.5
    assert [one.value for one in trial.metrics.get_history("mean_io_u")] == [[0.25], [0.5]]


def test_results_that_cannot_be_written_are_one_line(space, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "keras_tuner").touch()
    with pytest.raises(TfdistError, match="sweep/keras_tuner: File exists"):
        make_chief("random", space, tmp_path / "sweep", new_disk()).run()


def test_hyperband_goes_on_with_the_run_of_the_trial_it_continues(space, tmp_path):
    make_chief("hyperband", space, tmp_path / "sweep", new_disk()).run()
    trials = fold(read(tmp_path / "sweep" / "journal.jsonl")).trials
    continued = [t for t in trials.values() if "tuner/trial_id" in t.values]
    assert len(continued) >= 3  # a failed trial takes the place of one that would go on
    for trial in continued:
        past = trials[trial.values["tuner/trial_id"]]
        assert trial.run == past.run
        assert (trial.until or CHECKPOINTS) > (past.until or 0)
    assert {t.until for t in trials.values()} == {1, 3, None}


def test_more_trials_can_be_asked_for_later(space, tmp_path):
    trials = new_disk()
    make_chief("random", space, tmp_path / "sweep", trials, max_trials=5).run()
    Journal(tmp_path / "sweep" / "journal.jsonl", time_of_day=lambda: 1.0).add(
        "extended", max_trials=12
    )
    make_chief("random", space, tmp_path / "sweep", trials, max_trials=5).run()
    make_chief("random", space, tmp_path / "whole", new_disk(), max_trials=12).run()
    values = [row[2] for row in result(tmp_path / "sweep")]
    assert values == [row[2] for row in result(tmp_path / "whole")]


def test_conditional_and_nested_hyperparameters_are_known_before_the_first_trial(space):
    names = [one.name for one in space.hyperparameters.space]
    assert names == ["optimizer", "learning_rate", "momentum", "clip_norm"]
    values = {"optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.5, "tuner/epochs": 3}
    assert set(space.flags(values)) == {
        "--config.optimizer=sgd",
        "--config.learning_rate=0.01",
        "--config.momentum=0.5",
    }


def test_hyperparameters_under_a_plain_if_are_found_too(tmp_path):
    source = (
        "def space(hp, config):\n"
        '    config.optimizer = hp.Choice("optimizer", ["adam", "sgd"])\n'
        '    if config.optimizer == "sgd":\n'
        '        config.momentum = hp.Float("momentum", 0.5, 0.9)\n'
    )
    names = [one.name for one in space_of(tmp_path, source).hyperparameters.space]
    assert names == ["optimizer", "momentum"]


def test_a_switch_is_written_as_the_program_reads_it(tmp_path):
    source = "def space(hp, c):\n    c.augmentation.random_flip = hp.Boolean('flip')\n"
    flags = space_of(tmp_path, source).flags({"flip": True})
    assert flags == ("--config.augmentation.random_flip=true",)


@pytest.mark.parametrize(
    ("source", "line", "code"),
    [
        ("x = 1\n", "", "no-space"),
        ("def space(hp, config):\n    pass\n", "", "empty-space"),
        (
            'def space(hp, config):\n    config.dropout = hp.Choice("d", ["a"])\n',
            ", line 2",
            "CFG004",
        ),
        (
            'def space(hp, config):\n    config.droput = hp.Float("d", 0.0, 0.5)\n',
            ", line 2",
            "CFG003",
        ),
    ],
)
def test_a_space_that_cannot_be_is_refused(tmp_path, source, line, code):
    where = f"{tmp_path / 'config.py'}{line}"
    assert refused(lambda: space_of(tmp_path, source)) == (where, code)


def test_values_out_of_range_are_refused_before_anything_is_started(tmp_path):
    source = 'def space(hp, config):\n    config.dropout = hp.Float("d", 0.5, 3.0)\n'
    with pytest.raises(UsageError, match=r"config\.dropout: received 2\.5"):
        space_of(tmp_path, source).flags({"d": 2.5})


def finished(tmp_path: Path) -> SweepOptions:
    (tmp_path / "config.py").write_text(LINE)
    options = SweepOptions(
        config=str(tmp_path / "config.py"), sweep_dir=tmp_path / "sweep", max_trials=2, seed=1
    )
    options.sweep_dir.mkdir()
    journal = Journal(options.sweep_dir / "journal.jsonl", time_of_day=lambda: 1.0)
    description = ConfigSweep(options, base(), {}).describe()
    journal.add("begun", **{**description, "seed": 1})
    journal.add("finished", reason="all trials have ended", is_complete=True)
    return options


def run(options: SweepOptions, config: Any = None) -> int:
    return sweep.run(ConfigSweep(options, config or base(), {}))[0]


def test_a_finished_sweep_says_so_and_runs_nothing(tmp_path, capsys):
    assert run(finished(tmp_path)) == 0
    assert "all trials have ended" in capsys.readouterr().out


def test_a_changed_space_or_configuration_is_refused_with_the_difference(tmp_path):
    options = finished(tmp_path)
    config = base()
    config.momentum = 0.1
    with pytest.raises(UsageError, match=r"config\.momentum=0\.1 \(there: 0\.9\)"):
        run(options, config)
    (tmp_path / "config.py").write_text(LINE.replace("1e-1", "1.0"))
    with pytest.raises(UsageError, match=r"learning_rate\.max_value=1\.0 \(there: 0\.1\)"):
        run(options)


def test_more_processes_than_cpus_are_warned_of(tmp_path, caplog):
    def flags(parallel: int, *, workers: int) -> list[str]:
        options = RunOptions(
            sweep_dir=tmp_path, parallel_trials=parallel, strategy="multiworker", workers=workers
        )
        return launch_flags(options, cpus=4)

    assert flags(2, workers=2)[-2:] == ["--threads_per_task", "1"]
    assert flags(1, workers=2)[-2:] == ["--threads_per_task", "2"]
    assert not caplog.records
    flags(3, workers=2)
    assert "3 trials at once are 6 processes that compute, on 4 CPUs" in caplog.text


def test_overwrite_is_refused_while_a_sweep_runs(tmp_path):
    options = dataclasses.replace(finished(tmp_path), overwrite=True)
    with chief_lock(options.sweep_dir), pytest.raises(UsageError, match="a second chief"):
        run(options)
    assert not (options.sweep_dir / "old-1").exists()


@pytest.mark.parametrize(
    ("changes", "fields", "where"),
    [
        ({}, {"run_dir": "x"}, "config.run_dir"),
        ({}, {"publish": "served"}, "config.publish"),
        ({}, {"strategy": "ps"}, "--strategy"),
        ({}, {"validation_split": ""}, "--objective"),
        ({"tuner": "hyperband"}, {"checkpoints": 2}, "config.checkpoints"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, changes, fields, where):
    config = base()
    config.update(fields)
    options = dataclasses.replace(finished(tmp_path), **changes)
    assert refused(lambda: run(options, config))[0] == where
