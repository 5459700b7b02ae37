"""`tfdist.tuning` from Python: KerasTuner's own search, and trials of a tuner in this process."""

import contextlib
import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import numpy as np
import pytest
import sklearn.datasets  # noqa: F401  # seen as imported
from keras_tuner.src.engine.base_tuner import BaseTuner

import tfdist.tuning
from tests.refusals import refusal, refused
from tfdist.cluster import KINDS
from tfdist.errors import TfdistError
from tfdist.outputs.run_directory import RunDirectory
from tfdist.outputs.sweep_journal import Journal
from tfdist.strategy import Job, job
from tfdist.training import routing
from tfdist.training.callbacks import wants_every_batch
from tfdist.tuning import from_python, inside, trial
from tfdist.tuning.from_python import TunerSweep, own_program
from tfdist.tuning.options import RunOptions
from tfdist.tuning.sweep import require_same
from tfdist.tuning.trial_job import (
    Assignment,
    Completed,
    Goal,
    TrialProgram,
    outcome_of,
    read_assignment,
)

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")
LOSS_UP = keras_tuner.Objective("val_loss", "max")  # so that the first epoch is the best


def compiled(*layers: Any, **sgd: Any) -> keras.Model:
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, **sgd), loss, metrics=["accuracy"])
    return model


def build(hp: Any) -> keras.Model:
    return compiled(keras.layers.Dense(hp.Int("units", 2, 4)))


class OwnFit(keras_tuner.HyperModel):
    def build(self, hp: Any) -> keras.Model:
        hp.Choice("batch", [16, 32])
        return build(hp)

    def fit(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model.fit(*args, batch_size=hp.get("batch"), **kwargs)


def make_tuner(
    path: Path, model: Any = build, kind: Any = keras_tuner.RandomSearch, **options: Any
) -> Any:
    options = {"objective": "val_accuracy", "seed": 3, **options}
    if kind is not keras_tuner.Hyperband:
        options = {"max_trials": 2, **options}
    return kind(model, directory=str(path), project_name="p", **options)


def sweep_of(tuner: Any, sweep_dir: Path, **fitting: Any) -> TunerSweep:
    program = TrialProgram(command=())
    return TunerSweep(tuner, RunOptions(sweep_dir=sweep_dir), program, fitting)


def described_by(tuner: Any, sweep_dir: Path, **fitting: Any) -> dict[str, Any]:
    return sweep_of(tuner, sweep_dir, **fitting).describe()


# KerasTuner's own search, in one process.


@pytest.mark.parametrize("given", [build, OwnFit()], ids=["build", "own_fit"])
def test_keras_tuners_own_search_trains_with_the_engine(given, tmp_path, monkeypatch, strategies):
    """The tuner sees each epoch, and needs no block of one step."""
    calls, seen = [], []
    monkeypatch.setattr(job, "_made", [])
    job.remember(Job(strategy=strategies[2], kind=KINDS["mirrored"]))

    def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs.get("batch_size"))
        assert not any(wants_every_batch(c, mode="train") for c in kwargs["callbacks"])
        return tfdist.fit(model, *args, **kwargs)

    def on_epoch_end(self: Any, trial: Any, model: Any, epoch: int, logs: Any = None) -> None:
        seen.append(epoch)

    kind = type("Tuner", (keras_tuner.RandomSearch,), {"on_epoch_end": on_epoch_end})
    tuner = make_tuner(tmp_path, given, kind, distribution_strategy=strategies[2])
    with routing.fits_by(counted):
        tuner.search(X, Y, epochs=2, validation_data=(X, Y), verbose=0)
    best = tuner.oracle.get_best_trials()[0]
    batches = [t.hyperparameters.values.get("batch") for t in tuner.oracle.trials.values()]
    assert calls == batches
    assert seen == [0, 1] * len(calls)
    model = tuner.get_best_models()[0]
    assert model.evaluate(X, Y, verbose=0)[1] == pytest.approx(best.score)


