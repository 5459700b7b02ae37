"""Render job requests with the templates beside this file: a batch script or manifests.

Pods find each other through TFDIST_HOSTS, as defined in `tfdist.cluster.environment`.

* ``job``: an indexed Job and a headless Service. If a pod fails, only this pod restarts. The other
  tasks lose their peer, exit and restart too.
* ``jobset``: a JobSet with a Job for each role. Any failure restarts all Jobs together. Needs
  JobSet 0.10 or newer, because its failure policy can select failures by their message.
* ``trainjob``: the same Jobs as the runtime of a TrainJob, for clusters with Kubeflow Trainer.

TensorFlow's servers run any graph that a client sends. So pods get no service account by default,
and a NetworkPolicy admits only pods of the job.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped]

from tfdist.cluster.placement import DEFAULT_PORT
from tfdist.cluster.settings import ports_of
from tfdist.errors import EXIT_PEER_MISSING, EXIT_STOPPED, EXIT_USAGE, require_packages
from tfdist.options import HOSTS, PS, RESTARTS, RUN_DIR, UNCOUNTED_RESTARTS
from tfdist.submit.request import JobRequest, pairs, wrong

KINDS = ("job", "jobset", "trainjob")

_NAME = re.compile("[a-z]([a-z0-9-]{0,37}[a-z0-9])?")  # role, number and random letters follow
_INDEX = "batch.kubernetes.io/job-index"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Role of the pods of one Job: its name, its number of tasks, and the GPUs of each task."""

    name: str
    count: int
    gpus: int = 0


