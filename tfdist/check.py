"""``python -m tfdist.check [FILE ...] [-- COMMAND]``: find mistakes in a job before it starts.

Parses TF_CONFIG, the environment, files and a command line with the parsers of a task. Also checks
this host: packages, names, ports, memory, GPUs, proxies and the run directory. With ``--hosts``, an
agent of the launcher checks each host, and the packages of all hosts are compared.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import dataclasses
import importlib.util
import io
import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from tfdist.argument_parser import Parser, reading_file, run_program
from tfdist.cluster import TaskConfig, decode, is_port_free, read_environment
from tfdist.cluster.address import is_loopback, parse_hosts, split_address
from tfdist.cluster.placement import same_host
from tfdist.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, UsageError, named
from tfdist.files import fsync
from tfdist.launch.events import Message
from tfdist.launch.machine import Machine, memory_groups, nvidia_smi, this_machine
from tfdist.launch.multihost import on_ray
from tfdist.launch.multihost.agents import LOOK_EVERY_S, PipeAgent, shell_of
from tfdist.launch.multihost.host_agreement import passed_variables
from tfdist.launch.multihost.hosts import slurm_nodes
from tfdist.launch.multihost.pipe import Pipe
from tfdist.launch.options import LaunchOptions
from tfdist.options import HostFlags, JobOptions, table
from tfdist.versions import COMPARED, PACKAGES, versions

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC reads only these lower-case names
_NO_PROXIES = ("no_grpc_proxy", "no_proxy")
_TASK_BYTES = 1 << 30  # importing TensorFlow uses 640 MB of it
_SHM_BYTES = 256 << 20
_DISK_BYTES = 1 << 30
_REMOTE_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A mistake: the checked subject, the problem, the fix, and the host if several are checked."""

    subject: str
    problem: str
    fix: str
    is_error: bool = True
    host: str = ""

    def __str__(self) -> str:
        severity, host = "error" if self.is_error else "warning", f"{self.host}: " * bool(self.host)
        return f"{severity:<8} {host}{self.subject}: {self.problem}. Fix: {self.fix}."


Findings = Iterator[Finding]


def of_error(error: UsageError, *, subject: str = "") -> Finding:
    where = f"{subject} {error.where}".strip() if error.where != subject else subject
    return Finding(subject=where, problem=error.problem, fix=error.fix)


# Settings: TF_CONFIG, the environment, files and a command line.


def check_environment(environ: Mapping[str, str]) -> Findings:
    """Yield the mistakes in an environment, read with the parser of a task."""
    try:
        config = read_environment(environ)
    except UsageError as error:
        yield of_error(error, subject="environment")
        return
    if config is None:
        return
    yield from _check_cluster(config)
    hosts = [host for host, _ in _addresses(config)]
    if len(hosts) > 1:
        yield from _check_proxies(environ, list(dict.fromkeys(hosts)))


def _addresses(config: TaskConfig) -> list[tuple[str, int]]:
    tasks = config.cluster.training_tasks()
    return [split_address(config.cluster.address(task)) for task in tasks]


def _check_cluster(config: TaskConfig) -> Findings:
    """Yield addresses that are valid individually but cannot belong to one job."""
    hosts = [host for host, _ in _addresses(config)]
    local = [host for host in hosts if is_loopback(host) or host in ("0.0.0.0", "[::]")]
    if local and len(local) < len(hosts):
        problem = f"{local[0]} is a loopback address, so other hosts would connect to themselves"
        yield Finding(subject="TF_CONFIG", problem=problem, fix="write the name of the machine")
    fewest = config.options.min_workers
    if fewest is not None and fewest > len(config.cluster.worker):
        problem = f"min_workers is {fewest}, but the cluster has {len(config.cluster.worker)}"
        yield Finding(subject="TF_CONFIG", problem=f"{problem} workers", fix="lower min_workers")


def _check_proxies(environ: Mapping[str, str], hosts: Sequence[str]) -> Findings:
    proxy = next((name for name in _PROXIES if environ.get(name)), "")
    exceptions = next((environ[name] for name in _NO_PROXIES if environ.get(name)), "")
    entries = [entry.strip().lower() for entry in exceptions.split(",") if entry.strip()]
    caught = [host for host in hosts if not any(host.lower().endswith(e) for e in entries)]
    if proxy and caught:
        problem = f"{proxy} is set, so gRPC connects to {named(caught)} through a proxy"
        fix = f"export no_proxy={','.join(hosts[:64])}, or unset {proxy}"
        yield Finding(subject="proxy", problem=problem, fix=fix)


