"""What a user asks the launcher for; checked when created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfdist.cluster import STRATEGIES
from tfdist.cluster.ports import parse_ports
from tfdist.errors import UsageError, near

StartMethod = Literal["exec", "fork"]

STARTS = ("auto", "exec", "fork")
OF_OTHERS = {
    **dict.fromkeys(("n", "np", "nproc", "nproc_per_node", "num_proc", "num_processes"), "workers"),
    **dict.fromkeys(("num_workers", "num_processes_per_node"), "workers"),
    **dict.fromkeys(
        ("nnodes", "num_machines", "H", "host", "master_addr", "rdzv_endpoint"), "hosts"
    ),
    **dict.fromkeys(("machine_rank", "rank"), "node_rank"),
    **dict.fromkeys(("master_port", "rdzv_port", "main_process_port"), "rendezvous_port"),
}
"""How other launchers call what ours has a flag for."""
DEFAULT_MODULE = "tfdist.train"

_MAX_TASKS = 10_000
_MAX_RESTARTS = 1_000_000
_LEAST_HOST_TIMEOUT_S = 2.0
_LEAST_HANG_TIMEOUT_S = 2.0
_MAX_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What every task runs: a script by its path or a module by its name, and its flags."""

    target: str = DEFAULT_MODULE
    is_module: bool = True
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Returns the program as a person calls it: ``train.py`` or ``package.module``."""
        return self.target if self.is_module else self.target.rpartition("/")[2]

    @property
    def python_args(self) -> tuple[str, ...]:
        """Returns what to write after ``python`` to run it by hand."""
        return ("-m", self.target, *self.args) if self.is_module else (self.target, *self.args)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """The flags of the launcher.

    Raises:
        UsageError: a value out of its range, or values that do not go together.
    """

    strategy: str = "auto"
    workers: int = 1
    ps: int | None = None
    min_workers: int | None = None
    evaluator: bool = False
    devices_per_worker: int | None = None
    threads_per_task: int | None = None
    startup_timeout_s: float = 60.0
    grace_s: float = 10.0
    max_restarts: int = 0
    restart_window_s: float = 3600.0
    hang_timeout_s: float = 300.0
    hosts: str | None = None
    node_rank: int | None = None
    rendezvous_port: int | None = None
    rendezvous_token_file: str | None = None
    host_timeout_s: float = 5.0
    ports: str | None = None
    run_dir: str | None = None
    split_bytes: int | None = None
    profile_ps: bool = False
    isolate: bool = False
    dry_run: bool = False
    start: str = "auto"
    fork_server: int | None = None
    """Descriptor of a socket to a fork server that is there already."""
    program: Program = Program()

    def __post_init__(self) -> None:
        _check_name("strategy", self.strategy, STRATEGIES)
        _check_name("start", self.start, STARTS)
        for name in ("workers", "ps", "min_workers", "devices_per_worker", "threads_per_task"):
            _check_count(name, getattr(self, name))
        if self.split_bytes is not None and self.split_bytes < 1:
            expected, fix = "a number of bytes from 1", "use --split_bytes 4000000, for example"
            _refuse("split_bytes", str(self.split_bytes), expected, fix)
        _check_seconds("startup_timeout_s", self.startup_timeout_s, above_zero=True)
        _check_seconds("grace_s", self.grace_s, above_zero=False)
        _check_seconds("restart_window_s", self.restart_window_s, above_zero=True)
        _check_seconds("hang_timeout_s", self.hang_timeout_s, above_zero=False)
        if 0 < self.hang_timeout_s < _LEAST_HANG_TIMEOUT_S:
            expected = f"0, or {_LEAST_HANG_TIMEOUT_S:g} or more: tasks speak once a second"
            _refuse("hang_timeout_s", f"{self.hang_timeout_s:g}", expected, "use 300, the default")
        _check_seconds("host_timeout_s", self.host_timeout_s, above_zero=True)
        if self.host_timeout_s < _LEAST_HOST_TIMEOUT_S:
            expected = f"{_LEAST_HOST_TIMEOUT_S:g} or more: hosts show every second that they live"
            _refuse("host_timeout_s", f"{self.host_timeout_s:g}", expected, "use 5, the default")
        if not 0 <= self.max_restarts <= _MAX_RESTARTS:
            expected = f"an integer from 0 to {_MAX_RESTARTS}"
            _refuse("max_restarts", str(self.max_restarts), expected, "use --max_restarts 3")
        if self.run_dir is not None and not self.run_dir.strip():
            _refuse("run_dir", "''", "the path of a directory", "give one, or leave --run_dir out")
        if self.ports is not None:
            parse_ports(self.ports, where="--ports")
        _check_together(self)
        _check_hosts(self)

    @property
    def port_range(self) -> range | None:
        """Returns the ports that the job may have, None for any."""
        return None if self.ports is None else parse_ports(self.ports, where="--ports")

    @property
    def num_ps(self) -> int:
        """Returns how many ps a ps job has: one unless more were asked for."""
        return self.ps or 1


def _check_together(options: LaunchOptions) -> None:
    strategy, workers, ps = options.strategy, options.workers, options.ps
    if ps is not None and strategy not in ("auto", "ps"):
        fix = "leave --ps out, or use --strategy ps"
        _refuse("ps", f"{ps} with --strategy {strategy}", "no --ps", fix)
    for flag in ("split_bytes", "profile_ps"):
        value = getattr(options, flag)
        if value and strategy != "ps" and ps is None:
            fix = f"leave --{flag} out, or use --strategy ps"
            received = f"{value} in a job without ps"
            _refuse(flag, received, f"no --{flag}", fix, code="LCH001")
    fewest = options.min_workers
    if fewest is not None and strategy != "ps" and ps is None and options.hosts is None:
        fix = "leave --min_workers out, or use --strategy ps or --hosts"
        _refuse("min_workers", f"{fewest} in a job without ps", "no --min_workers", fix)
    if fewest is not None and fewest > workers and options.hosts is None:
        received = f"{fewest} of --workers {workers}"
        _refuse("min_workers", received, f"at most {workers}", f"use --min_workers {workers}")
    if options.fork_server is not None and (options.isolate or options.start == "exec"):
        received = f"a fork server with {'--isolate' if options.isolate else '--start exec'}"
        _refuse("fork_server", received, "one of them", "leave --fork_server out")
    if workers > 1 and strategy in ("single", "mirrored"):
        fix = "use --strategy multiworker, or leave --workers out"
        _refuse("workers", f"{workers} with --strategy {strategy}", "one process, 1", fix)
    devices = options.devices_per_worker
    if strategy == "single" and devices is not None and devices > 1:
        received = f"{devices} with --strategy single"
        _refuse("devices_per_worker", received, "1", "use --strategy mirrored")


def _check_hosts(options: LaunchOptions) -> None:
    if options.node_rank is not None and options.hosts is None:
        fix = "give --hosts too, or leave --node_rank out"
        _refuse("node_rank", f"{options.node_rank} without --hosts", "a list of hosts", fix)
    port = options.rendezvous_port
    if port is not None and not 1 <= port <= 65_535:
        expected, fix = "a port from 1 to 65535", "use --rendezvous_port 2222, for example"
        _refuse("rendezvous_port", str(port), expected, fix)
    if options.hosts is not None and options.strategy in ("single", "mirrored"):
        received = f"a list of hosts with --strategy {options.strategy}"
        fix = "use --strategy multiworker or ps, or leave --hosts out"
        _refuse("hosts", received, "a job of several tasks", fix)


def _check_name(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = "one of " + ", ".join(choices)
        _refuse(flag, repr(value), expected, f"use one of these{near(value.lower(), choices)}")


def _check_count(flag: str, value: int | None) -> None:
    if value is None or 1 <= value <= _MAX_TASKS:
        return
    expected = f"an integer from 1 to {_MAX_TASKS}"
    fix = f"use --{flag} 1 or more" if value < 1 else f"use --{flag} {_MAX_TASKS} or fewer"
    if flag == "ps" and value < 1:
        fix = "use --ps 1 or more, or --strategy multiworker, which has no ps"
    _refuse(flag, str(value), expected, fix)


def _check_seconds(flag: str, value: float, *, above_zero: bool) -> None:
    if (value > 0 or (value == 0 and not above_zero)) and value <= _MAX_SECONDS:
        return
    expected = "a positive number of seconds" + (" or 0" * (not above_zero))
    _refuse(flag, f"{value:g}", expected, f"use --{flag} 60, for example")


def _refuse(flag: str, received: str, expected: str, fix: str, *, code: str = "") -> None:
    raise UsageError(f"--{flag}", received=received, expected=expected, fix=fix, code=code)
