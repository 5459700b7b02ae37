"""Command line of `tfdist.submit`, parsed to a job request for any scheduler.

It has its own flags, the launcher's flags (checked by the launcher), and a program.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Mapping, Sequence

from tfdist.argument_parser import Parser
from tfdist.cluster.settings import holds_a_secret, names_a_secret
from tfdist.errors import UsageError, require_int, require_one_of
from tfdist.launch import options as launcher
from tfdist.launch.options import LaunchOptions
from tfdist.options import LaunchFlags, table
from tfdist.submit.request import VARIABLE, JobRequest, pairs, wrong
from tfdist.submit.schedulers import SCHEDULERS, WORD

_FORMS = {
    "name": (r"[A-Za-z0-9][A-Za-z0-9_.-]*", "only letters, digits, '.', '_' and '-'"),
    "node_selector": WORD,
    "memory": (r"[1-9][0-9]{0,8}[MGT][iB]?", "a number and M, G or T, such as 16G"),
    "time": (
        r"(?=.*[1-9])([0-9]{1,6}[smhd]|([0-9]{1,4}-)?[0-9]{1,4}:[0-5]?[0-9]:[0-5]?[0-9])",
        "30m, 4h, 2d, HH:MM:SS or D-HH:MM:SS",
    ),
}
"""Format of the text of a flag for all schedulers, as a pattern and in words."""

_LAUNCHER = {name: one for name, one in table(LaunchFlags).items() if one.help and name != "env"}
_SWITCHES = {name for name, one in _LAUNCHER.items() if one.type == "bool"}


def parse(argv: Sequence[str]) -> JobRequest | None:
    """Return the job of a command line, or `None` if it asks for the help text.

    Raises:
        UsageError: A flag is unknown, has no value, or does not apply to this scheduler.
    """
    flags = {action.dest: action.dest not in _SWITCHES for action in _parser()._actions}
    words, program = launcher.split(argv, takes_value={**flags, "help": False})
    if "--help" in words:
        return None
    values = vars(_parser().parse_args(words))
    own = {name: values.pop(name) for name in [*values] if name not in _LAUNCHER}
    fix = f"write {' or '.join(f'--to {name}' for name in SCHEDULERS)}"
    if own["to"] is None:
        raise wrong("to", "the scheduler is missing", fix, "no-value")
    to = require_one_of("--to", own["to"], SCHEDULERS, fix=fix)
    for name in {name for other in SCHEDULERS.values() for name in other.flags}:
        if own[name] and name not in SCHEDULERS[to].flags:
            problem = f"--to {to} does not support this flag"
            raise wrong(name, problem, f"leave --{name} out", "exclusive")
    forms = _FORMS | {name: flag.form for name, flag in SCHEDULERS[to].flags.items()}
    for name in forms:
        _check(name, own[name], forms[name])
    for name, least in (("cpus", 1), ("gpus", 0)):
        if own[name] is not None:
            require_int(f"--{name}", own[name], least=least, fix=f"write --{name} 2, for example")
    launch, env = _launch_options(values, program, to), pairs("env", own["env"])
    form, pattern = SCHEDULERS[to].secret
    _refuse_values(launch.program.python_args, env=env, form=form)
    secrets = dict(_reference(text, pattern, form) for text in own["secret"])
    return JobRequest(flags=argparse.Namespace(**own), launch=launch, env=env, secrets=secrets)


def help_text() -> str:
    """Return the text of ``--help``."""
    return _parser().format_help()


def _check(name: str, given: str | Sequence[str] | None, form: tuple[str, str]) -> None:
    for text in [given] if isinstance(given, str) else given or ():
        if not re.fullmatch(form[0], text):
            raise wrong(name, f"{text!r} is not valid", f"pass {form[1]}")


def _parser() -> Parser:
    names = "|".join(SCHEDULERS)
    parser = Parser(
        prog="python -m tfdist.submit",
        usage=f"python -m tfdist.submit --to {names} [--dry_run] [flags] "
        "[script.py | -m module] [the program's own flags]",
        description="Submit a job to a scheduler. With --dry_run, print its script or manifests.",
        add_help=False,
    )
    add = parser.add_argument
    add("--to", metavar=names, help="scheduler")
    add("--name", metavar="NAME", help="name of the job (the program's name)")
    add("--python", metavar="PATH", help="Python with tfdist (python)")
    add("--cpus", type=int, metavar="N", help="CPUs of each task")
    add("--memory", metavar="16G", help="memory of each task")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of each computing task (0)")
    add("--time", metavar="4h", help="limit of each run (Slurm) or of the job (Kubernetes)")
    collect = functools.partial(parser.add_argument, action="append", default=[])
    collect("--env", metavar="NAME=VALUE", help="variable of the tasks (repeatable)")
    secret = "variable with the value of a file (Slurm: /path) or a Secret (secret/key)"
    collect("--secret", metavar="NAME=WHERE", help=f"{secret} (repeatable)")
    selector = "label of the nodes, or their feature under Slurm (repeatable)"
    collect("--node_selector", metavar="KEY=VALUE|FEATURE", help=selector)
    for scheduler in SCHEDULERS.values():
        group = parser.add_argument_group(f"for {scheduler.title}")
        for name, flag in scheduler.flags.items():
            group.add_argument(
                f"--{name}",
                metavar=flag.shown,
                help=flag.help,
                action="append" if flag.is_repeated else "store",
                default=[] if flag.is_repeated else None,
            )
    add = parser.add_argument_group("of python -m tfdist.launch").add_argument
    for name, one in _LAUNCHER.items():
        about = argparse.SUPPRESS if one.submit is None else one.submit or one.help
        shown = "|".join(one.choices) or ("true" if one.type == "bool" else "VALUE")
        add(f"--{name}", nargs="?", default=argparse.SUPPRESS, metavar=shown, help=about)
    return parser


def _launch_options(
    values: Mapping[str, str | None], program: Sequence[str], to: str
) -> LaunchOptions:
    """Return the launcher's options with defaults for clusters, checked by the launcher."""
    for name in values:
        one = _LAUNCHER[name]
        if one.submit is None or name in SCHEDULERS[to].unused:
            raise UsageError(
                f"--{name}",
                f"--to {to} does not use this flag",
                fix=f"leave --{name} out",
                code="unused-option",
            )
    given = {name: one.submit_default for name, one in _LAUNCHER.items() if one.submit_default}
    words = [
        f"--{name}" if text is None else f"--{name}={text}"
        for name, text in {**given, **values}.items()
    ]
    options = launcher.parse([*words, *program])
    assert options is not None  # `parse` has handled --help
    return options


