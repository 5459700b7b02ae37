"""``python -m tfdist.doctor``: preflight checks of the hosts of a job.

Started on all hosts at once, by whatever starts the job there, or by ``--hosts a,b --node_rank R``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence

from tfdist.argument_parser import Parser, run_program
from tfdist.errors import EXIT_OK, require_number
from tfdist.ops.doctor import examine
from tfdist.ops.doctor.checks import RULES
from tfdist.ops.doctor.examine import PreflightResult, follow, lead
from tfdist.ops.doctor.facts import job_of
from tfdist.ops.rules import rules_as_json, rules_as_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    return run_program("tfdist.doctor", lambda: _run(parse(argv), dict(os.environ)), is_report=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line."""
    command: argparse.Namespace = _parser().parse_args(argv)
    if command.startup_timeout_s is not None:
        fix = "write --startup_timeout_s 60"
        require_number("--startup_timeout_s", command.startup_timeout_s, above=0, fix=fix)
    return command


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.doctor",
        description="Looks at the hosts of a job before it is started: start it on all of them, as "
        "the job is started (srun, mpirun, pods), or with --hosts. The first says what is wrong. "
        "Alone it looks at this one.",
        epilog="Exit code: 0 nothing is wrong, 1 warnings only, 2 errors or a wrong command line.",
    )
    add = parser.add_argument
    add("--hosts", metavar="a,b,...", help="the hosts of the job, as the launcher takes them")
    rank = "which of them this one is, from 0 on; without it found by its name or address"
    add("--node_rank", type=int, metavar="R", help=rank)
    shared = "a directory that all hosts are to share: where the job writes"
    add("--shared_dir", metavar="D", help=shared)
    token = "what the hosts must know to meet, as the launcher takes it"
    add("--rendezvous_token_file", metavar="F", help=token)
    quick = "leave TensorFlow's own servers out: no all-reduce, push and pull"
    add("--quick", action="store_true", help=quick)
    timeout = "how long the hosts wait for each other (60, or what the job says)"
    add("--startup_timeout_s", type=float, metavar="S", help=timeout)
    add("--json", action="store_true", help="findings and facts as JSON")
    add("--list", action="store_true", help="every rule and its reason")
    return parser


def _run(command: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if command.list:
        as_rules = rules_as_json if command.json else rules_as_text
        print(as_rules(RULES.values()), flush=True)
        return EXIT_OK
    job = job_of(
        environ,
        hosts=command.hosts,
        node_rank=command.node_rank,
        token_file=command.rendezvous_token_file,
    )
    if job.task != job.probe_task:
        _note(f"{job.task} leaves {job.host.name} to {job.probe_task}")
        return EXIT_OK
    if command.startup_timeout_s is not None:
        job = dataclasses.replace(job, startup_timeout_s=command.startup_timeout_s)
    shared_dir = command.shared_dir
    if job.index:
        done = follow(job, environ=environ, shared_dir=shared_dir)
        if isinstance(done, int):
            _note(f"the findings for {job.host.name} are printed on {job.hosts[0].name}")
            return done
        return _show(done, command)
    return _show(lead(job, environ=environ, shared_dir=shared_dir, quick=command.quick), command)


def _show(result: PreflightResult, command: argparse.Namespace) -> int:
    print(examine.as_json(result) if command.json else examine.as_text(result), flush=True)
    return examine.exit_code(result.findings)


def _note(text: str) -> None:
    print(f"tfdist.doctor: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
