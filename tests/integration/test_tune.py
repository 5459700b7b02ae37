"""KerasTuner's own oracles under the chief, with trials that are cheap: what survives a crash."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras_tuner
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.util.tensor_util import make_ndarray

from tests.refusals import refusal, refused
from tests.unit.sweep_world import FAILED, World, trials_in
from tfdist.configs import base
from tfdist.errors import TfdistError
from tfdist.outputs.sweep_journal import Journal, fold, read
from tfdist.tuning import sweep
from tfdist.tuning.config_sweep import ConfigSweep
from tfdist.tuning.options import RunOptions, SweepOptions
from tfdist.tuning.oracle import Search, SearchSpace, make_oracle
from tfdist.tuning.results import export_hparams

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
TWICE = """
def space(hp, config):
    optimizer = hp.Choice("optimizer", ["adam", "sgd"])
    for name, most in (("adam", 0.1), ("sgd", 1.0)):
        with hp.conditional_scope("optimizer", [name]):
            if optimizer == name:
                hp.Float("learning_rate", 0.0, most, step=most / 4)
"""
LINE = """
def space(hp, config):
    config.learning_rate = hp.Float("learning_rate", 1e-4, 1e-1, sampling="log")
"""
NUMBERS = """
def space(hp, config):
    config.learning_rate = hp.Float("learning_rate", 1e-4, 1e-1, sampling="log")
    config.global_batch_size = hp.Int("global_batch_size", 16, 128, step=2, sampling="log")
    config.optimizer = hp.Choice("optimizer", ["adam", "sgd"])
"""
SPACES = {"bayesian": LINE, "cmaes": NUMBERS}
MOST = {"random": 20, "grid": 20, "bayesian": 7, "hyperband": None, "tpe": 20, "cmaes": 20}
"""Trials: an answer of bayesian's model takes seconds; with one dimension it begins at the 4th.
The model of tpe begins after 10 completed trials, and of cmaes after each 6.
"""
TUNERS = {
    "random": keras_tuner.RandomSearch,
    "grid": keras_tuner.GridSearch,
    "bayesian": keras_tuner.BayesianOptimization,
    "hyperband": keras_tuner.Hyperband,
    **dict.fromkeys(("tpe", "cmaes"), keras_tuner.RandomSearch),  # which opens their results
}


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
    made = make_oracle(
        tuner,
        "val_accuracy",
        "max",
        max_epochs=CHECKPOINTS,
        factor=3,
        hyperparameters=space.hyperparameters.copy(),
        seed=3,
    )
    search = Search(made, sweep_dir=sweep_dir, max_trials=max_trials or MOST[tuner])
    search.replay(lines)
    search.publish()
    return search


def world_of(tuner: str, path: Path, *, max_trials: int | None = None, **options: Any) -> World:
    """A sweep of which every chief has an oracle of its own, and every fifth trial fails."""
    space = space_of(path.parent, SPACES.get(tuner, SPACE))
    search = partial(search_of, tuner, space, path, max_trials=max_trials)
    world = World(path, epochs=CHECKPOINTS, search_of=search, **options)
    world.sweep.flags_of = lambda trial, seed: space.flags(trial.values)
    world.fate_of = lambda run: FAILED if int(run) % 5 == 4 else None
    return world


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
def test_a_chief_killed_repeatedly_finds_the_same_trials(tuner, tmp_path, capsys):
    """KerasTuner opens what it has written."""
    whole = world_of(tuner, tmp_path / "whole")
    whole.run()
    torn = world_of(tuner, tmp_path / "torn")
    state = torn.run(at=7, how="within", always=True).state
    assert torn.chiefs > 2
    assert trials_in(torn.path) == trials_in(whole.path)
    best, there = state.ranked()[0], opened(tuner, torn.path)
    assert there.get_best_hyperparameters()[0].values == dict(best.values)
    assert there.oracle.get_best_trials()[0].score == pytest.approx(best.score)
    assert len(there.oracle.trials) == len(state.trials)
    there.results_summary(1)
    assert f"Trial {best.id} summary" in capsys.readouterr().out


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_replayed_oracle_answers_like_the_original_one(tuner, tmp_path, monkeypatch):
    """With several trials at once, too: it guesses at the results of those under way."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    world = world_of(tuner, tmp_path / "sweep", slots=3)
    world.run()
    lines = read(world.path / "journal.jsonl")
    asked = [number for number, line in enumerate(lines) if line["event"] == "asked"]
    for number in asked[-8:]:
        before = world.search_of(lines[:number])
        answer = before.ask()
        found = (answer.status, answer.trial, answer.values)
        assert found == tuple(lines[number][name] for name in ("status", "trial", "values"))
    over = world.search_of([])
    if tuner == "bayesian":  # of which a fit takes seconds, where nobody asks any more
        model = over._oracle.gpr
        monkeypatch.setattr(model, "fit", lambda *_: pytest.fail("a model is fitted"))
    over.replay(lines, is_over=True)
    trials = over._oracle.trials.values()
    expected = fold(lines).trials.values()
    assert [t.hyperparameters.values for t in trials] == [t.values for t in expected]
    assert [t.score for t in trials] == [t.score for t in expected]


