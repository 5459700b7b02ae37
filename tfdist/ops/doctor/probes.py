"""Probes of a host: what it has, what it reaches of the others, and the shared directory."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import ipaddress
import os
import platform
import re
import resource
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import psutil

from tfdist.cluster.ports import listen
from tfdist.files import fsync, replacing
from tfdist.launch.machine import memory_groups, this_machine
from tfdist.ops.doctor.facts import (
    Directory,
    Host,
    MachineProbe,
    NameFacts,
    PortFacts,
    Proxy,
    Reach,
    Wire,
    reason_of,
)

_PACKAGES = {
    "tensorflow": "tensorflow",
    "keras": "keras",
    "numpy": "numpy",
    "nvidia-cuda-runtime": "cuda",
    "nvidia-cuda-runtime-cu12": "cuda",
    "nvidia-cudnn-cu13": "cudnn",
    "nvidia-cudnn-cu12": "cudnn",
    "nvidia-nccl-cu13": "nccl",
    "nvidia-nccl-cu12": "nccl",
}
"""Names of packages, and of what each has in it."""
_DRIVER = Path("/proc/driver/nvidia/version")
_FEATURE = re.compile(r"avx\w*|fma|f16c|sse4_[12]|amx\w*|asimd\w*|sve\w*|i8mm|bf16")
# As gRPC reads them: in lower case alone, and the first that is set
# (https://grpc.github.io/grpc/core/md_doc_environment_variables.html).
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXIES = ("no_grpc_proxy", "no_proxy")


def look(environ: Mapping[str, str]) -> MachineProbe:
    """Return the software and the resources of this process."""
    usable = this_machine(environ)
    cpu, features = _processor()
    tightest = min(memory_groups(), key=lambda group: group[0] - group[1], default=None)
    limit, used = tightest or (None, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = own_addresses()
    return MachineProbe(
        host_name=socket.gethostname(),
        versions=tuple(_versions()),
        cpu=cpu,
        cpus=usable.cpus,
        cpu_features=features,
        gpus=len(usable.gpus),
        memory_available=psutil.virtual_memory().available,
        memory_limit=limit,
        memory_used=used,
        shared_memory=_free("/dev/shm"),
        open_files=None if soft == resource.RLIM_INFINITY else soft,
        open_files_most=None if hard == resource.RLIM_INFINITY else hard,
        own_addresses=own,
        public_addresses=tuple(a for a in own if ipaddress.ip_address(a).is_global),
        proxy=proxy_of(environ),
    )


def proxy_of(environ: Mapping[str, str]) -> Proxy | None:
    """Return the proxy that gRPC would take, without the password in it; None for none."""
    name = next((name for name in _PROXIES if environ.get(name)), None)
    if name is None:
        return None
    excepted_by = next((other for other in _NO_PROXIES if environ.get(other)), "")
    exceptions = environ.get(excepted_by, "").split(",")
    return Proxy(
        name=name,
        value=_without_password(environ[name]),
        excepted_by=excepted_by,
        exceptions=tuple(entry.strip() for entry in exceptions if entry.strip()),
    )


def own_addresses() -> tuple[str, ...]:
    """Return the addresses of the interfaces of this host, those of a link alone left out."""
    found = [
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return tuple(a for a in dict.fromkeys(found) if not ipaddress.ip_address(a).is_link_local)


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package, name in _PACKAGES.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(package)
    yield "tfdist", str(getattr(sys.modules["tfdist"], "__version__", "unknown"))
    if driver := re.search(r"Kernel Module\s.*?(\d+\.[\d.]+)", _text(_DRIVER)):
        yield "nvidia driver", driver[1]


def _processor() -> tuple[str, tuple[str, ...]]:
    text = _text(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    features = flags[1].split() if flags else []
    return (
        model[1].strip() if model else platform.machine(),
        tuple(sorted(name for name in features if _FEATURE.fullmatch(name))),
    )


def _free(directory: str) -> int:
    try:
        state = os.statvfs(directory)
    except OSError:
        return 0
    return state.f_bavail * state.f_frsize


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a value that is no URL"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# Name resolution on this host.


def look_up(names: Sequence[str]) -> tuple[NameFacts, ...]:
    """Resolve the names, all at once: each takes as long as the system's resolver waits."""
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        return tuple(pool.map(_look_up, names))


