"""Ring all-reduce over a job's workers. Each worker sends to the next worker.

TensorFlow's own ring copies every piece through protocol buffers several times
(``GrpcRemoteWorker::RecvBufAsync``). For a few megabytes on a CPU these copies are slower than the
network. This ring passes the tensors' memory to the sockets. Every worker sends and receives
``2 (n - 1) / n`` of the bytes, the theoretical minimum (Patarasuk and Yuan, 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002). All workers get the same bits.

For the setup, each worker listens at a port, sends the port to the others by a collective, and
connects to the next worker (`connect`). Workers of one machine use a Unix socket, which needs less
CPU time. A worker closes connections that do not present its secret.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import hmac
import itertools
import logging
import math
import os
import secrets
import select
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdist import phases
from tfdist.cluster.address import split_address
from tfdist.cluster.local_only import are_local, listen
from tfdist.strategy import rendezvous

_LOG = logging.getLogger(__name__)
_OF_BYTES = 120
# Number of earlier sums, checksum of the sum's description, and the description.
_HEADER = struct.Struct(f"<QI{_OF_BYTES}s")
_BUFFERS_A_CALL = 64
CALL_S = 1800.0
"""Seconds to wait for a neighbour's call of a public collective, as torch.distributed does."""

_BLOCK_BYTES = 2**18
_THREAD_BYTES = 2**22  # a thread copies larger arrays while the worker sends and receives
_KEPT_BYTES = 2**28  # memory of large results that is used again
_VECTOR = 32  # 512 bits of float16
_Piece = tuple[int, int, int]  # index of an array, first element, end element


class Members(abc.ABC):
    """Tasks of an elastic job, which take the ring's place (see `tfdist.elastic`).

    Attributes:
      lost, differs: As in `Ring`.
    """

    lost: str
    differs: tuple[str, str] | None

    @abc.abstractmethod
    def sum(self, *arrays: np.ndarray, of: str = "") -> list[np.ndarray]:
        """Return the sum over the members of each array."""

    @property
    @abc.abstractmethod
    def is_first(self) -> bool:
        """True in the chief, which has been a member for the longest time."""

    @abc.abstractmethod
    def own_shards(self, shards: int) -> range:
        """Return the shards of a batch that this task computes."""

    @property
    @abc.abstractmethod
    def absent(self) -> list[int]:
        """Indices of the tasks that are not members now."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close all connections."""

    @property
    @abc.abstractmethod
    def previous_name(self) -> str:
        """Name of the other members, for messages."""


