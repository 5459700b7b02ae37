"""The port of gRPC while there is no front: whoever comes then waits, and is refused nothing.

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
_PIECE = 1 << 16


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at an IPv4 address of the kind that gRPC's are; raise OSError.

    gRPC takes dual-stack sockets where there are some, and the kernel keeps the two kinds apart.
    """
    dual = socket.has_dualstack_ipv6()
    made = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        if dual:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            host = "::" if host == _ANY else f"{_MAPPED}{socket.gethostbyname(host)}"
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def address_of(bound: socket.socket) -> tuple[str, int]:
    """Return the IPv4 address and port of a socket."""
    host, port = bound.getsockname()[:2]
    return (_ANY if host == "::" else host.removeprefix(_MAPPED)), port


def prefer_the_next(listener: socket.socket) -> None:
    """Give connections to the second socket that listens at a port, to this first one if none does.

    The kernel asks a program for the number of the socket (socket(7), SO_ATTACH_REUSEPORT_CBPF);
    this one says 1, and where that is no number of a socket, the kernel takes the one there is.
    """
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 1))
    program = struct.pack("HL", 1, ctypes.addressof(instruction))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)


class Door:
    """Takes the connections for which there is no front, and relays them to the next one."""

    def __init__(self, listener: socket.socket) -> None:
        self.is_front_there = asyncio.Event()
        self._listener = listener
        self._own = set[int]()

    async def run(self) -> None:
        """Take connections until this is cancelled."""
        server = await asyncio.start_server(self._take, sock=self._listener, backlog=2048)
        async with server:
            await server.serve_forever()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer.get_extra_info("peername")[1] in self._own:  # the front has died this moment
            writer.close()
            return
        await self.is_front_there.wait()
        host, port = address_of(self._listener)
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.bind((host, 0))
            own = connection.getsockname()[1]
            self._own.add(own)
            try:
                await asyncio.get_running_loop().sock_connect(connection, (host, port))
                from_front, to_front = await asyncio.open_connection(sock=connection)
                await asyncio.gather(_copy(reader, to_front), _copy(from_front, writer))
            except OSError:
                writer.close()
            finally:
                self._own.discard(own)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Hand on bytes until one side has ended, then end the other."""
    with contextlib.suppress(OSError):
        while data := await source.read(_PIECE):
            sink.write(data)
            await sink.drain()
    sink.close()
