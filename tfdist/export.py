"""``python -m tfdist.export SOURCE DIRECTORY``: export a trained model for model servers.

SOURCE is a ``.keras`` file, the run directory of a ``tfdist.train``, the directory of a sweep (the
best model of its best trial), or a directory of checkpoints with ``--model file.py:function``. The
version is checked before it is published.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.argument_parser import Parser, reading_file, run_program
from tfdist.errors import EXIT_OK, mutually_exclusive, require_packages

_LOG = logging.getLogger("tfdist.export")
_LOOK_EVERY_S = 0.25


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program("tfdist.export", lambda: _export(argv))


def _parser() -> Parser:
    parser = Parser(prog="python -m tfdist.export", description=__doc__.partition("\n\n")[0])
    parser.add_argument("source", type=Path, help="a .keras file, run, sweep, or checkpoints")
    parser.add_argument("directory", help="write DIRECTORY/NAME/VERSION (a path or a URL)")
    parser.add_argument("--name", help="name in the server's URLs (default: the model's name)")
    parser.add_argument("--version", type=int, help="default: the version after the newest")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: newest)")
    parser.add_argument("--best", action="store_true", help="export the best checkpoint")
    parser.add_argument("--model", metavar="FILE.py:FUNCTION", help="makes the checkpoints' model")
    parser.add_argument("--samples", type=Path, metavar="FILE.npy", help="examples for the check")
    return parser


def _export(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    mutually_exclusive({"--step": options.step, "--best": options.best})
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    print(_publish(options))
    return EXIT_OK


def _publish(options: Any) -> Path | str:
    """Export the newest or selected model of the source and return the version's directory."""
    require_packages("tfdist.export", "tensorflow_serving", extra="serving")
    samples = _samples(options.samples) if options.samples else None
    # Imported here, so that a wrong flag is reported before TensorFlow loads (seconds).
    from tfdist.serving.export import export_model, read_model

    model, origin = read_model(
        options.source, step=options.step, best=options.best, make=options.model
    )
    return export_model(
        model,
        options.directory,
        name=options.name,
        version=options.version,
        samples=samples,
        origin=origin,
    )


def _samples(path: Path) -> Any:
    """Return the array in a file, or raise UsageError if the file has none."""
    import numpy as np

    with reading_file("--samples", path, expected="an array file of numpy.save"):
        return np.load(path)


if __name__ == "__main__":
    sys.exit(main())
