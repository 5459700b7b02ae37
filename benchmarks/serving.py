"""``python -m benchmarks.serving [--only ROW ...]``: what a service costs, and what it loses.

Measures `tfdist.serve` with exported models on this machine and writes `benchmarks/SERVING.md`, a
table of targets first. Rows that are not measured keep the figures of the last run. Needs two
cores, h2load (``apt-get install nghttp2-client``), and for the row `peers` the environment that
`benchmarks/setup.sh` makes. Without --only all rows but `faults` are measured, which takes some ten
minutes; `faults` takes about ten more. What is expected is said at each row, and for the peers in
`serving_peers.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # where its modules look for each other

import harness  # noqa: E402
import machine  # noqa: E402
import serving_peers  # noqa: E402

from benchmarks.load import Load, example_body, run  # noqa: E402

PAGE = ROOT / "benchmarks" / "SERVING.md"
RAW = ROOT / "benchmarks" / "serving.json"
ROUNDS = 3
DEADLINE_S = 240.0
DENSE = """
import keras

def make():
    inputs = keras.Input(({width},), name="x")
    outputs = inputs
    for _ in range({layers}):
        outputs = keras.layers.Dense({width}, activation="relu")(outputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="y")(outputs), name="m")
    model.compile("sgd", "mse")
    return model
"""
SMALL_CNN = """
import keras

def make():
    layers = keras.layers
    inputs = keras.Input((28, 28, 1), name="image")
    outputs = layers.Conv2D(8, 3, strides=2, activation="relu")(inputs)
    outputs = layers.Conv2D(16, 3, strides=2, activation="relu")(outputs)
    outputs = layers.Dense(10, activation="softmax", name="scores")(layers.Flatten()(outputs))
    model = keras.Model(inputs, outputs, name="cnn")
    model.compile("sgd", "mse")
    return model
"""
DEEP_CNN = """
import keras

def make():
    layers = keras.layers
    inputs = keras.Input((16,), name="x")
    outputs = layers.UpSampling2D(16)(layers.Reshape((4, 4, 1))(inputs))
    for _ in range(4):
        outputs = layers.Conv2D(64, 3, padding="same", activation="relu")(outputs)
    outputs = layers.Dense(2, name="y")(layers.GlobalAveragePooling2D()(outputs))
    model = keras.Model(inputs, outputs, name="m")
    model.compile("sgd", "mse")
    return model
"""
EXPORT = """
import sys, tfdist
sys.path.insert(0, sys.argv[1])
import program
tfdist.export_model(program.make(), sys.argv[2])
"""
OWN = """
import json, os, select, sys, time
os.sched_setaffinity(0, {int(sys.argv[2])})
from pathlib import Path
from tfdist.serving.model import ServedModel
import numpy as np
model = ServedModel(Path(sys.argv[1]), "m", batch_sizes=(1,))
signature = model.signatures["serving_default"]
(spec,) = signature.inputs.values()
x = np.zeros((1, *spec.shape[1:]), "float32")

def spent(calls, *parts):
    for part in parts:
        part()
    start = time.process_time()
    for _ in range(calls):
        for part in parts:
            part()
    return 1e6 * (time.process_time() - start) / calls

def pause():
    select.select([], [], [], 0.0005)

def call():
    signature.call(x)

for _ in range(100):
    call()
