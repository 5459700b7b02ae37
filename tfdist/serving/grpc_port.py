"""The port of gRPC while there is no front: whoever connects then waits, and is refused nothing.

gRPC takes no socket of others, so each front opens its own at the port (SO_REUSEPORT). This one is
held beside it, and a program of the kernel's gives connections to the front's wherever there is
one. Those that come in between are relayed to the next front, byte by byte, for their whole life.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct

_SO_ATTACH_REUSEPORT_CBPF = 51  # asm-generic/socket.h; Python's socket has no name for it
_RETURN = 0x06  # BPF_RET | BPF_K
_ANY, _MAPPED = "0.0.0.0", "::ffff:"
_BACKLOG = 2048
_PIECE = 1 << 16


class GrpcPort:
    """Socket at an IPv4 address of the kind that gRPC's are, and the relay of its connections.

    gRPC takes dual-stack sockets where there are some, and the kernel keeps the two kinds apart.
    Raises OSError where the port cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self.front_listens = asyncio.Event()
        self._relayed = set[int]()
        dual = socket.has_dualstack_ipv6()
        self._listener = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if dual:
                self._listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                host = "::" if host == _ANY else f"{_MAPPED}{socket.gethostbyname(host)}"
            self._listener.bind((host, port))
            _prefer_the_next(self._listener)
            self._listener.listen(_BACKLOG)
        except OSError:
            self.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """The IPv4 address and port."""
        host, port = self._listener.getsockname()[:2]
        return (_ANY if host == "::" else host.removeprefix(_MAPPED)), port

    async def run(self) -> None:
        """Relay the connections for which there is no front, until this is cancelled."""
        server = await asyncio.start_server(self._relay, sock=self._listener, backlog=_BACKLOG)
        async with server:
            await server.serve_forever()

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer.get_extra_info("peername")[1] in self._relayed:  # the front has died this moment
            writer.close()
            return
        await self.front_listens.wait()
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.bind((self.address[0], 0))
            own = connection.getsockname()[1]
            self._relayed.add(own)
            try:
                await asyncio.get_running_loop().sock_connect(connection, self.address)
                from_front, to_front = await asyncio.open_connection(sock=connection)
                await asyncio.gather(_copy(reader, to_front), _copy(from_front, writer))
            except OSError:
                writer.close()
            finally:
                self._relayed.discard(own)


def _prefer_the_next(listener: socket.socket) -> None:
    """Give connections to the second socket that listens at a port, to this first one if none does.

    The kernel asks a program for the number of the socket (socket(7), SO_ATTACH_REUSEPORT_CBPF);
    this one says 1, and where that is no number of a socket, the kernel takes the one there is.
    """
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 1))
    program = struct.pack("HL", 1, ctypes.addressof(instruction))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Hand on bytes until one side has ended, then end the other."""
    with contextlib.suppress(OSError):
        while data := await source.read(_PIECE):
            sink.write(data)
            await sink.drain()
    sink.close()
