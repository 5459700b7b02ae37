"""``python -m tfdist.find lr|batch SUBJECT``: what to set before a run.

SUBJECT is ``file.py:function``, a function that returns ``(model, x, y)``, or the flags of
`tfdist.train`: ``--config=configs/x.py --config.model=cnn``; without any, a CNN on the digits.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.argument_parser import Parser, require_writable, run_program
from tfdist.errors import EXIT_OK, mutually_exclusive, require_int
from tfdist.find.batch_size import BatchSearch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_program("tfdist.find", lambda: _find(words))


def parse(argv: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the options, and the words that name the subject; raise UsageError."""
    parser = Parser(prog="python -m tfdist.find", description=__doc__.partition("\n\n")[0])
    parser.add_argument("what", choices=("lr", "batch"), help="what to find")
    parser.add_argument(
        "subject", nargs="?", metavar="FILE.py:FUNCTION", help="returns model, x, y"
    )
    parser.add_argument("--batch_size", type=int, help="of lr; default 32, or as config")
    parser.add_argument("--steps", type=int, help="of lr (100), or of each trial of batch (3)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="picture of lr")
    parser.add_argument("--first", type=int, default=8, help="first size of batch")
    parser.add_argument("--most", type=int, default=65_536, help="largest size of batch")
    parser.add_argument("--timeout_s", type=float, default=600.0, help="of each trial of batch")
    config, ours = of_config(argv)
    options = parser.parse_args(ours)
    for flag in ("batch_size", "steps"):
        if (value := getattr(options, flag)) is not None:
            require_int(f"--{flag}", value, least=1)
    require_writable("--plot", options.plot)
    mutually_exclusive({"FILE.py:FUNCTION": options.subject, "--config": " ".join(config)})
    return options, [options.subject] if options.subject else config


def of_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of `tfdist.train`, each with its value, and all other words."""
    config, ours, rest = list[str](), list[str](), list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--config"):
            ours.append(word)
            continue
        config.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):  # else a switch
            config.append(rest.pop(0))
    return config, ours


def _find(argv: Sequence[str]) -> int:
    options, words = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    find = {"lr": _lr, "batch": _batch}[options.what]
    found = find(words, options)
    if found is not None:
        print(found)
    return EXIT_OK


def _lr(words: Sequence[str], options: Any) -> object:
    """Every training task of a job calls it; None but in the chief."""
    from tfdist.find.learning_rate import find_learning_rate
    from tfdist.find.subject import read
    from tfdist.strategy import barrier, is_chief, make_strategy

    subject = read(words, strategy=make_strategy())
    found = find_learning_rate(
        subject.model,
        subject.x,
        subject.y,
        options.batch_size or subject.batch_size or 32,
        steps=options.steps or 100,
    )
    if options.plot and is_chief():
        found.plot(options.plot)
    barrier()  # who ended before the others would take them down
    return found if is_chief() else None


def _batch(words: Sequence[str], options: Any) -> object:
    search = BatchSearch(
        first=options.first,
        most=options.most,
        steps=options.steps or 3,
        timeout_s=options.timeout_s,
    )
    return search.run({"subject": words})


if __name__ == "__main__":
    sys.exit(main())
