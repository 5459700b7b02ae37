"""Cluster resolver of Slurm: the variables that ``srun`` sets in a step's tasks.

Only a step of several tasks is a job to us. A batch script, a shell of ``salloc`` and a step of
one task are single processes, whatever the allocation has: in them ``SLURM_NTASKS`` speaks of
tasks that nobody has started. Seen with Slurm 22.05; the variables are those of
https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfdist.cluster import address, placement, settings
from tfdist.cluster.address import shown
from tfdist.cluster.settings import JobSettings, contradiction, missing, needed, text
from tfdist.cluster.tf_config import TaskConfig

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # the batch script, the shell of salloc, and their like
_GROUPS = ("SLURM_JOB_NODELIST_HET_GROUP_", "SLURM_JOB_NODELIST_PACK_GROUP_")  # today's, older
_PASS_ON = "pass Slurm's variables on to the task as they are"


class _Node(NamedTuple):
    """A node of the step, the number of its tasks, and the component of the job it is in."""

    name: str
    tasks: int
    group: int


class _Step(NamedTuple):
    """A step of several tasks: its nodes, the one of each rank, and this rank."""

    nodes: Sequence[_Node]
    of_ranks: Sequence[_Node]
    rank: int


def from_environ(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return this task's part of the job step, or None outside a step of several tasks.

    Tasks are taken in order of SLURM_PROCID. Their ports begin at one that follows from the job
    and step number (`placement.port_of_job`). In a heterogeneous job TFDIST_HET_GROUPS says what
    each component is for.

    Raises:
        UsageError: the variables contradict each other, or do not say on which node a task is.
    """
    step = _step(environ)
    if step is None:
        return None
    at = placement.ports_of_ranks(
        [node.name for node in step.of_ranks],
        first_port=first_port(environ, job_settings),
        among=job_settings.ports,
    )
    components = settings.integer(environ, "SLURM_HET_SIZE") or 1
    groups = [node.group for node in step.of_ranks]
    types = _types(groups, job_settings, components=components)
    return placement.placed(at, types, rank=step.rank, job_settings=job_settings)


def num_tasks(environ: Mapping[str, str]) -> int:
    """Return how many tasks ``srun`` started this process among; 1 if it did not."""
    step = settings.integer(environ, "SLURM_STEP_ID", most=2**32 - 1)
    if step is None or step >= _FIRST_SPECIAL_STEP or not text(environ, "SLURM_PROCID"):
        return 1
    return settings.integer(environ, "SLURM_STEP_NUM_TASKS", least=1) or 1


def node_of(environ: Mapping[str, str]) -> tuple[list[str], int] | None:
    """Return the hosts of the step and the position of this one, or None as `from_environ` does.

    For a launcher that ``srun`` starts once on each node.

    Raises:
        UsageError: the step has several tasks on a node, or its variables are wrong.
    """
    step = _step(environ)
    if step is None:
        return None
    if any(node.tasks != 1 for node in step.nodes):
        raise contradiction(
            "SLURM_STEP_TASKS_PER_NODE",
            shown(text(environ, "SLURM_STEP_TASKS_PER_NODE")),
            "1 for each node: a launcher starts the tasks of its node itself",
            "run srun with --ntasks-per-node=1",
        )
    return [node.name for node in step.of_ranks], step.rank


def first_port(environ: Mapping[str, str], job_settings: JobSettings) -> int:
    """Return the port of the first task of the step."""
    step = needed(environ, "SLURM_STEP_ID")
    return placement.port_of_job(
        str(needed(environ, "SLURM_JOB_ID")), step=step, job_settings=job_settings
    )


def _types(groups: Sequence[int], job_settings: JobSettings, *, components: int) -> list[str]:
    """Return the type of each rank; `groups` has the component of each."""
    group_types = job_settings.groups
    if not group_types:
        return placement.task_types(len(groups), job_settings=job_settings)
    listed = ",".join(group_types)
    if len(group_types) != components:
        raise contradiction(
            settings.GROUPS,
            f"{listed} in a job of {components} component(s)",
            "a type for each component of the job, from component 0 on",
            f"write {components} types, or unset it in a job that is not heterogeneous",
        )
    if job_settings.evaluator and "evaluator" not in group_types:
        fix = f"unset {settings.EVALUATOR}, or add the component"
        received, expected = f"it with {listed}", "a component of that type"
        raise contradiction(settings.EVALUATOR, received, expected, fix)
    types = [group_types[group] for group in groups]
    ps = types.count("ps")
    if job_settings.ps not in (None, ps):
        fix = f"unset {settings.PS}: the components say it"
        expected = f"{ps}, the tasks of the ps components"
        raise contradiction(settings.PS, f"{job_settings.ps}", expected, fix)
    if ps and "chief" not in types and "worker" in types:
        types[types.index("worker")] = "chief"
    if types.count("chief") > 1 or (ps and "worker" not in types) or ps == len(types):
        counts = ", ".join(f"{types.count(type_)} {type_}" for type_ in ("chief", "worker", "ps"))
        raise contradiction(
            settings.GROUPS,
            f"{listed}, which makes {counts}",
            "one chief at most, and a worker besides the chief where there are ps",
            "correct the types, or the tasks of the components",
        )
    return types


def _step(environ: Mapping[str, str]) -> _Step | None:
    """Return the step that this process is a task of, or None outside one of several tasks."""
    count = num_tasks(environ)
    if count == 1:
        return None
    nodes = _nodes(environ, count=count)
    of_ranks = [nodes[index] for index in _node_of_each_rank(environ, nodes)]
    step = _Step(nodes, of_ranks, needed(environ, "SLURM_PROCID", most=count - 1))
    _check_self(environ, step)
    return step


