"""Slurm: the batch script of a job. Pure.

The script starts the tasks as one step of ``srun``, from whose variables each finds its place
(`tfdist.cluster.environment`). Slurm warns the script, and not the tasks, before the time is over
(``--signal=B:USR1@s``): it passes the warning on, the tasks save and end with 143, and the job goes
back into the queue. What each exit code does is in `_AFTER`.

https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/srun.html; seen with 22.05.
"""

from __future__ import annotations

import math
import shlex

from tfdist.ops.submit.request import JobRequest, wrong

_TOGETHER = ("multiworker", "pipeline")

_HEAD = """\
#!/bin/bash
# {title}; rendered by python -m tfdist.submit.
{directives}

{variables}

failures={name}-$SLURM_JOB_ID.failures
max_restarts={max_restarts}
python={python}
if ! "$python" -c "import tfdist" 2>/dev/null; then
    echo "tfdist: $python on $(hostname): received no tfdist; expected it installed. \
Fix: name the Python that has it with --python"
    exit 2
fi

"""

_TRAPS = """\
# Slurm's warning comes to this script alone; on SIGTERM it tells the tasks itself.
asked=
trap 'again=yes; asked=${asked:-save}; kill -USR1 "$!"' USR1
trap 'again=yes; asked=${asked:-end}' TERM
"""

_WAIT = """
code=
again=yes
while [ "$again" ]; do  # a trap ends a wait, whatever the tasks do
    again=
    wait "$!"
    now=$?
    case "$now" in
    127 | -1) code=${code:-$now} ;;  # bash has told it already, or lost it in a trap
    *) code=$now ;;
    esac
done

"""

_AFTER = """\
requeue() {
    echo "tfdist: exit code $code: $1; queued again"
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
}

if [ "$asked" = end ]; then  # scancel, or a preemption, after which Slurm decides
    exit "$code"
fi
case "$code" in
0) rm -f "$failures" ;;
2) echo "tfdist: exit code 2: a mistake that would be made again" ;;
130 | 143) requeue "stopped, state saved" ;;
*)
    count=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
    echo "$count" >"$failures"
    if [ "$count" -le "$max_restarts" ]; then
        requeue "failure $count, of which $max_restarts are allowed"
    fi
    echo "tfdist: exit code $code: failure $count, and $max_restarts were allowed"
    ;;
esac
exit "$code"
"""


def render(request: JobRequest) -> str:
    """Return the batch script.

    Raises:
        UsageError: a job that Slurm cannot be asked for in this way.
    """
    _check(request)
    components, (python, *program) = _components(request), request.command
    blocks = []
    for number, (_, tasks, gpus) in enumerate(components):
        lines = _component(request, tasks=tasks, gpus=gpus)
        if not number:
            lines = _whole_job(request) + lines
        blocks.append("\n".join(f"#SBATCH {line}" for line in lines))
    head = _HEAD.format(
        title=request.title,
        directives="\n#SBATCH hetjob\n".join(blocks),
        variables="\n".join(_environment(request, groups=[group for group, _, _ in components])),
        name=shlex.quote(request.name),
        max_restarts=request.launch.max_restarts,
        python=shlex.quote(python),
    )
    step = _step(request, components, program=f'"$python" {shlex.join(program)}')
    return f"{head}{_TRAPS}{step} &{_WAIT}{_AFTER}"