def batch_script(request: JobRequest) -> str:
    """Return the sbatch script, or raise UsageError for a job that does not fit one srun step."""
    tasks, nodes = request.num_tasks, int(request.flags.nodes or 0)
    if request.kind.has_collectives and request.launch.workers == 1:
        fix = "use --workers 2 or more, or leave --strategy out"
        problem = f"--strategy {request.kind} needs 2 or more under Slurm"
        raise wrong("workers", problem, fix)
    if nodes > tasks:
        fix = f"use --nodes {tasks} or fewer"
        raise wrong("nodes", f"{nodes} nodes are more than the job's {tasks} tasks", fix)
    if request.kind.has_servers and request.flags.gpus:
        problem = "the chief and the ps of a Slurm step would hold GPUs too"
        raise wrong("gpus", problem, "use --to kubernetes --kind jobset")
    if request.time_s is not None and request.time_s <= request.grace_s:
        fix = "use a longer --time, or a shorter --grace_s"
        limits = f"{request.time_s} s with --grace_s {request.grace_s}"
        raise wrong("time", f"{limits} would stop each run at its start", fix)
    cpus, memory_mib = request.flags.cpus, request.memory_mib
    variables = request.variables()
    if request.kind.has_servers:
        variables[PS] = f"{request.num_ps}"
    run_dir = ""
    if request.launch.run_dir is None and RUN_DIR not in request.env:
        run_dir = variables.pop(RUN_DIR)
    python, *program = request.command
    return template("slurm.sbatch.j2").render(
        request=request,
        flags=request.flags,
        variables=variables,
        run_dir=run_dir,
        tasks_per_node=-(-tasks // nodes) if nodes else None,
        mem_per_cpu_mib=-(-memory_mib // (cpus or 1)) if memory_mib else None,
        time=_clock(request.time_s) if request.time_s else None,
        wait_s=math.ceil(request.launch.hang_timeout_s) if request.kind.has_collectives else 0,
        python=python,
        program=shlex.join(program),
    )


def manifests(request: JobRequest, *, kind: str) -> str:
    """Return the manifests of the job's objects in the order of creation.

    Raises:
        UsageError: The job does not fit this kind.
    """
    if request.flags.image is None:
        fix = "pass an image with tfdist: --image registry/name:tag"
        raise wrong("image", "the pods need an image", fix, "no-value")
    if not _NAME.fullmatch(request.name):
        fix = "use at most 39 lower-case letters, digits and '-', with a letter first"
        raise wrong("name", f"{request.name!r} is not a valid name in Kubernetes", fix)
    if kind == "job":
        _require_like_pods(request)
    ports = ports_of(request.launch)
    return template(f"{kind}.yaml.j2").render(
        request=request,
        flags=request.flags,
        roles=_roles(request) if kind != "job" else [],
        role=Role(name="", count=request.num_tasks, gpus=request.flags.gpus),
        variables=_variables(request, kind=kind),
        annotations=_annotations(request, kind=kind),
        volumes=request.volumes,
        ports=ports,
        port=DEFAULT_PORT if ports is None else ports[0],
        node_selector=pairs("node_selector", request.flags.node_selector),
        again=[EXIT_PEER_MISSING, 130, EXIT_STOPPED],
        mistake=EXIT_USAGE,
        peer_missing=EXIT_PEER_MISSING,
    )


def notes(request: JobRequest) -> tuple[str, ...]:
    """Return notes on the job for the user."""
    writable = [volume.mount for volume in request.volumes if not volume.read_only]
    if any(PurePosixPath(request.run_dir).is_relative_to(mount) for mount in writable):
        return ()
    return (
        f"note: the run directory {request.run_dir} is not on a --volume: its files are lost when "
        "the pods end, and the job cannot resume after a restart",
    )


def escape_dollars(text: str) -> str:
    """Escape a text for Kubernetes, which expands $(NAME) and replaces $$ by $."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _require_like_pods(request: JobRequest) -> None:
    """Raise UsageError if pods must differ: an indexed Job has one pod template."""
    if request.kind.has_servers and request.flags.gpus:
        problem = "the chief and the ps would hold GPUs too with --kind job"
        raise wrong("gpus", problem, "use --kind jobset")
    if request.launch.evaluator:
        problem = "an evaluator needs restarts of finished pods, which --kind job does not support"
        raise wrong("evaluator", problem, "use --kind jobset, or leave --evaluator out")


def _roles(request: JobRequest) -> list[Role]:
    workers = Role(name="worker", count=request.launch.workers, gpus=request.flags.gpus)
    made = [workers]
    if request.kind.has_servers:
        made = [Role(name="chief", count=1), workers, Role(name="ps", count=request.num_ps)]
    return made + [Role(name="evaluator", count=1)] * request.launch.evaluator


def _variables(request: JobRequest, *, kind: str) -> dict[str, str]:
    """Return the variables of every pod, including the names of all pods in task order."""
    made = request.variables()
    if request.kind.has_several_tasks:
        name = request.name
        if kind == "job":
            hosts = [f"{name}-{_numbers(request.num_tasks)}.{name}"]
        else:
            roles = _roles(request)
            hosts = [f"{name}-{role.name}-0-{_numbers(role.count)}.{name}" for role in roles]
        made[HOSTS] = ",".join(hosts)
    if request.kind.has_servers:
        made[PS] = f"{request.num_ps}"
    return made


def _annotations(request: JobRequest, *, kind: str) -> Mapping[str, str]:
    made = {RESTARTS: "jobset.sigs.k8s.io/restart-attempt"}
    if kind == "job":
        made = {
            RESTARTS: f"{_INDEX}-failure-count",
            UNCOUNTED_RESTARTS: f"{_INDEX}-ignored-failure-count",
        }
    return {name: key for name, key in made.items() if name not in request.env}


def _numbers(count: int) -> str:
    return "0" if count == 1 else f"[0-{count - 1}]"


def _clock(total_s: int) -> str:
    """Return ``D-HH:MM:SS``. (Slurm would read a plain number as minutes.)"""
    days, rest = divmod(total_s, 86_400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def _block(text: str, width: int) -> str:
    return textwrap.indent(text.strip("\n"), " " * width)


def _yaml(value: Any) -> str:
    """Return a value in YAML's flow style with quoted strings."""
    if isinstance(value, str):
        return str(yaml.safe_dump(value, default_style='"', width=math.inf)).rstrip("\n")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_yaml(k)}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return json.dumps(value)


def template(name: str) -> Any:
    """Return a template of this folder. Filters: ``shell``, ``yaml``, ``pod``, ``block``."""
    require_packages("tfdist.submit", "jinja2", extra="submit")
    return _environment().get_template(name)


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = {"shell": shlex.quote, "yaml": _yaml, "pod": escape_dollars, "block": _block}
    environment.filters |= filters
    return environment
