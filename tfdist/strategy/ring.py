"""Ring all-reduce over a job's workers: each sends to the next one.

TensorFlow's own ring copies every piece through protocol buffers several times
(``GrpcRemoteWorker::RecvBufAsync``), which for a few megabytes takes longer on a CPU than the wire.
This one hands the tensors' own memory to the sockets. Every worker sends and receives
``2 (n - 1) / n`` of the bytes, which is the least there can be (Patarasuk and Yuan, 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002), and all end with the same bits.
"""

from __future__ import annotations

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
from collections.abc import Sequence

import numpy as np

from tfdist import phases

_OF_BYTES = 120
# How many sums before this one, a checksum of what it is of, and that in words.
_HEADER = struct.Struct(f"<QI{_OF_BYTES}s")
_BUFFERS_A_CALL = 64
_Piece = tuple[int, int, int]  # of which array, from and up to which element


class Ring:
    """One worker's place in the ring. Every worker makes the same sums in the same order.

    Args:
      rank: this worker's place, from 0.
      size: how many workers there are, at least 2.
      to_next: connected to the worker after this one.
      from_previous: connected to the worker before this one.
      names: what to call each worker in an error.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        to_next: socket.socket,
        from_previous: socket.socket,
        names: Sequence[str],
    ) -> None:
        self._rank, self._size, self._names = rank, size, names
        self._to_next, self._from_previous = to_next, from_previous
        self._sums = 0
        self._at_work = threading.Lock()
        self._scratch = bytearray()
        self.lost = ""
        """What went wrong with a neighbour, once something has; no sum can be made any more."""
        self.differs: tuple[str, str] | None = None
        """The neighbour's sum and this worker's where the neighbour makes another one."""
        for end in (to_next, from_previous):
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
        if self.lost:
            raise ConnectionError(self.lost)
        if not self._at_work.acquire(blocking=False):
            raise RuntimeError(
                "two threads of this worker sum at once: what all tasks call has one order, and is"
                " called in one thread"
            )
        phases.set_at_sum(True)
        try:
            return self._sum(arrays, of)
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

    def _sum(self, arrays: Sequence[np.ndarray], of: str) -> list[np.ndarray]:
        mine = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        sums = [np.empty_like(array) for array in mine]
        chunks = _chunks(tuple(array.size for array in mine), self._size)
        self._agree(arrays, of)
        for hop in range(self._size - 1):
            out = _views(sums if hop else mine, chunks[(self._rank - hop) % self._size])
            self._add(out, mine, sums, chunks[(self._rank - hop - 1) % self._size])
        for hop in range(self._size - 1):
            out = _views(sums, chunks[(self._rank + 1 - hop) % self._size])
            self._exchange(out, _views(sums, chunks[(self._rank - hop) % self._size]))
        return [total.reshape(array.shape) for total, array in zip(sums, arrays, strict=True)]

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
def _chunks(sizes: tuple[int, ...], count: int) -> list[list[_Piece]]:
    """Divide arrays of these sizes, one after the other, into `count` runs of elements."""
    starts = [0, *itertools.accumulate(sizes)]
    bounds = [starts[-1] * chunk // count for chunk in range(count + 1)]
    return [
        [
            (index, max(low, start) - start, min(high, start + size) - start)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=False))
            if max(low, start) < min(high, start + size)
        ]
        for low, high in itertools.pairwise(bounds)
    ]


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
