"""``python -m tfdist.check [FILE ...] [-- COMMAND]``: find mistakes in a job before it starts.

Runs the parsers that a task runs on TF_CONFIG, the environment, files and a command line, and looks
at this host: packages, names, ports, memory, GPUs, proxies and the run directory. With ``--hosts``
it runs itself on each host through ssh and compares their packages.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import platform
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from tfdist.argument_parser import Parser, reading_file, run_program
from tfdist.cluster import TaskConfig, decode, is_port_free, read_environment, settings
from tfdist.cluster.address import parse_hosts, split_address
from tfdist.cluster.placement import same_host
from tfdist.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, UsageError, mutually_exclusive, named
from tfdist.files import fsync, replacing
from tfdist.launch.machine import Machine, memory_groups, this_machine

PACKAGES = ("tensorflow", "keras", "numpy", "tfdist")
"""Packages that every host needs, in the same version."""

_COMPARED = (*PACKAGES, "python", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia driver")
_DRIVER = Path("/proc/driver/nvidia/version")
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC reads these, in lower case only
_NO_PROXIES = ("no_grpc_proxy", "no_proxy")
_TASK_BYTES = 1 << 30  # the import of TensorFlow takes 640 MB of it
_SHM_BYTES = 256 << 20
_DISK_BYTES = 1 << 30
_RENAMES = 50
_OPEN_FILES = 1024
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


def of_error(error: UsageError, *, subject: str = "") -> Finding:
    """Return the finding for an error of a parser."""
    where = f"{subject} {error.where}".strip() if error.where != subject else subject
    problem = f"received {error.received}; expected {error.expected}"
    return Finding(subject=where, problem=problem, fix=error.fix)


# Settings: TF_CONFIG, the environment, files and a command line.


def check_environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the mistakes of an environment, as a task in it would read it."""
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
    if legacy := settings.legacy_keras(environ):
        problem = f"{settings.LEGACY_KERAS}={legacy} makes tf.keras Keras 2, which tfdist refuses"
        fix = f"unset {settings.LEGACY_KERAS}, or use only `import keras`"
        yield Finding(subject="environment", problem=problem, fix=fix, is_error=False)


def _addresses(config: TaskConfig) -> list[tuple[str, int]]:
    tasks = config.cluster.training_tasks()
    return [split_address(config.cluster.address(task)) for task in tasks]


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "0.0.0.0", "::", "::1") or host.startswith("127.")


def _check_cluster(config: TaskConfig) -> Iterator[Finding]:
    """Yield addresses that are valid one by one, but cannot be those of a job."""
    hosts = [host for host, _ in _addresses(config)]
    local = [host for host in hosts if _is_loopback(host)]
    if local and len(local) < len(hosts):
        problem = f"{local[0]} stands among other hosts, which would connect to themselves"
        yield Finding(subject="TF_CONFIG", problem=problem, fix="write the name of the machine")
    fewest = config.options.min_workers
    if fewest is not None and fewest > len(config.cluster.worker):
        problem = f"min_workers is {fewest}, but the cluster has {len(config.cluster.worker)}"
        yield Finding(subject="TF_CONFIG", problem=f"{problem} workers", fix="lower min_workers")


def _check_proxies(environ: Mapping[str, str], hosts: Sequence[str]) -> Iterator[Finding]:
    proxy = next((name for name in _PROXIES if environ.get(name)), "")
    exceptions = next((environ[name] for name in _NO_PROXIES if environ.get(name)), "")
    entries = [entry.strip().lower() for entry in exceptions.split(",") if entry.strip()]
    caught = [host for host in hosts if not any(host.lower().endswith(e) for e in entries)]
    if proxy and caught:
        problem = f"{proxy} is set, so gRPC connects to {named(caught)} through a proxy"
        fix = f"export no_proxy={','.join(hosts[:64])}, or unset {proxy}"
        yield Finding(subject="proxy", problem=problem, fix=fix)


def check_file(name: str) -> Iterator[Finding]:
    """Yield the mistakes of TF_CONFIG (.json), a config file (.py) or an environment (.env)."""
    path = Path(name)
    if path.suffix == ".py":
        yield from check_command(["tfdist", "train", f"--config={name}"], subject=name)
        return
    if path.suffix not in (".json", ".env"):
        fix = "name TF_CONFIG as .json, a config file as .py, the output of env as .env"
        yield Finding(subject=name, problem="the kind of this file is unknown", fix=fix)
        return
    with reading_file("command line", repr(name), expected="a text file"):
        text = path.read_text(encoding="utf-8")
    if path.suffix == ".env":
        pairs = (line.partition("=") for line in text.splitlines())
        found = check_environment({key: value for key, equals, value in pairs if equals})
        yield from (dataclasses.replace(one, subject=f"{name} {one.subject}") for one in found)
        return
    try:
        yield from _check_cluster(decode(text))
    except UsageError as error:
        yield of_error(error, subject=name)


