"""Processes in sessions of their own, which do not outlive the launcher: how they are made.

`isolate` moves the launcher, and all that it starts, into a network namespace with nothing but
loopback: TensorFlow's servers listen on every interface and run what any client sends. Where there
is no other interface, and no process that is not the job's, nobody else reaches them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.cluster import Task
from tfdist.errors import UsageError
from tfdist.launch.events import Ended, Started
from tfdist.launch.guardian import die_with
from tfdist.launch.options import Program

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))

# Of the kernel's interface; `os.unshare` comes with Python 3.12.
_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_IFREQ = "16sh22x"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """One task's process: what it runs, and in which environment."""

    task: Task
    program: Program
    argv: tuple[str, ...]
    """What a person would type to run this task by hand."""
    env: Mapping[str, str]
    added: tuple[str, ...]
    """Names in `env` that the launcher set; the rest is the user's own environment."""
    title: str

    @property
    def words(self) -> tuple[str, ...]:
        """Return the task's name and title, script or module, target, and arguments."""
        kind = "module" if self.program.is_module else "script"
        return (str(self.task), self.title, kind, self.program.target, *self.program.args)


class Starter:
    """Starter of tasks as new Pythons, without a helper process of its own."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        open_files: tuple[int, int],
        keep_fds: Collection[int] = (),
    ) -> None:
        self._clock = clock
        self._open_files = open_files
        self._keep_fds = tuple(keep_fds)
        self._children: dict[Task, subprocess.Popen[bytes]] = {}

    def start(
        self, spec: ProcessSpec, *, env: Mapping[str, str], output_fd: int, notes_fd: int
    ) -> Started | None:
        """Start a task; None if `Started` will come from `collect`. Raises OSError if it cannot."""
        child = start_process(
            bootstrap_command("task", str(notes_fd), *spec.words),
            env=env,
            output_fd=output_fd,
            keep_fds=(notes_fd, *self._keep_fds),
            open_files=self._open_files,
        )
        self._children[spec.task] = child
        return Started(task=spec.task, pid=child.pid, at_s=self._clock())

    def collect(self) -> list[Started | Ended]:
        """Return which tasks have started or ended since the last call."""
        now_s = self._clock()
        over = {t: child for t, child in self._children.items() if child.poll() is not None}
        for task in over:
            del self._children[task]
        return [Ended(task=t, status=child.returncode, at_s=now_s) for t, child in over.items()]

    def withdraw(self, task: Task) -> bool:
        """Withdraw a start that has not been begun; return whether it could."""
        return False

    def give_up(self) -> None:
        """Have starts and ends that nobody tells of come to an end: its helper does not answer."""

    def fileno(self) -> int | None:
        """Return what to watch for news besides SIGCHLD."""
        return None

    @property
    def pid(self) -> int | None:
        """Return the id of its helper, and of its session, which goes on to the next attempt."""
        return None

    def close(self) -> None:
        """End what the starter itself has running."""


def bootstrap_command(module: str, *args: str) -> list[str]:
    """Return the command that runs `main` of a module of the launcher in a new Python."""
    return [sys.executable, _BOOTSTRAP, module, *args]


def start_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    output_fd: int,
    keep_fds: Collection[int],
    open_files: tuple[int, int],
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which the kernel kills when we end.

    `open_files` are the limits it gets, which the launcher may have raised for itself.
    """
    parent = os.getpid()

    def before_exec() -> None:  # between fork and exec; the launcher has one thread
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        die_with(parent)

    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        pass_fds=tuple(keep_fds),
        start_new_session=True,
        preexec_fn=before_exec,
    )


def raise_file_limit(needed: int) -> tuple[int, int]:
    """Let this process open `needed` files if it may; return the limits from before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        most = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return soft, hard


def isolate() -> None:
    """Move this process, and all that it starts from now on, into a network of their own.

    Called while the process has one thread: the kernel takes no other into a user namespace.

    Raises:
        UsageError: the kernel does not let this user do it.
    """
    try:
        _unshare_network()
        _raise_loopback()
    except OSError as error:
        raise UsageError(
            "--isolate",
            received=f"a kernel that refuses it ({error.strerror})",
            expected="leave to make a network namespace",
            fix="allow user namespaces (sysctl user.max_user_namespaces, user.max_net_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns), or leave --isolate out",
            code="refused-by-kernel",
        ) from None


def _unshare_network() -> None:
    """Make the namespace; without the right to, inside a user namespace, where all have it."""
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        # Users stay who they are, so that files are theirs as before.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, os.strerror(number))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack(_IFREQ, b"lo", 0)
        _, flags = struct.unpack(_IFREQ, fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack(_IFREQ, b"lo", flags | _IFF_UP))
