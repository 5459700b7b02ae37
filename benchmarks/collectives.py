"""``python -m benchmarks.collectives``: seconds of tfdist's collectives beside gloo and TensorFlow.

Expectation, before the first run: the ring sends by Unix sockets and gloo by TCP over loopback, so
tfdist takes at most 1.1 of gloo's time from 64 KB on. Below, Python's calls dominate. TensorFlow
copies each array through protocol buffers and takes several times as long for large arrays.

Each side runs in processes of its own, in turn, for several rounds. Each row has the median time
of the slowest task. ``--peer`` is a Python with torch, such as benchmarks/.venv/bin/python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SIZES = [2**10, 2**13, 2**16, 2**19, 2**22, 2**24, 2**26]
SIDES = ("tfdist", "gloo", "tensorflow")
_MARK = '{"side": '
_BUDGET_S = 0.6  # of the calls of one kind and size
_TIMEOUT_S = 300

Calls = dict[str, Callable[[], Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tasks", default="2,4", help="numbers of tasks")
    parser.add_argument("--sizes", default=SIZES, type=_whole_numbers, help="bytes of an array")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--peer", default=str(ROOT / "benchmarks/.venv/bin/python"))
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        return run_side(options.side, int(options.tasks), options.sizes)
    rows = []
    for tasks in map(int, options.tasks.split(",")):
        seconds: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(dict)
        for _ in range(options.rounds):
            for side in SIDES:
                for row in of_side(side, tasks, options.sizes, options.peer):
                    of_sides = seconds[row["call"], row["bytes"]]
                    of_sides.setdefault(side, []).append(row["seconds"])
        for (call, size), of_sides in seconds.items():
            median = {side: statistics.median(each) for side, each in of_sides.items()}
            rows.append({"tasks": tasks, "call": call, "bytes": size, **median})
    print(table(rows))
    if options.json:
        record = {"cpus": len(os.sched_getaffinity(0)), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _whole_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| tasks | call | bytes | tfdist, ms | of gloo | of TensorFlow |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        ours = row["tfdist"]
        ratios = [f"{ours / row[s]:.2f}" if s in row else "" for s in ("gloo", "tensorflow")]
        lines.append(
            f"| {row['tasks']} | {row['call']} | {row['bytes']:,} | {ours * 1000:.3f} | "
            + " | ".join(ratios)
            + " |"
        )
    return "\n".join(lines)


def of_side(side: str, tasks: int, sizes: Sequence[int], peer: str) -> list[dict[str, Any]]:
    """Run one side and return its rows."""
    own = ["-m", "benchmarks.collectives", "--side", side, "--tasks", str(tasks)]
    own += ["--sizes", ",".join(map(str, sizes))]
    python = peer if side == "gloo" else sys.executable
    command = [python, *own]
    if side != "gloo":
        command = [python, "-m", "tfdist.launch", "--strategy", "multiworker"]
        command += ["--workers", str(tasks), "--run_dir", f"/tmp/collectives-{os.getpid()}", *own]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if ran.returncode:
        raise SystemExit(
            f"{side} ended with {ran.returncode}:\n{(ran.stdout + ran.stderr)[-3000:]}"
        )
    lines = [line[line.index(_MARK) :] for line in ran.stdout.splitlines() if _MARK in line]
    return [json.loads(line) for line in lines]


def run_side(side: str, tasks: int, sizes: Sequence[int]) -> int:
    """Measure in this process, or in processes of its own."""
    if side == "gloo":
        import torch.multiprocessing as processes

        processes.spawn(_of_gloo, (tasks, sizes), nprocs=tasks)
    elif side == "tfdist":
        _of_tfdist(tasks, sizes)
    else:
        _of_tensorflow(sizes)
    return 0


def measure(
    side: str,
    sizes: Sequence[int],
    calls_of: Callable[[int], Calls],
    slowest: Callable[[float], float],
    rank: int,
) -> None:
    """Print the median seconds of each call and size."""
    for size in sizes:
        for name, call in calls_of(size).items():
            seconds: list[float] = []
            rounds = 3
            while len(seconds) < rounds:
                slowest(0.0)  # the tasks begin together
                began_s = time.perf_counter()
                call()
                seconds.append(slowest(time.perf_counter() - began_s))
                if len(seconds) == 3:
                    rounds = int(min(200, max(5, _BUDGET_S / max(seconds[1:]))))
            if rank == 0:
                row = {"side": side, "call": name, "bytes": size}
                print(json.dumps({**row, "seconds": statistics.median(seconds[1:])}), flush=True)


def _of_tfdist(tasks: int, sizes: Sequence[int]) -> None:
    import tfdist

    strategy = tfdist.make_strategy()
    rank = strategy.cluster_resolver.task_id

    def calls_of(size: int) -> Calls:
        array = np.full(size // 4, rank, np.float32)
        rows = np.zeros((tasks, size // 4), np.float32) if rank == 0 else None
        return {
            "all_reduce": lambda: tfdist.all_reduce(array),
            "reduce": lambda: tfdist.reduce(array),
            "broadcast": lambda: tfdist.broadcast(array),
            "scatter": lambda: tfdist.scatter(rows),
            "gather": lambda: tfdist.gather(array),
            "all_gather": lambda: tfdist.all_gather(array),
        }

    measure("tfdist", sizes, calls_of, lambda s: float(tfdist.all_gather(s).max()), rank)
    tfdist.barrier()


def _of_gloo(rank: int, tasks: int, sizes: Sequence[int]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29517"))
    dist.init_process_group("gloo", rank=rank, world_size=tasks)

    def calls_of(size: int) -> Calls:
        array = torch.full((size // 4,), float(rank))
        mine = torch.empty_like(array)
        rows = [torch.empty_like(array) for _ in range(tasks)]
        of_root = rows if rank == 0 else None
        return {
            # as tfdist's calls, which return new arrays
            "all_reduce": lambda: dist.all_reduce(array.clone()),
            "reduce": lambda: dist.reduce(array.clone(), 0),
            "broadcast": lambda: dist.broadcast(array, 0),
            "scatter": lambda: dist.scatter(mine, of_root, 0),
            "gather": lambda: dist.gather(array, of_root, 0),
            "all_gather": lambda: dist.all_gather(rows, array),
        }

    def slowest(seconds: float) -> float:
        each = [torch.zeros(1, dtype=torch.float64) for _ in range(tasks)]
        dist.all_gather(each, torch.tensor([seconds], dtype=torch.float64))
        return max(float(one) for one in each)

    measure("gloo", sizes, calls_of, slowest, rank)
    dist.destroy_process_group()


def _of_tensorflow(sizes: Sequence[int]) -> None:
    import tensorflow as tf

    import tfdist

    strategy = tfdist.make_strategy()
    rank = strategy.cluster_resolver.task_id

    def in_replica(call: Callable[..., Any]) -> Callable[..., Any]:
        run = tf.function(lambda array: strategy.run(call, args=(array,)), autograph=False)
        return lambda array: run(array).numpy()

    context = tf.distribute.get_replica_context
    sum_of = in_replica(lambda array: context().all_reduce("SUM", tf.identity(array)))
    all_of = in_replica(lambda array: context().all_gather(tf.identity(array), axis=0))

    def calls_of(size: int) -> Calls:
        array = tf.fill([size // 4], float(rank))
        return {
            "all_reduce": lambda: sum_of(array),
            "all_gather": lambda: all_of(array),
        }

    measure("tensorflow", sizes, calls_of, lambda s: float(tfdist.all_gather(s).max()), rank)
    tfdist.barrier()


if __name__ == "__main__":
    sys.exit(main())