def test_a_best_epoch_of_a_checkpoint_names_no_other_file(tmp_path):
    path = tmp_path / "trial_1" / "x"
    original = types.SimpleNamespace(
        objective=keras_tuner.Objective("val_accuracy", "max"), filepath=str(path), best_value=0.9
    )
    saving = inside.SaveBest(original)
    assert saving.get_state() == {"trial": "trial_1", "best": "0.9"}
    for state in ([], {}, {"trial": "../.."}, {"trial": "/etc"}, {"trial": "a/b"}, {"trial": ".."}):
        saving.set_state(state)
        assert saving._before is None
    saving.set_state({"trial": "trial_1", "best": "much"})
    assert original.best_value == 0.9
    saving.set_state({"trial": "trial_0"})
    assert saving._before == tmp_path / "trial_0" / "x"


# The program, and what is refused.


def test_the_program_is_found_and_interactive_sessions_are_refused():
    session = types.ModuleType("__main__")
    assert refused(lambda: own_program(session, []))[1] == "no-program"
    script = types.ModuleType("__main__")
    script.__file__, script.__spec__ = "train.py", None
    program = own_program(script, ["--lr", "1"])
    assert program.python_args == (str(Path("train.py").absolute()), "--lr", "1")
    script.__spec__ = types.SimpleNamespace(name="package.__main__")
    assert own_program(script, []).python_args == ("-m", "package")


def used_up() -> Any:
    tuner = make_tuner(Path("."))
    tuner.oracle.create_trial("t")
    return tuner


def hyperband() -> Any:
    return make_tuner(Path("."), kind=keras_tuner.Hyperband)


def with_a_fit_of_its_own() -> Any:
    class Takes(OwnFit):
        def fit(self, hp: Any, model: Any, *data: Any, rounds: int = 1) -> Any:
            return model.fit(*data, epochs=rounds)

    return make_tuner(Path("."), Takes())


SEARCH = "tfdist.tuning.search"
WORKERS = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}


