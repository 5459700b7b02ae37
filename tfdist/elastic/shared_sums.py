"""Memory in which members on one host sum: each writes its own part, and reads the others'.

Sockets would copy each array twice. Each member has one file without a name (memfd), with two
halves that it uses in turn. A member reads the others' half of an operation before it begins the
next one, and the half after that waits for all members. So no half is written while it is read.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import socket
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tfdist.elastic.shards import ALIGNMENT, Array


class SharedSums:
    """The memory of the members of one view.

    Args:
      member: Number of this member.
      peers: Sockets to the other members, which do not block.
      wait: Wait until there is a message of a peer.
    """

    def __init__(
        self, member: int, peers: Mapping[int, socket.socket], wait: Callable[[int], None]
    ) -> None:
        self._member, self._peers, self._wait = member, peers, wait
        self._half_bytes = self._turn = 0
        self._halves: dict[int, mmap.mmap] = {}

    def fits(self, like: Sequence[Array], blocks: int) -> bool:
        """Return whether each member can write this number of blocks, with arrays as in `like`."""
        return blocks * _starts(like)[-1] <= self._half_bytes

    def begin(self, like: Sequence[Array]) -> Callable[[int, int], list[Array]]:
        """Begin an operation. Every member makes this call.

        Return a function of a member and the number of its block that returns the block's arrays.
        """
        *starts, block_bytes = _starts(like)
        self._turn = 1 - self._turn
        first = self._turn * self._half_bytes

        def arrays_of(member: int, number: int) -> list[Array]:
            of, at = self._halves[member], first + number * block_bytes
            return [
                np.frombuffer(of, array.dtype, array.size, at + start).reshape(array.shape)
                for array, start in zip(like, starts, strict=True)
            ]

        return arrays_of

    def share(self, like: Sequence[Array], blocks: int) -> None:
        """Make memory for this number of blocks, and map the other members' memory.

        Every member makes this call, with the same sizes. Raises ConnectionError if a member has
        exited, and another OSError if this process cannot make or map the memory.
        """
        half_bytes = blocks * _starts(like)[-1]
        size = 2 * half_bytes
        fd = os.memfd_create("tfdist sums")
        try:
            os.ftruncate(fd, size)
            self._halves = {self._member: mmap.mmap(fd, size)}
            for end in self._peers.values():
                socket.send_fds(end, [b"\0"], [fd])
        finally:
            os.close(fd)
        for peer, end in self._peers.items():
            self._halves[peer] = self._mapped(peer, end, size)
        self._half_bytes = half_bytes

    def _mapped(self, peer: int, end: socket.socket, size: int) -> mmap.mmap:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(end, 1, 1, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                self._wait(peer)
        if not data:
            raise ConnectionError("the peer has exited")
        if not fds:
            raise OSError(errno.EMFILE, "no file descriptor is left for a worker's memory")
        try:
            return mmap.mmap(fds[0], size)
        finally:
            os.close(fds[0])


def _starts(like: Sequence[Array]) -> list[int]:
    """Return the first byte of each array in a block, and the size of the block."""
    sizes = (-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in like)
    return list(itertools.accumulate(sizes, initial=0))