# Secrets: a job has only references. No flag, script or manifest has a secret's value.

_FIX = "store the value with the scheduler, and pass a reference: --secret NAME={form}"


def _refuse_values(program: Sequence[str], *, env: Mapping[str, str], form: str) -> None:
    """Reject values that look like secrets in --env or the program's arguments.

    The message has the name of the flag or variable, but not the value.
    """
    for name, value in env.items():
        if is_secret(name, value):
            raise _refused(f"--env {name}", form)
    for i, argument in enumerate(program):
        name, equals, value = argument.partition("=")
        after = program[i + 1] if i + 1 < len(program) else ""
        if name.startswith("-") and not equals:
            name, value = name, "" if after.startswith("-") else after
        elif not name.startswith("-"):
            name, value = "", argument
        if is_secret(name.lstrip("-"), value) or holds_a_secret(argument):
            raise _refused(name if name.startswith("--") else "the program's arguments", form)


def is_secret(name: str, value: str) -> bool:
    """Return whether `value` of the flag or variable `name` looks like a secret."""
    return bool(value) and (names_a_secret(name) or holds_a_secret(value))


def _reference(text: str, pattern: str, form: str) -> tuple[str, str]:
    """Split ``NAME=reference``. The error message shows at most the name."""
    name, equals, where = text.partition("=")
    if equals and re.fullmatch(VARIABLE, name) and re.fullmatch(pattern, where):
        return name, where
    shown = f"{name}=... (value not shown)" if equals else "a text without ="
    raise wrong("secret", f"{shown} is not of the form NAME={form}", _FIX.format(form=form))


def _refused(where: str, form: str) -> UsageError:
    problem = "the value (not shown) looks like a secret, which the job's files must not contain"
    return UsageError(where, problem, fix=_FIX.format(form=form), code="secret")
