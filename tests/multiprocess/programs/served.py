"""A sweep that is served, without KerasTuner: ``served.py DIRECTORY --serve|--join HOST:PORT``.

Its trials are runs of `stepping.py`. All else is as in `tfdist.tune`.
"""

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.unit.sweep_world import FakeSearch
from tfdist.errors import TfdistError
from tfdist.outputs.sweep_journal import TRIALS, Trial
from tfdist.tuning import sweep
from tfdist.tuning.options import RunOptions
from tfdist.tuning.trial_job import Assignment, TrialProgram

STEPPING = Path(__file__).parent / "stepping.py"


class CountingSweep(sweep.Sweep):
    """Trials that are told their number."""

    trials = 1

    def describe(self) -> Mapping[str, Any]:
        same = {"seed": 1, "max_trials": self.trials, "config": {}, "space": []}
        return {**same, "direction": "max", "objective": "val_accuracy", "tuner": "counting"}

    def search(self, begun: Mapping[str, Any]) -> Any:
        return FakeSearch(count=self.trials)

    def variables_of(self, trial: Trial, seed: int, *, is_best: bool = False) -> Mapping[str, str]:
        run_dir = str((self.options.sweep_dir / TRIALS / trial.run).absolute())
        return Assignment(
            sweep_dir=str(self.options.sweep_dir),
            trial=trial.id,
            run_dir=run_dir,
            checkpoints=run_dir,
            values=trial.values,
            seed=seed,
        ).encode()


def main() -> int:
    sweep.export_hparams = lambda state, sweep_dir: None
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--serve")
    parser.add_argument("--join")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--program", default="served")
    parser.add_argument("--parallel_trials", type=int)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    places = given.parallel_trials
    options = RunOptions(
        sweep_dir=given.directory,
        parallel_trials=places if places is not None else 0 if given.serve else 1,
        serve=given.serve,
        join=given.join,
        max_failed_trials=1,
    )
    program = TrialProgram(
        command=(str(STEPPING),),
        name=given.program,
        file=__file__,
        launch_flags=("--grace_s", "15"),
    )
    try:
        if options.join is not None:
            return sweep.join(options, program, os.environ)
        served = CountingSweep(options, program, os.environ)
        served.trials = given.trials
        return sweep.run(served)[0]
    except TfdistError as error:
        print(f"served: {error}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
