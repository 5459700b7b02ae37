"""The Python of the pages runs: the blocks of a page one after the other, as one program.

A block that is marked `py` is the other side of a page in docs/migrate or of Ray's: it runs in
tests/migrations, where its library is installed.
"""

import os
import re
from pathlib import Path

import pytest

from tests import forked_python
from tests.unit.test_docs import PAGES, ROOT, name_of, python_blocks

pytestmark = pytest.mark.slow

DEADLINE_S = 240
SMALLER = {
    "total_examples=1_000_000": "total_examples=1_000",
    "max_trials=20": "max_trials=1",
    "range(2000)": "range(20)",
    "range(5000)": "range(20)",
    "find_batch_size(model, x, y)": "find_batch_size(model, x, y, first=8, most=8, steps=1)",
    "loop.run(100)": "loop.run(2)",
    '"127.0.0.1:8500"': "grpc_address",
    '"http://127.0.0.1:8501/': 'f"http://{rest}/',
}
"""What is shorter here than in the pages, or has a port of the system's choice."""

DATA = """
import os, sys
import keras
import numpy as np
import tensorflow as tf
import tfdist
rng = np.random.default_rng(1)
x, y = rng.random(SHAPE, "float32"), np.arange(SHAPE[0]) % 10
xv, yv = x[:32], y[:32]

def make_model():
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input(SHAPE[1:]), layers.Flatten(), layers.Dense(8, name="encoder"),
         layers.Dense(10, activation="softmax", name="head")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

build_and_compile = make_model
"""
MODEL = """
strategy = tfdist.make_strategy()
with strategy.scope():
    model = make_model()
"""
FLAT, IMAGES = "SHAPE = (512, 64)", "SHAPE = (512, 8, 8, 1)"

