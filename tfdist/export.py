"""``python -m tfdist.export SOURCE DIRECTORY``: export a trained model for model servers.

SOURCE is a ``.keras`` file, the run directory of a ``tfdist.train``, the directory of a
``tfdist.tune`` (the best checkpoint of its best trial), or a directory of checkpoints with
``--model file.py:function``. The version is checked before it is published.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist import chatter
from tfdist.argument_parser import Parser, reading_file, run_program
from tfdist.errors import EXIT_OK, TfdistError, mutually_exclusive, require, require_packages
from tfdist.outputs.sweep_journal import JOURNAL

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
    parser.add_argument("--follow", action="store_true", help="export newer models until SIGTERM")
    parser.add_argument("--until_eof", action="store_true", help="stop --follow when stdin ends")
    return parser


def _export(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    mutually_exclusive({"--step": options.step, "--best": options.best})
    mutually_exclusive({"--follow": options.follow, "--step": options.step})
    mutually_exclusive({"--follow": options.follow, "--version": options.version})
    require(
        not (options.follow and (options.source / JOURNAL).is_file()),
        "--follow",
        f"{options.source} is a sweep",
        fix="name the run directory of a trial, or leave --follow out",
        code="exclusive",
    )
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    for name in ("absl", "tensorflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if options.follow:
        _follow(options)
    else:
        print(_publish(options))
    return EXIT_OK


def _publish(options: Any) -> Path | str:
    """Export the newest or selected model of the source and return the version's directory."""
    require_packages("tfdist.export", "tensorflow_serving", extra="serving")
    samples = _samples(options.samples) if options.samples else None
    # Imported here, so that a wrong flag is reported before TensorFlow loads (seconds).
    with chatter.hidden():
        import tensorflow as tf

        from tfdist.serving.export import export_model, read_model

        tf.config.list_physical_devices("GPU")  # loads the driver

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


def _follow(options: Any) -> None:
    """Export the source's model, and each newer model, until SIGTERM or Ctrl-C.

    A model that is newer at that time is exported before the program exits. Raises TfdistError if
    the first export fails. Later failures are logged, and the next model is tried.
    """
    with chatter.hidden():
        from tfdist.serving.export import newest_in

    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    if options.until_eof:
        threading.Thread(target=_set_at_eof, args=(stop,), daemon=True).start()
    there = _published(options)
    if not options.source.exists():
        _LOG.warning("%s does not exist yet, waiting for it", options.source)

    def newest() -> str | None:
        found = newest_in(options.source, best=options.best)
        return None if found in there else found

    def publish() -> None:
        print(_publish(options), flush=True)
        there.update(_published(options))  # it may be newer than `newest` found

    _publish_each(newest, publish, pause=lambda: stop.wait(_LOOK_EVERY_S))


def _set_at_eof(stop: threading.Event) -> None:
    sys.stdin.buffer.read()
    stop.set()


def _published(options: Any) -> set[str]:
    """Return the checkpoints of the source that are published already, in `newest_in`'s form.

    The form has the step and the time of the save: a restarted run may save the same step again.
    """
    from tfdist.checkpoint.remote import is_remote, local_directory

    there, directory = set(), options.directory
    remote = is_remote(directory)
    home = local_directory(directory.rstrip("/")) if remote else Path(directory)
    for file in home.glob("*/[!.]*/manifest.json"):  # a killed export leaves .partial-VERSION
        is_unsent = remote and file.with_name("saved_model.pb").exists()  # its upload failed
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
            manifest = json.loads(file.read_text())
            if manifest.get("run") == str(options.source.absolute()) and not is_unsent:
                there.add(f"{manifest['step']}:{manifest['saved_at']}")
    return there


def _publish_each(
    newest: Callable[[], str | None], publish: Callable[[], None], *, pause: Callable[[], bool]
) -> None:
    """Publish each newer model. After `pause` returns True, check a last time and return."""
    last: str | None = None
    said, has_ended = "", False
    while True:
        found = None
        try:
            found = newest()
            if found not in (None, last):
                publish()
        except TfdistError as error:
            if last is None:
                raise
            before, said = said, f"{found or 'newest model'}: not published: {error}"
            if said != before:  # log a repeated failure only once
                _LOG.error("%s", said)
        last = found or last
        if has_ended:
            return
        has_ended = pause()


if __name__ == "__main__":
    sys.exit(main())
