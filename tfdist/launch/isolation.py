"""Network of a job on one machine: a separate namespace, or a warning about reachable ports.

`isolate` moves the launcher, and all processes that it starts later, into a network namespace.
Only the job's processes can then connect to TensorFlow's servers, which execute any request.
slirp4netns, if installed, forwards outgoing connections to other machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from tfdist.cluster.address import is_loopback
from tfdist.cluster.local_only import kernel_filters
from tfdist.errors import UsageError, named

# Constants of the kernel. `os.unshare` needs Python 3.12.
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x2_0000, 0x1000_0000, 0x4000_0000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x8_0000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_IFREQ = "16sh22x"

_RESOLVERS = Path("/etc/resolv.conf")
_RESOLVER = "10.0.2.3"  # of slirp4netns
_HELPER_TIMEOUT_S = 20.0


def reach(ports: Iterable[int]) -> str:
    """Return a warning about access to TensorFlow's servers at these ports.

    Use it for a job on one machine without ``--isolate``. Return "" if the machine has no network
    interface besides loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        others = [name for _, name in socket.if_nameindex() if name != "lo"]
        if not any(_flags(control, name) & _IFF_UP for name in others):
            return ""
    servers = f"TensorFlow's servers (ports {named(ports)}), which run any request"
    if kernel_filters():
        return f"all users of this machine can reach {servers}. On a shared machine, use --isolate"
    return (
        "this kernel has no socket filters, so every machine of the network can reach "
        f"{servers}. To close the ports, use --isolate"
    )


def isolate(environ: Mapping[str, str]) -> str:
    """Move this process, and all processes that it starts later, into a new network namespace.

    Return a line about the possible outgoing connections. The process must have only one thread,
    because the kernel moves no multi-threaded process into a user namespace.

    Raises:
        UsageError: The kernel does not permit it for this user.
    """
    path = shutil.which("slirp4netns", path=environ.get("PATH"))
    helper = _Helper(path) if path else None
    needs_resolver = helper is not None and _resolver_is_on_loopback()
    try:
        _unshare_network(with_mounts=needs_resolver)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            flags = struct.pack(_IFREQ, b"lo", _flags(control, "lo") | _IFF_UP)
            fcntl.ioctl(control, _SIOCSIFFLAGS, flags)
    except OSError as error:
        raise UsageError(
            "--isolate",
            f"the kernel refused to create a network namespace ({error.strerror})",
            fix="enable user namespaces (sysctl user.max_user_namespaces, user.max_net_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns), or leave --isolate out",
            code="refused-by-kernel",
        ) from None
    failure = helper.connect() if helper else "slirp4netns is not installed"
    if failure:
        return (
            f"--isolate: connections to other machines fail (downloads, MLflow, W&B): {failure}. "
            "Fix: install slirp4netns, or store the data on this machine"
        )
    if needs_resolver:
        with contextlib.suppress(OSError):  # then only host names fail
            _replace_resolver()
    return (
        "--isolate: connections to other machines go through slirp4netns; services on this "
        "machine's loopback are at 10.0.2.2"
    )


class _Helper:
    """slirp4netns, which forwards connections out of the namespace. It starts outside and waits."""

    def __init__(self, path: str) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - until the end of the job
        self._ready, its_ready = os.pipe()
        its_end, self._open = os.pipe()  # slirp4netns exits when all processes have closed it
        fds = (f"--ready-fd={its_ready}", f"--exit-fd={its_end}")
        args = ("--configure", "--mtu=65520", *fds, str(os.getpid()), "tap0")
        self._process = subprocess.Popen(
            ["sh", "-c", 'read -r _ && exec "$0" "$@"', path, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            pass_fds=(its_ready, its_end),
            start_new_session=True,  # Ctrl-C must not stop it: tasks may still send data
        )
        os.close(its_ready)
        os.close(its_end)

    def connect(self) -> str:
        """Connect this process's namespace. Return "" or the reason for a failure."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as waiting:
            waiting.write(b"\n")
        readable, _, _ = select.select([self._ready], [], [], _HELPER_TIMEOUT_S)
        if readable and os.read(self._ready, 1) == b"1":
            return ""
        self._process.kill()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        return f"slirp4netns: {next(filter(str.strip, reversed(lines)), 'it does not respond')}"


def _resolver_is_on_loopback() -> bool:
    """Return whether the machine's name server is on loopback, outside the namespace."""
    try:
        servers = re.findall(r"^\s*nameserver\s+(\S+)", _RESOLVERS.read_text(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return False
    return any(map(is_loopback, servers[:1]))


def _replace_resolver() -> None:
    """Set another name server for this process and all processes that it starts."""
    with tempfile.NamedTemporaryFile("w", prefix="tfdist-resolv-") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(f"nameserver {_RESOLVER}\n")
        file.flush()
        _mount("none", "/", _MS_REC | _MS_SLAVE)  # hide these mounts from the machine
        _mount(file.name, str(_RESOLVERS), _MS_BIND)


def _unshare_network(*, with_mounts: bool) -> None:
    """Create the namespace. If this is not permitted, create it in a new user namespace."""
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNET | _CLONE_NEWNS * with_mounts
    try:
        _call("unshare", flags)
    except PermissionError:
        _call("unshare", _CLONE_NEWUSER | flags)
        # Keep the user and group ids, so that file ownership does not change.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _mount(source: str, target: str, flags: int) -> None:
    _call("mount", source.encode(), target.encode(), b"", ctypes.c_ulong(flags), None)


def _call(name: str, *args: object) -> None:
    """Call a function of the C library, and raise OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, os.strerror(number))


def _flags(control: socket.socket, interface: str) -> int:
    answer = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack(_IFREQ, interface.encode(), 0))
    return int(struct.unpack(_IFREQ, answer)[1])