def _check(request: JobRequest) -> None:
    if request.strategy in _TOGETHER and request.launch.workers == 1:
        fix = "use --workers 2 or more, or leave --strategy out"
        received = f"1 with --strategy {request.strategy}"
        expected = "2 or more: to Slurm a step of one task is a process by itself"
        raise wrong("workers", received, expected, fix)
    nodes = request.flags.nodes or 0
    if nodes > request.num_tasks:
        fix = f"use --nodes {request.num_tasks} or fewer"
        received, expected = f"{nodes}", f"at most {request.num_tasks}, the tasks"
        raise wrong("nodes", received, expected, fix)
    if nodes and len(_components(request)) > 1:
        fix = "leave --nodes out: the ps are on nodes of their own"
        received = "it in a ps job with --gpus"
        raise wrong("nodes", received, "no --nodes", fix)
    if request.time_s is not None and request.time_s <= request.grace_s:
        fix = "use a longer --time, or a shorter --grace_s"
        received = f"{request.time_s} s with --grace_s {request.grace_s}"
        expected = "more: the tasks would be told to stop at their start, in every run"
        raise wrong("time", received, expected, fix)


def _components(request: JobRequest) -> list[tuple[str, int, int]]:
    """Return type, tasks and GPUs of each component: one, unless ps would hold GPUs in vain."""
    gpus = request.flags.gpus
    if request.is_ps and gpus:  # the first task of the workers is the chief
        beside = [("evaluator", 1, 0)] * request.launch.evaluator
        return [("worker", 1 + request.launch.workers, gpus), ("ps", request.num_ps, 0), *beside]
    return [("", request.num_tasks, gpus)]


def _whole_job(request: JobRequest) -> list[str]:
    return [
        f"--job-name={request.name}",
        f"--output={request.name}-%j.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{request.grace_s}",
    ]


def _component(request: JobRequest, *, tasks: int, gpus: int) -> list[str]:
    lines = [f"--ntasks={tasks}"]
    flags, memory_mib = request.flags, request.memory_mib
    if flags.nodes:
        lines += [f"--nodes={flags.nodes}", f"--ntasks-per-node={-(-tasks // flags.nodes)}"]
    if flags.cpus:
        lines.append(f"--cpus-per-task={flags.cpus}")
    if memory_mib:  # of each task: Slurm counts it by node, by CPU or by GPU
        lines.append(f"--mem-per-cpu={-(-memory_mib // (flags.cpus or 1))}M")
    if gpus:
        lines.append(f"--gpus-per-task={gpus}")
    if request.time_s:
        lines.append(f"--time={_clock(request.time_s)}")
    for name in ("partition", "account", "qos"):
        if value := getattr(flags, name):
            lines.append(f"--{name}={value}")
    if flags.node_selector:
        lines.append(f"--constraint={'&'.join(flags.node_selector)}")
    return lines


def _clock(total_s: int) -> str:
    """Return ``D-HH:MM:SS``, which Slurm cannot misread, as it does a number alone."""
    days, rest = divmod(total_s, 86_400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def _environment(request: JobRequest, *, groups: list[str]) -> list[str]:
    made = request.variables()
    if len(groups) > 1:
        made["TFDIST_HET_GROUPS"] = ",".join(groups)
    elif request.is_ps:
        made["TFDIST_PS"] = f"{request.num_ps}"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in made.items()]
    for name, path in request.secrets.items():
        lines += [f"{name}=$(cat {shlex.quote(path)}) || exit 2", f"export {name}"]
    return lines


def _step(request: JobRequest, components: list[tuple[str, int, int]], *, program: str) -> str:
    """Return the line that starts the tasks.

    A task that ends does not end the others, which may be saving; where none can go on without it,
    those that still run `hang_timeout_s` later are ended by Slurm.
    """
    hang_timeout_s = math.ceil(request.launch.hang_timeout_s)
    wait_s = hang_timeout_s if request.strategy in _TOGETHER else 0
    flags = ["--kill-on-bad-exit=0", f"--wait={wait_s}"]
    if request.flags.cpus:  # srun does not take it from the script's own since 22.05
        flags.append(f"--cpus-per-task={request.flags.cpus}")
    if len(components) == 1:
        return f"srun {' '.join(flags)} \\\n    {program}"
    parts = [
        f"--het-group={number} {' '.join([*flags, '--distribution=block'])} \\\n    {program}"
        for number in range(len(components))
    ]
    return "srun " + " : \\\n    ".join(parts)