def check_file(name: str) -> Findings:
    """Yield the mistakes in TF_CONFIG (.json) or a config file (.py)."""
    path = Path(name)
    if path.suffix == ".py":
        yield from check_command(["tfdist", "train", f"--config={name}"], subject=name)
        return
    if path.suffix != ".json":
        fix = "use .json for TF_CONFIG, and .py for a config file"
        yield Finding(subject=name, problem="the kind of this file is unknown", fix=fix)
        return
    with reading_file("command line", repr(name), expected="a text file"):
        text = path.read_text(encoding="utf-8")
    try:
        yield from _check_cluster(decode(text))
    except UsageError as error:
        yield of_error(error, subject=name)


def check_command(words: Sequence[str], *, subject: str = "command") -> Findings:
    """Yield the mistakes in a command of `tfdist.launch` or `tfdist.train` (runs config files)."""
    from tfdist.configs.command_line import parse as parse_train
    from tfdist.launch.options import DEFAULT_MODULE, parse

    program, arguments = _program_of(words)
    try:
        if program == "launch":
            options = parse(arguments)
            if options is None or options.program.target != DEFAULT_MODULE:
                return
            program, arguments = "train", list(options.program.args)
        if program != "train":
            problem = f"{shlex.join(words)} is no command of tfdist.launch or tfdist.train"
            yield Finding(subject=subject, problem=problem, fix="write such a command after --")
            return
        with contextlib.redirect_stdout(io.StringIO()):  # discard the output of the config file
            parse_train(arguments)
    except UsageError as error:
        yield of_error(error, subject=subject)


