"""Ring all-reduce over a job's workers: each sends to the next one.

TensorFlow's own ring copies every piece through protocol buffers several times
(``GrpcRemoteWorker::RecvBufAsync``), which for a few megabytes takes longer on a CPU than the wire.
This one hands the tensors' own memory to the sockets. Every worker sends and receives
``2 (n - 1) / n`` of the bytes, which is the least there can be (Patarasuk and Yuan, 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002), and all end with the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import socket
import struct
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from tfdist import phases

_OF_BYTES = 120
# How many sums before this one, a checksum of what it is of, and that in words.
_HEADER = struct.Struct(f"<QI{_OF_BYTES}s")
_BUFFERS_A_CALL = 64
_VECTOR = 32  # 512 bits of float16
_Piece = tuple[int, int, int]  # of which array, from and up to which element


class Ring:
    """One worker's place in the ring. Every worker makes the same sums in the same order.

    Args:
      rank: this worker's place, from 0.
      names: what to call each worker in an error; they are at least 2.
      ends: connections to the worker after this one, and to the one before it.
    """

    def __init__(
        self, rank: int, names: Sequence[str], ends: tuple[socket.socket, socket.socket]
    ) -> None:
        self._rank, self._size, self._names = rank, len(names), names
        self._to_next, self._from_previous = ends
        self._sums = 0
        self._at_work = threading.Lock()
        self._scratch = bytearray()
        self.lost = ""
        """What went wrong with a neighbour, once something has; no sum can be made any more."""
        self.differs: tuple[str, str] | None = None
        """The neighbour's sum and this worker's where the neighbour makes another one."""
        for end in ends:
            end.setblocking(False)
        _close_in_children()
        _rings.add(self)

    def sum(self, *arrays: np.ndarray, of: str = "") -> list[np.ndarray]:
        """Return the sum over the workers of each array: new ones, of the same shapes and types.

        `of` says what is summed, in the same words in every worker: two sums of equal shapes are
        distinguished by it.

        Raises ConnectionError when a neighbour has gone, or makes another sum, and RuntimeError
        in a thread while another one of this worker is at a sum: they would have no order.
        """
        chunks = _chunks(tuple(array.size for array in arrays), self._size, apart=False)
        with self._at_sum():
            self._agree(arrays, of)
            sums = self._scatter(arrays, chunks)
            self._gather(sums, chunks)
        return [total.reshape(array.shape) for total, array in zip(sums, arrays, strict=True)]

    def reduce_scatter(self, *arrays: np.ndarray, of: str = "") -> list[np.ndarray]:
        """Return this worker's part of the sum of each array: flat, the elements `part` says.

        For half of the bytes of `sum`, and with two workers to its bits. With more the order of
        additions differs, as each array is divided among the workers by itself and not all of them
        one after the other. Raises as `sum`.
        """
        chunks = _chunks(tuple(array.size for array in arrays), self._size, apart=True)
        with self._at_sum():
            self._agree(arrays, f"the parts of {of}")
            sums = self._scatter(arrays, chunks)
        return [total[slice(*self.part(total.size))] for total in sums]

    def all_gather(
        self, *parts: np.ndarray, sizes: Sequence[int], of: str = ""
    ) -> list[np.ndarray]:
        """Return flat arrays of these sizes, of which each worker gives its `part`.

        Raises as `sum`.

        Args:
          parts: of each array the elements that `part` says.
          sizes: elements of each whole array.
          of: as in `sum`.
        """
        wholes = [np.empty(size, part.dtype) for size, part in zip(sizes, parts, strict=True)]
        for whole, part in zip(wholes, parts, strict=True):
            whole[slice(*self.part(whole.size))] = part.reshape(-1)
        with self._at_sum():
            self._agree(wholes, f"all of {of}")
            self._gather(wholes, _chunks(tuple(sizes), self._size, apart=True))
        return wholes

    def part(self, size: int) -> tuple[int, int]:
        """Return the first and the end of this worker's elements of a flat array of `size`."""
        own = (self._rank + 1) % self._size  # whole here first, of what goes round
        bounds = _bounds(size, self._size)
        return bounds[own], bounds[own + 1]

    @contextlib.contextmanager
    def _at_sum(self) -> Iterator[None]:
        """Let no other thread in, and leave the ring where what is done here fails."""
        if self.lost:
            raise ConnectionError(self.lost)
        if not self._at_work.acquire(blocking=False):
            raise RuntimeError(
                "two threads of this worker sum at once: what all tasks call has one order, and is"
                " called in one thread"
            )
        phases.set_at_sum(True)
        try:
            yield
        except OSError as error:
            self._leave(str(error))
            raise ConnectionError(self.lost) from error
        except BaseException as error:  # what is left on the wires belongs to no sum any more
            self._leave(f"a sum of this worker was interrupted: {type(error).__name__}")
            raise
        finally:
            phases.set_at_sum(False)
            self._at_work.release()

    def close(self) -> None:
        """End the connections; the neighbours' next sum fails."""
        self._leave("this worker has left the ring")

    def _leave(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._to_next.close()
        self._from_previous.close()

    def _scatter(
        self, arrays: Sequence[np.ndarray], chunks: Sequence[Sequence[_Piece]]
    ) -> list[np.ndarray]:
        """Sum around the ring; return flat arrays of which this worker's chunk alone is whole."""
        mine = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        sums = [np.empty_like(array) for array in mine]
        for hop in range(self._size - 1):
            out = _views(sums if hop else mine, chunks[(self._rank - hop) % self._size])
            self._add(out, mine, sums, chunks[(self._rank - hop - 1) % self._size])
        return sums

    def _gather(self, sums: Sequence[np.ndarray], chunks: Sequence[Sequence[_Piece]]) -> None:
        """Send this worker's chunk around the ring, and fill in those of the others."""
        for hop in range(self._size - 1):
            out = _views(sums, chunks[(self._rank + 1 - hop) % self._size])
            self._exchange(out, _views(sums, chunks[(self._rank - hop) % self._size]))

    def _agree(self, arrays: Sequence[np.ndarray], of: str) -> None:
        """Refuse to add what does not belong together."""
        what = f"{of} {[(array.dtype.name, array.shape) for array in arrays]}".encode()
        header = _HEADER.pack(self._sums, zlib.crc32(what), what[:_OF_BYTES])
        self._sums += 1
        theirs = bytearray(_HEADER.size)
        self._exchange(deque([memoryview(header)]), deque([memoryview(theirs)]))
        if theirs != header:
            self.differs = _in_words(theirs), _in_words(header)
            raise ConnectionError(
                f"{self._previous} makes another sum: {self.differs[0]}, where this worker is at"
                f" {self.differs[1]}"
            )

    def _add(
        self,
        out: deque[memoryview],
        mine: Sequence[np.ndarray],
        sums: Sequence[np.ndarray],
        pieces: Sequence[_Piece],
    ) -> None:
        """Receive the sum so far of these pieces, and add what this worker has."""
        sizes = [(stop - start) * mine[index].itemsize for index, start, stop in pieces]
        if len(self._scratch) < sum(sizes):
            self._scratch = bytearray(sum(sizes))
        whole, offset = memoryview(self._scratch), 0
        got = []
        for size in sizes:
            got.append(whole[offset : offset + size])
            offset += size
        self._exchange(out, deque(got))
        with np.errstate(all="ignore"):  # an overflow is for the loss scale to find
            for (index, start, stop), data in zip(pieces, got, strict=True):
                theirs = np.frombuffer(data, mine[index].dtype)
                np.add(theirs, mine[index][start:stop], out=sums[index][start:stop])

    def _exchange(self, out: deque[memoryview], into: deque[memoryview]) -> None:
        """Send all of `out` to the next worker while `into` is filled by the previous one."""
        while out or into:
            moved = bool(out) and self._send(out)
            moved |= bool(into) and self._receive(into)
            if not moved:
                self._wait(out, into)

    def _send(self, out: deque[memoryview]) -> bool:
        try:
            buffers = itertools.islice(out, _BUFFERS_A_CALL)
            sent = self._to_next.sendmsg(buffers, [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionError(f"{self._next} has gone: {error.strerror or error}") from error
        _take(out, sent)
        return True

    def _receive(self, into: deque[memoryview]) -> bool:
        try:
            buffers = list(itertools.islice(into, _BUFFERS_A_CALL))
            received = self._from_previous.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConnectionError(f"{self._previous} has gone: {reason}") from error
        if not received:
            raise ConnectionError(f"{self._previous} has gone: it has closed its connection")
        _take(into, received)
        return True

    def _wait(self, out: deque[memoryview], into: deque[memoryview]) -> None:
        poll = select.poll()
        if out:
            poll.register(self._to_next, select.POLLOUT)
        if into:
            poll.register(self._from_previous, select.POLLIN)
        poll.poll()

    @property
    def _next(self) -> str:
        return self._names[(self._rank + 1) % self._size]

    @property
    def _previous(self) -> str:
        return self._names[(self._rank - 1) % self._size]


@functools.lru_cache(maxsize=64)
def _chunks(sizes: tuple[int, ...], count: int, *, apart: bool) -> list[list[_Piece]]:
    """Divide arrays of these sizes, one after the other or each apart, into `count` chunks."""
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
    """Divide so many elements among workers, in whole vectors of the widest instructions.

    Elements after the last whole vector are computed one by one, and of some operations (`rsqrt`)
    to another last bit: so an element is computed in a part as in the whole.
    """
    vectors = -(-size // _VECTOR)
    return [min(size, vectors * chunk // count * _VECTOR) for chunk in range(count + 1)]


def _in_words(header: bytes | bytearray) -> str:
    number, _, what = _HEADER.unpack(header)
    cut = "" if what.endswith(b"\0") else "..."
    return f"sum {number} of the run, {what.rstrip(bytes(1)).decode(errors='replace')}{cut}"


def _views(arrays: Sequence[np.ndarray], pieces: Sequence[_Piece]) -> deque[memoryview]:
    return deque(arrays[i][start:stop].view(np.uint8).data for i, start, stop in pieces)


def _take(views: deque[memoryview], count: int) -> None:
    """Leave out the first `count` bytes."""
    while count:
        if count < len(views[0]):
            views[0] = views[0][count:]
            return
        count -= len(views.popleft())


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


@functools.cache
def _close_in_children() -> None:
    """Have forked children close their copies: neighbours see an end once the last is closed."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for ring in list(_rings):
        ring.close()