calls = int(sys.argv[3])
print(json.dumps([spent(calls, call), spent(calls, pause, call) - spent(calls, pause)]))
"""


TRAIN = """
import sys, numpy as np, tfdist
sys.path.insert(0, sys.argv[1])
import program
x = np.random.default_rng(0).random((64, 16), "float32")
backup = tfdist.BackupAndRestore(sys.argv[2], best="loss")
tfdist.fit(program.make(), x, x[:, :2], epochs=int(sys.argv[3]), callbacks=[backup], verbose=0)
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is measured, and what was expected before."""

    title: str
    expected: str
    measure: Callable[[argparse.Namespace], Found]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A line of the table: values of rounds, and the target that the middle one is held against."""

    what: str
    against: str
    values: Sequence[float]
    least: float | None = None
    most: float | None = None
    unit: str = ""

    @property
    def cells(self) -> list[str]:
        """What, against, target, measured, and whether the target is met."""
        target = f"at least {self.least:g}" if self.most is None else f"at most {self.most:g}"
        if not self.values:
            return [self.what, self.against, f"{target}{self.unit}", "no round counts", "no"]
        middle = statistics.median(self.values)
        met = middle >= self.least if self.least is not None else middle <= (self.most or 0)
        shown = ", ".join(f"{value:.3g}" for value in self.values)
        cells = [self.what, self.against, f"{target}{self.unit}", f"{shown}{self.unit}"]
        return [*cells, "yes" if met else "no"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a row has found: figures of the table, and lines below it."""

    figures: Sequence[Figure]
    lines: Sequence[str]


def python(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python on the processor alone; raise where it fails."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=ENVIRON, text=True, check=True, **options
    )


ENVIRON = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def export(scratch: Path, program: str = "") -> Path:
    """Write the program of a model, and a version of it; return the served directory."""
    (scratch / "program.py").write_text(program or dense())
    python("-c", EXPORT, str(scratch), str(scratch / "served"), stdout=subprocess.DEVNULL)
    return scratch / "served"


def dense(*, width: int = 16, layers: int = 1) -> str:
    """Return the program of a model of Dense layers."""
    return DENSE.format(width=width, layers=layers)


def own_us(version: Path, calls: int) -> tuple[float, float]:
    """Return processor us of a call of one example: one after the other, and after a pause."""
    words = [str(version), f"{serving_peers.SERVER_CORE}", f"{calls}"]
    hot, cold = json.loads(python("-c", OWN, *words, capture_output=True).stdout)
    return hot, cold


class Service:
    """A running service, and what it has logged."""

    def __init__(self, served: Path, *flags: str, core: int | None = None) -> None:
        self._log = served.parent / "log"
        words = ["-m", "tfdist.serve", str(served), "--rest_port=0", "--grpc_port=0", *flags]
        with self._log.open("w") as log, harness.pinned(core):
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=ENVIRON,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        found = re.search(r"(http://\S+)/v1/models", self.process.stdout.readline())
        assert found, self.said()
        self.url = f"{found[1]}/v1/models/m"

    def free_the_front(self) -> None:
        """Let the front use all cores, also where the replica has one."""
        for thread in self.front().threads():
            os.sched_setaffinity(thread.id, set(range(os.cpu_count() or 1)))

    def said(self) -> str:
        """Return the log."""
        return self._log.read_text()

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Return the matches of a pattern in the log once there are `count`."""
        end = time.monotonic() + DEADLINE_S
        while len(found := re.findall(pattern, self.said())) < count:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(self.said())
            time.sleep(0.02)
        return found

    def front(self) -> psutil.Process:
        """Return the front."""
        return next(p for p in self._children() if "tfdist.serving.front" in p.cmdline())

    def ready(self) -> list[int]:
        """Return the pids of the replicas that have been ready and live, the oldest first."""
        pids = dict(re.findall(r"replica (\d+) is loading version \d+ \(pid (\d+)\)", self.said()))
        ready = [int(pids[id]) for id in re.findall(r"replica (\d+) is ready", self.said())]
        return [pid for pid in ready if psutil.pid_exists(pid)]

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def load(self, stop: Callable[[], bool] = lambda: False, **options: Any) -> dict[str, Any]:
        """Send load; return the summary."""
        load = Load(url=self.url, body=example_body(self.url), **options)
        return asyncio.run(run(load, stop)).summary()


@contextlib.contextmanager
def service(
    served: Path, *flags: str, replicas: int = 1, core: int | None = None
) -> Iterator[Service]:
    """Run a service until the block ends, on a core or on all."""
    running = Service(served, "--replicas", f"{replicas}", *flags, core=core)
    try:
        running.wait_for(r"serving version \d+")
        time.sleep(0.5)  # the front has been told
        yield running
    finally:
        running.process.terminate()
        running.process.wait(60)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a directory that is removed."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def peers(args: argparse.Namespace) -> Found:
    """Requests/s at equal p99, beside LitServe, Ray Serve and FastAPI."""
    with scratch() as folder:
        found = serving_peers.compare(export(folder, SMALL_CNN), args.rounds)
    pairs = [("tfdist", name, 2.0) for name in ("litserve", "ray", "fastapi")]
    figures = [
        Figure(
            what="requests/s at equal p99, small CNN, 1 replica, 1 core: ratio, " + how,
            against=name,
            values=serving_peers.ratios(found, ours, name),
            least=least,
        )
        for ours, name, least in [*pairs, ("tfdist gRPC", "ray gRPC", 1.5)]
        for how in ["gRPC" if "gRPC" in name else "REST"]
    ]
    return Found(figures=figures, lines=serving_peers.described(found))


def processor(args: argparse.Namespace) -> Found:
    """Processor per request beside the model's own, at one and at 16 requests at a time."""
    figures, lines = [], []
    with scratch() as folder:
        models = {"16 numbers": (dense(), (16,)), "28x28x1 pixels": (SMALL_CNN, (28, 28, 1))}
        for name, (program, shape) in models.items():
            place = folder / name.partition(" ")[0]
            place.mkdir()
            served = export(place, program)
            (model,) = (path.name for path in served.iterdir() if path.is_dir())
            hot, cold = own_us(served / model / "1", 5_000)
            lines.append(f"{name}: the model's own call {hot:.0f} us, after a pause {cold:.0f} us")
            bodies = {"rest": serving_peers.rest_body(np.random.default_rng(0).random(shape))}
            spent: dict[int, list[float]] = {}
            for _ in range(args.rounds):
                with serving_peers.ours(served, model, bodies) as (pid, (address,)):
                    for connections in (1, 16):
                        one = serving_peers.h2load(
                            address, connections, lambda: serving_peers.tree_s(pid), seconds=3.0
                        )
                        spent.setdefault(connections, []).append(one.processor_us)
            for connections, all_us in spent.items():
                text = ", ".join(f"{us:.0f}" for us in all_us)
                lines.append(f"{name}, {connections} at a time: {text} us with the model's")
            figures += [
                Figure(
                    what=f"processor per request, REST, {name}, {connections} at a time",
                    against="the model's own" if connections == 1 else "nothing is taken off",
                    values=[us - (cold if connections == 1 else 0) for us in all_us],
                    most=120,
                    unit=" us",
                )
                for connections, all_us in spent.items()
            ]
    return Found(figures=figures, lines=lines)


def batching(args: argparse.Namespace) -> Found:
    """Requests/s of a model of 5 ms, with batches and with one example each."""
    found: dict[int, list[float]] = {}
    with scratch() as folder:
        served = export(folder, dense(width=2048, layers=7))
        hot, _ = own_us(served / "m" / "1", 100)
        for _ in range(args.rounds):
            for size in (32, 1):
                with service(served, "--max_batch", f"{size}") as running:
                    summary = running.load(connections=32, seconds=4.0)
                    found.setdefault(size, []).append(summary["per_s"])
    figure = Figure(
        what="requests/s with batches, a model of 5 ms: ratio",
        against="without (--max_batch 1)",
        values=[a / b for a, b in zip(found[32], found[1], strict=True)],
        least=3,
    )
    lines = [f"the model's own call of one example, one core: {hot / 1e3:.1f} ms"]
    lines += [f"--max_batch {n}: {', '.join(map(str, rates))}/s" for n, rates in found.items()]
    return Found(figures=[figure], lines=lines)


def replicas(args: argparse.Namespace) -> Found:
    """Requests/s of two replicas, each with a core, and of one with a core."""
    found: dict[int, list[float]] = {}
    with scratch() as folder:
        served = export(folder, DEEP_CNN)
        hot, _ = own_us(served / "m" / "1", 100)
        for _ in range(args.rounds):
            for count in (2, 1):
                core = serving_peers.SERVER_CORE if count == 1 else None
                with service(served, replicas=count, core=core) as running:
                    running.free_the_front()
                    summary = running.load(connections=32, seconds=4.0)
                    found.setdefault(count, []).append(summary["per_s"])
    figure = Figure(
        what="requests/s of 2 replicas on 2 cores, where load and front are too: ratio",
        against="1 replica on 1 core",
        values=[a / b for a, b in zip(found[2], found[1], strict=True)],
        least=1.7,
    )
    lines = [f"the model's own call of one example, one core: {hot / 1e3:.1f} ms"]
    lines += [f"{n} replicas: {', '.join(map(str, rates))}/s" for n, rates in found.items()]
    return Found(figures=[figure], lines=lines)


def faults(args: argparse.Namespace) -> Found:
    """Failed requests while replicas are killed and hang, versions change, the front is killed."""
    start = time.monotonic()
    with scratch() as folder:
        served = export(folder)
        with (
            service(served, "--hang_s=2", replicas=2) as running,
            concurrent.futures.ThreadPoolExecutor(1) as pool,
        ):
            disturbed = pool.submit(_disturb, running, folder, args)
            options = {"connections": 8, "seconds": 3600.0, "warm_up_s": 0.0, "tries": 3}
            found = running.load(stop=disturbed.done, **options)
            disturbed.result()
    what = f"{args.kills} kills of replicas, {args.hangs} hangs, {args.versions} version changes, "
    failed = sum(found["failed"].values())
    figure = Figure(
        what=f"failed requests: {what}{args.fronts} kills of the front",
        against="clients send again what a broken connection had",
        values=[failed],
        most=0,
    )
    total = f"{found['requests'] + failed} requests in {time.monotonic() - start:.0f} s"
    return Found(figures=[figure], lines=[f"{total}, failed: {found['failed']}", f"{found['ms']}"])


def _disturb(running: Service, folder: Path, args: argparse.Namespace) -> None:
    """Do one fault after the other, each once the service has recovered from the one before."""
    for _ in range(args.kills):
        _fault(running, signal.SIGKILL)
    for _ in range(args.hangs):
        _fault(running, signal.SIGSTOP)
    for number in range(args.versions):
        export(folder)
        running.wait_for(f"serving version {number + 2}")
    for number in range(args.fronts):
        time.sleep(1.0)
        running.front().kill()
        running.wait_for("front: killed", number + 1)
    time.sleep(2.0)


def _fault(running: Service, signum: int) -> None:
    """Send a signal to the oldest replica; return once another one has taken its place."""
    before = len(re.findall("is ready", running.said()))
    os.kill(running.ready()[0], signum)
    running.wait_for("is ready", before + 1)


def publish(args: argparse.Namespace) -> Found:
    """Seconds from a whole checkpoint to the first answer of its version."""
    seconds = []
    with scratch() as folder:
        export(folder)  # TensorFlow's files are in memory then
        program, served = f"{folder}/program.py:make", folder / "served"
        backup = str(folder / "backup")
        words = ["-m", "tfdist.export", backup, str(served), "--model", program, "--best"]
        with subprocess.Popen(
            [sys.executable, *words, "--follow"], env=ENVIRON, cwd=ROOT
        ) as follow:
            try:
                with service(served) as running:
                    for number in range(args.rounds + 1):
                        python("-c", TRAIN, str(folder), backup, f"{number + 1}")
                        seconds.append(_first_answer_s(running, served / "m", number + 2))
            finally:
                follow.terminate()
    first, *others = seconds
    figure = Figure(
        what="from a whole checkpoint to the first answer of it",
        against="",
        values=others,
        most=5,
        unit=" s",
    )
    return Found(
        figures=[figure], lines=[f"the first of a follower that just began: {first:.1f} s"]
    )


def _first_answer_s(running: Service, model: Path, version: int) -> float:
    """Return how long after its checkpoint was whole a version has answered a request."""
    request = urllib.request.Request(
        f"{running.url}/versions/{version}:predict",
        json.dumps({"instances": [[0.5] * 16]}).encode(),
    )
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S):
                now = time.time()
            break
        except urllib.error.HTTPError:
            if time.monotonic() > end:
                raise
        time.sleep(0.01)
    manifest = json.loads((model / f"{version}" / "manifest.json").read_text())
    return now - float(manifest["saved_at"])


