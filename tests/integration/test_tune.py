"""KerasTuner's own oracles under the chief, with trials that are cheap: what survives a crash."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras_tuner
import pytest

from tests.integration.conftest import CPU  # noqa: F401  # TensorFlow is set up before it is used
from tfdist.configs import base
from tfdist.errors import TfdistError, UsageError
from tfdist.launch.machine import Machine
from tfdist.tuning import sweep
from tfdist.tuning.chief import Chief, SweepPlan
from tfdist.tuning.directory import chief_lock
from tfdist.tuning.journal import Journal, Slot, SweepState, Trial, fold, read
from tfdist.tuning.options import RunOptions, SweepOptions
from tfdist.tuning.oracle import Search, make_oracle
from tfdist.tuning.space import SearchSpace
from tfdist.tuning.sweep_run import launch_flags
from tfdist.tuning.trial_job import Completed, Failed, Outcome, TrialJob

CHECKPOINTS = 9
MACHINE = Machine(cpus=2, gpus=(), has_gpu_driver=False)
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


class Crash(BaseException):
    """The chief is killed."""


class CrashingJournal(Journal):
    """Dies within the write with number `at`."""

    def __init__(self, path: Path, *, at: int | None = None) -> None:
        super().__init__(path, time_of_day=lambda: 1.0)
        self.left = at

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        if self.left == 0:
            super().add(event, **fields)
            os.truncate(self.path, self.path.stat().st_size - 3)
            raise Crash
        if self.left is not None:
            self.left -= 1
        return super().add(event, **fields)


def value_of(flags: Sequence[str], name: str, default: float) -> float:
    for flag in flags:
        if flag.startswith(f"--config.{name}="):
            return float(flag.partition("=")[2])
    return default


class Trials:
    """Trials that are done when they are started; every fifth fails. A score is of the flags."""

    def __init__(self) -> None:
        self.reached: dict[str, int] = {}
        self.places = 1

    def free_slots(self, taken: Collection[Slot]) -> list[Slot]:
        places = [Slot(number=number) for number in range(self.places)]
        return [place for place in places if place not in taken]

    def outcome(self, job: TrialJob) -> Completed | Failed | None:
        until = job.goal.until or CHECKPOINTS
        if self.reached.get(job.run_dir.name, 0) < until:
            return None
        rate = value_of(job.flags, "learning_rate", 1e-3)
        top = 1 / (1 + abs(rate - 0.01) + value_of(job.flags, "momentum", 0.3) / 10)
        history = tuple(
            {"virtual_epoch": i, "val_accuracy": top * i / CHECKPOINTS, "loss": 1 - top}
            for i in range(1, until + 1)
        )
        return Completed(history=history, score=top * until / CHECKPOINTS, best_virtual_epoch=until)

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return []

    def start(self, job: TrialJob) -> Any:
        self.reached[job.run_dir.name] = job.goal.until or CHECKPOINTS
        outcome: Outcome | None = self.outcome(job)
        if int(job.run_dir.name) % 5 == 4:
            self.reached.pop(job.run_dir.name)
            outcome = Failed(reason="ValueError: no")

        class Done:
            def poll(self) -> Outcome | None:
                return outcome

            def stop(self) -> None:
                pass

            def taken(self) -> None:
                pass

        return Done()

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        pass


class Nobody:
    def changed(self, state: SweepState, trial: Trial) -> None:
        pass

    def tick(self, state: SweepState) -> None:
        pass


@pytest.fixture
def space(tmp_path: Path) -> SearchSpace:
    return space_of(tmp_path, SPACE)


def space_for(tuner: str, tmp_path: Path) -> SearchSpace:
    return space_of(tmp_path, LINE if tuner == "bayesian" else SPACE)


def space_of(tmp_path: Path, source: str) -> SearchSpace:
    path = tmp_path / "config.py"
    path.write_text(source)
    return SearchSpace(str(path), base())


def make_chief(
    tuner: str,
    space: SearchSpace,
    sweep_dir: Path,
    trials: Trials,
    *,
    at: int | None = None,
    parallel: int = 1,
    max_trials: int | None = None,
) -> Chief:
    sweep_dir.mkdir(exist_ok=True)
    journal = CrashingJournal(sweep_dir / "journal.jsonl")
    if not journal.lines:
        journal.add("begun", objective="val_accuracy", direction="max", seed=3)
    journal.left = at
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
    search.replay(journal.lines)
    search.publish()
    trials.places = parallel
    plan = SweepPlan(
        sweep_dir=sweep_dir,
        objective="val_accuracy",
        direction="max",
        max_epochs=CHECKPOINTS,
        max_failed_trials=None,
        flags_of=lambda trial: space.flags(trial.values),
    )
    return Chief(plan, search=search, journal=journal, runner=trials, observer=Nobody())


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
def test_a_chief_killed_at_every_seventh_write_finds_the_same_trials(
    tuner: str, tmp_path: Path
) -> None:
    space = space_for(tuner, tmp_path)
    assert make_chief(tuner, space, tmp_path / "whole", Trials()).run() == 0
    trials, crashes = Trials(), 0
    while True:
        chief = make_chief(tuner, space, tmp_path / "torn", trials, at=7)
        try:
            assert chief.run() == 0
            break
        except Crash:
            crashes += 1
    assert crashes >= 2
    assert result(tmp_path / "torn") == result(tmp_path / "whole")


@pytest.mark.parametrize("tuner", ["random", "grid"])
def test_several_at_once_find_the_same_set(tuner: str, space: SearchSpace, tmp_path: Path) -> None:
    def values(name: str, **options: Any) -> set[str]:
        while True:
            try:
                make_chief(tuner, space, tmp_path / name, trials, **options).run()
            except Crash:
                continue
            return {json.dumps(row[2], sort_keys=True) for row in result(tmp_path / name)}

    trials = Trials()
    one = values("one")
    trials = Trials()
    assert values("three", parallel=3, at=9) == one
    assert len(one) == 20


def test_a_grid_is_searched_in_its_order_in_all_places_at_once(
    space: SearchSpace, tmp_path: Path
) -> None:
    class Counted(Trials):
        def wait(self, running: Sequence[Any], timeout_s: float) -> None:
            at_once.append(len(running))

    at_once: list[int] = []
    make_chief("grid", space, tmp_path / "three", Counted(), parallel=3).run()
    assert at_once == [3] * 6 + [2]
    make_chief("grid", space, tmp_path / "one", Trials()).run()
    values = [row[2] for row in result(tmp_path / "three")]
    assert values == [row[2] for row in result(tmp_path / "one")]


@pytest.mark.parametrize("tuner", TUNERS)
def test_keras_tuner_opens_what_was_written(
    tuner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chief = make_chief(tuner, space_for(tuner, tmp_path), tmp_path / "sweep", Trials())
    chief.run()
    best = chief.state.ranked()[0]
    there = opened(tuner, tmp_path / "sweep")
    assert there.get_best_hyperparameters()[0].values == dict(best.values)
    assert there.oracle.get_best_trials()[0].score == pytest.approx(best.score)
    assert len(there.oracle.trials) == len(chief.state.trials)
    there.results_summary(1)
    assert f"Trial {best.id} summary" in capsys.readouterr().out


def test_a_metric_that_keras_tuner_cannot_make_is_written_down_as_others_are(
    space: SearchSpace, tmp_path: Path
) -> None:
    """KerasTuner makes a MeanIoU to see which way is better, and does not know its classes."""
    chief = make_chief("random", space, tmp_path, Trials())
    search = chief._search
    name = search.ask().trial
    assert name is not None
    history = [{"virtual_epoch": n, "val_accuracy": 0.5, "mean_io_u": n / 4} for n in (1, 2)]
    search.tell(name, status="COMPLETED", history=history, reason="")
    search.publish()
    trial = opened("random", tmp_path).oracle.get_best_trials()[0]
    assert trial.score == 0.5
    assert [one.value for one in trial.metrics.get_history("mean_io_u")] == [[0.25], [0.5]]


def test_results_that_cannot_be_written_are_one_line(space: SearchSpace, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "keras_tuner").touch()
    with pytest.raises(TfdistError, match="sweep/keras_tuner: File exists"):
        make_chief("random", space, tmp_path / "sweep", Trials()).run()


def test_hyperband_goes_on_with_the_run_of_the_trial_it_continues(
    space: SearchSpace, tmp_path: Path
) -> None:
    make_chief("hyperband", space, tmp_path / "sweep", Trials()).run()
    trials = fold(read(tmp_path / "sweep" / "journal.jsonl")).trials
    continued = [t for t in trials.values() if "tuner/trial_id" in t.values]
    assert len(continued) >= 3  # a failed trial takes the place of one that would go on
    for trial in continued:
        past = trials[trial.values["tuner/trial_id"]]
        assert trial.run == past.run
        assert (trial.until or CHECKPOINTS) > (past.until or 0)
    assert {t.until for t in trials.values()} == {1, 3, None}


def test_more_trials_can_be_asked_for_later(space: SearchSpace, tmp_path: Path) -> None:
    trials = Trials()
    make_chief("random", space, tmp_path / "sweep", trials, max_trials=5).run()
    Journal(tmp_path / "sweep" / "journal.jsonl", time_of_day=lambda: 1.0).add(
        "extended", max_trials=12
    )
    make_chief("random", space, tmp_path / "sweep", trials, max_trials=5).run()
    make_chief("random", space, tmp_path / "whole", Trials(), max_trials=12).run()
    values = [row[2] for row in result(tmp_path / "sweep")]
    assert values == [row[2] for row in result(tmp_path / "whole")]


def test_conditional_and_nested_hyperparameters_are_known_before_the_first_trial(
    space: SearchSpace,
) -> None:
    names = [one.name for one in space.hyperparameters.space]
    assert names == ["optimizer", "learning_rate", "momentum", "clip_norm"]
    values = {"optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.5, "tuner/epochs": 3}
    assert set(space.flags(values)) == {
        "--config.optimizer=sgd",
        "--config.learning_rate=0.01",
        "--config.momentum=0.5",
    }


def test_hyperparameters_under_a_plain_if_are_found_too(tmp_path: Path) -> None:
    source = (
        "def space(hp, config):\n"
        '    config.optimizer = hp.Choice("optimizer", ["adam", "sgd"])\n'
        '    if config.optimizer == "sgd":\n'
        '        config.momentum = hp.Float("momentum", 0.5, 0.9)\n'
    )
    names = [one.name for one in space_of(tmp_path, source).hyperparameters.space]
    assert names == ["optimizer", "momentum"]


def test_a_space_can_be_named_after_the_fields(tmp_path: Path) -> None:
    source = (
        "import keras_tuner\n"
        "def get_search_space():\n"
        "    hp = keras_tuner.HyperParameters()\n"
        '    hp.Boolean("augmentation.random_flip")\n'
        '    hp.Int("global_batch_size", 32, 128, step=32)\n'
        "    return hp\n"
    )
    flags = space_of(tmp_path, source).flags(
        {"augmentation.random_flip": True, "global_batch_size": 96}
    )
    assert set(flags) == {"--config.augmentation.random_flip=true", "--config.global_batch_size=96"}
    with pytest.raises(UsageError, match="did you mean 'global_batch_size'"):
        space_of(tmp_path, source.replace("global_batch_size", "global_batch_sise"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\n", "no search space"),
        ("def space(hp, config):\n    pass\n", "a search space without a hyperparameter"),
        (
            'def space(hp, config):\n    config.dropout = hp.Choice("d", ["a"])\n',
            "line 2: received config.dropout",
        ),
        (
            'def space(hp, config):\n    config.droput = hp.Float("d", 0.0, 0.5)\n',
            "line 2: received config.droput",
        ),
        ("def get_search_space():\n    return {}\n", "a dict from get_search_space()"),
    ],
)
def test_a_space_that_cannot_be_is_one_line(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        space_of(tmp_path, source)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_values_out_of_range_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    source = 'def space(hp, config):\n    config.dropout = hp.Float("d", 0.5, 3.0)\n'
    with pytest.raises(UsageError, match=r"config\.dropout: received 2\.5"):
        space_of(tmp_path, source).flags({"d": 2.5})


def test_the_chiefs_own_parts_load_no_keras_tuner() -> None:
    names = [
        "chief",
        "directory",
        "journal",
        "options",
        "plot",
        "screen",
        "sweep",
    ]
    program = (
        f"import importlib, sys; [importlib.import_module('tfdist.tuning.' + n) for n in {names}];"
        "loaded = {'keras_tuner', 'keras', 'tensorflow'} & set(sys.modules); assert not loaded"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def finished(tmp_path: Path) -> SweepOptions:
    (tmp_path / "config.py").write_text(LINE)
    options = SweepOptions(
        config=str(tmp_path / "config.py"), sweep_dir=tmp_path / "sweep", max_trials=2, seed=1
    )
    options.sweep_dir.mkdir()
    journal = Journal(options.sweep_dir / "journal.jsonl", time_of_day=lambda: 1.0)
    description = sweep.describe(options, base(), SearchSpace(options.config, base()))
    journal.add("begun", **{**description, "seed": 1})
    journal.add("finished", reason="all trials have ended", is_complete=True)
    return options


def run(options: SweepOptions, config: Any = None) -> int:
    return sweep.run(options, config or base(), machine=MACHINE, environ={})


def test_a_finished_sweep_says_so_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(finished(tmp_path)) == 0
    assert "all trials have ended" in capsys.readouterr().out


def test_a_changed_space_or_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    options = finished(tmp_path)
    config = base()
    config.momentum = 0.1
    with pytest.raises(UsageError, match=r"config\.momentum=0\.1 \(there: 0\.9\)"):
        run(options, config)
    (tmp_path / "config.py").write_text(LINE.replace("1e-1", "1.0"))
    with pytest.raises(UsageError, match=r"learning_rate\.max_value=1\.0 \(there: 0\.1\)"):
        run(options)


def test_more_processes_than_cpus_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_overwrite_is_refused_while_a_sweep_runs(tmp_path: Path) -> None:
    options = dataclasses.replace(finished(tmp_path), overwrite=True)
    with chief_lock(options.sweep_dir), pytest.raises(UsageError, match="a second chief"):
        run(options)
    assert not (options.sweep_dir / "old-1").exists()


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        ({}, {"run_dir": "x"}, "config.run_dir: received 'x'"),
        ({}, {"strategy": "ps"}, "--strategy: received single with config.strategy='ps'"),
        ({}, {"validation_split": ""}, "received val_accuracy without a validation_split"),
        ({"tuner": "hyperband"}, {"checkpoints": 2}, "config.checkpoints: received 2"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    tmp_path: Path, changes: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    config = base()
    config.update(fields)
    with pytest.raises(UsageError) as error:
        run(dataclasses.replace(finished(tmp_path), **changes), config)
    assert said in str(error.value)
