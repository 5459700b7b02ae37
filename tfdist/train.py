"""``python -m tfdist.train --config configs/x.py --config.global_batch_size=128``.

Trains the model of a config file (default: a CNN on the digits) with the strategy of TF_CONFIG.
``python -m tfdist.launch`` starts this program once for each task.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from tfdist import chatter
from tfdist.argument_parser import run_program, show
from tfdist.cluster import read_environment
from tfdist.configs.command_line import help_text, parse
from tfdist.errors import EXIT_OK
from tfdist.options import asks_for_help


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    _set_up_logging()
    words = sys.argv[1:] if argv is None else argv
    if asks_for_help(words):
        return show("tfdist.train", help_text(full="--helpfull" in words))
    return run_program("tfdist.train", lambda: _run(words))


def _set_up_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(levelname).1s %(asctime)s %(name)s: %(message)s"
    )
    # absl logs each file that TFDS opens, and TensorFlow logs each traced all-reduce.
    logging.getLogger("absl").setLevel(logging.WARNING)
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    logging.getLogger("tensorflow").propagate = False  # it has its own handler


def _run(words: Sequence[str]) -> int:
    from absl.logging.converter import absl_to_standard

    command = parse(words)
    logging.getLogger().setLevel(absl_to_standard(command.verbosity))
    read_environment(os.environ)
    # Imported here, so that a wrong flag or variable is reported before TensorFlow loads
    # (seconds).
    with chatter.hidden():
        from tfdist.app.run import run

    run(command.config, overwrite=command.overwrite, environ=os.environ)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