def check_command(words: Sequence[str], *, subject: str = "command") -> Iterator[Finding]:
    """Yield the mistakes of a command of `tfdist.launch` or `tfdist.train`; config files run."""
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
            fix = "write a command of tfdist.launch or tfdist.train behind --"
            yield Finding(subject=subject, problem=f"{shlex.join(words)} is neither", fix=fix)
            return
        with contextlib.redirect_stdout(io.StringIO()):  # the output of the config file
            parse_train(arguments)
    except UsageError as error:
        yield of_error(error, subject=subject)


def _program_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return launch or train, or an empty text, and the arguments of a command."""
    for position, word in enumerate(words):
        name, rest = word.rpartition("/")[2], list(words[position + 1 :])
        if name in ("tfdist.launch", "tfdist.train"):
            return name.partition(".")[2], rest
        if name == "tfdist":
            is_named = rest[:1] in (["launch"], ["train"])
            return (rest[0], rest[1:]) if is_named else ("launch", rest)
    return "", []


# This host.


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter, of Python and of the GPU driver."""
    found = {"python": platform.python_version()}
    for name in _COMPARED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(OSError, IndexError):
        found["nvidia driver"] = _DRIVER.read_text().split("Module")[1].split()[0]
    return found


def check_host(
    environ: Mapping[str, str], *, machine: Machine | None = None, run_dir: str = "."
) -> Iterator[Finding]:
    """Yield the mistakes of this host for the job of an environment."""
    machine = machine or this_machine(environ)
    with contextlib.suppress(UsageError):  # `check_environment` reports it
        config = read_environment(environ)
        if config is not None:
            yield from _check_names(config)
            yield from _check_ports(config)
    yield from check_packages(versions(), metadata.requires("tfdist") or ())
    yield from _check_machine(machine)
    yield from check_directory(run_dir)


def check_packages(found: Mapping[str, str], requirements: Sequence[str]) -> Iterator[Finding]:
    """Yield packages that are missing, or that tfdist was not tested with."""
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


def _check_names(config: TaskConfig) -> Iterator[Finding]:
    for host in dict.fromkeys(host for host, _ in _addresses(config)):
        try:
            socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        except OSError as error:
            problem = f"{host} does not resolve ({error.strerror or error})"
            fix = f"enter {host} in DNS or in /etc/hosts of {socket.gethostname()}"
            yield Finding(subject="names", problem=problem, fix=fix)


def _check_ports(config: TaskConfig) -> Iterator[Finding]:
    """Yield the ports of this host's tasks that another process holds."""
    own, _ = split_address(config.cluster.address(config.task))
    for host, port in _addresses(config):
        if same_host(host, own) and not is_port_free(f"{host}:{port}"):
            problem = f"port {port} of {host} is taken"
            fix = f"stop the process that listens there (ss -ltnp 'sport = {port}')"
            yield Finding(subject="ports", problem=problem, fix=fix)


def _check_machine(machine: Machine) -> Iterator[Finding]:
    groups = [limit - used for limit, used in memory_groups()]
    free = min([*groups, available_bytes()])
    if free < _TASK_BYTES:
        problem = f"{free >> 20} MiB of memory are free; a task needs about 1024 MiB"
        fix = "stop other processes, or ask the scheduler for more memory"
        yield Finding(subject="memory", problem=problem, fix=fix, is_error=False)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _OPEN_FILES:
        problem, fix = f"at most {limit} files may be open", f"ulimit -n {_OPEN_FILES}"
        yield Finding(subject="open files", problem=problem, fix=fix, is_error=False)
    state = os.statvfs("/dev/shm") if machine.gpus and os.path.isdir("/dev/shm") else None
    if state is not None and state.f_bavail * state.f_frsize < _SHM_BYTES:
        problem = "less than 256 MiB are free in /dev/shm, which NCCL uses between GPUs"
        fix = "docker run --shm-size=1g, or mount an emptyDir of medium Memory at /dev/shm"
        yield Finding(subject="shared memory", problem=problem, fix=fix, is_error=False)


def available_bytes() -> int:
    """Return the memory that this host has left for a new process."""
    return int(psutil.virtual_memory().available)


def check_directory(name: str) -> Iterator[Finding]:
    """Yield what keeps checkpoints from being saved there: no right, no fsync, a torn rename."""
    path = Path(name)
    while not path.exists() and path != path.parent:
        path = path.parent  # the job makes the rest
    try:
        with tempfile.TemporaryDirectory(prefix=".tfdist-check-", dir=path) as folder:
            page = Path(folder) / "page"
            page.write_bytes(b"\0" * 65_536)
            fsync(page)
            torn = _torn_reads(page)
        state = os.statvfs(path)
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        yield Finding(subject="run directory", problem=problem, fix="choose another --run_dir")
        return
    if torn:
        problem = f"{path}: a rename is not atomic: {torn} reads found neither file"
        fix = "use a file system with atomic renames, and not an object store"
        yield Finding(subject="run directory", problem=problem, fix=fix)
    free = state.f_bavail * state.f_frsize
    if free < _DISK_BYTES:
        problem, fix = f"{path}: {free >> 20} MiB are free", "delete old runs"
        yield Finding(subject="run directory", problem=problem, fix=fix, is_error=False)


