"""``python -m tfdist.tune --config configs/digits_sweep.py --tuner random --max_trials 20``.

Searches for hyperparameters with KerasTuner or Optuna. Each trial is a job of `tfdist.launch`.
Run the same command again to resume an interrupted sweep. ``--show DIR`` prints a sweep, and
``--best DIR`` its best trial.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl.logging.converter import absl_to_standard

from tfdist.argument_parser import run_program, show
from tfdist.configs import command_line
from tfdist.errors import EXIT_OK, require_packages
from tfdist.options import OPTUNA_PACKAGES, asks_for_help
from tfdist.tuning import sweep
from tfdist.tuning.config_sweep import ConfigSweep
from tfdist.tuning.options import SweepOptions, help_text, parse
from tfdist.tuning.results import show as show_sweep
from tfdist.tuning.results import show_best


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(asctime)s %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    words = sys.argv[1:] if argv is None else argv
    if asks_for_help(words):
        return show("tfdist.tune", help_text(full="--helpfull" in words))
    return run_program("tfdist.tune", lambda: _run(parse(words)))


def _run(options: SweepOptions | tuple[str, Path]) -> int:
    if isinstance(options, tuple):
        view, sweep_dir = options
        {"show": show_sweep, "best": show_best}[view](sweep_dir)
        return EXIT_OK
    logging.getLogger().setLevel(absl_to_standard(options.verbosity))
    require_packages("tfdist.tune", "keras_tuner", "sklearn", "tensorboard", extra="tune")
    if options.tuner in OPTUNA_PACKAGES:
        names, more = OPTUNA_PACKAGES[options.tuner], "torch" if options.tuner == "gp" else ""
        require_packages(f"--tuner {options.tuner}", *names, extra="optuna", more=more)
    sweep.require_alone("tfdist.tune", os.environ)
    environ = dict(os.environ)
    config = command_line.parse([f"--config={options.config}", *options.config_flags]).config
    # KerasTuner loads TensorFlow, but the chief computes nothing with it. Hide the GPUs, so that
    # all their memory is left for the trials, and silence its log.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    exit_code, _ = sweep.run(ConfigSweep(options, config, environ))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
