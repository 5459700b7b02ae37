"""Listening sockets that accept only connections from this machine, for any bound address.

TensorFlow's servers listen on every interface, and no option changes the address. A socket filter
makes the kernel drop packets from interfaces other than loopback. The filter compares the packet's
interface with loopback (index 1 in each network namespace). The sockets of accepted connections
inherit the filter. It needs no privileges.

TensorFlow listens and serves in one call, so the filter can only be set after this call.
Until then a guard socket listens at the same port, first in the port's SO_REUSEPORT group. A filter
program of the group sends connections from other machines to the guard, which drops them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator

from tfdist.cluster.address import is_loopback, split_address
from tfdist.cluster.ports import unbound
from tfdist.cluster.tf_config import ClusterSpec, TaskConfig

_LOG = logging.getLogger(__name__)

# Of <asm-generic/socket.h> and <linux/filter.h>.
_SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 26, 51
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_INTERFACE = 0xFFFF_F000 + 8  # SKF_AD_OFF + SKF_AD_IFINDEX
_LOOPBACK = 1
_WHOLE_PACKET, _NOTHING = 0xFFFF_FFFF, 0

_BACKLOG = 4096  # connections that wait for `accept`
_TENSORFLOW_REUSES_PORT = "TF_GRPC_REUSE_PORT"


def is_local(cluster: ClusterSpec) -> bool:
    """Return whether all tasks have loopback addresses, so the job runs on one machine."""
    return are_local(cluster.address(task) for task in cluster.tasks())


def are_local(addresses: Iterable[str]) -> bool:
    """Return whether every ``host:port`` is on loopback."""
    return all(is_loopback(split_address(address)[0]) for address in addresses)


def listen(port: int, *, only_local: bool = False) -> socket.socket:
    """Return a socket that listens at `port` (0 for any port) on every interface.

    With `only_local` other machines cannot connect, if the kernel has socket filters.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(unbound())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if only_local:
            with contextlib.suppress(OSError):
                restrict(listener)
        listener.bind(("::" if listener.family == socket.AF_INET6 else "", port))
        listener.listen(_BACKLOG)
        stack.pop_all()
    return listener


def restrict(listener: socket.socket) -> None:
    """Drop packets from other machines to a socket and to its accepted connections.

    Raises:
        OSError: the kernel has no socket filters.
    """
    _attach(listener, _SO_ATTACH_FILTER, by_interface=(_WHOLE_PACKET, _NOTHING))


def kernel_filters() -> bool:
    """Return whether the kernel applies socket filters. Some sandboxes ignore the filters."""
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            receiver.bind(("127.0.0.1", 0))
            _attach(receiver, _SO_ATTACH_FILTER, by_interface=(_NOTHING, _NOTHING))
            sender.sendto(b"x", receiver.getsockname())
            receiver.setblocking(False)
            receiver.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def restricting_server(config: TaskConfig) -> Iterator[None]:
    """Restrict the server that TensorFlow starts for this task in the block.

    It has no effect in a job of several machines.
    """
    if not is_local(config.cluster):
        yield
        return
    port = split_address(config.cluster.address(config.task))[1]
    with _guard(port):
        yield
        try:
            found = _restrict_own(port)
        except OSError as error:
            _LOG.warning(
                "port %d stays open to other hosts, because tfdist cannot restrict it: %s",
                port,
                error.strerror,
            )
        else:
            if not found:
                _LOG.warning("port %d: found no server to restrict to this host", port)


@contextlib.contextmanager
def _guard(port: int) -> Iterator[None]:
    """Block other machines from a port in the block. A local server can still listen."""
    with contextlib.closing(unbound()) as guard:
        try:
            guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            guard.bind(("::" if guard.family == socket.AF_INET6 else "", port))
            # Set after the bind, so that the bind fails if another process listens there.
            guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            _attach(guard, _SO_ATTACH_FILTER, by_interface=(_NOTHING, _NOTHING))
            _attach(guard, _SO_ATTACH_REUSEPORT_CBPF, by_interface=(1, 0))
            guard.listen()
        except OSError as error:  # TensorFlow will report that the port is in use
            _LOG.debug("no guard at port %d: %s", port, error)
            yield
            return
        before = os.environ.get(_TENSORFLOW_REUSES_PORT)
        os.environ[_TENSORFLOW_REUSES_PORT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_TENSORFLOW_REUSES_PORT]
            else:
                os.environ[_TENSORFLOW_REUSES_PORT] = before


def _restrict_own(port: int) -> int:
    """Restrict the sockets of this process that listen at a port. Return their number."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_listening and found.family != socket.AF_UNIX and found.getsockname()[1] == port:
                restrict(found)
                count += 1
    return count


def _attach(target: socket.socket, option: int, *, by_interface: tuple[int, int]) -> None:
    """Attach a program that returns the first number for a loopback packet, else the second."""
    on_loopback, on_others = by_interface
    instructions = (
        (_LOAD, 0, 0, _INTERFACE),
        (_JUMP_IF_EQUAL, 0, 1, _LOOPBACK),
        (_RETURN, 0, 0, on_loopback),
        (_RETURN, 0, 0, on_others),
    )
    code = b"".join(struct.pack("HBBI", *one) for one in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HL", len(instructions), ctypes.addressof(buffer))
    target.setsockopt(socket.SOL_SOCKET, option, program)