def _look_up(name: str) -> NameFacts:
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        return NameFacts(name=name, error=error.strerror or str(error))
    return NameFacts(name=name, addresses=tuple(dict.fromkeys(str(e[4][0]) for e in found)))


# Fixed workload on all CPUs of this host, to find a slower host.

_PIECE_BYTES = 16 << 20
_ROUNDS = 6


def work_s(cpus: int) -> float:
    """Return how long the piece took each of `cpus` threads, in the best of a few rounds.

    Hashing lets go of Python's lock, so the threads run side by side.
    """
    return min(_round(bytes(_PIECE_BYTES), cpus) for _ in range(_ROUNDS))


def _round(piece: bytes, cpus: int) -> float:
    threads = [threading.Thread(target=hashlib.blake2b, args=(piece,)) for _ in range(cpus)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


# Probes of the shared directory: visibility, renames, durability, free space.

_PAGE_BYTES = 64 << 10
_SEEN_WITHIN_S = 2.0
_PAGE_S = 0.5
_NOT_TO_BE_WRITTEN = (errno.EROFS, errno.EACCES, errno.EPERM)


class Storage:
    """This host's side of a look at a directory: all write, then all read, then all clean up.

    Args:
      path: the directory; everything is written into one of its own in it.
      mark: names that one, the same on all hosts.
      index: of this host; the first replaces the file that all read.
    """

    def __init__(self, path: str, *, mark: str, index: int) -> None:
        self._home = Path(path)
        self._place = self._home / f".tfdist-doctor-{mark}"
        self._index = index

    @property
    def _page(self) -> Path:
        return self._place / "page"

    def _file(self, index: int) -> Path:
        return self._place / f"host-{index}"

    def write(self) -> Directory:
        """Write this host's file, and the first host's page, through to the disk."""
        try:
            self._place.mkdir(exist_ok=True)
            self._file(self._index).write_bytes(b"%d" % self._index)
            if self._index == 0:
                self._write_page(0)
            state = os.statvfs(self._home)
        except OSError as error:
            is_read_only = error.errno in _NOT_TO_BE_WRITTEN
            return Directory(error=reason_of(error), is_read_only=is_read_only)
        found = Directory(free=state.f_bavail * state.f_frsize)
        try:
            for path in (self._file(self._index), self._place):
                fsync(path)
        except OSError as error:
            return replace(found, sync_error=reason_of(error))
        return found

    def read(self, written: Directory, *, present: Sequence[int]) -> Directory:
        """Return `written` completed by the state of the others' files."""
        if written.error:
            return written
        deadline_s = time.monotonic() + _SEEN_WITHIN_S
        unseen = tuple(index for index in present if not self._sees(index, deadline_s))
        torn = reads = 0
        if self._index == 0:
            self._replace_page()
        elif 0 not in unseen:
            torn, reads = self._watch_page()
        return replace(written, unseen=unseen, torn=torn, reads=reads)

    def clean(self) -> None:
        """Remove what this host has written, and the last one the directory too."""
        with contextlib.suppress(OSError):
            self._file(self._index).unlink(missing_ok=True)
            if self._index == 0:
                self._page.unlink(missing_ok=True)
            self._place.rmdir()

    def _sees(self, index: int, deadline_s: float) -> bool:
        while True:
            with contextlib.suppress(OSError):
                if self._file(index).read_bytes() == b"%d" % index:
                    return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)

    def _watch_page(self) -> tuple[int, int]:
        """Read the page over and over; return how many reads were torn, and how many were made.

        A whole page is of one byte alone.
        """
        torn = reads = 0
        deadline_s = time.monotonic() + _PAGE_S
        while time.monotonic() < deadline_s:
            try:
                page = self._page.read_bytes()
                torn += len(page) != _PAGE_BYTES or page.count(page[:1]) != _PAGE_BYTES
            except OSError as error:
                if error.errno == errno.ESTALE:  # NFS says of itself that it is to be read again
                    continue
                torn += 1
            reads += 1
        return torn, reads

    def _replace_page(self) -> None:
        """Replace the page again and again, while the other hosts read it."""
        deadline_s = time.monotonic() + _PAGE_S
        number = 0
        while time.monotonic() < deadline_s:
            number = (number + 1) % 256
            with contextlib.suppress(OSError):
                self._write_page(number)

    def _write_page(self, number: int) -> None:
        """Replace the page as checkpoints are: by a file beside it, which is renamed."""
        with replacing(self._page, durable=False) as unfinished:
            unfinished.write_bytes(bytes([number]) * _PAGE_BYTES)


