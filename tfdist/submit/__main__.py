"""``python -m tfdist.submit --to slurm|kubernetes ...``: submit a job to a scheduler.

Accepts the launcher's flags and a few of its own, and renders an sbatch script or manifests. It
submits them, or prints them with ``--dry_run``. Exit code 2: nothing was submitted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist.argument_parser import run_program
from tfdist.errors import EXIT_OK
from tfdist.submit.command_line import help_text, parse
from tfdist.submit.schedulers import SCHEDULERS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_program("tfdist.submit", lambda: _run(words), is_report=True)


def _run(words: Sequence[str]) -> int:
    request = parse(words)
    text = help_text() if request is None else SCHEDULERS[request.flags.to].submit(request)
    print(text.rstrip("\n"), flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
