"""Connections between members on different hosts: TLS 1.3 with one certificate of the job.

The launcher makes a key and a certificate for each job, and sends them through the agents. Both
ends of a connection show this certificate and accept no other. So a stranger on the network can
neither read the tensors nor take part.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Collection, Generator, Mapping
from typing import TypeVar

from tfdist.cluster.address import split_address
from tfdist.cluster.local_only import listen
from tfdist.strategy.ring import exactly

_HELLO = struct.Struct("<II")  # number of the view, member
_CONNECT_S = 5.0
_UNREACHABLE_S = 20.0  # a lost member has left the view by then
_TAKEN = b"+"
"""Answer to the hello. In TLS 1.3, a client ends its handshake before the server refuses it."""
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME: the clocks of two hosts may differ
LESSON = 0
"""In place of the view in a connection that brings earlier results. The first view is 1."""
NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Exceptions of a socket that has to wait."""

_T = TypeVar("_T")
_Steps = Generator[int, None, _T]


class HostLinks:
    """This member's connections to members on other hosts.

    Args:
      member: Number of this member.
      addresses: ``host:port`` of each member. This member listens at its own port.
    """

    def __init__(self, member: int, addresses: Mapping[int, str]) -> None:
        self._member, self._addresses = member, addresses
        self._listener = listen(split_address(addresses[member])[1])
        self._listener.setblocking(False)
        self._contexts: list[ssl.SSLContext] = []

    def use(self, pem: str) -> None:
        """Use the job's key and certificate."""
        self._contexts = [
            _context(pem, side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        ]

    def close(self) -> None:
        """Stop to listen."""
        self._listener.close()

    def meet(
        self, peers: Collection[int], epoch: int, control: socket.socket, hear: Callable[[], None]
    ) -> dict[int, ssl.SSLSocket]:
        """Return connections to members of a view. Each one connects to those with lower numbers.

        `hear` reads the messages at `control`. It raises an exception if the view has ended.

        Raises:
          ConnectionError: A member of the view cannot be reached.
        """
        with contextlib.ExitStack() as stack:
            lower = {
                peer: stack.enter_context(self._reached(peer, epoch, control, hear))
                for peer in sorted(peers)
                if peer < self._member
            }
            higher = set(peers).difference(lower)
            found = lower | self.accept(higher, epoch, control, hear)
            stack.pop_all()
        return found

    def _reached(
        self, peer: int, epoch: int, control: socket.socket, hear: Callable[[], None]
    ) -> ssl.SSLSocket:
        until_s = time.monotonic() + _UNREACHABLE_S
        while True:
            hear()
            try:
                return self.connect(peer, epoch, timeout_s=_CONNECT_S)
            except OSError as error:
                if time.monotonic() > until_s:
                    address = self._addresses[peer]
                    lost = f"no connection to worker-{peer} at {address}: {error}"
                    raise ConnectionError(lost) from error
            select.select([control], [], [], 0.1)

    def connect(self, peer: int, epoch: int, *, timeout_s: float | None) -> ssl.SSLSocket:
        """Connect to a member that accepts this connection, or raise OSError."""
        raw = socket.create_connection(split_address(self._addresses[peer]), timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.ExitStack() as stack:
            end = stack.enter_context(self._contexts[0].wrap_socket(raw))
            end.sendall(_HELLO.pack(epoch, self._member))
            exactly(end, len(_TAKEN))
            stack.pop_all()
        return end

    def accept(
        self,
        peers: Collection[int],
        epoch: int,
        control: socket.socket,
        hear: Callable[[], None],
    ) -> dict[int, ssl.SSLSocket]:
        """Return the connections of members, and close all others. A silent one delays no other."""
        found: dict[int, ssl.SSLSocket] = {}
        trying: dict[ssl.SSLSocket, tuple[_Steps[bytes], int]] = {}
        try:
            while len(found) < len(peers):
                poll = select.poll()
                for one in (control, self._listener):
                    poll.register(one, select.POLLIN)
                for end, (_, flags) in trying.items():
                    poll.register(end, flags)
                poll.poll()
                hear()
                with contextlib.suppress(OSError):
                    raw, _ = self._listener.accept()
                    raw.setblocking(False)
                    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    end = self._contexts[1].wrap_socket(
                        raw, server_side=True, do_handshake_on_connect=False
                    )
                    trying[end] = _hello_of(end), select.POLLIN
                for end, (steps, _) in list(trying.items()):
                    try:
                        trying[end] = steps, next(steps)
                    except StopIteration as done:
                        its_epoch, member = _HELLO.unpack(done.value)
                        del trying[end]
                        if its_epoch == epoch and member in peers and member not in found:
                            with contextlib.suppress(OSError):  # its exit is an event of its own
                                end.send(_TAKEN)
                            found[member] = end
                        else:
                            end.close()
                    except OSError:  # a stranger, or a member that has exited
                        del trying[end]
                        end.close()
        except BaseException:
            for end in found.values():
                end.close()
            raise
        finally:
            for end in trying:
                end.close()
        return found


def _context(pem: str, side: int) -> ssl.SSLContext:
    made = ssl.SSLContext(side)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    if side == ssl.PROTOCOL_TLS_SERVER:
        made.num_tickets = 0  # a client that closes with an unread ticket resets the connection
    made.verify_flags |= _NO_CHECK_TIME
    made.check_hostname, made.verify_mode = False, ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=pem[pem.index("-----BEGIN CERTIFICATE") :])
    fd = os.memfd_create("tfdist")  # OpenSSL reads keys only from files
    try:
        os.write(fd, pem.encode())
        made.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return made


def _hello_of(end: ssl.SSLSocket) -> _Steps[bytes]:
    """Read a client's first message. Yield the events to wait for."""
    yield from _once_ready(end.do_handshake)
    hello = yield from _once_ready(lambda: end.recv(_HELLO.size))
    if len(hello) < _HELLO.size:  # a record of TLS arrives whole
        raise ConnectionError("the client has disconnected")
    return hello


def _once_ready(call: Callable[[], _T]) -> _Steps[_T]:
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            yield select.POLLIN
        except ssl.SSLWantWriteError:
            yield select.POLLOUT
