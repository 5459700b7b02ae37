"""Slurm: the cluster of a job step from the variables that ``srun`` sets in its tasks.

Only a step of several tasks is a job to us. A batch script, a shell of ``salloc`` and a step of
one task are single processes, whatever the allocation has: in them ``SLURM_NTASKS`` speaks of
tasks that nobody has started. Seen with Slurm 22.05; the variables are those of
https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdist.cluster import placement, wishes
from tfdist.cluster.address import shown
from tfdist.cluster.slurm_nodes import check_self, hosts_of_ranks, node_of_each_rank, step_nodes
from tfdist.cluster.tf_config import TaskConfig
from tfdist.cluster.wishes import Wishes, needed, text
from tfdist.errors import UsageError

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # the batch script, the shell of salloc, and their like


def num_tasks(environ: Mapping[str, str]) -> int:
    """Returns how many tasks ``srun`` started this process among; 1 if it did not."""
    step = wishes.integer(environ, "SLURM_STEP_ID", most=2**32 - 1)
    if step is None or step >= _FIRST_SPECIAL_STEP or not text(environ, "SLURM_PROCID"):
        return 1
    return wishes.integer(environ, "SLURM_STEP_NUM_TASKS", least=1) or 1


def from_environ(environ: Mapping[str, str]) -> TaskConfig | None:
    """Returns this task's part of the job step, or None outside a step of several tasks.

    Tasks are taken in order of SLURM_PROCID. Their ports begin at one that follows from the job
    and step number (`placement.port_of_job`), or at TFDIST_PORT. In a heterogeneous job
    TFDIST_HET_GROUPS says what each component is for.

    Raises:
        UsageError: the variables contradict each other, or do not say on which node a task is.
    """
    count = num_tasks(environ)
    if count == 1:
        return None
    wished = wishes.from_environ(environ)
    nodes = step_nodes(environ, count=count)
    where = node_of_each_rank(environ, nodes)
    rank = needed(environ, "SLURM_PROCID", most=count - 1)
    check_self(environ, nodes, where=where, rank=rank)
    at = placement.ports_of_ranks(
        hosts_of_ranks(environ, nodes, where=where),
        first_port=first_port(environ, wished),
        among=wished.ports,
    )
    components = wishes.integer(environ, "SLURM_HET_SIZE") or 1
    types = _types([nodes[index].group for index in where], wished, components=components)
    return placement.placed(at, types, rank=rank, wished=wished, attempt=attempt(environ))


def attempt(environ: Mapping[str, str]) -> int:
    """Returns which attempt at its job a process is: Slurm counts those that came before."""
    return 1 + (wishes.integer(environ, "SLURM_RESTART_COUNT") or 0)


def node_of(environ: Mapping[str, str]) -> tuple[list[str], int] | None:
    """Returns the hosts of the step and the position of this one, or None as `from_environ` does.

    For a launcher that ``srun`` starts once on each node.

    Raises:
        UsageError: the step has several tasks on a node, or its variables are wrong.
    """
    count = num_tasks(environ)
    if count == 1:
        return None
    nodes = step_nodes(environ, count=count)
    if any(node.tasks != 1 for node in nodes):
        raise UsageError(
            "SLURM_STEP_TASKS_PER_NODE",
            received=shown(text(environ, "SLURM_STEP_TASKS_PER_NODE")),
            expected="1 for each node: a launcher starts the tasks of its node itself",
            fix="run srun with --ntasks-per-node=1",
        )
    where = node_of_each_rank(environ, nodes)
    rank = needed(environ, "SLURM_PROCID", most=count - 1)
    check_self(environ, nodes, where=where, rank=rank)
    return hosts_of_ranks(environ, nodes, where=where), rank


def first_port(environ: Mapping[str, str], wished: Wishes) -> int:
    """Returns the port of the first task of the step: the one wished for, or the job's own."""
    if wished.port:
        return wished.port
    step = needed(environ, "SLURM_STEP_ID")
    return placement.port_of_job(str(needed(environ, "SLURM_JOB_ID")), step=step, wished=wished)


def _types(groups: Sequence[int], wished: Wishes, *, components: int) -> list[str]:
    """Returns the type of each rank, which is in the component that `groups` says."""
    if not wished.groups:
        return placement.task_types(len(groups), wished=wished)
    if len(wished.groups) != components:
        raise UsageError(
            wishes.GROUPS,
            received=f"{','.join(wished.groups)} in a job of {components} component(s)",
            expected="a type for each component of the job, from component 0 on",
            fix=f"write {components} types, or unset it in a job that is not heterogeneous",
        )
    if wished.evaluator and "evaluator" not in wished.groups:
        fix = f"unset {wishes.EVALUATOR}, or add the component"
        received, expected = f"it with {','.join(wished.groups)}", "a component of that type"
        raise UsageError(wishes.EVALUATOR, received=received, expected=expected, fix=fix)
    types = [wished.groups[group] for group in groups]
    ps = types.count("ps")
    if wished.ps not in (None, ps):
        fix = f"unset {wishes.PS}: the components say it"
        expected = f"{ps}, the tasks of the ps components"
        raise UsageError(wishes.PS, received=f"{wished.ps}", expected=expected, fix=fix)
    if ps and "chief" not in types and "worker" in types:
        types[types.index("worker")] = "chief"
    if types.count("chief") > 1 or (ps and "worker" not in types) or ps == len(types):
        counts = ", ".join(f"{types.count(type_)} {type_}" for type_ in ("chief", "worker", "ps"))
        raise UsageError(
            wishes.GROUPS,
            received=f"{','.join(wished.groups)}, which makes {counts}",
            expected="one chief at most, and a worker besides the chief where there are ps",
            fix="correct the types, or the tasks of the components",
        )
    return types
