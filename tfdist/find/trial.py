"""Child process of `find_batch_size`: trains a few steps of one batch size, and says what it took.

``python -m tfdist.find.trial`` reads one JSON object from its standard input and writes one to its
standard output. Data are zeros in the shape of the real ones. Nothing is unpickled: the
model is a ``.keras`` file, read in Keras' safe mode, or comes from ``file.py:function``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import UsageError
from tfdist.launch.guardian import die_with

_OUT_OF_MEMORY = re.compile(r"ResourceExhausted|\bOOM\b|bad_alloc|out of memory|MemoryError")


def main() -> int:
    """Run a trial; return 0 where its answer was written."""
    request = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the program prints is no answer
    die_with(int(request["parent"]))
    with contextlib.suppress(OSError):  # a container may have /proc to read alone
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first to go without memory
    try:
        answer = _run(request)
    except UsageError as error:
        parts = ("where", "received", "expected", "fix", "code")
        answer = {"refused": {part: str(getattr(error, part)) for part in parts}}
    except Exception as error:
        answer = failure(error)
    with output:
        json.dump(answer, output)
    return 0


def failure(error: Exception) -> dict[str, str]:
    """Return the answer of a trial that has failed: for want of memory, or for something else."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return {"out_of_memory" if _OUT_OF_MEMORY.search(text) else "error": text[:500]}


def _run(request: dict[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")[:1]
    tf.config.set_visible_devices(gpus, "GPU")
    limit = request["gpu_limit_bytes"]
    for gpu in gpus if limit else ():
        part = tf.config.LogicalDeviceConfiguration(memory_limit=limit >> 20)
        tf.config.set_logical_device_configuration(gpu, [part])
    model, spec = _subject(request)
    data = zeros(spec, int(request["batch_size"]))
    examples_per_second, cores = _train(model, data, request)
    gpu = tf.config.experimental.get_memory_info("GPU:0") if gpus else {"peak": None}
    return {
        "peak_bytes": _peak_bytes(),
        "gpu_peak_bytes": gpu["peak"],
        "examples_per_second": examples_per_second,
        "cores": cores,
        "parameters": model.count_params(),
    }


def _subject(request: dict[str, Any]) -> tuple[Any, Any]:
    """Return the compiled model, and the nest of `tf.TensorSpec` of a batch."""
    import keras
    import tensorflow as tf

    if request["subject"] is not None:
        from tfdist.find.subject import read, spec_of

        subject = read(request["subject"], strategy=tf.distribute.get_strategy())
        return subject.model, spec_of(subject.x, subject.y)
    keras.config.set_dtype_policy(request["dtype_policy"])
    model = keras.models.load_model(request["model"])
    return model, decode_spec(request["spec"])


def _train(model: Any, data: Sequence[Any], request: dict[str, Any]) -> tuple[float, float]:
    """Train rounds of so many steps; return the examples per second, and the cores that were busy.

    The first round, which traces, is left out; the others go on for `least_s`.
    """
    import keras

    from tfdist.training.fitting import fit

    batch_size, steps = int(request["batch_size"]), int(request["steps"])
    began, took = list[float](), list[float]()

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            now = (time.perf_counter(), time.process_time())
            began.extend(() if began else now)
            took[:] = epoch, now[0] - began[0], now[1] - began[1]
            self.model.stop_training = bool(epoch) and took[1] >= request["least_s"]

    x, y, weight = data
    fit(
        model,
        x,
        y,
        batch_size=batch_size,
        sample_weight=weight,
        epochs=1000,
        steps_per_epoch=steps,
        callbacks=[Clock()],
        verbose=0,
    )
    rounds, wall_s, busy_s = took
    return batch_size * steps * rounds / wall_s, busy_s / wall_s


def zeros(spec: Any, batch_size: int) -> tuple[Any, Any, Any]:
    """Return x, y and sample weights of zeros, or of empty strings; None for what is not there."""
    import tensorflow as tf

    def make(part: Any) -> Any:
        return part if part is None else tf.zeros((batch_size, *part.shape[1:]), part.dtype).numpy()

    data = tf.nest.map_structure(make, spec)
    x, y, weight = (*(data if isinstance(data, tuple) else (data,)), None, None)[:3]
    return x, y, weight


def _peak_bytes() -> int:
    """Return the most that this process had in memory; getrusage has what made it in it, too."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def encode_spec(spec: Any) -> Any:
    """Return a nest of `tf.TensorSpec` as JSON says it."""
    if isinstance(spec, dict):
        return {"dict": {key: encode_spec(part) for key, part in spec.items()}}
    if isinstance(spec, list | tuple):
        return {"tuple": [encode_spec(part) for part in spec]}
    return None if spec is None else [list(spec.shape), spec.dtype.name]


def decode_spec(value: Any) -> Any:
    """Return what `encode_spec` was given."""
    import tensorflow as tf

    if isinstance(value, dict) and "dict" in value:
        return {key: decode_spec(part) for key, part in value["dict"].items()}
    if isinstance(value, dict):
        return tuple(map(decode_spec, value["tuple"]))
    return None if value is None else tf.TensorSpec(*value)


if __name__ == "__main__":
    sys.exit(main())