GAN = f"""
sys.path.insert(0, {str(ROOT / "docs" / "examples")!r})
import gan
images = rng.random((128, 8, 8, 1), "float32")

def make_models():
    global step
    models = gan.make_models()
    made = gan.make_step(*models, keras.random.SeedGenerator(7))
    def step(data):
        seen.update_state(tf.ones(tf.shape(data)[:1]))
        return made(data)
    return models
"""
RECORDS = """
def augment(batch, *, example_ids, epoch, seed):
    return batch

os.mkdir("data")
np.save("x.npy", x)
FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)
}
with tf.io.TFRecordWriter("data/train-0.tfrecord") as writer:
    for label in range(8):
        features = {
            "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(32 * 32 * 3)])),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        }
        example = tf.train.Example(features=tf.train.Features(feature=features))
        writer.write(example.SerializeToString())
dataset = [{"image": image, "label": label} for image, label in zip(x, y)]
"""
SEARCHED = """
import keras_tuner
from tests.forked_python import SharedTemplate
from tfdist.tuning import sweep

sweep.ForkTemplate = SharedTemplate

def build_model(hp):
    hp.Int("units", 16, 64)
    return make_model()

if not os.path.exists("runs/digits_sweep-random"):
    keras_tuner.RandomSearch(
        build_model, objective=keras_tuner.Objective("val_accuracy", "max"), max_trials=1,
        directory="runs/digits_sweep-random", project_name="keras_tuner",
    ).search(x, y, validation_data=(xv, yv), verbose=0)
"""
SERVED = """
import ctypes, re, signal, subprocess
import grpc
import keras
import tfdist
model = keras.Sequential([keras.Input((3,), name="features"), keras.layers.Dense(2)])
tfdist.export_model(model, "served", name="digits")
command = [sys.executable, "-m", "tfdist.serve", "served", "--rest_port=0", "--grpc_port=0"]
ends_with_us = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)
server = subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=ends_with_us
)
for line in server.stdout:
    if found := re.search(r"REST http://([^/]+)/\\S+ gRPC (\\S+)", line):
        rest, grpc_address = found.groups()
    if "serving version" in line:
        break
grpc.channel_ready_future(grpc.insecure_channel(grpc_address)).result(60)
"""
BEFORE = {
    "README.md": f'{FLAT}{DATA}\nos.environ["TFDIST_RUN_DIR"] = "run"',
    "docs/all_reduce.md": "",
    "docs/checkpoints.md": f'{FLAT}{DATA}{MODEL}\nmodel.save("pretrained.keras")',
    "docs/data.md": f"{FLAT}{DATA}{RECORDS}{MODEL}",
    "docs/find.md": f"{FLAT}{DATA}{MODEL}\ny = x.argmax(1) // 8",
    "docs/migrate/model_fit.md": f"{IMAGES}{DATA}",
    "docs/pipeline.md": f"{FLAT}{DATA}",
    "docs/ps.md": f"{FLAT}{DATA}",
    "docs/serving.md": f"import sys{SERVED}",
    "docs/spawn.md": f"{FLAT}{DATA}\nbuild, X, Y = make_model, x, y",
    "docs/start.md": f"{FLAT}{DATA}",
    "docs/strategies.md": f"{FLAT}{DATA}",
    "docs/steps.md": f"{FLAT}{DATA}{GAN}{MODEL}",
    "docs/training.md": f"{FLAT}{DATA}\nimport logging",
    "docs/tuning.md": f"{FLAT}{DATA}{SEARCHED}",
    "docs/tutorials/resume.md": f"""{FLAT}{DATA}{MODEL}
tfdist.fit(model, x, y, callbacks=[tfdist.BackupAndRestore("runs/digits/backup")])""",
    "docs/tutorials/phases.md": "",
    "docs/tutorials/ray.md": "",
    "docs/upstream/tensorflow-cache-after-prefetch.md": "",
}
"""What a page takes for granted; of pages that are not here: data, and a model in a scope."""
AFTER = {
    "README.md": 'assert os.path.exists("run/backup")',
    "docs/all_reduce.md": """
for tasks in (2, 3, 5):
    arrays = list(np.random.default_rng(1).random((tasks, 7)))
    for algorithm in naive, ring:
        for summed in all_reduce(algorithm, arrays):
            np.testing.assert_allclose(summed, sum(arrays))
""",
    "docs/checkpoints.md": """
assert checkpoint.step == 20 and checkpoint.arrays["weights/0"].shape == (64, 8)
tfdist.fit(model, x, y, epochs=2, validation_data=(xv, yv), callbacks=[Best()])
""",
    "docs/configs.md": "assert get_config().total_examples == 300_000",
    "docs/data.md": "assert source.num_examples == len(x) and train.num_examples == 1442",
    "docs/find.md": """
(trial,) = found.trials
assert (found.per_replica, found.global_batch_size, trial.batch_size) == (8, 8, 8)
assert trial.fits and trial.peak_bytes > 100 << 20
""",
    "docs/ps.md": """
metric = Mistakes()
metric.update_state(tf.one_hot([1, 2], 3), tf.one_hot([1, 0], 3))
assert float(metric.result()) == 1
""",
    "docs/serving.md": "server.terminate(); assert server.wait() in (0, 143)",
    "docs/steps.md": "assert totals['seen'] == 128",
    "docs/tuning.md": """
from tfdist.configs import base
space(keras_tuner.HyperParameters(), base())
""",
    "docs/tutorials/ray.md": """
train_loop({"folder": "run", "callbacks": []})
assert os.path.exists("run/model.keras")
""",
}
"""What is asked of a page's first program at its end, or done with what it defines."""
SHOWN = ("docs/all_reduce.md", "docs/tutorials/phases.md")
"""Pages whose blocks marked `console` are the output of their Python."""
WITH_PYTHON = [page for page in PAGES if any(python_blocks(page))]
_BEGINS = re.compile(r"tfdist\.make_strategy\(|__main__")


def programs_of(page: Path) -> list[str]:
    """The code of a page, cut where a block makes a strategy, which has to come first."""
    programs = [""]
    for line, code in python_blocks(page):
        if programs[-1] and _BEGINS.search(code):
            programs.append("")
        programs[-1] += f"# {name_of(page)}, line {line}\n{code}\n"
    return programs


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs(page, tmp_path):
    before = BEFORE.get(name_of(page), f"{FLAT}{DATA}{MODEL}")
    after = AFTER.get(name_of(page), "")
    for number, text in enumerate(programs_of(page)):
        for long, short in SMALLER.items():
            text = text.replace(long, short)
        program = tmp_path / f"program_{number}.py"
        program.write_text("\n".join([before, text, after * (number == 0)]))
        environ = {**os.environ, **forked_python.ENVIRON}
        done = forked_python.run(str(program), timeout=DEADLINE_S, cwd=tmp_path, env=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        for _, output in python_blocks(page, "console") if name_of(page) in SHOWN else ():
            assert output in done.stdout