def _torn_reads(page: Path) -> int:
    """Return how many reads of a page found neither the old nor the new one while it changed."""
    is_over, torn = threading.Event(), 0

    def read() -> None:
        nonlocal torn
        while not is_over.is_set():
            try:
                text = page.read_bytes()
                torn += text.count(text[:1]) != 65_536
            except OSError:
                torn += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(_RENAMES):
            with replacing(page, durable=False) as unfinished:
                unfinished.write_bytes(bytes([number % 256]) * 65_536)
    finally:
        is_over.set()
        reader.join()
    return torn


# Other hosts.


def check_hosts(hosts: Sequence[str], *, rsh: Sequence[str], run_dir: str) -> Iterator[Finding]:
    """Run the check of each host there, and compare the versions of their packages."""
    command = [sys.executable, "-m", "tfdist.check", "--json", "--run_dir", run_dir]

    def ask(host: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [*rsh, host, shlex.join(["cd", os.getcwd()]) + " && " + shlex.join(command)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_REMOTE_S,
            )
            answer: dict[str, Any] = json.loads(done.stdout)
            return answer
        except subprocess.TimeoutExpired:
            return {"failure": f"no answer within {_REMOTE_S:.0f} s"}
        except OSError as error:
            return {"failure": f"{rsh[0]}: {error.strerror}"}
        except ValueError:
            words = (done.stderr or done.stdout).strip().splitlines()
            return {"failure": words[-1] if words else f"exit code {done.returncode}"}

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        answers = dict(zip(hosts, pool.map(ask, hosts), strict=True))
    for host, answer in answers.items():
        if failure := answer.get("failure"):
            fix = f"run `{shlex.join([*rsh, host])} true` until it needs no password"
            yield Finding(subject="host", problem=failure, fix=fix, host=host)
        for one in answer.get("findings", ()):
            yield Finding(**{**one, "host": host})
    yield from compare({h: a["versions"] for h, a in answers.items() if "versions" in a})


def compare(found: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield packages whose versions differ between hosts."""
    for name in _COMPARED:
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
    """Run the program; return its exit code: 0 without findings, 1 with warnings, 2 with errors."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program("tfdist.check", lambda: _run(parse(words)), is_report=True)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; `command` has what follows ``--``."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    arguments: argparse.Namespace = _parser().parse_args(words[:at])
    arguments.command = words[at + 1 :]
    mutually_exclusive({"--hosts": arguments.hosts, "--": " ".join(arguments.command)})
    return arguments


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.check",
        description="Find mistakes in a job's settings, files, command line and hosts.",
        epilog="Write a command of tfdist.launch or tfdist.train behind -- to check it. "
        "Config files run. Exit code: 0 no findings, 1 warnings, 2 errors.",
    )
    add = parser.add_argument
    files = "TF_CONFIG (.json), a config file (.py), or the output of env (.env)"
    add("files", nargs="*", metavar="FILE", help=files)
    add("--hosts", metavar="a,b,...", help="check these hosts, through ssh")
    add("--rsh", default="ssh -o BatchMode=yes", help="remote shell of --hosts")
    add("--run_dir", default=".", metavar="D", help="where the job writes (.)")
    add("--json", action="store_true", help="print findings and versions as JSON")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    environ = dict(os.environ)
    findings: list[Finding] = []
    if arguments.hosts:
        hosts = [host for host, _ in parse_hosts(arguments.hosts)]
        rsh = shlex.split(arguments.rsh)
        findings += check_hosts(hosts, rsh=rsh, run_dir=arguments.run_dir)
    elif arguments.files or arguments.command:
        for name in arguments.files:
            findings += check_file(name)
        if arguments.command:
            findings += check_command(arguments.command)
    else:
        findings += check_environment(environ)
        findings += check_host(environ, run_dir=arguments.run_dir)
    if arguments.json:
        parts = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"findings": parts, "versions": versions()}, indent=1), flush=True)
    else:
        errors = sum(finding.is_error for finding in findings)
        summary = f"{errors} errors, {len(findings) - errors} warnings"
        print(*findings, summary if findings else "no findings", sep="\n", flush=True)
    return _code(findings)


def _code(findings: Sequence[Finding]) -> int:
    if any(finding.is_error for finding in findings):
        return EXIT_USAGE
    return EXIT_FAILED if findings else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
