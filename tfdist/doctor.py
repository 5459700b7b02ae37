"""``python -m tfdist.doctor``: what is wrong with the hosts of a job, before it is started.

Started on all hosts at once, by whatever starts the job there, or by ``--hosts a,b --node_rank R``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from tfdist.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from tfdist.ops.doctor import report
from tfdist.ops.doctor.checks import RULES
from tfdist.ops.doctor.command_line import HELP, DoctorCommand, parse
from tfdist.ops.doctor.examine import PreflightResult, Wanted, follow, lead
from tfdist.ops.doctor.job import job_of
from tfdist.ops.rules import rules_as_json, rules_as_text

_EXIT_SIGPIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        if command.help:
            print(HELP)
            return EXIT_OK
        if command.list:
            as_rules = rules_as_json if command.json else rules_as_text
            print(as_rules(RULES.values()), flush=True)
            return EXIT_OK
        return _run(command, dict(os.environ))
    except UsageError as error:
        print(f"tfdist.doctor: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # nobody reads the findings to their end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _EXIT_SIGPIPE


def _run(command: DoctorCommand, environ: Mapping[str, str]) -> int:
    job = job_of(
        environ,
        hosts=command.hosts,
        node_rank=command.node_rank,
        token_file=command.rendezvous_token_file,
        ports=command.ports,
    )
    if job.task != job.speaker:
        _say(f"{job.task} leaves {job.host.name} to {job.speaker}")
        return EXIT_OK
    wanted = Wanted(
        shared_dir=command.shared_dir,
        quick=command.quick,
        startup_timeout_s=command.startup_timeout_s or job.startup_timeout_s,
    )
    if job.index:
        done = follow(job, wanted, environ=environ)
        if isinstance(done, int):
            _say(f"what was seen of {job.host.name} is said on {job.hosts[0].name}")
            return done
        return _show(done, command)
    verdict, meeting = lead(job, wanted, environ=environ)
    meeting.end(report.exit_code(verdict.findings))
    return _show(verdict, command)


def _show(verdict: PreflightResult, command: DoctorCommand) -> int:
    print(report.as_json(verdict) if command.json else report.as_text(verdict), flush=True)
    return report.exit_code(verdict.findings)


def _say(text: str) -> None:
    print(f"tfdist.doctor: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
