"""``python -m tfdist.tune --config configs/digits_sweep.py --tuner random --max_trials 20``.

Searches for hyperparameters with KerasTuner. Every trial is a job of `tfdist.launch`; the same
command again goes on with a sweep that was broken off. ``--show DIR`` prints one.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from tfdist.configs import command_line
from tfdist.errors import EXIT_INTERRUPTED, EXIT_OK, TfdistError
from tfdist.tuning.hosts import placed
from tfdist.tuning.options import Show, SweepOptions, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(asctime)s %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if isinstance(options, Show):
            from tfdist.tuning.screen import show

            show(options.sweep_dir)
            return EXIT_OK
        return _sweep(options)
    except TfdistError as error:
        print(f"tfdist.tune: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _sweep(options: SweepOptions) -> int:
    options, environ = placed(options, os.environ)
    if options.join is not None:
        return _join(options, environ)
    config = command_line.parse([f"--config={options.config}", *options.config_flags]).config
    # KerasTuner loads TensorFlow, of which the chief uses nothing: it is to take no GPU's memory
    # from the trials, and to say nothing.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    from tfdist.launch.machine import this_machine
    from tfdist.tuning.sweep import run

    return run(options, config, machine=this_machine(environ), environ=environ)


def _join(options: SweepOptions, environ: Mapping[str, str]) -> int:
    """Is a runner of a sweep, which needs no KerasTuner."""
    from tfdist.launch.machine import this_machine
    from tfdist.tuning.sweep import join

    return join(options, machine=this_machine(environ), environ=environ)


if __name__ == "__main__":
    sys.exit(main())
