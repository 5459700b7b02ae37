"""A fixed piece of work on all CPUs of this host at once, to find the host that is slower."""

from __future__ import annotations

import hashlib
import threading
import time

_PIECE_BYTES = 16 << 20
_ROUNDS = 6


def work_s(cpus: int) -> float:
    """Returns how long the piece took each of `cpus` threads, in the best of a few rounds.

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
