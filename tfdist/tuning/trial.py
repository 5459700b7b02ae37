"""``python -m tfdist.tuning.trial script.py args...``: the user's program as one trial.

The program is run again, from its beginning: that is how a trial comes by the build function and
the data. Its call of `tfdist.tuning.search` runs the trial and ends the process. The strategy is
made before, as KerasTuner's tuners build a model when they are made, and TensorFlow's servers must
be there before its first operation; a worker or ps of a ps job never comes to the program at all.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Sequence

from tfdist.errors import UsageError
from tfdist.strategy import make_strategy


def main(argv: Sequence[str]) -> None:
    """Runs the program; its search raises SystemExit."""
    logging.basicConfig(
        level=logging.INFO, format="%(levelname).1s %(asctime)s %(name)s: %(message)s"
    )
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    logging.getLogger("tensorflow").propagate = False  # it has a handler of its own
    make_strategy()
    if argv[0] == "-m":
        sys.argv[:] = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = list(argv)
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
        runpy.run_path(argv[0], run_name="__main__")
    raise UsageError(
        argv[0],
        received="a run that ended before it came to its tfdist.tuning.search",
        expected="the same path to it in every run: each trial runs the program again",
        fix="call it wherever the sweep itself has called it",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