# Optuna's samplers.

EVERY_TYPE = """
def space(hp, c):
    hp.Fixed("fixed", 0.5)
    hp.Int("int", 1, 6, step=2)
    hp.Int("log_int", 1, 1000, sampling="log")
    hp.Int("log_step", 2, 40, step=2, sampling="log")
    hp.Float("step", 0.0, 0.35, step=0.1)
    hp.Float("log", 1e-4, 1e-1, sampling="log")
    hp.Float("reverse", 1.0, 8.0, step=2, sampling="reverse_log")
    hp.Choice("number", [0.5, 0.25])
    if hp.Boolean("flag"):
        with hp.conditional_scope("flag", [True]):
            hp.Float("float", -1.0, 1.0)
"""


@pytest.mark.parametrize("slots", [1, 3])
def test_optuna_draws_the_values_that_keras_tuner_allows(tmp_path, slots):
    search = search_of("tpe", space_of(tmp_path, EVERY_TYPE), tmp_path, [], max_trials=40)
    drawn: list[Any] = []
    while (answer := search.ask()).trial is not None:
        drawn.append(answer)
        if len(drawn) % slots == 0:
            for one in drawn[-slots:]:
                history = [{"virtual_epoch": 1, "val_accuracy": one.values["log"]}]
                search.tell(
                    {"trial": one.trial, "status": "COMPLETED", "history": history, "reason": ""}
                )
    seen = {name: {a.values[name] for a in drawn if name in a.values} for name in drawn[0].values}
    assert seen["fixed"] == {0.5}
    assert seen["int"] == {1, 3, 5}
    assert seen["log_step"] == {2, 4, 8, 16, 32}
    assert seen["step"] == {0.0, 0.1, 0.2, 3 * 0.1}
    assert seen["reverse"] == {8.0, 7.0, 5.0, 1.0}
    assert seen["number"] == {0.5, 0.25}
    assert all(isinstance(value, int) for value in seen["log_int"] | seen["log_step"])
    assert min(seen["log_int"]) < 30 < 100 < max(seen["log_int"])
    assert all(("float" in a.values) == a.values["flag"] for a in drawn)
    told = [t.value for t in search._oracle._study.trials if t.value is not None]
    assert told == [a.values["log"] for a in drawn[:39]]  # the 40th request told them


def test_the_values_of_the_journal_are_kept(tmp_path):
    """Another release of Optuna may choose other values."""
    space, values = space_of(tmp_path, NUMBERS), {"global_batch_size": 32, "optimizer": "sgd"}
    lines = [
        {
            "event": "asked",
            "status": "RUNNING",
            "trial": str(number),
            "values": {"learning_rate": rate, **values},
        }
        for number, rate in enumerate([0.05, 0.02])
    ]
    for tuner in ("tpe", "cmaes"):
        search = search_of(tuner, space, tmp_path, lines, max_trials=3)
        study = search._oracle._study
        assert [t.params["learning_rate"] for t in study.trials] == [0.05, 0.02]
        assert [t.params["global_batch_size"] for t in study.trials] == [1, 1]
        assert search.ask().trial == "2"


@pytest.mark.parametrize(
    ("tuner", "source", "says"),
    [
        ("tpe", LINE.replace('"log"', '"reverse_log"'), "learning_rate has sampling='reverse_log'"),
        ("cmaes", 'def space(hp, c):\n    hp.Choice("d", [1, 2])\n', "no Int or Float"),
        ("cmaes", 'def space(hp, c):\n    hp.Int("a", 1, 2, step=2)\n', "no Int or Float"),
        ("cmaes", 'def space(hp, c):\n    hp.Float("a", 2.0, 2.0)\n', "no Int or Float"),
        ("cmaes", SPACE, "momentum is conditional"),
        ("tpe", TWICE, "learning_rate is defined twice"),
    ],
)
def test_spaces_that_optuna_cannot_search_are_refused(tmp_path, tuner, source, says):
    (tmp_path / "config.py").write_text(source)
    options = SweepOptions(
        config=str(tmp_path / "config.py"), sweep_dir=tmp_path / "sweep", tuner=tuner
    )
    error = refusal(lambda: ConfigSweep(options, base(), {}).describe())
    assert (error.where, error.code) == (f"--tuner {tuner}", "search-space")
    assert says in str(error)


