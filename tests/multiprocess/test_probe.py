"""`--probe`: a program under each strategy, with jobs of its own."""

import os
import re
import subprocess
import sys

PROGRAM = """
import keras, numpy as np
import tfdist
strategy = tfdist.make_strategy()
if strategy.num_replicas_in_sync > 1 and tfdist.strategy.current_job().kind.name == "mirrored":
    raise ValueError("no replicas")
x, y = np.ones((128, 4), "float32"), np.ones((128, 1), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
saves = keras.callbacks.ModelCheckpoint("best.keras")
model.fit(x, y, batch_size=16, epochs=10**6, verbose=0, validation_data=(x, y), callbacks=[saves])
open("after", "w")
"""
SHORT = """
import sys
from tfdist.launch import __main__, probe
probe.SECONDS = 0.1
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_a_program_is_measured_under_each_strategy(tmp_path):
    folder, scratch = tmp_path / "program", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-c", SHORT, "--probe", "--ps", "1", "train.py"],
        capture_output=True, cwd=folder, text=True, timeout=500,
        env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.split("noise\n")[1]
    rows = re.findall(r"^(\w+) +(\d worker.*?)  +([\d,]+|-) .*$", table, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        *(("single", "1 worker"), ("mirrored", "1 worker")),
        *(("multiworker", "2 workers"), ("ps", "2 workers, 1 ps")),
    ], done.stdout
    assert [row[2] == "-" for row in rows] == [False, True, False, False], done.stdout
    assert "ValueError: no replicas" in table
    assert re.search(r"^(fastest|within noise): ", table, re.MULTILINE)
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert len(list(scratch.glob("tfdist-probe-*"))) == 1  # the logs of the failed job
