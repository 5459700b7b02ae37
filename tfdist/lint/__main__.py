"""``python -m tfdist.lint FILE...``: what is wrong with a job's files, before it is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tfdist.errors import EXIT_OK, UsageError
from tfdist.lint import report
from tfdist.lint.command_line import HELP, Command, parse, read
from tfdist.lint.files import lint

_EXIT_SIGPIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        return _run(command)
    except UsageError as error:
        print(f"tfdist.lint: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # nobody reads the findings to their end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _EXIT_SIGPIPE


def _run(command: Command) -> int:
    if command.help:
        print(HELP)
        return EXIT_OK
    if command.list:
        print(report.rules_as_json() if command.json else report.rules_as_text(), flush=True)
        return EXIT_OK
    environ = dict(os.environ) if command.environ else None
    findings = lint(read(command), environ=environ, replicas=command.replicas)
    files = len(command.files) + command.environ
    print(
        report.as_json(findings) if command.json else report.as_text(findings, files=files),
        flush=True,
    )
    return report.exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
