"""Detection of this process's job and task from its environment.

Whoever starts the tasks leaves variables for them, each in its own way. A reader knows one
way: it returns None when its variables are not there or speak of one process, and raises
`UsageError` when they are there and say something wrong.

The rules, which docs/clusters.md has for users:

* A process is one of several tasks only if it was started as one: by our launcher, by ``srun``
  as a step of several tasks, by ``mpirun`` with several ranks, in a pod with TFDIST_HOSTS, or
  with TF_CONFIG. An allocation or an index alone says nothing.
* In a task of our launcher (it sets TFDIST_JOB) TF_CONFIG is all that is read: the launcher may
  well be one task of a Slurm step itself.
* Else TF_CONFIG goes before the rest, and must agree with it on the number of tasks and, where
  both name hosts in the same way, on the host of this one. Ports, other names of hosts and task
  types may differ: whoever wrote TF_CONFIG knew better.
* ``mpirun`` goes before ``srun``: in an allocation it runs inside a step.
* TFDIST_CLUSTER names one source and nothing else is read; ``none`` is a process by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tfdist.cluster import tf_config
from tfdist.cluster.job import JobOptions
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import TaskConfig
from tfdist.errors import UsageError, near

Reader = Callable[[Mapping[str, str]], TaskConfig | None]


def _read_mpi(environ: Mapping[str, str]) -> TaskConfig | None:
    if not any(name in environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK")):
        return None
    from tfdist.cluster import mpi  # a task that our launcher starts needs none of these

    return mpi.from_environ(environ)


def _read_slurm(environ: Mapping[str, str]) -> TaskConfig | None:
    if "SLURM_STEP_ID" not in environ:
        return None
    from tfdist.cluster import slurm

    return slurm.from_environ(environ)


def _read_kubernetes(environ: Mapping[str, str]) -> TaskConfig | None:
    if "TFDIST_HOSTS" not in environ:
        return None
    from tfdist.cluster import kubernetes

    return kubernetes.from_environ(environ)


def _read_hosts(environ: Mapping[str, str]) -> TaskConfig | None:
    if "TFDIST_HOSTS" not in environ:
        return None
    from tfdist.cluster import placement

    return placement.from_environ(environ)


SOURCES: Mapping[str, Reader] = {
    "tf_config": tf_config.from_environ,
    "mpi": _read_mpi,
    "slurm": _read_slurm,
    "kubernetes": _read_kubernetes,
    "hosts": _read_hosts,
}
"""By the name that TFDIST_CLUSTER has for it; in order of precedence."""

READERS: tuple[Reader, ...] = tuple(SOURCES.values())[1:]
"""What is asked besides TF_CONFIG, the innermost launcher first."""


def read_environment(
    environ: Mapping[str, str], *, readers: Sequence[Reader] = READERS
) -> TaskConfig | None:
    """Return which task of which job this process is, or None: a process by itself.

    Raises:
        UsageError: a source is wrong, or two of them disagree; the message has both.
    """
    if "TFDIST_JOB" in environ:
        told = tf_config.from_environ(environ)
        if told is not None:
            return told
    _check_settings(environ)
    named = environ.get("TFDIST_CLUSTER", "").strip()
    if named not in ("", "auto"):
        return _from_source(named, environ)
    told = tf_config.from_environ(environ)
    if told is not None:
        told = _with_options(_with_settings(told, environ), environ)
        _check_agreement(told, environ)
        return told
    for reader in readers:
        found = reader(environ)
        if found is not None:
            if reader is _read_slurm and environ.get("TFDIST_HOSTS", "").strip():
                _check_listed(found, environ["TFDIST_HOSTS"])
            return found
    return _alone(environ)


def _check_settings(environ: Mapping[str, str]) -> None:
    """Refuse our variables where they are wrong, also where nothing else would read them."""
    if any(name.startswith("TFDIST_") for name in environ):
        from tfdist.cluster import settings

        settings.from_environ(environ)


def _alone(environ: Mapping[str, str]) -> TaskConfig | None:
    """Return what a process by itself is told: None, or options and which attempt it is."""
    if "SLURM_RESTART_COUNT" not in environ and not any(n.startswith("TFDIST_") for n in environ):
        return None
    from tfdist.cluster import settings, slurm

    options = settings.from_environ(environ).options(attempt=slurm.attempt(environ))
    job_settings = options.strategy
    ps = environ.get("TFDIST_PS", "").strip()
    if job_settings in ("multiworker", "ps"):
        raise _not_several("TFDIST_STRATEGY", job_settings)
    if ps and int(ps):
        raise _not_several("TFDIST_PS", ps)
    if options.evaluator:
        raise _not_several("TFDIST_EVALUATOR", "1")
    if options == JobOptions():
        return None
    return TaskConfig(cluster=ClusterSpec(), task=Task("worker", 0), options=options)


def _not_several(where: str, value: str) -> UsageError:
    return UsageError(
        where,
        received=f"{value} in a process that nothing started as one of several tasks",
        expected="a step of srun, ranks of mpirun, TFDIST_HOSTS or TF_CONFIG",
        fix=f"start the program so, or unset {where}",
    )


def _from_source(name: str, environ: Mapping[str, str]) -> TaskConfig | None:
    """Return what the source that the user named says."""
    if name == "none":
        return _alone(environ)
    if name not in SOURCES:
        choices = ("auto", "none", *SOURCES)
        raise UsageError(
            "TFDIST_CLUSTER",
            received=f"{name!r}{near(name, choices)}",
            expected=f"one of {', '.join(choices)}",
            fix="name one of them, or unset it",
        )
    config = SOURCES[name](environ)
    if config is None:
        raise UsageError(
            "TFDIST_CLUSTER",
            received=f"{name}, whose variables do not make this process one of several tasks",
            expected=f"a process that {name} started as a task of a job",
            fix="start it so, or unset TFDIST_CLUSTER",
        )
    if name != "tf_config":
        return config
    return _with_options(_with_settings(config, environ), environ)


def _with_settings(told: TaskConfig, environ: Mapping[str, str]) -> TaskConfig:
    """Return `told` with the strategy of TFDIST_STRATEGY, where TF_CONFIG leaves it open."""
    job_settings, has = environ.get("TFDIST_STRATEGY", "").strip() or "auto", told.options.strategy
    if "auto" not in (job_settings, has) and job_settings != has:
        _disagree("TFDIST_STRATEGY", f"{job_settings}, and TF_CONFIG with {has}")
    ps, count = environ.get("TFDIST_PS", "").strip(), len(told.cluster.ps)
    if ps and int(ps) != count:
        _disagree("TFDIST_PS", f"{ps}, and TF_CONFIG with {count} ps")
    if job_settings == "auto" or has != "auto":
        return told
    return replace(told, options=replace(told.options, strategy=job_settings))


def _with_options(told: TaskConfig, environ: Mapping[str, str]) -> TaskConfig:
    """Return `told` with the options of our variables, where TF_CONFIG has none of its own."""
    if told.options != JobOptions(strategy=told.options.strategy):
        return told
    if not any(name.startswith("TFDIST_") for name in environ):
        return told
    from tfdist.cluster import settings

    options = settings.from_environ(environ).options()
    return replace(told, options=replace(options, strategy=told.options.strategy))


def _disagree(where: str, received: str) -> None:
    fix = f"unset {where}, or correct TF_CONFIG"
    raise UsageError(where, received=received, expected="the two to agree", fix=fix, code="ENV006")


def _check_agreement(told: TaskConfig, environ: Mapping[str, str]) -> None:
    """Compare TF_CONFIG with what else says how many tasks there are and where this one is."""
    if told.task.type == "evaluator":
        return  # beside the job, and counted by some and not by others
    count = max(1, len(told.cluster.training_tasks()))
    for source, other in _sizes(environ):
        if other not in (1, count):
            raise UsageError(
                "TF_CONFIG",
                received=f"{count} training {'task' if count == 1 else 'tasks'} in TF_CONFIG, "
                f"and {other} in {source}",
                expected="the two to agree",
                fix="unset TF_CONFIG, or set TFDIST_CLUSTER=tf_config to have it alone read",
                code="ENV006",
            )
    for variable in ("PMIX_HOSTNAME", "SLURMD_NODENAME"):
        _check_host(told, variable, environ.get(variable, "").strip())


def _check_listed(found: TaskConfig, value: str) -> None:
    """Refuses a list of hosts beside another source that has other tasks, or has them elsewhere."""
    from tfdist.cluster import placement
    from tfdist.cluster.address import shown, split_address

    cluster = found.cluster
    unseen = int(found.options.evaluator and not cluster.evaluator)  # by those that train
    here = [split_address(cluster.address(task))[0] for task in cluster.tasks()]
    listed = placement.ranks_of(placement.parse_hosts(value, where="TFDIST_HOSTS"))
    known = set(here)
    strange = [
        host
        for host in dict.fromkeys(listed)
        if host not in known
        and placement.is_name(host)
        and not any(placement.same_host(host, h) or not placement.is_name(h) for h in known)
    ]
    if (strange and not unseen) or len(listed) != len(here) + unseen:
        raise UsageError(
            "TFDIST_HOSTS",
            received=f"{shown(value)}, {len(listed)} tasks, in a job of {len(here) + unseen} tasks "
            f"on {shown(','.join(dict.fromkeys(here)))}",
            expected="the two to agree",
            fix="unset TFDIST_HOSTS, or set TFDIST_CLUSTER=hosts to have it alone read",
            code="ENV006",
        )


def _sizes(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the variable and the number of tasks of the innermost launcher that counts them."""
    if "OMPI_COMM_WORLD_SIZE" in environ or "PMI_RANK" in environ:
        from tfdist.cluster import mpi

        name = "OMPI_COMM_WORLD_SIZE" if "OMPI_COMM_WORLD_SIZE" in environ else "PMI_SIZE"
        size = mpi.num_tasks(environ)
        if size > 1:
            return [(name, size)]
    if "SLURM_STEP_ID" in environ:
        from tfdist.cluster import slurm

        size = slurm.num_tasks(environ)
        if size > 1:
            return [("SLURM_STEP_NUM_TASKS", size)]
    if environ.get("TFDIST_HOSTS", "").strip():
        from tfdist.cluster import placement

        listed = placement.parse_hosts(environ["TFDIST_HOSTS"], where="TFDIST_HOSTS")
        return [("TFDIST_HOSTS", sum(slots for _, slots in listed))]
    return []


def _check_host(told: TaskConfig, variable: str, name: str) -> None:
    """Refuses a TF_CONFIG that knows this host by its name, and puts the task on another."""
    if not name or told.cluster.kind == "single":
        return
    from tfdist.cluster.address import split_address
    from tfdist.cluster.placement import same_host

    own = split_address(told.cluster.address(told.task))[0]
    if same_host(own, name):
        return
    here: list[Task] = [
        task
        for task in told.cluster.training_tasks()
        if same_host(split_address(told.cluster.address(task))[0], name)
    ]
    if here:
        raise UsageError(
            "TF_CONFIG",
            received=f"{told.task} on {own} in TF_CONFIG, and {variable}={name}",
            expected=f"the two to agree: TF_CONFIG has {here[0]} on {name}",
            fix="give each task its own index in TF_CONFIG, or unset it",
            code="ENV006",
        )
