"""A sweep that is served, without KerasTuner: ``served.py DIRECTORY --serve|--join HOST:PORT``.

Its trials are runs of `stepping.py`. All else is as in `tfdist.tune`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError
from tfdist.launch.multihost.hosts import environment_of_tasks
from tfdist.tuning import sweep_run
from tfdist.tuning.chief import RUNNING, STOPPED, NextTrial, SweepPlan
from tfdist.tuning.directory import TRIALS
from tfdist.tuning.hosts import SweepAddress, sweep_address_of
from tfdist.tuning.journal import SweepState, Trial
from tfdist.tuning.options import RunOptions
from tfdist.tuning.remote_runner import RemoteRunner
from tfdist.tuning.runner import LauncherRunner
from tfdist.tuning.trial_job import Assignment

STEPPING = Path(__file__).parent / "stepping.py"


class Counting:
    """Asks for trials 0, 1, ... as often as it is to."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._asked = 0

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        asked = [line for line in lines if line["event"] == "asked" and line["trial"] is not None]
        self._asked = len(asked)

    def ask(self) -> NextTrial:
        if self._asked >= self._count:
            return NextTrial(status=STOPPED, asker="r")
        self._asked += 1
        name = str(self._asked - 1)
        return NextTrial(status=RUNNING, asker="r", trial=name, values={"x": int(name)})

    def tell(self, trial: str, **how: Any) -> None:
        pass

    def publish(self, trials: Iterable[str] | None = None) -> None:
        pass


class NoBoard:
    """Stands for TensorBoard's, which loads TensorFlow."""

    def __init__(self, sweep_dir: Path) -> None:
        pass

    def load(self) -> None:
        pass

    def update(self, state: SweepState) -> None:
        pass


def main() -> int:
    sweep_run.HParamsBoard = NoBoard  # type: ignore[misc,assignment]
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--serve")
    parser.add_argument("--join")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--program", default="served")
    parser.add_argument("--parallel_trials", type=int)
    parser.add_argument("--reconnect_s", type=float, default=300.0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    places = given.parallel_trials
    options = RunOptions(
        sweep_dir=given.directory,
        parallel_trials=places if places is not None else 0 if given.serve else 1,
        serve=given.serve,
        join=given.join,
        reconnect_s=given.reconnect_s,
    )
    runner = LauncherRunner(
        program=(str(STEPPING),),
        launch_flags=("--strategy", "single", "--grace_s", "15"),
        gpus=(),
        places=options.parallel_trials,
        environ=environment_of_tasks(os.environ),
        timeout_s=600.0,
    )
    try:
        sweep_address = sweep_address_of(
            options, os.environ, program=given.program, program_file=__file__, args=()
        )
        if options.join is not None and sweep_address is not None:
            return RemoteRunner(options, runner, sweep_address=sweep_address).run()
        return _run_sweep(options, runner, sweep_address, given.trials)
    except TfdistError as error:
        print(f"served: {error}", flush=True)
        return error.exit_code


def _run_sweep(
    options: RunOptions, runner: LauncherRunner, sweep_address: SweepAddress | None, trials: int
) -> int:
    def variables_of(trial: Trial) -> Mapping[str, str]:
        run_dir = str((options.sweep_dir / TRIALS / trial.run).absolute())
        return Assignment(
            sweep_dir=str(options.sweep_dir),
            trial=trial.id,
            run_dir=run_dir,
            checkpoints=run_dir,
            values=trial.values,
            seed=1,
        ).encode()

    plan = SweepPlan(
        sweep_dir=options.sweep_dir,
        objective="val_accuracy",
        direction="max",
        max_epochs=None,
        max_failed_trials=1,
        variables_of=variables_of,
    )
    same = {"seed": 1, "max_trials": trials, "config": {}, "space": [], "direction": "max"}
    exit_code, _ = sweep_run.run_sweep(
        sweep_run.Sweep(
            options=options,
            describe=lambda: {**same, "objective": "val_accuracy", "tuner": "counting"},
            search_of=lambda begun: Counting(trials),  # type: ignore[arg-type,return-value]
            plan_of=lambda begun: plan,
            best_of=lambda trial, begun: sys.exit("no such thing"),
            runner=runner,
            sweep_address=sweep_address,
        )
    )
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