# Listener on the ports of this host's tasks during the preflight.
#
# It listens on every interface, as TensorFlow's servers will: what is free, or reached, for one is
# so for the other. It says whose port this is, and takes data; nothing it is sent is run.

MAX_PIECE_BYTES = 64 << 20

_GREETING = "tfdist doctor"
_PATIENCE_S = 10.0


class PortListener:
    """Listener on ports, with a thread for each client.

    Args:
      greeting: the line that whoever connects gets first.
      ports: of this host's tasks.
    """

    def __init__(self, greeting: str, ports: Sequence[int]) -> None:
        self._greeting = greeting.encode() + b"\n"
        self._servers: list[_Server] = []
        self.ports = tuple(self._open(port) for port in ports)

    def close(self) -> None:
        """Free the ports; connections go on."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()

    def _open(self, port: int) -> PortFacts:
        try:
            server = _Server(port, self._greeting)
        except OSError as error:
            why = os.strerror(error.errno).lower() if error.errno else str(error)
            return PortFacts(port=port, error=why, holder=_holder_of(port))
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return PortFacts(port=port)


class _Server(socketserver.ThreadingTCPServer):
    """Server at one port of all interfaces; errors of a client end its connection alone."""

    daemon_threads = True

    def __init__(self, port: int, greeting: bytes) -> None:
        super().__init__(("", port), _Handler, bind_and_activate=False)
        self.greeting = greeting
        self.socket.close()
        self.socket = listen(port)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the client is gone, or is no doctor."""