def _program_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return ``launch``, ``train`` or an empty text, and the arguments of a command."""
    for position, word in enumerate(words):
        name, rest = word.rpartition("/")[2], list(words[position + 1 :])
        if name in ("tfdist.launch", "tfdist.train"):
            return name.partition(".")[2], rest
        if name == "tfdist":
            is_named = rest[:1] in (["launch"], ["train"])
            return (rest[0], rest[1:]) if is_named else ("launch", rest)
    return "", []


# This host.


def check_host(
    environ: Mapping[str, str], *, machine: Machine | None = None, run_dir: str = "."
) -> Findings:
    """Yield the problems of this host for the job that an environment describes."""
    machine = machine or this_machine(environ)
    with contextlib.suppress(UsageError):  # `check_environment` reports it
        config = read_environment(environ)
        if config is not None:
            yield from _check_names(config)
            yield from _check_ports(config)
    found = versions()
    requirements = metadata.requires("tfdist") if "tfdist" in found else ()  # a checkout
    yield from check_packages(found, requirements or ())
    yield from _check_machine(machine)
    if machine.gpus:
        nccl = found.get("nvidia-nccl-cu12") or found.get("nvidia-nccl-cu13")
        nccl = nccl or ctypes.util.find_library("nccl") or ""
        yield from check_gpus(_gpus(), _kernels(), nccl=nccl)
    yield from check_directory(run_dir)


def check_packages(found: Mapping[str, str], requirements: Sequence[str]) -> Findings:
    """Yield missing packages, and packages in versions that tfdist is not tested with."""
    from packaging.requirements import Requirement

    for name in PACKAGES:
        if name not in found:
            yield Finding(subject="packages", problem=f"{name} is missing", fix=f"install {name}")
    for requirement in map(Requirement, requirements):
        version = found.get(requirement.name)
        is_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if version and not is_extra and not requirement.specifier.contains(version, True):
            problem = f"{requirement.name} {version} is not tested with this tfdist"
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(subject="packages", problem=problem, fix=fix, is_error=False)


def _check_names(config: TaskConfig) -> Findings:
    for host in dict.fromkeys(host for host, _ in _addresses(config)):
        try:
            socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        except OSError as error:
            problem = f"{host} does not resolve ({error.strerror or error})"
            fix = f"add {host} to DNS or to /etc/hosts of {socket.gethostname()}"
            yield Finding(subject="names", problem=problem, fix=fix)


def _check_ports(config: TaskConfig) -> Findings:
    own, _ = split_address(config.cluster.address(config.task))
    for host, port in _addresses(config):
        if same_host(host, own) and not is_port_free(f"{host}:{port}"):
            problem = f"port {port} of {host} is taken"
            fix = f"stop the process that listens there (ss -ltnp 'sport = {port}')"
            yield Finding(subject="ports", problem=problem, fix=fix)


def _check_machine(machine: Machine) -> Findings:
    free = available_bytes()
    if free < _TASK_BYTES:
        problem = f"{free >> 20} MiB of memory are free, but a task needs about 1024 MiB"
        fix = "stop other processes, or ask the scheduler for more memory"
        yield Finding(subject="memory", problem=problem, fix=fix, is_error=False)
    state = os.statvfs("/dev/shm") if machine.gpus and os.path.isdir("/dev/shm") else None
    if state is not None and state.f_bavail * state.f_frsize < _SHM_BYTES:
        problem = "less than 256 MiB are free in /dev/shm, which NCCL uses between GPUs"
        fix = "docker run --shm-size=1g, or mount an emptyDir of medium Memory at /dev/shm"
        yield Finding(subject="shared memory", problem=problem, fix=fix, is_error=False)


def check_gpus(gpus: Sequence[tuple[str, str]], kernels: Sequence[str], *, nccl: str) -> Findings:
    """Yield GPUs that the TensorFlow wheel has no kernels for, and a missing NCCL.

    Args:
        gpus: Name and compute capability of each GPU, such as ``("NVIDIA H200", "9.0")``.
        kernels: Targets of the wheel. ``sm_89`` is machine code. ``compute_90`` is machine code,
            and also PTX, which the driver compiles for later GPUs.
        nccl: Version or file of NCCL, empty if it is missing.
    """
    targets = [(int(number) // 10, int(number) % 10) for _, number in map(_split_target, kernels)]
    ptx = [number for kind, number in map(_split_target, kernels) if kind == "compute"]
    for name, capability in dict.fromkeys(gpus):
        major, minor = map(int, capability.split("."))
        if not targets or any(major == a and b <= minor for a, b in targets):
            continue
        can_compile = any(int(number) <= 10 * major + minor for number in ptx)
        problem = f"TensorFlow has no kernels for {name} (sm_{major}{minor}), only {named(kernels)}"
        if can_compile:
            problem += ". The driver compiles them at the first start, for minutes, or fails with "
            problem += "CUDA_ERROR_INVALID_PTX"
        fix = "use a TensorFlow that is built for this GPU, such as NVIDIA's container"
        yield Finding(subject="GPU", problem=problem, fix=fix, is_error=not can_compile)
    if gpus and not nccl:
        problem = "NCCL is missing, which TensorFlow loads for sums between GPUs"
        fix = "pip install 'tfdist[gpu]', or install libnccl2"
        yield Finding(subject="GPU", problem=problem, fix=fix, is_error=False)


def _split_target(target: str) -> tuple[str, str]:
    kind, _, number = target.partition("_")
    return kind, number.rstrip("af")  # sm_120a has instructions of this GPU only


def _gpus() -> list[tuple[str, str]]:
    """Return the name and the compute capability of each GPU that nvidia-smi lists."""
    listed = nvidia_smi("--query-gpu=name,compute_cap", "--format=csv,noheader")
    return re.findall(r"^(.*), (\d+\.\d+)$", listed, re.MULTILINE)


def _kernels() -> list[str]:
    """Return the targets of the TensorFlow wheel, without importing TensorFlow."""
    spec = importlib.util.find_spec("tensorflow")
    for folder in (spec and spec.submodule_search_locations) or ():
        with contextlib.suppress(OSError):
            text = (Path(folder) / "python" / "platform" / "build_info.py").read_text()
            return re.findall(r"\b((?:sm|compute)_\d+[af]?)\b", text)
    return []


def available_bytes() -> int:
    """Return how many bytes new processes can use before the kernel kills a process."""
    groups = [max(0, limit - used) for limit, used in memory_groups()]
    return min([int(psutil.virtual_memory().available), *groups])


def check_directory(name: str) -> Findings:
    """Yield the reasons that prevent saving there: permissions, fsync, disk space."""
    path = Path(name)
    while not os.path.exists(path) and path != path.parent:
        path = path.parent  # the job creates the missing directories
    try:
        with tempfile.TemporaryDirectory(prefix=".tfdist-check-", dir=path) as folder:
            page = Path(folder) / "page"
            page.write_bytes(b"\0")
            fsync(page)
        state = os.statvfs(path)
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        yield Finding(subject="run directory", problem=problem, fix="choose another --run_dir")
        return
    free = state.f_bavail * state.f_frsize
    if free < _DISK_BYTES:
        problem, fix = f"{path}: {free >> 20} MiB are free", "delete old runs"
        yield Finding(subject="run directory", problem=problem, fix=fix, is_error=False)


# Other hosts.


def check_hosts(options: LaunchOptions, environ: Mapping[str, str], *, run_dir: str) -> Findings:
    """Start an agent on each host to check it, then compare the versions of their packages."""
    if options.hosts is not None:
        hosts = [host for host, _ in parse_hosts(options.hosts)]
    elif options.on == "ray":
        name, slots = on_ray.reserve(0, within_s=_REMOTE_S)
        options = dataclasses.replace(options, rsh=shlex.join(on_ray.shell(name)))
        hosts = [f"node-{number}" for number in range(1, len(slots) + 1)]
    else:
        hosts = list(slurm_nodes(environ))
    env = passed_variables(environ, (options.env or "").split(","))
    first = {"module": "tfdist.check", "cwd": os.getcwd(), "env": env, "run_dir": run_dir}
    found: dict[str, Mapping[str, str]] = {}
    for host, answer in _answers(hosts, shell_of(options.where, options.rsh), first):
        if isinstance(answer, Finding):
            yield answer
        else:
            yield from (Finding(**{**one, "host": host}) for one in answer["findings"])
            found[host] = answer["versions"]
    yield from compare(found)


def _answers(
    hosts: Sequence[str], shell: Sequence[str], first: Message
) -> Iterator[tuple[str, Message | Finding]]:
    """Start an agent on each host. Yield the host and its answer, or a finding if it has none."""
    agents: dict[str, PipeAgent] = {}
    quiet: Any = {"show": lambda _: None, "say": lambda _: None, "may_read": lambda: True}
    for host in dict.fromkeys(hosts):
        try:
            agents[host] = PipeAgent(host, shell, first, startup_timeout_s=_REMOTE_S, **quiet)
        except OSError as error:
            problem, fix = f"{shell[0]}: {error.strerror}", "install it here"
            yield host, Finding(subject="host", problem=problem, fix=fix, host=host)
    while agents:
        wait([fd for agent in agents.values() for fd in agent.filenos()], LOOK_EVERY_S)
        for host, agent in list(agents.items()):
            agent.turn()
            answers = agent.take_messages()
            if not answers and not agent.lost:
                continue
            del agents[host]
            problem, fix = agent.close()
            if answers and "findings" in answers[0]:
                yield host, answers[0]
                continue
            if answers:
                problem, _, fix = answers[0]["refused"].partition(". Fix: ")
            fix = fix or "set up a remote shell that needs no password"
            yield host, Finding(subject="host", problem=problem, fix=fix, host=host)


def serve(first: Message, pipe: Pipe) -> int:
    """Check this host in an agent, and send the findings and the versions to the launcher."""
    environ = dict(os.environ)
    findings = [*check_environment(environ), *check_host(environ, run_dir=first["run_dir"])]
    pipe.send({"findings": list(map(dataclasses.asdict, findings)), "versions": versions()})
    return EXIT_OK


def compare(found: Mapping[str, Mapping[str, str]]) -> Findings:
    """Yield the packages that differ in version between hosts."""
    for name in COMPARED:
        by_version: dict[str, list[str]] = {}
        for host, has in found.items():
            version = has.get(name, "none")
            version = version.rpartition(".")[0] if name == "python" else version
            by_version.setdefault(version, []).append(host)
        if len(by_version) > 1:
            groups = [f"{version} on {named(hosts)}" for version, hosts in by_version.items()]
            fix = "install the same versions on all hosts"
            yield Finding(subject="packages", problem=f"{name} {'; '.join(groups)}", fix=fix)


# The program.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return exit code 0 without findings, 1 with warnings, 2 with errors."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program("tfdist.check", lambda: _run(words), is_report=True)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.check",
        description="Find mistakes in a job's settings, files, command line and hosts.",
        epilog="Write a command of tfdist.launch or tfdist.train after -- to check it. "
        "Config files run. Exit code: 0 no findings, 1 warnings, 2 errors.",
    )
    add = parser.add_argument
    files = "TF_CONFIG (.json) or a config file (.py)"
    add("files", nargs="*", metavar="FILE", help=files)
    for one in (*table(HostFlags).values(), table(JobOptions)["run_dir"]):
        add(f"--{one.name}", action="append" if one.repeated else "store", help=one.help)
    return parser


def _run(words: Sequence[str]) -> int:
    environ, findings = dict(os.environ), list[Finding]()
    at = words.index("--") if "--" in words else len(words)
    arguments, command = _parser().parse_args(words[:at]), words[at + 1 :]
    hosts, on, env = arguments.hosts, arguments.on, ",".join(arguments.env or ()) or None
    elsewhere = LaunchOptions(on=on, hosts=hosts, rsh=arguments.rsh, env=env)
    run_dir = arguments.run_dir or "."
    for name in arguments.files:
        findings += check_file(name)
    if command:
        findings += check_command(command)
    if hosts or elsewhere.where != "local":
        findings += check_hosts(elsewhere, environ, run_dir=run_dir)
    elif not arguments.files and not command:
        findings += check_environment(environ)
        findings += check_host(environ, run_dir=run_dir)
    errors = sum(finding.is_error for finding in findings)
    summary = f"{errors} errors, {len(findings) - errors} warnings"
    print(*findings, summary if findings else "no findings", sep="\n", flush=True)
    return EXIT_USAGE if errors else EXIT_FAILED if findings else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
