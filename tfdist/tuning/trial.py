"""``python -m tfdist.tuning.trial script.py args...``: the user's program as one trial.

A trial runs the user's program again from its first line to get the build function and the data.
The call of `tfdist.tuning.search` in the program runs the trial and exits. This module makes the
strategy first, because a KerasTuner tuner builds a model when it is constructed. TensorFlow's
servers must start before that first operation. In a ps job, only the chief runs the program.
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
    """Run the program. Its call of `search` raises SystemExit."""
    logging.basicConfig(
        level=logging.INFO, format="%(levelname).1s %(asctime)s %(name)s: %(message)s"
    )
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    logging.getLogger("tensorflow").propagate = False  # this logger has its own handler
    make_strategy()
    have_tuners_overwrite_nothing()
    if assignment := read_assignment(os.environ):
        have_the_tuner_know_its_space(assignment)
    try:
        _run(argv)
    except SystemExit as ended:
        job = current_job()
        if ended.code == EXIT_OK and (job is None or job.kind.is_one_process):
            _end()
        raise
    except TrialFailed as passed:
        error: Any = passed.__cause__
        raise error from None


def have_tuners_overwrite_nothing() -> None:
    """Make tuners ignore ``overwrite=True``, which deletes a project when a tuner is constructed.

    The sweep's process has already deleted the project. Several tasks that delete the same files
    at the same time would fail.
    """
    from keras_tuner.src.engine.base_tuner import BaseTuner

    make = BaseTuner.__init__

    def make_without(tuner: Any, *args: Any, **kwargs: Any) -> None:
        make(tuner, *args, **{**kwargs, "overwrite": False})

    BaseTuner.__init__ = make_without


def have_the_tuner_know_its_space(assignment: Assignment) -> None:
    """Make the sweep's tuner read the search space from the journal when it is constructed.

    KerasTuner would build one model, and one more for each condition, to find the space.
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
    """Exit from a finished trial as `sys.exit` does, but skip Python's finalization.

    Finalization would copy memory pages that all forked trials share and delay the next trial.
    This function joins threads, runs `atexit` callbacks and flushes output, as a `multiprocessing`
    child does. Tasks with peers call `sys.exit`, so that they exit together.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # the interpreter calls this at exit
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_OK)


if __name__ == "__main__":
    main(sys.argv[1:])
