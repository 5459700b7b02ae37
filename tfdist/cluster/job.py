"""The cluster of a whole job, from how many workers and ps it is to have."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.cluster.address import shown
from tfdist.cluster.options import check_strategy
from tfdist.cluster.spec import ClusterSpec, Kind, Task
from tfdist.errors import UsageError


def addressed_tasks(
    *, strategy: str, workers: int = 1, ps: int = 0, chief: bool = False, evaluator: bool = False
) -> tuple[Task, ...]:
    """Returns the tasks of a job that need an address, in the order in which they start.

    A ps job always has a chief, which is not counted among `workers`. In a multiworker job
    worker 0 is the chief, unless `chief` asks for a task of that type besides the workers.
    A job of one process needs no address for it.

    Raises:
        UsageError: the numbers are not those of a job of this strategy.
    """
    kind = _kind(strategy, workers=workers, ps=ps, chief=chief)
    counts = {
        "chief": int(kind == "ps" or chief),
        "worker": 0 if kind == "single" else workers,
        "ps": ps,
        "evaluator": int(evaluator),
    }
    return tuple(Task(type_, i) for type_, count in counts.items() for i in range(count))


def build_cluster(
    *,
    strategy: str,
    addresses: Sequence[str],
    workers: int = 1,
    ps: int = 0,
    chief: bool = False,
    evaluator: bool = False,
) -> ClusterSpec:
    """Returns the cluster of a job in which `addressed_tasks` get `addresses`, in their order."""
    tasks = addressed_tasks(
        strategy=strategy, workers=workers, ps=ps, chief=chief, evaluator=evaluator
    )
    if len(addresses) != len(tasks):
        expected = f"{len(tasks)}, one for each task that needs one"
        fix = "give as many addresses as addressed_tasks() returns tasks"
        raise UsageError("addresses", received=f"{len(addresses)}", expected=expected, fix=fix)
    lists: dict[str, list[str]] = {}
    for task, address in zip(tasks, addresses, strict=True):
        lists.setdefault(task.type, []).append(address)
    return ClusterSpec.from_dict(lists)


def _kind(strategy: str, *, workers: int, ps: int, chief: bool) -> Kind:
    check_strategy(strategy, where="strategy")
    _check_count("workers", workers, at_least=1)
    _check_count("ps", ps, at_least=0)
    if strategy == "ps" and not ps:
        fix = "ask for at least one ps (--ps 1), or for strategy multiworker"
        raise UsageError("ps", received="0 with strategy ps", expected="1 or more", fix=fix)
    if strategy == "ps" or (strategy == "auto" and ps):
        return "ps"
    if ps:
        fix = "ask for strategy ps, or leave ps out"
        raise UsageError("ps", received=f"{ps} with strategy {strategy}", expected="0", fix=fix)
    if strategy == "multiworker" or (strategy == "auto" and (workers > 1 or chief)):
        return "multiworker"
    if workers > 1 or chief:
        received = f"{workers + chief} training tasks with strategy {strategy}"
        fix = "ask for strategy multiworker, or leave workers out"
        raise UsageError("workers", received=received, expected="one process", fix=fix)
    return "single"


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return
    expected = f"an integer from {at_least} on"
    fix = f"ask for --{name} {max(at_least, 1)} or more"
    raise UsageError(name, received=shown(value), expected=expected, fix=fix)
