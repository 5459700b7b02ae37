"""Checks a script that starts tfdist: what it sets, what it runs, and under Slurm how."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tfdist.cluster import wishes
from tfdist.lint.commands import check_flags, runs_launcher, runs_tfdist
from tfdist.lint.findings import Finding, Place
from tfdist.lint.sbatch_options import check_options, named, number
from tfdist.lint.sbatch_signals import check_signals
from tfdist.lint.shell import Command, Script, read_script
from tfdist.lint.variables import are_alone, check_size, check_variables, is_ours, num_training


def check_script(text: str, file: str) -> Iterator[Finding]:
    """Yields what is wrong with a script of sh or bash, an sbatch script or another."""
    script = read_script(text)
    values = _values(script)
    yield from check_variables(values, lambda name: _at(file, script.lines.get(name), name))
    shared = _replicas(script, values)
    for command in script.commands:
        replicas = shared if _is_srun(command) and not _step_options(command) else None
        yield from check_flags(command.words, _at(file, command.line), replicas=replicas)
    if not (script.directives or script.late or script.doubtful):
        return
    yield from _head(script, file)
    yield from check_options(script, file)
    if not _is_ours(script):
        return
    yield from check_signals(script, file)
    yield from _tasks_of_steps(script, file, values)
    yield from _groups(script, file, values)
    yield from _environment(script, file)
    yield from _exit_codes(script, file)


def _at(file: str, line: int | None, path: str = "") -> Place:
    return Place(file=file, line=line, path=path)


def _values(script: Script) -> dict[str, str]:
    """Returns the variables whose value does not depend on others."""
    made = dict(script.variables)
    for command in script.commands:
        made |= command.variables
    return {n: v for n, v in made.items() if "$" not in v and "`" not in v}


def _is_ours(script: Script) -> bool:
    ours = any(map(is_ours, script.lines))
    return ours or any(runs_tfdist(command.words) for command in script.commands)


def _is_srun(command: Command) -> bool:
    return command.name == "srun"


def _is_ps(values: dict[str, str]) -> bool:
    groups = values.get(wishes.GROUPS, "")
    return values.get(wishes.STRATEGY) == "ps" or wishes.PS in values or "ps" in groups


def _replicas(script: Script, values: dict[str, str]) -> int | None:
    """Returns how many replicas at least compute a global batch; None where that is unsure."""
    tasks = _tasks(script)
    if tasks is None or _is_ps(values) or are_alone(values):
        return None
    # In a heterogeneous job the evaluator is not one of the first component's tasks.
    return tasks if wishes.GROUPS in values else num_training(tasks, values)


def _tasks(script: Script, *, group: int = 0) -> int | None:
    """Returns how many tasks a component has, None where its options do not say."""
    tasks = number(script, "ntasks", group=group)
    nodes = number(script, "nodes", group=group)
    each = number(script, "ntasks-per-node", group=group)
    if tasks is not None or each is None:
        return tasks if tasks is not None else nodes
    return each * (nodes or 1)


def _head(script: Script, file: str) -> Iterator[Finding]:
    if not script.shebang:
        yield Finding(
            code="SLM001",
            place=_at(file, 1),
            received="a first line without #!",
            expected="the script's interpreter",
            fix="begin with #!/usr/bin/env bash",
        )
    for line in script.late:
        yield Finding(
            code="SLM002",
            place=_at(file, line),
            received="#SBATCH after a command",
            expected="it before the first command",
            fix="move it up",
        )
    for line, text in script.doubtful:
        yield Finding(
            code="SLM016",
            place=_at(file, line),
            received=text[:60],
            expected="#SBATCH and a blank, in capitals and at the beginning of the line",
            fix="write it so, or ##  for a comment",
        )


def _tasks_of_steps(script: Script, file: str, values: dict[str, str]) -> Iterator[Finding]:
    tasks, nodes = number(script, "ntasks"), number(script, "nodes")
    each, count = number(script, "ntasks-per-node"), _tasks(script)
    if None not in (tasks, nodes, each) and tasks != (nodes or 0) * (each or 0):
        directive = named(script, "ntasks")
        yield Finding(
            code="SLM007",
            place=_at(file, directive.line if directive else None, "--ntasks"),
            received=f"{tasks} tasks on {nodes} nodes with {each} each",
            expected=f"{(nodes or 0) * (each or 0)} tasks",
            fix="leave --ntasks out",
        )
    steps = [c for c in script.commands if _is_srun(c)]
    if not steps and count and count > 1:
        yield from _no_srun(script, file, count)
    for step in steps:
        yield from _step(script, step, file)
    plain = script.groups == 1 and all(not _step_options(step) for step in steps)
    if steps and count and plain:
        yield from check_size(count, values, lambda name: _at(file, script.lines.get(name), name))


def _no_srun(script: Script, file: str, count: int) -> Iterator[Finding]:
    mpi = ("mpirun", "mpiexec", "prterun")
    if any(command.name in mpi for command in script.commands):
        return
    for command in script.commands:
        if runs_tfdist(command.words) and not runs_launcher(command.words):
            yield Finding(
                code="SLM005",
                place=_at(file, command.line),
                received=f"one process for {count} tasks",
                expected="srun before the command",
                fix=f"write srun {' '.join(command.words)[:60]}",
            )


def _step_options(step: Command) -> list[str]:
    """Returns the words of srun itself that change the tasks of the step."""
    own = []
    for word in step.words[1:]:
        if not word.startswith("-"):
            break
        own.append(word)
    changing = r"-[nNm].*|--(ntasks|nodes|distribution|het-group|ntasks-per-node)\b.*"
    return [word for word in own if re.fullmatch(changing, word)]


def _step(script: Script, step: Command, file: str) -> Iterator[Finding]:
    at = _at(file, step.line)
    each, tasks, nodes = (number(script, name) for name in ("ntasks-per-node", "ntasks", "nodes"))
    several = (each or 0) > 1 or (each is None and (tasks or 0) > (nodes or 1))
    if runs_launcher(step.words) and several and not _step_options(step):
        yield Finding(
            code="SLM006",
            place=at,
            received="srun of the launcher with several tasks on a node",
            expected="one launcher for each node",
            fix="write --ntasks-per-node=1, or srun the program itself",
        )
    option = named(script, "distribution")
    own = [word for word in _step_options(step) if "arbitrary" in word]
    if own or (option and "arbitrary" in (option.value or "")):
        yield Finding(
            code="SLM013",
            place=at if own else _at(file, option.line if option else None),
            received="the distribution arbitrary",
            expected="block, cyclic or plane",
            fix="take it out",
        )


def _groups(script: Script, file: str, values: dict[str, str]) -> Iterator[Finding]:
    value = values.get(wishes.GROUPS)
    if value is None:
        return
    types = len(value.split(","))
    if types != script.groups:
        yield Finding(
            code="SLM014",
            place=_at(file, script.lines.get(wishes.GROUPS), wishes.GROUPS),
            received=f"{value!r} in a job of {script.groups} component(s)",
            expected="a type for each component",
            fix=f"write {script.groups} of chief, worker, ps",
        )


def _environment(script: Script, file: str) -> Iterator[Finding]:
    export = named(script, "export")
    ours = sorted(filter(is_ours, script.exported))
    steps = [c for c in script.commands if _is_srun(c)]
    if export is None or not ours or (export.value or "").split(",")[0] != "NONE":
        return
    if any(not any(w.startswith("--export") for w in step.words) for step in steps):
        yield Finding(
            code="SLM018",
            place=_at(file, export.line, "--export"),
            received=f"NONE, and {ours[0]} exported for srun",
            expected="srun with an environment",
            fix="write srun --export=ALL, or leave --export out",
        )


def _exit_codes(script: Script, file: str) -> Iterator[Finding]:
    commands = script.commands
    for position, command in enumerate(commands):
        if not (_is_srun(command) or runs_tfdist(command.words)) or command.is_exec:
            continue
        if command.ends_with in ("|", "|&") and not script.pipefail:
            yield _hidden("SLM019", file, command.line, "a pipe", "set -o pipefail")
            continue
        following = [c for c in commands[position + 1 :] if c.ends_with not in ("|", "|&")]
        after = [c for c in following if c.name not in ("wait", "exit", "fi", "done", "}")]
        says = any(c.name in ("exit", "wait") for c in following)
        asks = any("$?" in word for c in following for word in c.words)
        if command.ends_with in ("|", "|&", "||", "&") or script.errexit or says or asks:
            continue
        if after and not any("$?" in value for value in script.variables.values()):
            fix = "begin with set -euo pipefail, or make it the last command"
            yield _hidden("SLM020", file, command.line, f"{after[-1].name} after it", fix)


def _hidden(code: str, file: str, line: int, received: str, fix: str) -> Finding:
    return Finding(
        code=code,
        place=_at(file, line),
        received=received,
        expected="a script that ends with the code of its tasks",
        fix=fix,
    )
