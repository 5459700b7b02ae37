"""``python -m tfdist.lint FILE...``: checks of a job's files before it is started."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tfdist.argument_parser import Parser, reading_file, run_program
from tfdist.errors import EXIT_OK, UsageError, require_int
from tfdist.ops.lint import KINDS, LintSource, lint
from tfdist.ops.lint.rules import RULES, Finding
from tfdist.ops.rules import Severity, count, printable, rules_as_json, rules_as_text, worst


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_program("tfdist.lint", lambda: _run(parse(words)), is_report=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command line; a command to check follows ``--``."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    arguments: argparse.Namespace = _parser().parse_args(words[:cut])
    arguments.command = words[cut + 1 :]
    if not (arguments.files or arguments.command or arguments.environ or arguments.list):
        raise UsageError(
            "command line",
            received="no file",
            expected="files, -, --environ or -- COMMAND",
            fix="see --help",
            code="no-value",
        )
    if arguments.replicas is not None:
        require_int("--replicas", arguments.replicas, least=1, fix="write --replicas 8")
    return arguments


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.lint",
        description="Says what is wrong with a job's files before anything is started.",
        epilog="What follows -- is a command of tfdist.launch or tfdist.train to check. "
        "Config files are run, in a process of their own; nothing else is. "
        "Exit code: 0 no findings, 1 warnings only, 2 errors or a wrong command line.",
    )
    files = "TF_CONFIG (.json), a config file (.py), Kubernetes manifests (.yaml, .yml, .json), "
    files += "the output of env (.env); - for standard input"
    parser.add_argument("files", nargs="*", metavar="FILE", help=files)
    parser.add_argument("--environ", action="store_true", help="check the present environment")
    parser.add_argument("--kind", choices=KINDS, help="what the files are")
    replicas = "how many replicas the job will have, for the global batch of a config file"
    parser.add_argument("--replicas", type=int, metavar="N", help=replicas)
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument("--list", action="store_true", help="every rule")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        as_rules = rules_as_json if arguments.json else rules_as_text
        print(as_rules(RULES.values()), flush=True)
        return EXIT_OK
    sources = [LintSource(name=n, data=_bytes(n), kind=arguments.kind) for n in arguments.files]
    findings = lint(
        sources,
        environ=dict(os.environ) if arguments.environ else None,
        command=arguments.command,
        replicas=arguments.replicas,
    )
    checked = len(sources) + arguments.environ + bool(arguments.command)
    print(_as_json(findings) if arguments.json else _as_text(findings, checked), flush=True)
    return worst(RULES[finding.code].severity for finding in findings)


def _as_text(findings: Sequence[Finding], checked: int) -> str:
    """Return a line for each finding, and one that counts them."""
    severities = [RULES[finding.code].severity for finding in findings]
    lines = [printable(str(finding)) for finding in findings]
    wrong = severities.count(Severity.ERROR)
    counts = f"{count(wrong, 'error')}, {count(len(lines) - wrong, 'warning')}"
    return "\n".join([*lines, f"{count(checked, 'file')}: {counts if lines else 'no findings'}"])


def _as_json(findings: Sequence[Finding]) -> str:
    """Return an object with the exit code and the findings, each with its parts."""
    exit_code = worst(RULES[finding.code].severity for finding in findings)
    listed = []
    for finding in findings:
        rule, parts = RULES[finding.code], asdict(finding)
        about = {"code": parts.pop("code"), "severity": rule.severity, "title": rule.title}
        listed.append({**about, **parts.pop("location"), **parts})
    return json.dumps({"exit_code": exit_code, "findings": listed}, indent=1)


def _bytes(name: str) -> bytes:
    with reading_file("command line", repr(name), expected="a file"):
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()


if __name__ == "__main__":
    sys.exit(main())