@pytest.mark.parametrize("tuner", ["random", "grid"])
def test_parallel_trials_draw_the_same_set_of_values(tuner, tmp_path):
    at_once: list[int] = []

    def values(name: str, *, at: int | None = None, **options: Any) -> list[str]:
        world = world_of(tuner, tmp_path / name, **options)
        at_once.clear()
        world.events = lambda: at_once.append(sum(one.lives for one in world.processes))
        world.run(at=at, how="within", always=True)
        return [json.dumps(row[2], sort_keys=True) for row in trials_in(world.path)]

    one, three = values("one"), values("three", slots=3)
    assert set(at_once[:-CHECKPOINTS]) == {3}
    assert len(set(one)) == 20
    assert set(three) == set(one) == set(values("torn", slots=3, at=9))
    if tuner == "grid":
        assert three == one


def test_unwritable_results_are_a_one_line_error(tmp_path):
    (tmp_path / "keras_tuner").touch()
    with pytest.raises(TfdistError, match="/keras_tuner: File exists"):
        search_of("random", space_of(tmp_path, SPACE), tmp_path, [])


def test_hyperband_continues_the_run_of_an_earlier_trial(tmp_path):
    trials = world_of("hyperband", tmp_path / "sweep").run().state.trials
    continued = [t for t in trials.values() if "tuner/trial_id" in t.values]
    assert len(continued) >= 3  # a failed trial takes the place of one that would go on
    for trial in continued:
        past = trials[trial.values["tuner/trial_id"]]
        assert trial.run == past.run
        assert (trial.until or CHECKPOINTS) > (past.until or 0)
    assert {t.until for t in trials.values()} == {1, 3, None}


def test_a_sweep_can_be_extended_with_more_trials(tmp_path):
    five = world_of("random", tmp_path / "sweep", max_trials=5)
    five.run()
    book = Journal(five.path / "journal.jsonl", time_of_day=lambda: 1.0)
    book.add("extended", max_trials=12)
    five.run()
    whole = world_of("random", tmp_path / "whole", max_trials=12)
    whole.run()
    assert [row[2] for row in trials_in(five.path)] == [row[2] for row in trials_in(whole.path)]


# The search space of a config file.


