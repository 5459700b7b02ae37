"""Estimated against measured memory of a training, for models of keras.applications.

    python benchmarks/memory_estimates.py [MODEL:SIZE:BATCH ...] > benchmarks/MEMORY.md

Each model trains three steps in a fresh process, three times. Measured is the largest resident
size that the process had, less that of a started TensorFlow: the median of the three, as the order
in which TensorFlow's threads happen to take the ops of a step decides how much is held at once.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

SIX = (
    "MobileNetV2:128:16",
    "ResNet50:128:16",
    "DenseNet121:128:16",
    "EfficientNetB0:128:16",
    "VGG16:128:16",
    "NASNetMobile:224:8",
)

CHILD = """
import json, sys
import keras, numpy as np, tensorflow as tf
import tfdist
from tfdist.find.memory import estimate_memory
def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))
name, size, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tf.function(lambda x: tf.linalg.matmul(x, x))(tf.ones((64, 64)))
before = status("VmRSS")
model = getattr(keras.applications, name)(
    weights=None, input_shape=(size, size, 3), classes=100)
model.compile("adam", "sparse_categorical_crossentropy")
x, y = np.zeros((batch, size, size, 3), "float32"), np.zeros(batch, "int32")
tfdist.fit(model, x, y, batch_size=batch, epochs=3, verbose=0)
measured = status("VmHWM") - before
found, names = estimate_memory(model, batch), "weights gradients slots activations program peak"
print(json.dumps([measured, {n: getattr(found, n) for n in names.split()}]))
"""


def measure(what: str, *, runs: int = 3, threads: int | None = None) -> tuple[int, dict[str, int]]:
    """Return the measured bytes of one model, and its estimate; TensorFlow's own threads if None.

    One thread takes the ops always in the same order.
    """
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")  # more hold more at once
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ |= dict.fromkeys(names, str(threads)) if threads else {}
    environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", CHILD, *what.split(":")]
    peaks = []
    for _ in range(runs):
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{what}: {done.stderr[-2000:]}")
        measured, estimate = json.loads(done.stdout.splitlines()[-1])
        peaks.append(measured)
    return statistics.median(peaks), estimate


def main() -> None:
    """Print a table in MiB, a row for each model."""
    parts = ("weights", "slots", "activations", "program")
    print(f"| model | measured | estimated | off by | {' | '.join(parts)} |")
    print("|---" * (4 + len(parts)) + "|", flush=True)
    for what in sys.argv[1:] or SIX:
        measured, estimate = measure(what)
        cells = [what, measured >> 20, estimate["peak"] >> 20]
        cells += [f"{estimate['peak'] / measured - 1:+.1%}", *(estimate[p] >> 20 for p in parts)]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
