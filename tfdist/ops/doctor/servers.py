"""``python -m tfdist.ops.doctor.servers INDEX ADDRESS...``: an all-reduce, a push and a pull.

A server of TensorFlow on each host; the first has them reduce, push and pull, and prints what came
of it as JSON. It ends with its standard input, so that it never outlives the doctor.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.launch.events import decode, encode, signal_name
from tfdist.ops.doctor.facts import Exchange

SIZE_BYTES = 4 << 20
_ROUNDS = 6
_LONG_S = 0.5
_PIECE_BYTES = 1 << 20
_STEP_MS = 10_000


def main(argv: Sequence[str]) -> int:
    """Serve, or in the first task have the others work; return the exit code."""
    index, addresses = int(argv[0]), list(argv[1:])
    threading.Thread(target=_end_with_input, daemon=True).start()
    _stage("importing TensorFlow")
    import tensorflow as tf

    tf.compat.v1.disable_eager_execution()
    config = tf.compat.v1.ConfigProto()
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    config.experimental.recv_buf_max_chunk = _PIECE_BYTES  # as the strategies have it
    server = tf.distribute.Server(
        {"worker": addresses}, job_name="worker", task_index=index, config=config
    )
    if index:
        server.join()
    found = _exchange(tf, server.target, config, len(addresses))
    print(json.dumps(encode(found)), flush=True)
    return 0


def _exchange(tf: Any, target: str, config: Any, tasks: int) -> Exchange:
    graph = tf.Graph()
    with graph.as_default():
        sums, reduce = _all_reduce(tf, tasks)
        with tf.device(_device(tasks - 1)):
            weights = tf.compat.v1.Variable(tf.zeros([_length()]), use_resource=True)
        with tf.device(_device(0)):
            gradient = tf.fill([_length()], tf.compat.v1.random_uniform([]))
            pull = tf.reduce_sum(weights.read_value())
        with tf.device(_device(tasks - 1)):
            push = weights.assign_add(gradient, read_value=False)
    options = tf.compat.v1.RunOptions(timeout_in_ms=_STEP_MS)
    with tf.compat.v1.Session(target, graph=graph, config=config) as session:

        def run(what: Any) -> Any:
            return session.run(what, options=options)

        _stage("waiting for the servers of the other hosts")
        run(weights.initializer)
        _stage("in the all-reduce")
        expected = tasks * (tasks + 1) / 2
        is_right = all(value == expected for value in run(sums))
        reduce_s = _best_s(lambda: run(reduce))
        _stage("in the push")
        push_s = _best_s(lambda: run(push))
        _stage("in the pull")
        pull_s = _best_s(lambda: run(pull))
    return Exchange(
        size_bytes=SIZE_BYTES,
        is_right=is_right,
        reduce_s=reduce_s,
        push_s=push_s,
        pull_s=pull_s,
    )


def _all_reduce(tf: Any, tasks: int) -> tuple[list[Any], Any]:
    """Return the ends of what each task has of the sum, and the operation that makes it."""
    ends, made = [], []
    for index in range(tasks):
        with tf.device(_device(index)):
            total = tf.raw_ops.CollectiveReduceV2(
                input=tf.fill([_length()], float(index + 1)),
                group_size=tasks,
                group_key=1,
                instance_key=1,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                communication_hint="ring",
            )
            ends += [total[0], total[-1]]
            made.append(total.op)
    return ends, tf.group(*made)


def _device(index: int) -> str:
    return f"/job:worker/task:{index}/device:CPU:0"


def _length() -> int:
    return SIZE_BYTES // 4


def _best_s(run: Callable[[], object]) -> float:
    """Return the shortest time of several rounds, of two where one takes long."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < _ROUNDS and sum(times) < _LONG_S):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _stage(name: str) -> None:
    """Print the stage; the last line is shown for a process that does not end."""
    print(name, file=sys.stderr, flush=True)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


# Starting this program beside the doctor, and hearing what came of it in time.

DEADLINE_S = 40.0

_MAX_OUTPUT_BYTES = 64 << 10
# What TensorFlow says on every machine without GPUs.
_NOISE = re.compile(r"WARNING: All log messages before absl|[IW]\d{4} |E\d{4} .*cuInit")


class ServerProcess:
    """TensorFlow's server of one index, in a process of its own."""

    def __init__(self, index: int, addresses: Sequence[str], *, environ: Mapping[str, str]) -> None:
        # What is tried is what tasks on CPUs do: no GPU is taken from whoever has them.
        own = {**environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        own.pop("TF_CONFIG", None)
        # In memory: a pod may have no directory to write to.
        self._stdout = open(os.memfd_create("stdout"), "w+b")  # noqa: SIM115  # closed in close
        self._stderr = open(os.memfd_create("stderr"), "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tfdist.ops.doctor.servers", str(index), *addresses],
            stdin=subprocess.PIPE,
            stdout=self._stdout,
            stderr=self._stderr,
            env=own,
        )

    def close(self) -> None:
        """End the server."""
        with self._process as process, self._stdout, self._stderr:
            process.kill()

    def result(self) -> Exchange:
        """Wait for the result, on the host of the first server."""
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            return Exchange(error=self._why(f"no result after {DEADLINE_S:.0f} s"))
        if failed := self.failure():
            return Exchange(error=failed)
        self._stdout.seek(0)
        return decode(Exchange, json.loads(self._stdout.read(_MAX_OUTPUT_BYTES)))

    def failure(self) -> str:
        """Return why the server has ended; empty while it has not failed."""
        code = self._process.poll()
        if not code:
            return ""
        return self._why(f"ended by {signal_name(-code)}" if code < 0 else f"exit code {code}")

    def _why(self, what: str) -> str:
        """Return what happened, and the last line that the server has printed."""
        size = self._stderr.seek(0, 2)
        self._stderr.seek(max(0, size - _MAX_OUTPUT_BYTES))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip() and not _NOISE.match(line)]
        return f"{what}: {lines[-1][:500]}" if lines else what


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the servers of the others are gone, and TensorFlow would wait for them