ROWS = {
    "peers": Row(
        title="beside LitServe, Ray Serve and FastAPI",
        expected="in serving_peers.py",
        measure=peers,
    ),
    "processor": Row(
        title="processor per request",
        expected="16 numbers: 130 us at one beside the model's own call, 90 at 16: front 65, "
        "replica 25, a batch shares a call; the supervisor nothing. Pixels: 110 more for the JSON",
        measure=processor,
    ),
    "batching": Row(
        title="batches",
        expected="6: a batch of 32 reads the weights once, and they are what takes the time",
        measure=batching,
    ),
    "replicas": Row(
        title="two replicas",
        expected="1.85: front and load take 0.1 of each core at 400 requests/s",
        measure=replicas,
    ),
    "publish": Row(
        title="from training to an answer",
        expected="4 s: 0.1 to be noticed, 1 for export and check, 0.1, 3 for a new replica",
        measure=publish,
    ),
    "faults": Row(
        title="faults of real replicas under load",
        expected="0",
        measure=faults,
    ),
}


def main() -> int:
    """Measure the rows asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    usual = [name for name in ROWS if name != "faults"]
    parser.add_argument("--only", nargs="+", choices=sorted(ROWS), default=usual)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hangs", type=int, default=5)
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--fronts", type=int, default=3)
    args = parser.parse_args()
    if not shutil.which("h2load"):
        parser.error("h2load is not installed: apt-get install nghttp2-client")
    found = json.loads(RAW.read_text()) if RAW.exists() else {}
    for name in args.only:
        described = machine.describe(with_peers=False)
        start = time.monotonic()
        row = ROWS[name].measure(args)
        found[name] = {
            "table": [figure.cells for figure in row.figures],
            "lines": [*row.lines, f"took {time.monotonic() - start:.0f} s"],
            "machine": described,
        }
        print(name, *found[name]["table"], *row.lines, sep="\n  ", flush=True)
        RAW.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text("\n".join(page(found)) + "\n")
    return 0


def page(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from ("# Serving", "", "Written by `python -m benchmarks.serving`; not by hand. A target")
    yield from ("is held against the middle one of the rounds.", "")
    yield from ("| what | against | target | measured, by round | met |", "|---|---|---|---|---|")
    for name in ROWS:
        for cells in found.get(name, {}).get("table", ()):
            yield f"| {' | '.join(cells)} |"
    for name, row in ROWS.items():
        if name in found:
            yield from ("", f"## {row.title.capitalize()}", "")
            yield from _listed([f"expected before measuring: {row.expected}"])
            yield from _listed(found[name]["lines"])
            yield from _listed([f"{key}: {value}" for key, value in found[name]["machine"].items()])


def _listed(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