class Ring:
    """One worker's place in the ring. Every worker runs the same sums in the same order.

    Args:
      rank: Rank of this worker, from 0.
      names: Names of all workers (at least 2) for error messages.
      ends: Connections to the next worker and to the previous worker.
    """

    def __init__(
        self, rank: int, names: Sequence[str], ends: tuple[socket.socket, socket.socket]
    ) -> None:
        self._rank, self._size, self._names = rank, len(names), names
        self._to_next, self._from_previous = ends
        self._sums = 0
        self._at_work = threading.Lock()
        self._caller: int | None = None  # thread in `call`
        self._scratch = bytearray()
        self.lost = ""
        """Reason why the ring is closed, or "". A closed ring cannot run sums."""
        self.differs: tuple[str, str] | None = None
        """Descriptions of the neighbour's sum and of this worker's sum, if they differ."""
        for end in ends:
            end.setblocking(False)
        close_in_children(self)

    def sum(
        self, *arrays: np.ndarray, of: str = "", within_s: float | None = None
    ) -> list[np.ndarray]:
        """Return the sum over the workers of each array, as new arrays of the same shape and type.

        `of` describes the sum, with the same text in every worker. It distinguishes sums of equal
        shapes.

        Raises ConnectionError if a neighbour has exited, runs another sum, or starts none for
        `within_s` seconds. Raises RuntimeError if another thread of this worker runs a sum.
        """
        chunks = chunks_of(tuple(array.size for array in arrays), self._size, apart=False)
        with self._at_sum():
            self._agree(arrays, of, within_s=within_s)
            sums = self._scatter(arrays, chunks)
            self._gather(sums, chunks)
        return [total.reshape(array.shape) for total, array in zip(sums, arrays, strict=True)]

    def reduce_scatter(self, *arrays: np.ndarray, of: str = "") -> list[np.ndarray]:
        """Return this worker's part of the sum of each array: the flat elements given by `part`.

        It sends half of the bytes of `sum`. With two workers the bits equal those from `sum`. With
        more workers the order of additions differs, because each array is divided separately.
        Raises the errors of `sum`.
        """
        chunks = chunks_of(tuple(array.size for array in arrays), self._size, apart=True)
        with self._at_sum():
            self._agree(arrays, f"the parts of {of}")
            sums = self._scatter(arrays, chunks)
        return [total[slice(*self.part(total.size))] for total in sums]

    def all_gather(
        self, *parts: np.ndarray, sizes: Sequence[int], of: str = ""
    ) -> list[np.ndarray]:
        """Return the whole flat arrays, made from the `parts` of all workers.

        Raises the errors of `sum`.

        Args:
          parts: This worker's elements of each array, as given by `part`.
          sizes: Number of elements of each whole array.
          of: Description (see `sum`).
        """
        wholes = [empty([size], part.dtype) for size, part in zip(sizes, parts, strict=True)]
        for whole, part in zip(wholes, parts, strict=True):
            whole[slice(*self.part(whole.size))] = part.reshape(-1)
        with self._at_sum():
            self._agree(wholes, f"all of {of}")
            self._gather(wholes, chunks_of(tuple(sizes), self._size, apart=True))
        return wholes

    def from_root(self, array: np.ndarray, root: int, *, of: str) -> None:
        """Fill `array` with the root's elements. Each worker passes them on as they arrive.

        `of` is empty if an earlier transfer of the same `call` has named it to all workers.
        """
        blocks, hops = _blocks(array), self._hops_from(root)
        with self._at_sum():
            if of:
                self._agree([array], of)  # the root may compute its value for hours
            into = blocks if hops else []
            self._relay(into, blocks if hops < self._size - 1 else [], ahead=len(into) and 1)

    def rows_from_root(self, rows: np.ndarray, root: int) -> np.ndarray:
        """Return this worker's row of the root's `rows`, an array of one row for each worker.

        Only the shape and the type of the other workers' `rows` count. An earlier transfer of the
        same `call` has told all workers of this transfer.
        The rows of half of the workers travel in the other direction, so they are passed on less.
        """
        hops, half = self._hops_from(root), self._size // 2
        with self._at_sum():
            own = empty(rows.shape[1:], rows.dtype)
            if not hops:
                ranks = [(root + far) % self._size for far in range(1, self._size)]
                ways = (self, ranks[half - 1 :: -1]), (self._backward, ranks[half:])
                with _copying(rows[self._rank, ...], own):
                    for way, farthest_first in ways:
                        out = [b for rank in farthest_first for b in _blocks_of_row(rows, rank)]
                        way._relay([], out, ahead=0)
                return own
            blocks = _blocks(own)
            way, rest = (self, half - hops) if hops <= half else (self._backward, hops - half - 1)
            passed = _passing(blocks * rest)
            way._relay([*passed, *blocks], passed, ahead=1)
        return own

    def rows_to_root(self, row: np.ndarray, root: int, *, of: str) -> np.ndarray | None:
        """Return the rows of all workers in the root, and `None` in the other workers."""
        hops = self._hops_from(root)
        with self._at_sum():
            self._agree([row], of, within_s=CALL_S)
            if hops:
                own = _blocks(row)
                passed = _passing(own * (hops - 1))
                self._relay(passed, [*passed, *own], ahead=len(passed) and 1)
                return None
            rows = empty([self._size, *row.shape], row.dtype)
            ranks = [(root + far) % self._size for far in range(1, self._size)]
            with _copying(row, rows[self._rank, ...]):
                into = [block for rank in ranks for block in _blocks_of_row(rows, rank)]
                self._relay(into, [], ahead=0)
        return rows

    def sum_to_root(self, array: np.ndarray, root: int, *, of: str) -> np.ndarray | None:
        """Return the sum over the workers in the root, and `None` in the other workers."""
        hops = self._hops_from(root) or self._size
        mine = np.ascontiguousarray(array).reshape(-1)
        step = max(1, _BLOCK_BYTES // mine.itemsize)
        own = _blocks(mine, step * mine.itemsize)
        total: np.ndarray | None = None
        into: list[memoryview] = []
        if hops == self._size:
            total = empty(mine.shape, mine.dtype)
            into = _blocks(total, step * mine.itemsize)
        elif hops > 1:
            into = _passing(own)

        def add(block: int) -> None:
            part = np.frombuffer(into[block], mine.dtype)
            with np.errstate(all="ignore"):  # as in `_add`
                np.add(part, mine[block * step : (block + 1) * step], out=part)

        with self._at_sum():
            self._agree([array], of, within_s=CALL_S)
            out = [] if total is not None else into or own
            self._relay(into, out, ahead=len(into) and 1, arrived=add)
        return None if total is None else total.reshape(array.shape)

    def rows_of_all(self, row: np.ndarray, *, of: str) -> np.ndarray:
        """Return the rows of all workers, in their order."""
        rows = empty([self._size, *row.shape], row.dtype)
        rows[self._rank] = row
        with self._at_sum():
            self._agree([row], of, within_s=CALL_S)
            for hop in range(self._size - 1):
                sent, received = ((self._rank - hop - later) % self._size for later in (0, 1))
                self._exchange(
                    deque(_blocks_of_row(rows, sent)), deque(_blocks_of_row(rows, received))
                )
        return rows

    @functools.cached_property
    def _backward(self) -> Ring:
        """The same connections, for transfers to the previous worker."""
        ends = self._from_previous, self._to_next
        return Ring(self._size - 1 - self._rank, self._names[::-1], ends)

    def _hops_from(self, root: int) -> int:
        return (self._rank - root) % self._size

    def _relay(
        self,
        into: Sequence[memoryview],
        out: Sequence[memoryview],
        *,
        ahead: int,
        arrived: Callable[[int], None] = lambda block: None,
    ) -> None:
        """Receive the blocks `into`. Send the blocks `out`, starting `ahead` turns later."""
        for step in range(max(len(into), len(out) + ahead if out else 0)):
            sent = step - ahead
            block = out[sent : sent + 1] if sent >= 0 else ()
            self._exchange(deque(block), deque(into[step : step + 1]))
            if step < len(into):
                arrived(step)

    def part(self, size: int) -> tuple[int, int]:
        """Return the first and end index of this worker's elements in a flat array of `size`."""
        own = (self._rank + 1) % self._size  # the chunk that `_scatter` completes here
        bounds = _bounds(size, self._size)
        return bounds[own], bounds[own + 1]

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Run the transfers of one call, whose later transfers the workers do not compare."""
        self._caller = threading.get_ident()
        try:
            yield
        except BaseException as error:  # the others would take the next call for data
            self._leave(f"a call of this worker was interrupted: {type(error).__name__}")
            raise
        finally:
            self._caller = None

    @contextlib.contextmanager
    def _at_sum(self) -> Iterator[None]:
        """Allow one thread in the block, and close the ring if the block fails."""
        if self.lost:
            raise ConnectionError(self.lost)
        is_free = self._caller in (None, threading.get_ident())
        if not is_free or not self._at_work.acquire(blocking=False):
            raise RuntimeError(
                "two threads of this worker run collectives at the same time. Fix: call "
                "collectives from one thread"
            )
        phases.set_at_sum(True)
        try:
            yield
        except OSError as error:
            self._leave(str(error))
            raise ConnectionError(self.lost) from error
        except BaseException as error:  # unread bytes would corrupt a later sum
            self._leave(f"a sum of this worker was interrupted: {type(error).__name__}")
            raise
        finally:
            phases.set_at_sum(False)
            self._at_work.release()

    def close(self) -> None:
        """Close the connections. The neighbours' next sum fails."""
        self._leave("this worker closed the ring")

    def _leave(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._to_next.close()
        self._from_previous.close()

    def _scatter(
        self, arrays: Sequence[np.ndarray], chunks: Sequence[Sequence[_Piece]]
    ) -> list[np.ndarray]:
        """Sum around the ring. In the returned flat arrays only this worker's chunk is complete."""
        mine = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        sums = [empty(array.shape, array.dtype) for array in mine]
        for hop in range(self._size - 1):
            out = views_of(sums if hop else mine, chunks[(self._rank - hop) % self._size])
            self._add(out, mine, sums, chunks[(self._rank - hop - 1) % self._size])
        return sums

    def _gather(self, sums: Sequence[np.ndarray], chunks: Sequence[Sequence[_Piece]]) -> None:
        """Send this worker's chunk around the ring, and receive the other workers' chunks."""
        for hop in range(self._size - 1):
            out = views_of(sums, chunks[(self._rank + 1 - hop) % self._size])
            self._exchange(out, views_of(sums, chunks[(self._rank - hop) % self._size]))

    def _agree(
        self, arrays: Sequence[np.ndarray], of: str, *, within_s: float | None = None
    ) -> None:
        """Raise ConnectionError if the previous worker runs another sum."""
        what = f"{of} {[(array.dtype.name, array.shape) for array in arrays]}".encode()
        header = _HEADER.pack(self._sums, zlib.crc32(what), what[:_OF_BYTES])
        self._sums += 1
        theirs = bytearray(_HEADER.size)
        self._exchange(deque([memoryview(header)]), deque([memoryview(theirs)]), within_s=within_s)
        if theirs != header:
            self.differs = _in_words(theirs), _in_words(header)
            raise ConnectionError(
                f"{self._previous} runs {self.differs[0]}, but this worker runs {self.differs[1]}"
            )

    def _add(
        self,
        out: deque[memoryview],
        mine: Sequence[np.ndarray],
        sums: Sequence[np.ndarray],
        pieces: Sequence[_Piece],
    ) -> None:
        """Receive the partial sum of these pieces, and add this worker's elements."""
        sizes = [(stop - start) * mine[index].itemsize for index, start, stop in pieces]
        if len(self._scratch) < sum(sizes):
            self._scratch = bytearray(sum(sizes))
        whole, offset = memoryview(self._scratch), 0
        got = []
        for size in sizes:
            got.append(whole[offset : offset + size])
            offset += size
        self._exchange(out, deque(got))
        with np.errstate(all="ignore"):  # the loss scale detects an overflow
            for (index, start, stop), data in zip(pieces, got, strict=True):
                theirs = np.frombuffer(data, mine[index].dtype)
                np.add(theirs, mine[index][start:stop], out=sums[index][start:stop])

    def _exchange(
        self,
        out: deque[memoryview],
        into: deque[memoryview],
        *,
        within_s: float | None = None,
    ) -> None:
        """Send `out` to the next worker, and fill `into` from the previous worker.

        Raise ConnectionError if nothing moves for `within_s` seconds.
        """
        while out or into:
            moved = bool(out) and self._send(out)
            moved |= bool(into) and self._receive(into)
            if not moved and not self._wait(out, into, within_s):
                raise ConnectionError(
                    f"{self._previous} has not called this collective for {within_s:g} s"
                )

    def _send(self, out: deque[memoryview]) -> bool:
        try:
            buffers = itertools.islice(out, _BUFFERS_A_CALL)
            sent = self._to_next.sendmsg(buffers, [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionError(f"lost {self._next}: {error.strerror or error}") from error
        remove_first(out, sent)
        return True

    def _receive(self, into: deque[memoryview]) -> bool:
        try:
            buffers = list(itertools.islice(into, _BUFFERS_A_CALL))
            received = self._from_previous.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConnectionError(f"lost {self._previous}: {reason}") from error
        if not received:
            raise ConnectionError(f"lost {self._previous}: it closed the connection")
        remove_first(into, received)
        return True

    def _wait(
        self, out: deque[memoryview], into: deque[memoryview], within_s: float | None
    ) -> bool:
        poll = select.poll()
        if out:
            poll.register(self._to_next, select.POLLOUT)
        if into:
            poll.register(self._from_previous, select.POLLIN)
        return bool(poll.poll(None if within_s is None else within_s * 1000))

    @property
    def previous_name(self) -> str:
        """Name of the previous worker, without its address."""
        return self._previous.partition(" ")[0]

    @property
    def _next(self) -> str:
        return self._names[(self._rank + 1) % self._size]

    @property
    def _previous(self) -> str:
        return self._names[(self._rank - 1) % self._size]


def _blocks(array: np.ndarray, size: int = 0) -> list[memoryview]:
    """Return the bytes of a contiguous array in blocks that a worker passes on."""
    size = size or _BLOCK_BYTES
    data = array.reshape(-1).view(np.uint8).data
    return [data[start : start + size] for start in range(0, len(data), size)]


def _blocks_of_row(rows: np.ndarray, index: int) -> list[memoryview]:
    return _blocks(rows[index : index + 1])


def _passing(blocks: Sequence[memoryview]) -> list[memoryview]:
    """Return blocks of the same sizes for bytes that a worker receives and sends one turn later.

    They alternate between two buffers, so a worker needs no memory for the arrays of others.
    """
    size = max(map(len, blocks), default=0)
    buffers = [memoryview(bytearray(size)) for _ in range(2)]
    return [buffers[index % 2][: len(block)] for index, block in enumerate(blocks)]


@contextlib.contextmanager
def _copying(source: np.ndarray, target: np.ndarray) -> Iterator[None]:
    """Copy an array while the block runs. The copy is complete when the block ends.

    The first write to new memory is as slow as the socket, so large arrays have a thread.
    """
    if source.nbytes < _THREAD_BYTES:
        yield
        _copy(source, target)
        return
    thread = threading.Thread(target=_copy, args=(source, target), name="tfdist-copy")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    np.copyto(target, source)


_kept: deque[np.ndarray] = deque()
_at_kept = threading.Lock()


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an empty array. A large one gets the memory of an earlier one that nothing uses.

    The system clears new memory, which takes longer than a transfer.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not _THREAD_BYTES <= size <= _KEPT_BYTES:
        return np.empty(shape, dtype)
    with _at_kept:
        for data, references in zip(_kept, _references(_kept), strict=True):
            if data.size == size and references == _UNUSED:
                return data.view(dtype).reshape(shape)
        _kept.append(np.empty(size, np.uint8))
        while sum(data.size for data in _kept) > _KEPT_BYTES:
            _kept.popleft()
        return _kept[-1].view(dtype).reshape(shape)


def _references(arrays: Iterable[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([np.empty(0)])[0]


@functools.lru_cache(maxsize=64)
def chunks_of(sizes: tuple[int, ...], count: int, *, apart: bool) -> list[list[_Piece]]:
    """Divide each array (if `apart`) or all arrays together into `count` chunks."""
    if apart:
        bounds = [_bounds(size, count) for size in sizes]
        return [
            [(i, b[chunk], b[chunk + 1]) for i, b in enumerate(bounds) if b[chunk] < b[chunk + 1]]
            for chunk in range(count)
        ]
    starts = [0, *itertools.accumulate(sizes)]
    ends = [starts[-1] * chunk // count for chunk in range(count + 1)]
    return [
        [
            (index, max(low, start) - start, min(high, start + size) - start)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=False))
            if max(low, start) < min(high, start + size)
        ]
        for low, high in itertools.pairwise(ends)
    ]


def _bounds(size: int, count: int) -> list[int]:
    """Divide `size` elements among workers, in whole vectors of the widest CPU instructions.

    The CPU computes elements after the last whole vector individually. For some operations
    (`rsqrt`) this changes the last bit. With whole vectors, a part gets the bits of the whole.
    """
    vectors = -(-size // _VECTOR)
    return [min(size, vectors * chunk // count * _VECTOR) for chunk in range(count + 1)]


def _in_words(header: bytes | bytearray) -> str:
    number, _, what = _HEADER.unpack(header)
    cut = "" if what.endswith(b"\0") else "..."
    return f"sum {number} of the run, {what.rstrip(bytes(1)).decode(errors='replace')}{cut}"


def views_of(arrays: Sequence[np.ndarray], pieces: Sequence[_Piece]) -> deque[memoryview]:
    return deque(arrays[i][start:stop].view(np.uint8).data for i, start, stop in pieces)


def remove_first(views: deque[memoryview], count: int) -> None:
    """Remove the first `count` bytes."""
    while count:
        if count < len(views[0]):
            views[0] = views[0][count:]
            return
        count -= len(views.popleft())


_of_this_process: weakref.WeakSet[Ring | Members] = weakref.WeakSet()


def close_in_children(connected: Ring | Members) -> None:
    """Close the sockets in forked children, so that peers notice when this worker exits."""
    _of_this_process.add(connected)
    _follow_forks()


@functools.cache
def _follow_forks() -> None:
    def close() -> None:
        for connected in list(_of_this_process):
            connected.close()

    os.register_at_fork(after_in_child=close)


# Setup. Workers connect to their neighbours, or agree to use no ring.


_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI")
_ROW = struct.Struct(f"<I{_SECRET_BYTES}s64s")
_HELLO_S = 1.0  # seconds a client has to identify itself
_PAUSE_S = 0.01  # after a failed accept
BUFFER_BYTES = 4 * 2**20
_LOCAL_BUFFER_BYTES = 2**20  # bytes in flight stay in the CPU's cache: a sixth less CPU time
# A waiting worker notices after about 30 s that a neighbour's machine is down. TCP_USER_TIMEOUT is
# not set, because it would also disconnect a worker that reads slowly.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))

Sum = Callable[[np.ndarray], np.ndarray]


def connect(
    rank: int,
    addresses: Sequence[str],
    names: Sequence[str],
    *,
    total: Sum,
    timeout_s: float,
    ports: range | None = None,
    stride: int = 1,
) -> tuple[socket.socket, socket.socket] | None:
    """Return the connections to the next worker and the previous worker. A collective.

    The last worker connects to the first. Return `None` in every worker if a worker cannot connect.

    Args:
      rank: Rank of this worker, from 0.
      addresses: ``host:port`` of each worker. Neighbours connect to the host.
      names: Names of all workers for messages.
      total: Function that sums an int32 vector over the workers. A collective.
      timeout_s: Seconds to wait for both neighbours.
      ports: Ports to listen at for other machines, `None` for any free port.
      stride: Distance in ranks to the next worker (default: 1).
    """
    size, secret = len(addresses), secrets.token_bytes(_SECRET_BYTES)
    hosts = [split_address(address)[0] for address in addresses]
    with contextlib.ExitStack() as stack:
        near = socket.socket(socket.AF_UNIX)
        near.bind(_local_name(secret))
        near.listen()
        far = _listen_for_others(ports, only_local=are_local(addresses))
        listeners = [stack.enter_context(one) for one in (near, far) if one]
        own, port = rendezvous.own_versions(), far.getsockname()[1] if far else 0
        table = np.zeros((size, _ROW.size // 4), np.int32)
        table[rank] = np.frombuffer(_ROW.pack(port, secret, own.encode()), np.int32)
        table = total(table.reshape(-1)).reshape(table.shape)
        workers = [_ROW.unpack(row.tobytes()) for row in table]  # port, secret and versions of each
        for name, (_, _, versions) in zip(names, workers, strict=True):
            theirs = versions.rstrip(b"\0").decode()
            rendezvous.require_same_versions(theirs, task=name, own=own, own_task=names[rank])
        after = (rank + stride) % size
        port, its_secret, _ = workers[after]
        deadline_s = time.monotonic() + timeout_s
        place = f"{hosts[after]}:{port}"
        to_next = _connect(hosts[after], port, _HELLO.pack(its_secret, rank), deadline_s)
        expected = _HELLO.pack(secret, (rank - stride) % size)
        from_previous = accepted(listeners, [expected], deadline_s).get(expected)
    reached = np.zeros(size, np.int32)
    reached[rank] = to_next is not None and from_previous is not None
    reached = total(reached)
    if reached.all() and to_next is not None and from_previous is not None:
        return to_next, from_previous
    if to_next is None:
        _LOG.warning("%s cannot connect to %s at %s", names[rank], names[after], place)
    for end in (to_next, from_previous):
        if end is not None:
            end.close()
    return None


def _listen_for_others(ports: range | None, *, only_local: bool = False) -> socket.socket | None:
    """Listen for workers in other network namespaces or machines, `None` if no port is free."""
    for port in ports or (0,):
        with contextlib.suppress(OSError):
            return listen(port, only_local=only_local)
    return None


def _local_name(secret: bytes) -> bytes:
    """Return a public socket name that does not reveal the secret."""
    return b"\0tfdist-" + hashlib.sha256(b"place" + secret).hexdigest()[:32].encode()


def _connect(host: str, port: int, hello: bytes, deadline_s: float) -> socket.socket | None:
    near = socket.socket(socket.AF_UNIX)
    try:
        near.connect(_local_name(hello[:_SECRET_BYTES]))
        near.sendall(hello)
        return prepared(near)
    except OSError:
        near.close()
    try:
        remaining_s = max(deadline_s - time.monotonic(), 0.1)
        far = socket.create_connection((host, port), timeout=remaining_s)
        far.sendall(hello)
        return prepared(far)
    except OSError as error:
        _LOG.debug("%s:%d: %s", host, port, error)
        return None


def accepted(
    listeners: Sequence[socket.socket], expected: Collection[bytes], deadline_s: float
) -> dict[bytes, socket.socket]:
    """Return each client's connection by its `expected` message. Close all other connections.

    Each client has `_HELLO_S` seconds to send its message. A silent client delays no other client.
    The result omits clients that miss the deadline. All messages have the same length.
    """
    size = len(next(iter(expected)))
    found: dict[bytes, socket.socket] = {}
    clients: dict[Any, tuple[bytes, float]] = {}  # bytes so far, and deadline
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        stack.callback(lambda: [client.close() for client in clients])
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        while len(found) < len(expected) and (now_s := time.monotonic()) < deadline_s:
            for key, _ in selector.select(min(_HELLO_S, deadline_s - now_s)):
                end: Any = key.fileobj
                if end in clients:
                    clients[end] = _heard(end, *clients[end], size=size)
                elif client := _next_client(end):
                    clients[client] = b"", time.monotonic() + _HELLO_S
                    selector.register(client, selectors.EVENT_READ)
            for client, (said, until_s) in list(clients.items()):
                if len(said) == size or until_s < now_s:
                    selector.unregister(client)
                    del clients[client]
                    # Close a client that has disconnected or that is not expected.
                    with contextlib.suppress(OSError), contextlib.ExitStack() as not_expected:
                        not_expected.enter_context(client)
                        known = any(hmac.compare_digest(said, each) for each in expected)
                        if known and said not in found:
                            found[said] = prepared(client)
                            not_expected.pop_all()
    return found


def _next_client(listener: socket.socket) -> socket.socket | None:
    """Accept a connection. Return `None` if the client disconnected or no descriptor is free."""
    try:
        client = listener.accept()[0]
    except OSError:
        time.sleep(_PAUSE_S)  # the listener may stay ready: no busy loop
        return None
    client.setblocking(False)
    return client


def _heard(client: socket.socket, said: bytes, until_s: float, *, size: int) -> tuple[bytes, float]:
    """Return the client's bytes so far and its deadline (0.0 if the client disconnected)."""
    try:
        piece = client.recv(size - len(said))
    except OSError:
        piece = b""
    return said + piece, until_s if piece else 0.0


def exactly(end: socket.socket, count: int) -> bytes:
    """Receive `count` bytes. Raise OSError if the connection closes or times out."""
    data = b""
    while len(data) < count:
        piece = end.recv(count - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return data


def prepared(end: socket.socket) -> socket.socket:
    """Return the socket with large buffers, and with keep-alive if it connects two machines."""
    is_local = end.family == socket.AF_UNIX
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        size = _LOCAL_BUFFER_BYTES if is_local else BUFFER_BYTES
        end.setsockopt(socket.SOL_SOCKET, option, size)
    if not is_local:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEP_ALIVE:
            end.setsockopt(socket.IPPROTO_TCP, option, seconds)
    return end
