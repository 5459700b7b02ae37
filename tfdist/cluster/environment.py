"""Detection of this process's job and task from its environment.

Whoever starts the tasks leaves variables for them, each in its own way. A module for each way reads
them: its `from_environ` returns None when they are not there or speak of one process, and raises
`UsageError` when they are there and say something wrong.

The rules, which docs/hosts.md has for users:

* A process is one of several tasks only if it was started as one: by our launcher, by ``srun``
  as a step of several tasks, by ``mpirun`` with several ranks, in a pod with TFDIST_HOSTS, or
  with TF_CONFIG. An allocation or an index alone says nothing.
* In a task of our launcher (it sets TFDIST_JOB) TF_CONFIG is all that is read: the launcher may
  well be one task of a Slurm step itself.
* Else the sources are asked in the order of `SOURCES`, and the first that knows the process is
  taken: TF_CONFIG goes before the rest, and ``mpirun`` before ``srun``, inside whose step it runs.
* TF_CONFIG must agree with the rest on the number of tasks and, where both name hosts in the same
  way, on the host of this one. Ports, other names of hosts and task types may differ: whoever
  wrote TF_CONFIG knew better.
* TFDIST_CLUSTER names one source and nothing else is read; ``none`` is a process by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tfdist.cluster import hosts, kubernetes, mpi, settings, slurm, tf_config
from tfdist.cluster.address import shown, split_address
from tfdist.cluster.hostlist import parse_hosts, ranks_of
from tfdist.cluster.job import JobOptions
from tfdist.cluster.placement import is_name, same_host
from tfdist.cluster.settings import CLUSTER, EVALUATOR, HOSTS, PS, STRATEGY, JobSettings, text
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import TaskConfig
from tfdist.errors import UsageError, require_one_of

Reader = Callable[[Mapping[str, str], JobSettings], TaskConfig | None]


def _read_tf_config(environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig | None:
    """Return what TF_CONFIG says, and our variables where it leaves something open."""
    config = tf_config.from_environ(environ)
    return None if config is None else _with_settings(config, job_settings)


SOURCES: Mapping[str, Reader] = {
    "tf_config": _read_tf_config,
    "mpi": mpi.from_environ,
    "slurm": slurm.from_environ,
    "kubernetes": kubernetes.from_environ,
    "hosts": hosts.from_environ,
}
"""By the name that TFDIST_CLUSTER has for it; in order of precedence."""


def detect(environ: Mapping[str, str]) -> TaskConfig | None:
    """Return what `tfdist.cluster.read_environment` does, outside the tasks of our launcher."""
    job_settings = settings.from_environ(environ)
    named = text(environ, CLUSTER)
    check_source(named)
    if named == "none":
        return _alone(job_settings)
    if named not in ("", "auto"):
        return _from_source(named, environ, job_settings)
    for name, read in SOURCES.items():
        config = read(environ, job_settings)
        if config is not None:
            _check_agreement(name, config, environ)
            return config
    return _alone(job_settings)


def check_source(name: str) -> None:
    """Refuse a value of TFDIST_CLUSTER that names no source."""
    fix = "name one of them, or unset it"
    require_one_of(CLUSTER, name or "auto", ("auto", "none", *SOURCES), fix=fix, code="ENV001")


def _alone(job_settings: JobSettings) -> TaskConfig | None:
    """Return the settings of a process by itself: None, or options and its attempt."""
    for where, value, is_of_several in (
        (
            STRATEGY,
            job_settings.strategy,
            job_settings.strategy in ("multiworker", "ps", "pipeline"),
        ),
        (PS, job_settings.ps, job_settings.ps),
        (EVALUATOR, 1, job_settings.evaluator),
    ):
        if is_of_several:
            raise UsageError(
                where,
                received=f"{value} in a process that nothing started as one of several tasks",
                expected="a step of srun, ranks of mpirun, TFDIST_HOSTS or TF_CONFIG",
                fix=f"start the program so, or unset {where}",
                code="ENV004",
            )
    options = job_settings.options()
    if options == JobOptions():
        return None
    return TaskConfig(cluster=ClusterSpec(), task=Task("worker", 0), options=options)


def _from_source(name: str, environ: Mapping[str, str], job_settings: JobSettings) -> TaskConfig:
    """Return what the source that the user named says."""
    config = SOURCES[name](environ, job_settings)
    if config is None:
        raise UsageError(
            CLUSTER,
            received=f"{name}, whose variables do not make this process one of several tasks",
            expected=f"a process that {name} started as a task of a job",
            fix=f"start it so, or unset {CLUSTER}",
            code="ENV007",
        )
    return config


def _with_settings(config: TaskConfig, job_settings: JobSettings) -> TaskConfig:
    """Return `config` with the strategy and the options of our variables, where it has none."""
    strategy, has = job_settings.strategy, config.options.strategy
    if "auto" not in (strategy, has) and strategy != has:
        raise _disagreement(STRATEGY, f"{strategy}, and TF_CONFIG with {has}", "correct TF_CONFIG")
    count = len(config.cluster.ps)
    if job_settings.ps not in (None, count):
        received = f"{job_settings.ps}, and TF_CONFIG with {count} ps"
        raise _disagreement(PS, received, "correct TF_CONFIG")
    options = config.options
    if options == JobOptions(strategy=has):
        options = job_settings.options()
    return replace(config, options=replace(options, strategy=strategy if has == "auto" else has))


def _check_agreement(source: str, config: TaskConfig, environ: Mapping[str, str]) -> None:
    """Compare what is taken with what else says how many tasks there are and where this one is."""
    if source == "tf_config" and config.task.type != "evaluator":  # which some count, others not
        _check_size(config, environ)
        for variable in ("PMIX_HOSTNAME", "SLURMD_NODENAME"):
            _check_host(config, variable, text(environ, variable))
    if source == "slurm" and text(environ, HOSTS):
        _check_listed(config, text(environ, HOSTS))


def _check_size(config: TaskConfig, environ: Mapping[str, str]) -> None:
    """Compare the number of tasks in TF_CONFIG with that of the innermost launcher."""
    count = max(1, len(config.cluster.training_tasks()))
    sizes = dict([mpi.counted(environ), ("SLURM_STEP_NUM_TASKS", slurm.num_tasks(environ))])
    if text(environ, HOSTS):
        sizes[HOSTS] = len(ranks_of(parse_hosts(environ[HOSTS], where=HOSTS)))
    source, other = next(((name, size) for name, size in sizes.items() if size > 1), ("", count))
    if other != count:
        raise _disagreement(
            "TF_CONFIG",
            f"{count} training {'task' if count == 1 else 'tasks'} in TF_CONFIG, "
            f"and {other} in {source}",
            f"set {CLUSTER}=tf_config to have it alone read",
        )


def _check_host(config: TaskConfig, variable: str, name: str) -> None:
    """Refuse a TF_CONFIG that knows this host by its name, and puts the task on another."""
    if not name or config.cluster.kind == "single":
        return
    at = {t: split_address(config.cluster.address(t))[0] for t in config.cluster.training_tasks()}
    own = at[config.task]
    here = next((task for task, host in at.items() if same_host(host, name)), None)
    if here is not None and not same_host(own, name):
        raise UsageError(
            "TF_CONFIG",
            received=f"{config.task} on {own} in TF_CONFIG, and {variable}={name}",
            expected=f"the two to agree: TF_CONFIG has {here} on {name}",
            fix="give each task its own index in TF_CONFIG, or unset it",
            code="ENV006",
        )


def _check_listed(found: TaskConfig, value: str) -> None:
    """Refuse a list of hosts beside a step that has other tasks, or has them elsewhere."""
    cluster = found.cluster
    unseen = int(found.options.evaluator and not cluster.evaluator)  # by those that train
    here = [split_address(cluster.address(task))[0] for task in cluster.tasks()]
    listed = ranks_of(parse_hosts(value, where=HOSTS))
    known = set(here)
    unknown = [
        host
        for host in dict.fromkeys(listed)
        if host not in known
        and is_name(host)
        and not any(same_host(host, h) or not is_name(h) for h in known)
    ]
    if (unknown and not unseen) or len(listed) != len(here) + unseen:
        raise _disagreement(
            HOSTS,
            f"{shown(value)}, {len(listed)} tasks, in a job of {len(here) + unseen} tasks "
            f"on {shown(','.join(dict.fromkeys(here)))}",
            f"set {CLUSTER}=hosts to have it alone read",
        )


def _disagreement(where: str, received: str, or_else: str) -> UsageError:
    fix = f"unset {where}, or {or_else}"
    return UsageError(where, received=received, expected="the two to agree", fix=fix, code="ENV006")
