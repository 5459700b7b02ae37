"""``python -m tfdist.train --config configs/x.py --config.global_batch_size=128``.

Trains what a config file describes, under the strategy that TF_CONFIG describes; without
``--config``, a CNN on the digits. ``python -m tfdist.launch`` starts it once for each task.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from tfdist.argument_parser import run_program
from tfdist.cluster import read_environment
from tfdist.configs.command_line import TrainCommand, help_text, parse
from tfdist.errors import EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    _set_up_logging()
    words = sys.argv[1:] if argv is None else argv
    return run_program("tfdist.train", lambda: _run(parse(words)))


def _set_up_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(levelname).1s %(asctime)s %(name)s: %(message)s"
    )
    # TFDS tells through absl of each file it opens, and TensorFlow of each all-reduce it traces.
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    logging.getLogger("tensorflow").propagate = False  # it has a handler of its own


def _run(command: TrainCommand) -> int:
    if command.help:
        print(help_text())
        return EXIT_OK
    read_environment(os.environ)
    # Only now: a wrong flag or variable is answered without the seconds that TensorFlow takes to
    # load, and the lines that it prints.
    from tfdist.app.run import run

    run(command.config, overwrite=command.overwrite, environ=os.environ)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