def _nodes(environ: Mapping[str, str], *, count: int) -> list[_Node]:
    """Return the nodes of the step, component by component, in order of SLURM_NODEID."""
    names = _expanded(environ, "SLURM_STEP_NODELIST")
    variable = "SLURM_STEP_TASKS_PER_NODE"
    value = text(environ, variable)
    if not value:
        raise missing(variable, "how many tasks each node has, as in 2(x3),1")
    tasks = address.expand_counts(value, where=variable)
    if len(tasks) != len(names) or sum(tasks) != count:
        raise contradiction(
            variable,
            f"{shown(value)}: {sum(tasks)} tasks on {len(tasks)} nodes",
            f"SLURM_STEP_NUM_TASKS={count} tasks on the {len(names)} nodes of "
            f"SLURM_STEP_NODELIST={shown(environ['SLURM_STEP_NODELIST'])}",
            _PASS_ON,
        )
    groups = _group_of_each(environ, names)
    nodes = [_Node(name, n, groups[name]) for name, n in zip(names, tasks, strict=True)]
    if max(groups.values()):
        order = {name: at for at, name in enumerate(groups)}
        nodes.sort(key=lambda node: order[node.name])
    return nodes


def _group_of_each(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, int]:
    """Return the component of each node, in the order in which the step counts nodes."""
    size = settings.integer(environ, "SLURM_HET_SIZE") or 0
    if size < 2:
        return dict.fromkeys(names, 0)
    wanted, groups = set(names), dict[str, int]()
    for group in range(size):
        variable = next((p for p in _GROUPS if f"{p}{group}" in environ), _GROUPS[0])
        listed = _expanded(environ, f"{variable}{group}")
        twice = next((name for name in listed if name in groups), None)
        if twice is not None:
            raise contradiction(
                f"{variable}{group}",
                f"the node {shown(twice)}, which component {groups[twice]} has too",
                "nodes of its own for each component",
                "give the components different nodes (sbatch --exclusive)",
            )
        groups |= {name: group for name in listed if name in wanted}
    if len(groups) < len(wanted):
        unknown = next(name for name in names if name not in groups)
        expected = f"a node of {_GROUPS[0]}0 to {size - 1}"
        raise contradiction("SLURM_STEP_NODELIST", shown(unknown), expected, _PASS_ON)
    return groups


def _node_of_each_rank(environ: Mapping[str, str], nodes: Sequence[_Node]) -> list[int]:
    """Return the index of the node of each rank, by the step's distribution.

    https://slurm.schedmd.com/srun.html#OPT_distribution: ``block`` fills node after node,
    ``cyclic`` deals the tasks out one by one, and ``plane`` some at a time. Components of a
    heterogeneous job have a distribution each, of which a task knows its own only; one with a
    task a node is the same in all.
    """
    tasks = [node.tasks for node in nodes]
    distribution = text(environ, "SLURM_DISTRIBUTION").lower()
    kind = re.split("[:,]", distribution)[0]
    if kind == "arbitrary":
        raise contradiction(
            "SLURM_DISTRIBUTION",
            shown(distribution),
            "block, cyclic or plane: an arbitrary one does not say where the rest are",
            "run srun with --distribution=block",
        )
    het = len({node.group for node in nodes}) > 1
    if kind == "cyclic" and not het:
        return _dealt(tasks, 1)
    if kind == "plane" and not het:
        return _dealt(tasks, needed(environ, "SLURM_DIST_PLANESIZE", least=1))
    return [index for index, count in enumerate(tasks) for _ in range(count)]


def _dealt(tasks: Sequence[int], at_a_time: int) -> list[int]:
    left, made = list(tasks), list[int]()
    while any(left):
        for index, count in enumerate(left):
            given = min(at_a_time, count)
            made += [index] * given
            left[index] -= given
    return made


def _check_self(environ: Mapping[str, str], step: _Step) -> None:
    """Compare the place of this task by its rank with its own variables."""
    fix = "run srun with --distribution=block, and pass Slurm's variables on as they are"
    node = step.of_ranks[step.rank]
    name = text(environ, "SLURMD_NODENAME")
    if name and name not in {node.name for node in step.nodes}:
        listed = shown(text(environ, "SLURM_STEP_NODELIST"))
        expected = f"a node of SLURM_STEP_NODELIST={listed}"
        raise contradiction("SLURMD_NODENAME", shown(name), expected, _PASS_ON)
    if name and node.name != name:
        expected = f"{node.name} for SLURM_PROCID={step.rank}"
        raise contradiction("SLURMD_NODENAME", shown(name), expected, fix)
    tasks_here = text(environ, "SLURM_GTIDS")
    here = ",".join(str(rank) for rank, other in enumerate(step.of_ranks) if other == node)
    if tasks_here and tasks_here != here:
        expected = f"{shown(here)}, which are the tasks of {node.name}"
        raise contradiction("SLURM_GTIDS", shown(tasks_here), expected, fix)


def _expanded(environ: Mapping[str, str], variable: str) -> list[str]:
    value = text(environ, variable)
    if not value:
        raise missing(variable, "a node list, as in n[1-4]")
    names = address.expand_hosts(value, where=variable)
    if len(set(names)) < len(names):
        raise contradiction(variable, shown(value), "each node once", _PASS_ON)
    return names
