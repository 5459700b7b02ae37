"""Plan of a job: one process per task, with its share of this machine's CPUs and GPUs.

Planning starts no process, so ``--dry_run`` can print the plan.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist.cluster import AUTO, KINDS, ClusterSpec, Kind, Task, TaskConfig, job_configs, settings
from tfdist.cluster.address import split_address
from tfdist.cluster.tf_config import VARIABLE, encode
from tfdist.launch.machine import Machine
from tfdist.launch.multihost.host_agreement import without_secrets
from tfdist.launch.options import LaunchOptions, Program, StartMethod, refuse
from tfdist.options import RESTARTS, JobOptions, part

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SPARE_THREADS = 2  # in addition to one thread per worker that may block


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Plan of an attempt for one host."""

    number: int
    restarts: int = 0
    """Number of earlier restarts of the job by this launcher."""
    run_dir: str
    cluster: ClusterSpec
    tasks: tuple[Task, ...]
    """Tasks on this host."""
    control: str | None = None
    """Name of this host's socket for the members of an elastic job."""
    pem: str | None = None
    """Key and certificate of an elastic job on several hosts."""
    hosts: dict[str, str] = field(default_factory=dict)
    """Host of each task, by the task's name (empty if the job runs on one host)."""

    @property
    def logs(self) -> Path:
        """Return the directory of the attempt's logs."""
        return Path(self.run_dir) / "logs" / f"attempt-{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """Program, command and environment of one task's process."""

    task: Task
    program: Program
    argv: tuple[str, ...]
    """Command that runs this task by hand."""
    env: Mapping[str, str]
    added: tuple[str, ...]
    """Names in `env` that the launcher sets. All others are from the user's environment."""
    title: str
    claim: str = ""
    """File that lists the tasks that train separate models ("" if this is allowed)."""

    @property
    def words(self) -> tuple[str, ...]:
        """Return the task's name, title, claim, kind (script or module), target and arguments."""
        kind, program = "module" if self.program.is_module else "script", self.program
        return (str(self.task), self.title, self.claim, kind, program.target, *program.args)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDescription:
    """Description of a job, without its ports."""

    options: LaunchOptions
    kind: Kind
    machine: Machine
    environ: Mapping[str, str]
    run_dir: Path
    python: str = sys.executable
    start: StartMethod = "exec"
    """Method that starts the tasks."""
    fork_server: int | None = None
    """Socket of a fork server that another process started, or `None`."""
    ports: Sequence[int] | None = None
    """Ports that the tasks may use (if `None`, any port)."""
    given: LaunchOptions = field(default_factory=LaunchOptions)
    """Options of the command line, before the launcher completes them."""

    @property
    def shards(self) -> int | None:
        """Return the number of shards of a batch in an elastic job, fixed for all its workers."""
        if not self.kind.is_elastic:
            return None
        few, many = 4, 8
        return self.options.shards or (few if self.options.workers <= few else many)

    @property
    def local_tasks(self) -> tuple[Task, ...]:
        """Return the tasks of a job on this machine, in start order."""
        if self.kind.is_one_process:
            return (Task("worker", 0),)
        counts = {"worker": self.options.workers, "evaluator": int(self.options.evaluator)}
        if self.kind.has_servers:
            counts |= {"chief": 1, "ps": self.options.num_ps}
        return tuple(sorted(Task(type_, i) for type_, n in counts.items() for i in range(n)))

    @property
    def num_local_addresses(self) -> int:
        """Return the number of tasks that need an address, in a job on this machine."""
        return len(self.local_tasks) if self.kind.has_several_tasks else 0

    def local_attempt(self, addresses: Sequence[str], *, number: int, restarts: int = 0) -> Attempt:
        """Return an attempt of a job on this machine, whose tasks have the `addresses`."""
        tasks = self.local_tasks
        return Attempt(
            number=number,
            restarts=restarts,
            run_dir=str(self.run_dir),
            cluster=ClusterSpec.of(dict(zip(tasks, addresses, strict=bool(addresses)))),
            tasks=tasks,
        )

    def specs(self, attempt: Attempt) -> tuple[ProcessSpec, ...]:
        """Return the processes of an attempt's tasks on this host, in start order.

        Raises:
            UsageError: The job does not fit this machine, for example with too few GPUs.
        """
        options = self.options
        job_options = part(
            JobOptions,
            options,
            strategy=self.kind.name,
            min_workers=options.min_workers if self.kind.has_servers else None,
            control=attempt.control,
            shards=self.shards,
            run_dir=attempt.run_dir,
            attempt=attempt.number,
            stages=(options.stages or options.workers) if self.kind.has_stages else None,
        )
        gpus = divide_gpus(self, attempt.tasks)
        return tuple(
            _process(self, config, gpus=gpus, attempt=attempt)
            for config in job_configs(attempt.cluster, options=job_options)
            if config.task in attempt.tasks
        )


def decided_kind(options: LaunchOptions, machine: Machine) -> Kind:
    """Return the job's kind. ``auto`` is resolved from the numbers of tasks and devices.

    Raises:
        UsageError: ``--evaluator`` is set for a job of one process.
    """
    kind = options.kind
    if kind is AUTO:
        devices = options.devices_per_worker or len(machine.gpus)
        alone = "mirrored" if devices > 1 else "single"
        kind = KINDS["multiworker" if options.workers > 1 else alone]
    if options.evaluator and kind.is_one_process:
        fix = "leave --evaluator out, or use --strategy ps, multiworker or pipeline"
        refuse("evaluator", f"a {kind} job has only one process, so none can join it", fix)
    return kind


