"""``python -m benchmarks.serving [--only ROW ...]``: what a service costs, and what it loses.

Measures `tfdist.serve` with exported models on this machine by `tfdist.serving.load`, and writes
`benchmarks/SERVING.md`. Rows that are not measured keep the figures of the last run.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # where its modules look for each other

import machine  # noqa: E402

from tfdist.serving.load import Load, example_body, run  # noqa: E402

PAGE = ROOT / "benchmarks" / "SERVING.md"
RAW = ROOT / "benchmarks" / "serving.json"
ROUNDS = 3
DEADLINE_S = 240.0
MODELS = """
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
EXPORT = """
import sys, tfdist
sys.path.insert(0, sys.argv[1])
import program
tfdist.export_model(program.make(), sys.argv[2])
"""
OWN = """
import sys, time
from pathlib import Path
from tfdist.serving.model import ServedModel
model = ServedModel(Path(sys.argv[1]), "m", batch_sizes=(1,))
import numpy as np
x = np.zeros((1, {width}), "float32")
call = model.signatures["serving_default"].call
for _ in range(200):
    call(x)
start = time.process_time()
for _ in range({calls}):
    call(x)
print((time.process_time() - start) / {calls})
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
    """A row of the table: what is measured, its target, and what was expected before."""

    title: str
    target: str
    expected: str
    measure: Callable[[argparse.Namespace], list[str]]


def python(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python on the processor alone; raise where it fails."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=ENVIRON, text=True, check=True, **options
    )


ENVIRON = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def export(scratch: Path, *, width: int = 16, layers: int = 1) -> Path:
    """Write the program of a model, and a version of it; return the served directory."""
    (scratch / "program.py").write_text(MODELS.format(width=width, layers=layers))
    python("-c", EXPORT, str(scratch), str(scratch / "served"), stdout=subprocess.DEVNULL)
    return scratch / "served"


class Service:
    """A running service, and what it has logged."""

    def __init__(self, served: Path, *flags: str) -> None:
        self._log = served.parent / "log"
        words = ["-m", "tfdist.serve", str(served), "--rest_port=0", "--grpc_port=0", *flags]
        with self._log.open("w") as log:
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
        pids = dict(re.findall(r"replica (\d+) loads version \d+ \(pid (\d+)\)", self.said()))
        ready = [int(pids[id]) for id in re.findall(r"replica (\d+) is ready", self.said())]
        return [pid for pid in ready if psutil.pid_exists(pid)]

    def processor_s(self) -> dict[str, float]:
        """Return processor seconds of front, replicas and supervisor since they began."""
        found = dict.fromkeys(("front", "replica"), 0.0)
        for process in self._children():
            kind = process.cmdline()[2].rpartition(".")[2]
            found[kind] += sum(process.cpu_times()[:2])
        return found | {"supervisor": sum(psutil.Process(self.process.pid).cpu_times()[:2])}

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def load(self, stop: Callable[[], bool] = lambda: False, **options: Any) -> dict[str, Any]:
        """Send load; return the summary."""
        load = Load(url=self.url, body=example_body(self.url), **options)
        return asyncio.run(run(load, stop)).summary()


@contextlib.contextmanager
def service(served: Path, *flags: str, replicas: int = 1) -> Iterator[Service]:
    """Run a service until the block ends."""
    running = Service(served, "--replicas", f"{replicas}", *flags)
    try:
        running.wait_for(r"version \d+ is served")
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


def processor(args: argparse.Namespace) -> list[str]:
    """Processor per request beside the model's own, at one and at 16 connections."""
    figures: dict[int, list[str]] = {}
    with scratch() as folder:
        served = export(folder)
        own = python(
            "-c", OWN.format(width=16, calls=20_000), str(served / "m" / "1"), capture_output=True
        )
        own_us = 1e6 * float(own.stdout)
        with service(served, "--spares=0") as running:
            for _ in range(args.rounds):
                for connections in (1, 16):
                    before = running.processor_s()
                    found = running.load(connections=connections, seconds=5.0, warm_up_s=0.0)
                    after = running.processor_s()
                    us = {k: 1e6 * (after[k] - before[k]) / found["requests"] for k in after}
                    beside = sum(us.values()) - (own_us if connections == 1 else 0)
                    parts = ", ".join(f"{name} {value:.0f}" for name, value in us.items())
                    figures.setdefault(connections, []).append(
                        f"{beside:.0f} us ({parts}; {found['per_s']:.0f}/s)"
                    )
    return [
        f"the model's own call of one example: {own_us:.0f} us",
        *(f"{n} connections: {'; '.join(parts)}" for n, parts in figures.items()),
    ]


