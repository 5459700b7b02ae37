"""Program of the jobs of `benchmarks.split_sizes`: trains a step when it is told to.

``python -m benchmarks.split_trial REQUEST SOCKET``. Each task pins itself to a core of its own
where there are enough. The first step of several stages finds the cut, and the split size where it
is to be found. Then come steps of all sizes, round after round. The chief waits for a line on the
socket before each step, and answers with its seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import keras
import numpy as np

from benchmarks.subject import Subject, read
from tfdist.data.resolve import as_source
from tfdist.data.source import spec_of_batches
from tfdist.find.batch_size import zeros
from tfdist.strategy import current_job, make_strategy
from tfdist.strategy.job import Job
from tfdist.strategy.pipeline_setup import PipelineOptions
from tfdist.training.fitting import fit


class Steps(keras.callbacks.Callback):
    """Sets the size of each step's micro-batches, and waits and answers in the chief.

    Args:
      job: of this task.
      sizes: of all steps; 0 for the size that the first one has found.
      path: of the socket.
    """

    def __init__(self, job: Job, sizes: list[int], path: str) -> None:
        super().__init__()
        assert job.stages is not None
        self._chosen, self._sizes, self._found = job.stages.chosen, sizes, 0
        self._lines: Any = None
        if job.is_chief:
            self._end = socket.socket(socket.AF_UNIX)
            self._end.connect(path)
            self._lines = self._end.makefile("rw")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        size = self._sizes[batch] or self._found
        if size:
            self._chosen.split_size = size
        if self._lines is not None and not self._lines.readline():
            raise SystemExit("who asked for the steps has gone")
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        seconds = time.perf_counter() - self._began_s
        size = self._chosen.split_size or 0
        self._found = self._found or size
        if self._lines is not None:
            answer = {"seconds": seconds, "size": size}
            self._lines.write(json.dumps(answer) + "\n")
            self._lines.flush()


def main() -> int:
    """Train until all steps are done; return the exit code."""
    request, path = json.loads(sys.argv[1]), sys.argv[2]
    sizes = request["first"] + request["sizes"] * request["rounds"]
    options = PipelineOptions(
        split_size="auto" if 0 in request["sizes"] else None,
        schedule=request["schedule"],
        keep=request["keep"],
    )
    strategy = make_strategy(pipeline=options, threads=1)
    job = current_job()
    assert job is not None
    _pin(job)
    subject = _subject(request, strategy)
    x, y, weight = zeros(spec_of_batches(as_source(subject.x, subject.y)), request["batch_size"])
    fit(
        subject.model,
        x,
        y,
        batch_size=request["batch_size"],
        sample_weight=weight,
        steps_per_epoch=len(sizes),
        callbacks=[Steps(job, sizes, path)],
        verbose=0,
        fused_kernels=request["fused_kernels"],
    )
    return 0


def _pin(job: Job) -> None:
    """Have a core alone, unless there are fewer cores than tasks."""
    assert job.config is not None
    tasks, cores = job.config.cluster.training_tasks(), sorted(os.sched_getaffinity(0))
    if len(tasks) <= len(cores):
        core = cores[-1 - tasks.index(job.config.task)]  # the first one serves interrupts
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})


def _subject(request: dict[str, Any], strategy: Any) -> Subject:
    if request["subject"]:
        return read([request["subject"]], strategy=strategy)
    size = request["image_size"]
    with strategy.scope():
        model = keras.applications.ResNet50(
            weights=None, input_shape=(size, size, 3), classifier_activation=None
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3), loss)
    return Subject(model=model, x=np.zeros((1, size, size, 3), "float32"), y=np.zeros(1, "int32"))


if __name__ == "__main__":
    sys.exit(main())
