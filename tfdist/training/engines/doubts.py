"""Workers that answer and get nothing done, as one does that cannot reach a parameter server."""

from __future__ import annotations

import collections

_MOST = 3  # failures in a row; one that came back unseen fails once


class Doubts:
    """Counts the pieces in a row that workers could not do, although they were there."""

    def __init__(self) -> None:
        self._failures: collections.Counter[int] = collections.Counter()
        self.left_out: frozenset[int] = frozenset()

    def did(self, worker: int) -> None:
        """A worker has done a piece."""
        self._failures.pop(worker, None)

    def failed(self, worker: int, error: BaseException) -> str | None:
        """Returns a line once a worker is to be left out."""
        self._failures[worker] += 1
        if self._failures[worker] < _MOST or worker in self.left_out:
            return None
        self.left_out |= {worker}
        said = first_line(error)
        return f"worker-{worker} answers, but none of {_MOST} pieces of work got done: {said}"


def first_line(error: BaseException) -> str:
    """What an error says, in a line that is not too long."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
