"""``python -m tfdist.tuning.trial script.py args...``: the user's program as one trial.

The program is run again, from its beginning: that is how a trial comes by the build function and
the data. Its call of `tfdist.tuning.search` runs the trial and ends the process. The strategy is
made before, as KerasTuner's tuners build a model when they are made, and TensorFlow's servers must
be there before its first operation; a worker or ps of a ps job never comes to the program at all.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfdist.errors import EXIT_OK
from tfdist.outputs.sweep_journal import JOURNAL
from tfdist.strategy import current_job, make_strategy
from tfdist.tuning.trial_job import Assignment, TrialFailed, read_assignment


def main(argv: Sequence[str]) -> None:
    """Run the program; its search raises SystemExit."""
    logging.basicConfig(
        level=logging.INFO, format="%(levelname).1s %(asctime)s %(name)s: %(message)s"
    )
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    logging.getLogger("tensorflow").propagate = False  # it has a handler of its own
    make_strategy()
    have_tuners_overwrite_nothing()
    if assignment := read_assignment(os.environ):
        have_the_tuner_know_its_space(assignment)
    try:
        _run(argv)
    except SystemExit as ended:
        job = current_job()
        if ended.code == EXIT_OK and (job is None or job.kind in ("single", "mirrored")):
            _end()
        raise
    except TrialFailed as passed:
        error: Any = passed.__cause__
        raise error from None


def have_tuners_overwrite_nothing() -> None:
    """Have tuners delete no project when they are made, as ``overwrite=True`` has it.

    The sweep's own process has done so. Tasks that start at once would do it at once, and one of
    them fail, as what it deletes is gone.
    """
    from keras_tuner.src.engine.base_tuner import BaseTuner

    make = BaseTuner.__init__

    def make_without(tuner: Any, *args: Any, **kwargs: Any) -> None:
        make(tuner, *args, **{**kwargs, "overwrite": False})

    BaseTuner.__init__ = make_without


def have_the_tuner_know_its_space(assignment: Assignment) -> None:
    """Have the tuner of the sweep read the space when it is made; KerasTuner builds models for it.

    One more for each condition, to find what is asked for there.
    """
    from keras_tuner import HyperParameters
    from keras_tuner.src.engine.base_tuner import BaseTuner

    from tfdist.tuning.oracle import default_dir

    populate = BaseTuner._populate_initial_space

    def populate_known(tuner: Any) -> None:
        if not assignment.belongs_to(default_dir(tuner)):
            populate(tuner)
            return
        with open(Path(assignment.sweep_dir, JOURNAL), encoding="utf-8") as journal:
            space = json.loads(journal.readline())["space"]
        hp = HyperParameters.from_config({"space": space, "values": dict(assignment.values)})
        if tuner.hypermodel is not None:
            tuner.hypermodel.declare_hyperparameters(hp)
        tuner.oracle.update_space(hp)

    BaseTuner._populate_initial_space = populate_known


def _run(argv: Sequence[str]) -> None:
    if argv[0] == "-m":
        sys.argv[:] = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = list(argv)
        sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
        runpy.run_path(argv[0], run_name="__main__")


def _end() -> NoReturn:
    """End a trial that is done, as `sys.exit` would, but does not take Python apart.

    That would touch, and so copy, what all forked trials share, and the next one would wait for it.
    Threads are joined, what was registered with `atexit` is called, and output is written, as a
    child of `multiprocessing` ends. A task with peers ends as ever: in step with them.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_OK)


if __name__ == "__main__":
    main(sys.argv[1:])
