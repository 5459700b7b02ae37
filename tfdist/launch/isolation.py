"""Network isolation: a namespace in which there is nothing but loopback.

TensorFlow's servers listen on every interface and run what any client sends. Where there is no
other interface, and no process that is not the job's, nobody else reaches them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

from tfdist.errors import UsageError

# Of the kernel's interface; `os.unshare` comes with Python 3.12.
_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_IFREQ = "16sh22x"


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
        asked = struct.pack(_IFREQ, b"lo", 0)
        _, flags = struct.unpack(_IFREQ, fcntl.ioctl(control, _SIOCGIFFLAGS, asked))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack(_IFREQ, b"lo", flags | _IFF_UP))