def batching(args: argparse.Namespace) -> list[str]:
    """Requests/s of a model that takes some ms, with batches and with one example each."""
    found: dict[int, list[float]] = {}
    with scratch() as folder:
        served = export(folder, width=2048, layers=4)
        own = python(
            "-c", OWN.format(width=2048, calls=200), str(served / "m" / "1"), capture_output=True
        )
        for _ in range(args.rounds):
            for size in (32, 1):
                with service(served, "--spares=0", "--max_batch", f"{size}") as running:
                    summary = running.load(connections=32, seconds=5.0)
                    found.setdefault(size, []).append(summary["per_s"])
    ratios = [a / b for a, b in zip(found[32], found[1], strict=True)]
    return [
        f"the model's own call of one example: {1e3 * float(own.stdout):.1f} ms",
        *(f"--max_batch {size}: {', '.join(map(str, rates))}/s" for size, rates in found.items()),
        f"ratio: {', '.join(f'{ratio:.2f}' for ratio in ratios)}",
    ]


def faults(args: argparse.Namespace) -> list[str]:
    """Failed requests while replicas are killed and hang, versions change, the front is killed."""
    with scratch() as folder:
        served = export(folder)
        with (
            service(served, "--hang_s", "2", replicas=2) as running,
            concurrent.futures.ThreadPoolExecutor(1) as pool,
        ):
            disturbed = pool.submit(_disturb, running, folder, args)
            options = {"connections": 8, "seconds": 3600.0, "warm_up_s": 0.0, "tries": 3}
            found = running.load(stop=disturbed.done, **options)
            disturbed.result()
    return [
        f"{args.kills} kills of replicas, {args.hangs} hangs, {args.versions} version changes, "
        f"{args.fronts} kills of the front: {sum(found['failed'].values())} of "
        f"{found['requests'] + sum(found['failed'].values())} requests failed {found['failed']}",
        f"ms: {found['ms']}",
    ]


def _disturb(running: Service, folder: Path, args: argparse.Namespace) -> None:
    """Do one fault after the other, each once the service has recovered from the one before."""
    for _ in range(args.kills):
        _fault(running, signal.SIGKILL)
    for _ in range(args.hangs):
        _fault(running, signal.SIGSTOP)
    for number in range(args.versions):
        export(folder)
        running.wait_for(f"version {number + 2} is served")
    for number in range(args.fronts):
        time.sleep(1.0)
        running.front().kill()
        running.wait_for("front: was killed", number + 1)
    time.sleep(2.0)


def _fault(running: Service, signum: int) -> None:
    """Send a signal to the oldest replica; return once another one has taken its place."""
    before = len(re.findall("is ready", running.said()))
    os.kill(running.ready()[0], signum)
    running.wait_for("is ready", before + 1)


def publish(args: argparse.Namespace) -> list[str]:
    """Seconds from a whole checkpoint to the version that is served."""
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
                        found = running.wait_for(rf"version {number + 2} is served, ([\d.]+) s")
                        seconds.append(float(found[0]))
            finally:
                follow.terminate()
    first, *others = seconds
    return [f"{', '.join(map(str, others))} s; the first of a follower that just began: {first} s"]


ROWS = {
    "processor": Row(
        title="processor per request beside the model's own, REST, one replica",
        target="at most 120 us",
        expected="150 us at one connection and 130 at 16: front 115, replica 30, a batch shares "
        "a call; the supervisor nothing",
        measure=processor,
    ),
    "batching": Row(
        title="requests/s with batches / without, a model of some 5 ms",
        target="at least 3",
        expected="6: a batch of 32 reads the weights once, and they are what takes the time",
        measure=batching,
    ),
    "faults": Row(
        title="failed requests under load; clients send again what a broken connection had",
        target="0",
        expected="0",
        measure=faults,
    ),
    "publish": Row(
        title="from a whole checkpoint to its version served, one replica",
        target="at most 5 s",
        expected="6 s: 0.1 to be noticed, 2 for export and check, 0.1, 3.5 for a replica to load "
        "TensorFlow",
        measure=publish,
    ),
}


def main() -> int:
    """Measure the rows asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hangs", type=int, default=5)
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--fronts", type=int, default=3)
    args = parser.parse_args()
    found = json.loads(RAW.read_text()) if RAW.exists() else {}
    for name in args.only:
        described = machine.describe(with_peers=False)
        lines = ROWS[name].measure(args)
        found[name] = {"lines": lines, "machine": described}
        print(name, *lines, sep="\n  ", flush=True)
        RAW.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text("\n".join(page(found)) + "\n")
    return 0


def page(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from ("# Serving", "", "Written by `python -m benchmarks.serving`; not by hand. Load and")
    yield from ("service share the machine's cores, so rates are of both.", "")
    for name, row in ROWS.items():
        if name not in found:
            continue
        yield from (f"## {row.title}", "", f"- target: {row.target}")
        yield from (f"- expected before measuring: {row.expected}", *_listed(found[name]["lines"]))
        yield ""
        yield from _listed([f"{key}: {value}" for key, value in found[name]["machine"].items()])
        yield ""


def _listed(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
