"""Sweep over a config file: the file defines the search space, and `tfdist.train` runs a trial."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist import chatter
from tfdist.configs import FREE, flat
from tfdist.errors import require
from tfdist.options import OPTUNA_PACKAGES
from tfdist.outputs.sweep_journal import Trial
from tfdist.tuning import sweep
from tfdist.tuning.options import SweepOptions
from tfdist.tuning.trial_job import TrialProgram

if TYPE_CHECKING:  # these modules import KerasTuner and TensorFlow
    from tfdist.tuning.oracle import Search, SearchSpace


class ConfigSweep(sweep.Sweep):
    """Sweep over the fields of a config file. `config` is its config before `space` runs."""

    options: SweepOptions

    def __init__(self, options: SweepOptions, config: Any, environ: Mapping[str, str]) -> None:
        _check(options, config)
        program = ("-m", "tfdist.train", f"--config={options.config}", *options.config_flags)
        imports = ("tfdist.app.run",)
        super().__init__(options, TrialProgram(command=program, imports=imports), environ)
        self._config = config
        self.max_epochs = config.checkpoints

    @functools.cached_property
    def space(self) -> SearchSpace:
        """The search space. The first access takes seconds: KerasTuner imports TensorFlow."""
        with chatter.hidden():
            from tfdist.tuning.oracle import SearchSpace

        return SearchSpace(self.options.config, self._config)

    def describe(self) -> dict[str, Any]:
        if self.options.tuner in OPTUNA_PACKAGES:
            from tfdist.tuning.optuna_oracle import require_supported

            require_supported(self.options.tuner, self.space.hyperparameters)
        values = {k: v for k, v in flat(self._config).items() if k not in FREE}
        names = ("tuner", "objective", "direction", "factor", "strategy", "workers", "ps", "seed")
        return {
            **{name: getattr(self.options, name) for name in (*names, "max_trials")},
            "config": json.loads(json.dumps(values)),
            "space": self.space.description,
        }

    def search(self, begun: Mapping[str, Any]) -> Search:
        from tfdist.tuning.oracle import Search, make_oracle

        options = self.options
        oracle = make_oracle(
            options.tuner,
            options.objective,
            options.direction,
            max_epochs=self._config.checkpoints,
            factor=options.factor,
            hyperparameters=self.space.hyperparameters.copy(),
            seed=begun["seed"],
        )
        return Search(oracle, sweep_dir=options.sweep_dir, max_trials=begun["max_trials"])

    def asked_for(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return self.space.asked(values)

    def flags_of(self, trial: Trial, seed: int) -> tuple[str, ...]:
        flags = self.space.flags(trial.values)
        is_set = self._config.seed is not None or any(f.startswith("--config.seed=") for f in flags)
        return flags if is_set else (*flags, f"--config.seed={seed}")


def _check(options: SweepOptions, config: Any) -> None:
    require(
        not config.run_dir,
        "config.run_dir",
        f"all trials would share the run directory {config.run_dir!r}",
        fix="leave it out, and pass --sweep_dir",
        code="shared-directory",
    )
    require(
        not config.objective_file,
        "config.objective_file",
        f"all trials would share the file {config.objective_file!r}",
        fix="leave it out (journal.jsonl has the scores)",
        code="shared-directory",
    )
    require(
        config.validation_split or not options.objective.startswith("val_"),
        "--objective",
        f"{options.objective} needs a validation_split",
        fix="set config.validation_split, or use --objective loss",
        code="missing-validation",
    )
