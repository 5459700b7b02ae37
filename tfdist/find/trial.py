"""Child process of `find_batch_size`: trains a few steps of one batch size, and says what it took.

``python -m tfdist.find.trial`` reads one JSON object from its standard input and writes one to the
descriptor that it names. Data are zeros in the shape of the real ones. Nothing is unpickled: the
model is a ``.keras`` file, read in Keras' safe mode, or comes from ``file.py:function``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tfdist.launch.guardian import die_with

_OUT_OF_MEMORY = ("ResourceExhausted", "OOM", "bad_alloc", "out of memory", "MemoryError")


def main() -> int:
    """Run a trial; return 0 where its answer was written."""
    request = json.load(sys.stdin)
    die_with(int(request["parent"]))
    _be_the_first_to_go()
    try:
        answer = _run(request)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        key = "out_of_memory" if any(word in text for word in _OUT_OF_MEMORY) else "error"
        answer = {key: " ".join(text.split())[:500]}
    with os.fdopen(int(request["answer_fd"]), "w") as file:
        json.dump(answer, file)
    return 0


def _be_the_first_to_go() -> None:
    """Have the kernel end this process rather than another one when memory runs out."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def _run(request: dict[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")[:1]
    tf.config.set_visible_devices(gpus, "GPU")
    limit = request["gpu_limit_bytes"]
    for gpu in gpus if limit else ():
        part = tf.config.LogicalDeviceConfiguration(memory_limit=limit >> 20)
        tf.config.set_logical_device_configuration(gpu, [part])
    model, spec = _subject(request)
    batch_size, steps = int(request["batch_size"]), int(request["steps"])
    examples_per_second = _train(model, _zeros(spec, batch_size), batch_size, steps=steps)
    return {
        "peak_bytes": _peak_bytes(),
        "gpu_peak_bytes": _gpu_peak_bytes() if gpus else None,
        "examples_per_second": examples_per_second,
    }


def _subject(request: dict[str, Any]) -> tuple[Any, Any]:
    """Return the compiled model, and the nest of `tf.TensorSpec` of a batch."""
    import keras
    import tensorflow as tf

    if request["subject"] is not None:
        from tfdist.find.subject import read

        subject = read(request["subject"], strategy=tf.distribute.get_strategy())
        return subject.model, subject.spec()
    keras.config.set_dtype_policy(request["dtype_policy"])
    model = keras.models.load_model(request["model"])
    return model, decode_spec(request["spec"])


def _train(model: Any, data: Any, batch_size: int, *, steps: int) -> float:
    """Train so many steps; return the rate of all but the first, which traces."""
    from tfdist.training.fitting import fit

    parts = data if isinstance(data, tuple) else (data,)
    x, y, weight = (*parts, None, None)[:3]
    options = {"batch_size": batch_size, "sample_weight": weight, "verbose": 0}
    fit(model, x, y, epochs=1, **options)
    began_s = time.perf_counter()
    fit(model, x, y, epochs=steps, **options)
    return batch_size * steps / (time.perf_counter() - began_s)


def _zeros(spec: Any, batch_size: int) -> Any:
    import numpy as np
    import tensorflow as tf

    def zeros(part: Any) -> Any:
        if part is None:
            return None
        return np.zeros((batch_size, *part.shape[1:]), part.dtype.as_numpy_dtype)

    return tf.nest.map_structure(zeros, spec)


def _peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def _gpu_peak_bytes() -> int:
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])


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