@pytest.mark.parametrize(
    ("tuner_of", "options", "where", "code"),
    [
        (hyperband, {"sweep_dir": "p/sweep"}, "sweep_dir", "shared-directory"),
        (hyperband, {"backup_every_steps": 0}, "--backup_every_steps", "bad-value"),
        (hyperband, {"strategy": tfdist}, "--strategy", "bad-value"),
        (used_up, {}, SEARCH, "another-run"),
        (hyperband, {"workers_in": WORKERS}, SEARCH, "search-in-a-job"),
    ],
)
def test_search_options_that_cannot_work_are_refused(
    tuner_of, options, where, code, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options = dict(options)
    if cluster := options.pop("workers_in", None):
        monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    tuner = tuner_of()
    assert refused(lambda: tfdist.tuning.search(tuner, X, Y, **options)) == (where, code)


def test_arguments_of_keras_and_custom_fits_are_checked(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    known = {"epochs": 2, "validation_data": (X, Y), "seed": None}
    from_python.require_known(hyperband(), known)
    from_python.require_known(with_a_fit_of_its_own(), {"rounds": 2})
    from_python.require_known(make_tuner(tmp_path, OwnFit()), {"anything": 2})
    with pytest.raises(TypeError, match="'paralell_trials'"):
        tfdist.tuning.search(hyperband(), X, Y, paralell_trials=2)
    with pytest.raises(TypeError, match="'epochs'"):
        tfdist.tuning.search(with_a_fit_of_its_own(), X, Y, epochs=2)


def test_search_by_keras_tuner_inside_a_job_is_refused(tmp_path, monkeypatch, strategies):
    monkeypatch.setattr(job, "_made", [Job(strategy=strategies[1], kind=KINDS["multiworker"])])
    tuner = make_tuner(tmp_path, distribution_strategy=strategies[1])
    assert refused(lambda: tuner.search(X, Y)) == ("tuner.search", "search-in-a-job")


def test_a_tuner_with_several_objectives_is_refused(tmp_path):
    tuner = make_tuner(tmp_path, build, objective=["val_loss", "val_accuracy"])
    assert refused(lambda: described_by(tuner, tmp_path)) == ("objective", "objective")


@pytest.mark.parametrize(
    ("kind", "before", "now", "said"),
    [
        (keras_tuner.Hyperband, {"max_epochs": 8}, {"max_epochs": 9}, "tuner.max_epochs='9'"),
        (keras_tuner.RandomSearch, {}, {"seed": 4}, "seed=4 (there: 3)"),
        (keras_tuner.RandomSearch, {}, {"executions_per_trial": 2}, "executions_per_trial='2'"),
        (
            keras_tuner.RandomSearch,
            *({}, {"objective": keras_tuner.Objective("val_accuracy", "min")}),
            "direction='min' (there: 'max')",
        ),
    ],
)
def test_settings_of_the_tuner_identify_the_sweep(tmp_path, kind, before, now, said):
    def described(**options: Any) -> Any:
        return described_by(make_tuner(tmp_path, kind=kind, **options), tmp_path, epochs=3)

    first = described(**before)
    require_same(tmp_path, first, described(**before, seed=None))
    assert said in str(refusal(lambda: require_same(tmp_path, first, described(**now))))
    older = {**first, "config": {**first["config"], "gradient_accumulation_steps": 1}}
    require_same(tmp_path, older, first)
    json.dumps(first, allow_nan=False)  # the journal's


# The search space.


def by_layers(hp: Any) -> keras.Model:
    """As KerasTuner's guide has it: a loop over layers, and an ``if`` without a condition."""
    layers = [keras.layers.Dense(hp.Int(f"units_{i}", 2, 4)) for i in range(hp.Int("layers", 1, 3))]
    if hp.Choice("kind", ["plain", "dropped"]) == "dropped":
        layers.append(keras.layers.Dropout(hp.Float("rate", 0.1, 0.5)))
        if hp.Boolean("broken"):
            hp.Int("lost", 1, 10**12)
            raise ValueError("a size that cannot be built")
    return compiled(*layers, keras.layers.Dense(2))


NESTED = {"layers", "kind", "units_0", "units_1", "units_2", "rate", "broken", "lost"}


def names_of(tuner: Any) -> set[str]:
    return {one.name for one in tuner.oracle.get_space().space}


def test_conditional_hyperparameters_in_code_are_known_before_trials(trials):
    tuner = make_tuner(trials.path, by_layers)
    assert names_of(tuner) == {"layers", "kind", "units_0"}
    described = described_by(tuner, trials.path)["space"]
    assert {one["config"]["name"] for one in described} == NESTED

    values = tuner.oracle.create_trial("t").hyperparameters.values
    assert set(values) == NESTED
    values = {**values, "layers": 3, "units_2": 3, "kind": "dropped", "broken": False}
    again = Trials(trials.path / "again", trials.strategy)  # its tuner knows as little
    outcome = again.run(again.tuner(by_layers), values)
    assert isinstance(outcome, Completed)
    assert set(outcome.hyperparameters) == NESTED - {"lost"}
    values |= {"layers": 1, "kind": "plain", "tuner/epochs": 1}
    outcome = again.run(again.tuner(by_layers), values, name="1")
    assert outcome.hyperparameters == {name: values[name] for name in ("layers", "kind", "units_0")}

    space = keras_tuner.HyperParameters()
    space.Int("layers", 1, 3)
    closed = make_tuner(trials.path, by_layers, hyperparameters=space, tune_new_entries=False)
    described_by(closed, trials.path)
    assert names_of(closed) == {"layers"}, "it was closed"


# Trials, each as a task of its job runs it.


def assigned(path: Path, *, name: str = "0", **values: Any) -> Assignment:
    trials = path / "trials"
    one = Assignment(
        sweep_dir=str(path),
        trial=name,
        run_dir=str(trials / name),
        checkpoints=str(trials / ("0" if "tuner/trial_id" in values else name) / "checkpoints"),
        values=values,
        seed=1,
    )
    assert read_assignment(one.encode()) == one
    return one


@dataclasses.dataclass
class Trials:
    """Runs trials of a sweep in this process."""

    path: Path
    strategy: Any

    def tuner(self, model: Any = build, **options: Any) -> Any:
        return make_tuner(self.path, model, distribution_strategy=self.strategy, **options)

    def run(
        self,
        tuner: Any,
        values: Mapping[str, Any] = {"units": 2},
        *,
        name: str = "0",
        data: Any = (X, Y),
        **fitting: Any,
    ) -> Any:
        """Returns the outcome."""
        fitting = {"validation_data": (X, Y), "verbose": 0, **fitting} if data else fitting
        inside.run_assigned(tuner, assigned(self.path, name=name, **values), data, fitting)
        written, objective = self.directory(name), tuner.oracle.objective
        goal = Goal(objective=objective.name, direction=objective.direction)
        return outcome_of(goal, summary=written.read_summary(), metrics=written.read_metrics())

    def directory(self, name: str = "0") -> RunDirectory:
        return RunDirectory(self.path / "trials" / name)

    def lines(self, what: str, name: str = "0") -> list[Any]:
        return [line[what] for line in self.directory(name).read_metrics()]


@pytest.fixture
def trials(tmp_path, strategies, monkeypatch):
    monkeypatch.setattr(job, "_made", [])
    return Trials(tmp_path, strategies[1])


def test_errors_detected_late_in_a_trial_are_reported(trials):
    """A hyperparameter that is new in `fit`, and an objective that its first epoch does not have"""

    class Late(keras_tuner.HyperModel):
        def build(self, hp: Any) -> keras.Model:
            return build(hp)

        def fit(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            return model.fit(*args, batch_size=hp.Choice("batch", [16, 32]), **kwargs)

    late = refused(lambda: trials.run(trials.tuner(Late())))
    assert late == ("search space", "search-space")
    tuner = trials.tuner(objective=keras_tuner.Objective("val_acuracy", "max"))
    error = refusal(lambda: trials.run(tuner, name="1", epochs=3))
    assert error.code == "objective"
    assert "did you mean 'val_accuracy'?" in str(error)
    assert trials.lines("virtual_epoch", "1") == [1]


@pytest.mark.parametrize("as_callback", [True, False])
def test_settings_of_a_run_reach_the_fit_of_a_trial(trials, as_callback):
    run = {"virtual_epochs": tfdist.VirtualEpochs(total_examples=64, checkpoints=2)}
    fitting = {"callbacks": [tfdist.Run(**run)]} if as_callback else run
    trials.run(trials.tuner(), batch_size=16, **fitting)
    assert trials.lines("step") == [2, 4]


def test_a_trial_of_an_eager_model_is_refused(trials):
    """Keras' own fit would write no checkpoints and no lines, so its trial could not resume."""

    def eager(hp: Any) -> keras.Model:
        model = build(hp)
        model.run_eagerly = True
        return model

    assert refused(lambda: trials.run(trials.tuner(eager))) == ("tfdist.fit", "unsupported")


def test_a_trial_with_rare_validation_has_the_best_score(trials):
    tuner = trials.tuner(objective=LOSS_UP)
    outcome = trials.run(tuner, validation_freq=2, epochs=5)
    assert outcome.best_virtual_epoch == 2
    assert ["val_loss" in line for line in outcome.history] == [False, True, False, True, False]
    model = tuner.load_model(tuner.oracle.trials["0"])
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(outcome.score)


def test_a_non_finite_loss_fails_the_trial(trials):
    with pytest.raises(TfdistError, match="the loss is nan in epoch 1"):
        trials.run(trials.tuner(), data=(X * np.nan, Y), epochs=3)


def test_untuned_values_are_those_of_the_best_hyperparameters(trials):
    """As in KerasTuner: those of a build, of a fit, and of what it looks up by name."""

    class Fixed(keras_tuner.HyperModel):
        def build(self, hp: Any) -> keras.Model:
            hp.Int("units", 2, 8, default=4)
            return build(hp)

        def fit(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            hp.get("rate")
            return model.fit(*args, batch_size=hp.Choice("batch", [16, 32]), **kwargs)

    space = keras_tuner.HyperParameters()
    space.Float("rate", 0.1, 0.5)
    closed = {"hyperparameters": space, "tune_new_entries": False}
    tuner = make_tuner(trials.path, Fixed(), **closed)
    begun = {"seed": 1, "max_trials": 1}
    search = from_python.search_of(tuner, trials.path, begun)
    asked = search.ask()
    assert set(asked.values) == {"rate"}
    outcome = trials.run(trials.tuner(Fixed(), **closed), asked.values)
    line = {
        "trial": asked.trial,
        "status": "COMPLETED",
        "reason": "",
        **dataclasses.asdict(outcome),
    }
    search.tell(line)
    search.publish()
    wanted = {**asked.values, "units": 4, "batch": 16}
    assert tuner.get_best_hyperparameters()[0].values == wanted
    assert tuner.get_best_hyperparameters()[0].get("units") == 4
    (file,) = trials.path.rglob("trial.json")
    assert json.loads(file.read_text())["hyperparameters"]["values"] == wanted


def test_a_hypermodel_with_its_own_fit_runs_in_jobs(trials):
    trials.run(trials.tuner(OwnFit()), {"units": 2, "batch": 16}, epochs=2)
    assert trials.lines("step") == [4, 8]
    assert any((trials.directory().path / "checkpoints").iterdir())


class Alone(keras_tuner.RandomSearch):
    """A tuner without a model, as KerasTuner's guide has it."""

    asks = ("x",)

    def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        return {"score": sum(trial.hyperparameters.Float(name, -1, 1) ** 2 for name in self.asks)}


def test_a_tuner_without_a_model_uses_its_declared_space(trials):
    space = keras_tuner.HyperParameters()
    space.Float("x", -1, 1)

    def run(kind: Any) -> Any:
        objective = keras_tuner.Objective("score", "min")
        tuner = trials.tuner(None, kind=kind, objective=objective, hyperparameters=space)
        assert described_by(tuner, trials.path)["space"]
        return trials.run(tuner, {"x": 0.5}, data=())

    assert run(Alone).score == 0.25
    late = type("Late", (Alone,), {"asks": ("x", "y")})
    assert refused(lambda: run(late)) == ("search space", "search-space")


def test_two_executions_give_their_mean_and_train_once(trials):
    directory = trials.directory()

    def run() -> tuple[Any, Any]:
        trials.run(trials.tuner(executions_per_trial=2), epochs=2)
        return directory.read_summary(), directory.read_metrics()

    summary, lines = run()
    assert [line["virtual_epoch"] for line in lines] == [1, 2, 3, 4]
    values = [line["val_accuracy"] for line in lines]
    mean = (max(values[:2]) + max(values[2:])) / 2
    assert summary["result"]["val_accuracy"] == pytest.approx(mean)
    assert (summary["steps"], summary["virtual_epochs"]) == (8, 4)
    directory.summary_file.unlink()  # killed before it was written
    assert run() == ({**summary, "resumed_from_step": 4}, lines)


def run_in_hyperband(
    trials: Trials, number: int, *, first: int, until: int, model: Any = build, **options: Any
) -> tuple[Any, Any]:
    """Runs trial 0, or one that continues the one before; returns its outcome and the tuner."""
    callbacks = options.pop("callbacks", [])
    kind = {"kind": keras_tuner.Hyperband, "objective": LOSS_UP, "max_epochs": 4, "factor": 2}
    tuner = trials.tuner(model, **kind, **options)
    values = {"units": 2, "tuner/initial_epoch": first, "tuner/epochs": until}
    if number:
        values["tuner/trial_id"] = str(number - 1)
    trials.directory(str(number)).path.mkdir(parents=True)  # the launcher's log is in it
    return trials.run(tuner, values, name=str(number), callbacks=callbacks), tuner


@pytest.mark.parametrize(
    ("patience", "best", "done"),
    [(9, [1, 2, 4], [[1], [2, 3], [4]]), (1, [1, 2, 2], [[1], [2], []])],
    ids=["worse", "stopped"],
)
def test_a_hyperband_trial_without_improvement_can_be_loaded(patience, best, done, trials):
    """Its score and weights are of its own best epoch; where none was left, of the one before."""
    scores = []
    for number, (first, until) in enumerate([(0, 1), (1, 3), (3, 4)]):
        stop = keras.callbacks.EarlyStopping("val_loss", patience=patience, mode="max")
        outcome, tuner = run_in_hyperband(
            trials, number, first=first, until=until, callbacks=[stop]
        )
        scores.append(outcome.score)
        assert outcome.best_virtual_epoch == best[number]
        assert trials.lines("virtual_epoch", str(number)) == done[number]
        model = tuner.load_model(tuner.oracle.trials[str(number)])
        assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(outcome.score)
    assert scores[0] > scores[1]
    assert scores[2] == scores[1] if patience == 1 else scores[2] < scores[1]


# The program of a trial.


def test_another_search_in_a_trial_is_read_from_disk(tmp_path, monkeypatch):
    """In a trial of a program's second search, the first one is met again."""
    sweep_dir = tmp_path / "first"
    sweep_dir.mkdir()
    book = Journal(sweep_dir / "journal.jsonl", time_of_day=lambda: 1.0)
    book.add("begun", seed=3, max_trials=1)
    values = {"units": 4}
    book.add("asked", status="RUNNING", trial="0", values=values, run="0", until=None)
    history = [{"virtual_epoch": 1, "val_accuracy": 0.5}]
    book.add("ended", trial="0", status="COMPLETED", history=history, reason="")
    book.add("finished", reason="all trials finished", is_complete=True)
    for name, value in assigned(tmp_path / "second", units=2).encode().items():
        monkeypatch.setenv(name, value)
    tuner = make_tuner(tmp_path)
    tfdist.tuning.search(tuner, X, Y, sweep_dir=sweep_dir)
    assert tuner.get_best_hyperparameters()[0].get("units") == 4
    assert tuner.project_dir == str(sweep_dir / "keras_tuner")
    assert not (sweep_dir / "keras_tuner" / "oracle.json").exists(), "a trial writes none"


def test_a_directory_that_differs_between_runs_is_refused(tmp_path, monkeypatch):
    for name, value in assigned(tmp_path / "12:00", units=2).encode().items():
        monkeypatch.setenv(name, value)
    tuner = make_tuner(tmp_path)
    found = refused(lambda: tfdist.tuning.search(tuner, X, Y, sweep_dir=tmp_path / "12:01"))
    assert found == ("sweep_dir", "not-a-run")


def test_an_exception_caught_around_search_ends_the_trial(tmp_path, monkeypatch):
    """It went on behind the search, and was said not to have come to it."""

    def program(argv):
        with contextlib.suppress(Exception):
            tfdist.tuning.search(make_tuner(tmp_path), X, Y, sweep_dir=tmp_path / "sweep")

    def failing(*_):
        raise LookupError("mine")

    for name, value in assigned(tmp_path / "sweep", units=2).encode().items():
        monkeypatch.setenv(name, value)
    names = ("make_strategy", "have_tuners_overwrite_nothing", "have_the_tuner_know_its_space")
    for name in names:
        monkeypatch.setattr(trial, name, lambda *_: None)
    monkeypatch.setattr(trial, "_run", program)
    monkeypatch.setattr(inside, "run_assigned", failing)
    with pytest.raises(LookupError, match="mine"):
        trial.main(["program.py"])


def test_a_tuner_inside_a_trial_deletes_no_files(tmp_path, monkeypatch):
    """Tasks that start at once would, and one of them find nothing to delete."""
    monkeypatch.setattr(BaseTuner, "__init__", BaseTuner.__init__)  # to be given back
    trial.have_tuners_overwrite_nothing()
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "kept").touch()
    make_tuner(tmp_path, overwrite=True)
    assert (tmp_path / "p" / "kept").exists()