class _Handler(socketserver.StreamRequestHandler):
    """Greeting of a client, then pieces of announced sizes, confirmed once all of one is here."""

    server: _Server
    timeout = _PATIENCE_S
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Take pieces until the client hangs up."""
        self.wfile.write(self.server.greeting)
        buffer = memoryview(bytearray(1 << 20))
        while len(head := self.rfile.read(8)) == 8:
            left = int.from_bytes(head, "big")
            if left > MAX_PIECE_BYTES:
                return
            while left:
                count = self.rfile.readinto(buffer[: min(left, len(buffer))])
                if not count:
                    return
                left -= count
            self.wfile.write(head)


def _holder_of(port: int) -> str:
    """Return the process that listens at a port, as ``python (4711)``; empty if unknown."""
    with contextlib.suppress(OSError, psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_there = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if is_there and connection.pid is not None:  # else it is another user's
                return f"{psutil.Process(connection.pid).name()} ({connection.pid})"
    return ""


def greeting(index: int, fingerprint: str) -> str:
    """Return the line by which a host of a job is known."""
    return f"{_GREETING} {index} {fingerprint}"


def host_of(line: str, fingerprint: str) -> int:
    """Return the host of the job with this greeting; -1 for none."""
    match = re.fullmatch(_GREETING + r" (\d{1,6}) (\w+)", line)
    return int(match[1]) if match and match[2] == fingerprint else -1


# Connection probes to the other hosts: reachability, latency, throughput.

_CONNECT_S = 2.0
_TALK_S = 5.0
_REACH_S = 20.0
_AT_ONCE = 64
_MAX_GREETING_BYTES = 80
_PINGS = 50
_FIRST_PIECE_BYTES = 64 << 10
_LONG_ENOUGH_S = 0.1  # for a piece, to be a measure of what goes through
_MEASURE_S = 1.0


def reach(
    hosts: Sequence[Host], *, present: Sequence[int], index: int, fingerprint: str
) -> tuple[Reach, ...]:
    """Connect to every port of the other hosts that are present; return the results.

    Many ports at which nobody answers take long: some may not be tried in time, which is their
    error.
    """
    deadline_s = time.monotonic() + _REACH_S
    targets = [(other, port) for other in present if other != index for port in hosts[other].ports]

    def one(place: tuple[int, int]) -> Reach:
        other, port = place
        if time.monotonic() > deadline_s:
            return Reach(host=other, port=port, error=f"not tried within {_REACH_S:.0f} s")
        try:
            with connected(hosts[other].name, port) as (_, _, line):
                answered = host_of(line, fingerprint)
            return Reach(host=other, port=port, answered=answered)
        except OSError as error:
            return Reach(host=other, port=port, error=reason_of(error))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(pool.map(one, targets))


def measure(address: str, port: int, *, host: int) -> Wire:
    """Return how fast a plain connection to a host is, which has answered before."""
    latency_s, carried = 0.0, "nothing comes back"
    try:
        with connected(address, port) as (sock, reader, _):
            sock.settimeout(_TALK_S)
            send = functools.partial(_send_piece, sock, reader)
            latency_s = _latency_s(send)
            carried = f"{_FIRST_PIECE_BYTES >> 10} KiB do not come through"
            return Wire(host=host, latency_s=latency_s, bytes_per_s=_bytes_per_s(send))
    except OSError as error:
        return Wire(host=host, latency_s=latency_s, error=f"{carried}: {reason_of(error)}")


@contextlib.contextmanager
def connected(address: str, port: int) -> Iterator[tuple[socket.socket, BinaryIO, str]]:
    """Connect; yield the connection, its reader, and the line with which it was greeted.

    The line is empty where none comes in time: others need not greet.
    """
    bare = address.strip("[]")
    with (
        socket.create_connection((bare, port), timeout=_CONNECT_S) as sock,
        sock.makefile("rb") as reader,
    ):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = b""
        with contextlib.suppress(OSError):
            line = reader.readline(_MAX_GREETING_BYTES)
        yield sock, reader, line.decode(errors="replace").rstrip("\n")


def _latency_s(send: Callable[[int], float]) -> float:
    """Return the shortest time that a piece without bytes took there and back."""
    deadline_s = time.monotonic() + _MEASURE_S
    times = [send(0)]
    while len(times) < _PINGS and time.monotonic() < deadline_s:
        times.append(send(0))
    return min(times)


def _bytes_per_s(send: Callable[[int], float]) -> float:
    """Return the better speed of two pieces that take long enough to tell.

    Smaller ones come first, until it is known how large these are. What they say is left out: the
    first of them may go through a limit that has been idle as if there were none.
    """
    size = _FIRST_PIECE_BYTES
    deadline_s = time.monotonic() + _MEASURE_S
    while True:
        took_s = send(size)
        is_long = took_s > _LONG_ENOUGH_S or time.monotonic() > deadline_s
        if is_long or size >= MAX_PIECE_BYTES:
            return size / min(took_s, send(size))
        size *= 2


def _send_piece(sock: socket.socket, reader: BinaryIO, size: int) -> float:
    """Return how long it took until the other side had all of it."""
    data = bytes(size)
    start = time.perf_counter()
    sock.sendall(size.to_bytes(8, "big"))
    sock.sendall(data)
    if len(reader.read(8)) < 8:
        raise ConnectionError("the connection was closed")
    return time.perf_counter() - start