def start_method(
    options: LaunchOptions, machine: Machine, *, imports_tensorflow: bool
) -> StartMethod:
    """Return the method that starts the tasks.

    ``auto`` means fork if the program imports TensorFlow and there is no GPU driver, else exec.
    """
    if options.start != "auto":
        return "fork" if options.start == "fork" else "exec"
    is_cpu_only = not (machine.gpus or machine.has_gpu_driver)
    return "fork" if is_cpu_only and imports_tensorflow else "exec"


def render(specs: Sequence[ProcessSpec]) -> str:
    """Return the tasks as shell commands, with the variables that the launcher adds.

    The text omits the user's environment, and hides arguments that look like secrets."""
    blocks = []
    for spec in specs:
        variables = [f"{name}={shlex.quote(spec.env[name])} \\" for name in spec.added]
        command = shlex.join(without_secrets(spec.argv))
        blocks.append("\n".join([f"# {spec.task}", *variables, command]))
    return "\n\n".join(blocks)


def _process(
    job: JobDescription,
    config: TaskConfig,
    *,
    gpus: Mapping[Task, str],
    attempt: Attempt,
) -> ProcessSpec:
    options, task, program = job.options, config.task, job.options.program
    forced = {VARIABLE: encode(config), "PYTHONUNBUFFERED": "1"}
    if attempt.restarts:  # in addition to the scheduler's restarts
        before = settings.integer(job.environ, RESTARTS) or 0
        forced[RESTARTS] = f"{before + attempt.restarts}"
    if task in gpus:
        forced["CUDA_VISIBLE_DEVICES"] = gpus[task]
    if options.threads_per_task is not None:
        forced |= _compute_threads(options.threads_per_task)
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONFAULTHANDLER": "1"}
    defaults["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # tensors in pages of 2 MiB
    defaults |= _thread_defaults(job, config, attempt.tasks)
    if not job.machine.has_gpu_driver:
        defaults["CUDA_VISIBLE_DEVICES"] = "-1"  # else each task logs that it found no GPU
    if config.cluster.kind.has_servers:
        defaults["GRPC_FAIL_FAST"] = "use_caller"
    forced |= _without_proxy(job.environ, config.cluster)
    added = forced | {k: v for k, v in defaults.items() if k not in {**job.environ, **forced}}
    is_single = len(attempt.cluster.tasks()) < 2
    return ProcessSpec(
        task=task,
        program=program,
        argv=(job.python, *program.python_args),
        env={**job.environ, **added},
        added=tuple(added),
        title=f"tfdist {task} {program.name}",
        claim="" if options.independent or is_single else str(attempt.logs / "trains-alone"),
    )


def _thread_defaults(
    job: JobDescription, config: TaskConfig, here: Collection[Task]
) -> dict[str, str]:
    """Return the thread variables for the task's share of the CPUs. The user's values override.

    In a ps job an operation may block an inter-op thread until a worker answers. The job hangs if
    it has fewer of these threads than workers.
    """
    cluster = config.cluster
    computing = max(1, sum(task.type in ("worker", "ps", "evaluator") for task in here))
    share = max(1, job.machine.cpus // computing)
    inter_op = max(2, job.options.threads_per_task or share)
    if cluster.kind.has_servers and config.task.type in ("chief", "ps"):
        inter_op = max(inter_op, len(cluster.worker) + _SPARE_THREADS)
    return {**_compute_threads(share), "TF_NUM_INTEROP_THREADS": str(inter_op)}


def _compute_threads(count: int) -> dict[str, str]:
    return {"TF_NUM_INTRAOP_THREADS": str(count), "OMP_NUM_THREADS": str(count)}


def _without_proxy(environ: Mapping[str, str], cluster: ClusterSpec) -> dict[str, str]:
    """Return the variables that exclude connections between the tasks from any proxy.

    gRPC reads no_grpc_proxy before no_proxy. So if no_grpc_proxy is set, it is extended too.
    """
    addresses = (cluster.address(task) for task in cluster.tasks())
    ours = dict.fromkeys((*_LOOPBACK, *(split_address(address)[0] for address in addresses)))
    names = ["no_proxy", "NO_PROXY", *(n for n in ("no_grpc_proxy",) if n in environ)]
    result = {}
    for name in names:
        given = environ.get(name) or environ.get(name.swapcase(), "")
        hosts = [host.strip() for host in given.split(",") if host.strip()]
        hosts += [host for host in ours if host not in hosts]
        result[name] = ",".join(hosts)
    return result


def divide_gpus(job: JobDescription, here: Collection[Task]) -> dict[Task, str]:
    """Return CUDA_VISIBLE_DEVICES for each task of a machine with GPUs.

    Raises:
        UsageError: The machine has too few GPUs.
    """
    gpus, kind = job.machine.gpus, job.kind
    if kind.is_elastic:
        return dict.fromkeys(here, "-1")  # its workers use CPUs
    if not gpus:
        return {}
    workers = [task for task in here if task.type == "worker"]
    most = 1 if kind.has_several_tasks and kind.has_one_device else len(gpus)  # for one task
    each = job.options.devices_per_worker or min(most, len(gpus) // max(1, len(workers)) or 1)
    shared = not kind.is_synchronous and each == 1  # collectives of two tasks cannot share a GPU
    if each * len(workers) > len(gpus) and not shared:
        problem = f"{len(workers)} workers with {each} GPUs each need more than {len(gpus)} GPUs"
        fix = "use fewer, or set CUDA_VISIBLE_DEVICES=-1 to use CPUs"
        name = "workers" if job.options.devices_per_worker is None else "devices_per_worker"
        refuse(name, problem, fix, code="devices")
    visible = dict.fromkeys(here, "-1")
    for number, task in enumerate(workers):
        mine = (gpus[(number * each + k) % len(gpus)] for k in range(each))
        visible[task] = ",".join(mine)
    return visible