def test_nested_hyperparameters_are_known_before_the_first_trial(tmp_path):
    space = space_of(tmp_path, SPACE)
    names = [one.name for one in space.hyperparameters.space]
    assert names == ["optimizer", "learning_rate", "momentum", "clip_norm"]
    values = {"optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.5, "tuner/epochs": 3}
    assert set(space.flags(values)) == {
        "--config.optimizer=sgd",
        "--config.learning_rate=0.01",
        "--config.momentum=0.5",
    }
    plain = space_of(
        tmp_path,
        "def space(hp, c):\n"
        '    if hp.Choice("optimizer", ["adam", "sgd"]) == "sgd":\n'
        '        c.augmentation.random_flip = hp.Boolean("flip")\n',
    )
    assert [one.name for one in plain.hyperparameters.space] == ["optimizer", "flip"]
    flags = plain.flags({"optimizer": "sgd", "flip": True})
    assert flags == ("--config.augmentation.random_flip=True",)
    assert plain.asked({"optimizer": "adam", "flip": True}) == {"optimizer": "adam"}
    assert SearchSpace(f"{tmp_path}/config.py:small", base()).description == plain.description


@pytest.mark.parametrize(
    ("source", "line", "code"),
    [
        ("x = 1\n", "", "search-space"),
        ('def space(hp, c):\n    c.dropout = hp.Choice("d", ["a"])\n', ", line 2", "CFG001"),
        ('def space(hp, c):\n    c.droput = hp.Float("d", 0.0, 0.5)\n', ", line 2", "CFG003"),
    ],
)
def test_an_invalid_search_space_is_refused(tmp_path, source, line, code):
    where = f"{tmp_path / 'config.py'}{line}"
    assert refused(lambda: space_of(tmp_path, source)) == (where, code)


def test_out_of_range_values_are_refused_before_any_start(tmp_path):
    space = space_of(tmp_path, 'def space(hp, c):\n    c.dropout = hp.Float("d", 0.5, 3.0)\n')
    assert refused(lambda: space.flags({"d": 2.5}))[0] == "config.dropout"


# A sweep over a config file.


@pytest.fixture
def finished(tmp_path):
    (tmp_path / "config.py").write_text(LINE)
    options = SweepOptions(
        config=str(tmp_path / "config.py"), sweep_dir=tmp_path / "sweep", max_trials=2, seed=1
    )
    options.sweep_dir.mkdir()
    journal = Journal(options.sweep_dir / "journal.jsonl", time_of_day=lambda: 1.0)
    journal.add("begun", **{**ConfigSweep(options, base(), {}).describe(), "seed": 1})
    journal.add("finished", reason="all trials finished", is_complete=True)
    return options


def run(options: SweepOptions, config: Any = None) -> int:
    return sweep.run(ConfigSweep(options, config or base(), {}))[0]


def test_a_finished_sweep_refuses_changes_with_the_difference(tmp_path, finished, capsys):
    assert run(finished) == 0
    assert "all trials finished" in capsys.readouterr().out
    config = base()
    config.momentum = 0.1
    assert "config.momentum=0.1 (there: 0.9)" in str(refusal(lambda: run(finished, config)))
    (tmp_path / "config.py").write_text(LINE.replace("1e-1", "1.0"))
    error = refusal(lambda: run(finished))
    assert error.code == "another-run"
    assert "learning_rate.max_value=1.0 (there: 0.1)" in str(error)


@pytest.mark.parametrize(
    ("field", "value", "where", "code"),
    [
        ("run_dir", "x", "config.run_dir", "shared-directory"),
        ("objective_file", "m", "config.objective_file", "shared-directory"),
        ("validation_split", "", "--objective", "missing-validation"),
    ],
)
def test_conflicting_settings_are_refused(finished, field, value, where, code):
    config = base()
    config.update({field: value})
    assert refused(lambda: run(finished, config)) == (where, code)


def test_more_processes_than_cpus_warn(tmp_path, caplog):
    def threads(parallel: int) -> str:
        options = RunOptions(
            sweep_dir=tmp_path, parallel_trials=parallel, strategy="multiworker", workers=2
        )
        return sweep.launch_flags(options, cpus=4)[-1]

    assert (threads(2), threads(1)) == ("1", "2")
    assert not caplog.records
    threads(3)
    assert "3 parallel trials run 6 processes on 4 CPUs" in caplog.text


# What is written for TensorBoard's HParams, read as TensorBoard reads it.


def hparams_in(path: Path) -> tuple[EventAccumulator, dict[str, bytes]]:
    events = EventAccumulator(str(path))
    events.Reload()
    return events, events.summary_metadata and events.PluginTagToContent("hparams")


def test_tensorboard_files_hold_trials_and_are_written_once(tmp_path):
    def trial(name: str, *scores: float) -> list[dict[str, Any]]:
        history = [{"virtual_epoch": n, "val_accuracy": value} for n, value in enumerate(scores, 1)]
        values = {"lr": 0.5, "opt": "adam", "flip": True, "tuner/epochs": 3}
        end = {"status": "COMPLETED" if scores else "FAILED", "score": max(scores, default=None)}
        end |= {"best_virtual_epoch": 1, "history": history, "reason": "", "last_lines": []}
        return [
            {"event": "asked", "trial": name, "values": values, "run": name, "until": None},
            {"event": "started", "trial": name, "at": 1.0},
            {"event": "ended", "at": 2.0, "trial": name, **end},
        ]

    begun = {"event": "begun", "objective": "val_accuracy", "direction": "max"}
    state = fold([begun, *trial("0", 0.5, 0.75), *trial("1"), *trial("2", 0.1)[:2]])
    export_hparams(state, tmp_path)
    board = tmp_path / "tensorboard"
    (board / ".0.unfinished").mkdir()  # of a chief that was killed
    (board / "0").rename(board / ".0.unfinished" / "0")
    kept = list((board / "1").iterdir())
    export_hparams(state, tmp_path)
    assert list((board / "1").iterdir()) == kept
    assert {path.name for path in board.iterdir()} == {"0", "1"}, "2 is running"

    events, content = hparams_in(board / "0")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    values = {name: value.WhichOneof("kind") for name, value in start.hparams.items()}
    assert values == {"lr": "number_value", "opt": "string_value", "flip": "bool_value"}
    assert start.hparams["lr"].number_value == 0.5
    assert start.group_name == "0"
    tensors = events.Tensors("val_accuracy")
    scores = [(e.step, float(make_ndarray(e.tensor_proto))) for e in tensors]
    assert scores == [(1, 0.5), (2, 0.75)]
    for name, status in (("0", api_pb2.STATUS_SUCCESS), ("1", api_pb2.STATUS_FAILURE)):
        _, content = hparams_in(board / name)
        end = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
        assert end.status == status
