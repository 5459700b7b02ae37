"""Connections between members on different hosts: TLS 1.3 with one certificate of the job.

The launcher makes a key and a certificate for each job, and sends them through the agents. Both
ends of a connection show this certificate and accept no other. So a stranger on the network can
neither read the tensors nor take part.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tfdist.cluster.address import split_address
from tfdist.strategy.rendezvous import listening
from tfdist.strategy.ring import exactly, prepared

_HELLO = struct.Struct("<II")  # number of the view, member
_CONNECT_S = 5.0
_UNREACHABLE_S = 20.0  # a lost member has left the view by then
_MOST_CLIENTS = 64  # connections before their hello. Strangers may connect too
_LOOK_EVERY_MS = 1000
_PAUSE_S = 0.1
_TAKEN = b"+"
"""Answer to the hello. In TLS 1.3, a server may refuse a client after the client's handshake."""
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME: the clocks of two hosts may differ
LESSON = 0
"""Number of the view in a connection for a lesson (earlier results). Real views begin at 1."""
NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Exceptions of a socket that has to wait."""

_T = TypeVar("_T")
_Steps = Generator[int, None, _T]


@dataclass(slots=True)
class _Client:
    """A connection before its first message, and the events to wait for."""

    steps: _Steps[bytes]
    since_s: float
    flags: int = select.POLLIN


class HostLinks:
    """This member's connections to members on other hosts.

    Args:
      member: Number of this member.
      addresses: ``host:port`` of each member. This member listens at its own port.
    """

    def __init__(self, member: int, addresses: Mapping[int, str]) -> None:
        self._member, self._addresses = member, addresses
        self._listener = listening(f"worker-{member}", addresses[member], only_local=False)
        self._listener.setblocking(False)
        self._contexts: list[ssl.SSLContext] = []

    def use(self, pem: str) -> None:
        """Use the job's key and certificate."""
        self._contexts = [
            _context(pem, side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        ]

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def meet(
        self, peers: Collection[int], epoch: int, control: socket.socket, hear: Callable[[], None]
    ) -> dict[int, ssl.SSLSocket]:
        """Return connections to members of a view. A member connects to lower-numbered members.

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
        raw = socket.create_connection(split_address(self._addresses[peer]), _CONNECT_S)
        raw.settimeout(timeout_s)
        with contextlib.ExitStack() as stack:
            end = stack.enter_context(self._contexts[0].wrap_socket(prepared(raw)))
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
        """Return the connections of members, and close all others. A silent client delays none.

        One connection that brings a lesson is enough: all members have the same lesson.
        """
        found: dict[int, ssl.SSLSocket] = {}
        clients = self._clients(control, hear)
        try:
            while len(found) < (1 if epoch == LESSON else len(peers)):
                end, its_epoch, member = next(clients)
                if its_epoch == epoch and member in peers and member not in found:
                    with contextlib.suppress(OSError):  # if it has exited, a view follows
                        end.send(_TAKEN)
                    found[member] = end
                else:
                    end.close()
        except BaseException:
            for end in found.values():
                end.close()
            raise
        finally:
            clients.close()
        return found

    def _clients(
        self, control: socket.socket, hear: Callable[[], None]
    ) -> Generator[tuple[ssl.SSLSocket, int, int], None, None]:
        """Yield each client that has said hello, with its view and member."""
        trying: dict[ssl.SSLSocket, _Client] = {}  # oldest first
        try:
            while True:
                ready = self._ready(control, trying)
                hear()
                for end in self._waiting():
                    trying[end] = _Client(_hello_of(end), time.monotonic())
                for client in list(trying.values())[:-_MOST_CLIENTS]:
                    client.since_s = -math.inf
                for end, client in list(trying.items()):
                    try:
                        if end.fileno() in ready:
                            client.flags = next(client.steps)
                        elif time.monotonic() > client.since_s + _CONNECT_S:
                            raise ConnectionError("the client is silent")
                    except StopIteration as done:
                        del trying[end]
                        yield end, *_HELLO.unpack(done.value)
                    except OSError:  # a stranger, or a member that has exited
                        del trying[end]
                        end.close()
        finally:
            for end in trying:
                end.close()

    def _ready(
        self, control: socket.socket, trying: Mapping[ssl.SSLSocket, _Client]
    ) -> Collection[int]:
        """Wait for the launcher or a client. Return the descriptors that are ready."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for end, client in trying.items():
            poll.register(end, client.flags)
        return [fd for fd, _ in poll.poll(_LOOK_EVERY_MS if trying else None)]

    def _waiting(self) -> Iterator[ssl.SSLSocket]:
        """Accept the connections that wait now, before their handshake."""
        for _ in range(_MOST_CLIENTS):
            try:
                raw = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:  # strangers may hold all descriptors
                time.sleep(_PAUSE_S)
                return
            with contextlib.suppress(OSError):
                raw.setblocking(False)
                yield self._contexts[1].wrap_socket(
                    prepared(raw), server_side=True, do_handshake_on_connect=False
                )


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
