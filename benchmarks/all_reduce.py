"""``python -m benchmarks.all_reduce``: seconds of a sum over tasks, naive and by tfdist's ring.

Naive: task 0 receives the arrays of all tasks, adds them, and sends the sum to all tasks. Tasks
are processes of this machine that are connected by Unix sockets, as `tfdist.strategy.ring` is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.strategy.ring import Ring

_BUFFER_BYTES = 4 * 2**20  # the ring's
_TIMEOUT_S = 120.0

Sum = Callable[[np.ndarray], np.ndarray]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tasks", default="2,4,8", help="numbers of tasks")
    parser.add_argument("--mib", default="1,4,16,64", help="sizes of the array")
    parser.add_argument("--rounds", type=int, default=9, help="sums of each kind and size")
    parser.add_argument("--json", type=Path, help="file for the record")
    options = parser.parse_args(argv)
    rows = []
    for tasks in map(int, options.tasks.split(",")):
        for row in measure(tasks, [int(m) for m in options.mib.split(",")], options.rounds):
            naive_s, ring_s = (statistics.median(row[kind]) for kind in ("naive_s", "ring_s"))
            print(f"{tasks} tasks, {row['mib']} MiB: naive {naive_s:.4f} s, ring {ring_s:.4f} s")
            rows.append({"tasks": tasks, **row})
    if options.json:
        record = {"cpus": len(os.sched_getaffinity(0)), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measure(tasks: int, mib: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of task 0 for each sum, with both kinds in turn."""
    ring = [_pair() for _ in range(tasks)]  # of task i and the next task
    star = [_pair() for _ in range(tasks)]  # of task 0 and task i
    context = multiprocessing.get_context("fork")
    others = []
    for rank in range(1, tasks):
        own = (rank, tasks, (ring[rank][0], ring[rank - 1][1]), [star[rank][1]], mib, rounds)
        others.append(context.Process(target=_run, args=own, daemon=True))
        others[-1].start()
    ends = [pair[0] for pair in star[1:]]
    rows = _run(0, tasks, (ring[0][0], ring[-1][1]), ends, mib, rounds)
    for other in others:
        other.join(_TIMEOUT_S)
        if other.exitcode != 0:
            raise SystemExit(f"a task ended with {other.exitcode}")
    return rows


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return pair


def _run(
    rank: int,
    tasks: int,
    neighbours: tuple[socket.socket, socket.socket],
    star: Sequence[socket.socket],
    mib: Sequence[int],
    rounds: int,
) -> list[dict[str, Any]]:
    ring = Ring(rank, [f"task-{i}" for i in range(tasks)], neighbours)
    kinds: dict[str, Sum] = {
        "naive_s": lambda array: naive_sum(rank, array, star),
        "ring_s": lambda array: ring.sum(array)[0],
    }
    rows = []
    for size in mib:
        array = np.full(size * 2**18, rank + 1, np.float32)
        row: dict[str, Any] = {"mib": size, **{kind: [] for kind in kinds}}
        for number in range(rounds + 1):
            for kind, summed in kinds.items():
                ring.sum(np.zeros(1, np.float32))  # all tasks start together
                began_s = time.perf_counter()
                total = summed(array)
                if number:  # the first round is a warm-up
                    row[kind].append(time.perf_counter() - began_s)
                if total[0] != total[-1] or total[0] != tasks * (tasks + 1) / 2:
                    raise SystemExit(f"{kind}: wrong sum {total[0]}")
        rows.append(row)
    return rows


def naive_sum(rank: int, array: np.ndarray, star: Sequence[socket.socket]) -> np.ndarray:
    """Return the sum. Task 0 has a connection to each other task, which has one to task 0."""
    if rank:
        star[0].sendall(memoryview(array).cast("B"))
        total = np.empty_like(array)
        _receive(star[0], total)
        return total
    total, received = array.copy(), np.empty_like(array)
    for end in star:
        _receive(end, received)
        total += received
    for end in star:
        end.sendall(memoryview(total).cast("B"))
    return total


def _receive(end: socket.socket, array: np.ndarray) -> None:
    left = memoryview(array).cast("B")
    while left:
        if not (count := end.recv_into(left)):
            raise SystemExit("a task has exited")
        left = left[count:]


if __name__ == "__main__":
    sys.exit(main())
