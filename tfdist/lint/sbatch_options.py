"""Options of sbatch: their names, and what their values must look like."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from tfdist.lint.findings import Finding, Place
from tfdist.lint.shell import Directive, Script

SHORT = {
    "A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold",
    "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output", "O": "overcommit",
    "p": "partition", "q": "qos", "s": "oversubscribe", "S": "core-spec", "t": "time",
    "v": "verbose", "w": "nodelist", "W": "wait", "x": "exclude",
}  # fmt: skip

_NAMES = (
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment "
    "constraint container container-id contiguous core-spec cores-per-socket cpu-freq "
    "cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude "
    "exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq "
    "gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint hold "
    "ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem "
    "mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile "
    "nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket "
    "open-mode output overcommit oversubscribe parsable partition power prefer priority "
    "profile propagate qos quiet reboot requeue reservation resv-ports segment signal "
    "sockets-per-node spread-job stepmgr switches test-only thread-spec threads-per-core time "
    "time-min tmp tres-bind tres-per-task uid use-min-nodes usage verbose version wait "
    "wait-all-nodes wckey wrap"
)
_LONG = frozenset(_NAMES.split())

_NUMBER = ("ntasks", "cpus-per-task", "ntasks-per-node", "cpus-per-gpu", "ntasks-per-gpu")
_COUNT = re.compile(r"[1-9]\d*")
_NODES = re.compile(r"\d+[kKmM]?([-,:]\d+[kKmM]?)*")
_TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})|infinite|unlimited", re.IGNORECASE)
_SIZE = re.compile(r"\d+[kKmMgGtT]?[bB]?")
_PATTERNS = {
    "nodes": (_NODES, "a number of nodes, or least-most"),
    "time": (_TIME, "minutes, hours:minutes:seconds or days-hours"),
    "time-min": (_TIME, "minutes, hours:minutes:seconds or days-hours"),
    "mem": (_SIZE, "megabytes, or a number with K, M, G or T"),
    "mem-per-cpu": (_SIZE, "megabytes, or a number with K, M, G or T"),
    "mem-per-gpu": (_SIZE, "megabytes, or a number with K, M, G or T"),
    "open-mode": (re.compile("append|truncate"), "append or truncate"),
    **{name: (_COUNT, "a number from 1 on") for name in _NUMBER},
}


def long_name(directive: Directive) -> str:
    """Returns the long name of an option, which may have been given by its letter."""
    return SHORT.get(directive.name, directive.name)


def named(script: Script, name: str, *, group: int = 0) -> Directive | None:
    """Returns the last option of this long name in a component of the job."""
    found = [d for d in script.directives if long_name(d) == name and d.group == group]
    return found[-1] if found else None


def number(script: Script, name: str, *, group: int = 0) -> int | None:
    """Returns the value of an option that is a number."""
    directive = named(script, name, group=group)
    value = directive.value or "" if directive else ""
    return int(value) if re.fullmatch(r"\d{1,9}", value) else None


def check_options(script: Script, file: str) -> Iterator[Finding]:
    """Yields options that sbatch refuses or takes for something else."""
    for directive in script.directives:
        name = long_name(directive)
        at = Place(file=file, line=directive.line, path=f"--{name}")
        if "$" in (directive.value or "") and name != "wrap":
            yield Finding(
                code="SLM017",
                place=at,
                received=str(directive.value),
                expected="the value itself",
                fix="write it out, or give the option to sbatch on the command line; "
                "%j in file names is the job's number",
            )
        elif len(name) > 1 and name not in _LONG:
            yield from _misspelt(name, at)
        elif name in _PATTERNS and not _PATTERNS[name][0].fullmatch(directive.value or ""):
            yield Finding(
                code="SLM004",
                place=at,
                received=str(directive.value or "no value"),
                expected=_PATTERNS[name][1],
                fix="correct the value",
            )
    yield from _memory(script, file)


def _misspelt(name: str, at: Place) -> Iterator[Finding]:
    close = difflib.get_close_matches(name, _LONG, n=1, cutoff=0.75)
    if close and not any(known.startswith(name) for known in _LONG):
        yield Finding(
            code="SLM003",
            place=at,
            received=f"--{name}",
            expected=f"--{close[0]}",
            fix=f"write --{close[0]}",
        )


def _memory(script: Script, file: str) -> Iterator[Finding]:
    given = [d for d in script.directives if d.group == 0 and d.name.startswith("mem")]
    given = [d for d in given if d.name in ("mem", "mem-per-cpu", "mem-per-gpu")]
    if len({d.name for d in given}) > 1:
        yield Finding(
            code="SLM015",
            place=Place(file=file, line=given[-1].line, path=f"--{given[-1].name}"),
            received=" and ".join(f"--{d.name}" for d in given),
            expected="one of them",
            fix="take the others out",
        )
