"""``python -m benchmarks.probe``: compare the choice of ``tfdist launch --probe`` with full runs.

Each of 8 models runs under each strategy for ``--seconds``, and is probed. A probe is right if its
strategy is the fastest of the full runs, or at most 5 % slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.launch.options import parse
from tfdist.launch.probe import STRATEGIES, fastest, measured, verdict
from tfdist.outputs.run_directory import RunDirectory

MODELS = {
    **{f"dense-{size}": ("dense", "vectors", size) for size in (32, 256, 2048)},
    **{f"wide-{size}": ("wide", "pixels", size) for size in (64, 1024)},
    **{f"cnn-{size}": ("cnn", "images", size) for size in (16, 64, 256)},
}
"""Model and data of `benchmarks.models`, and the global batch size, by name."""
_EXAMPLES = 8192
_MOST_SLOWER = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names of models")
    parser.add_argument("--seconds", type=float, default=40, help="training of a full run")
    parser.add_argument("--workers", type=int, default=2, help="of multiworker and ps")
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--train", metavar="MODEL", help="train as a task of a job")
    options = parser.parse_args(argv)
    if options.train:
        train(options.train, options.seconds)
        return 0
    rows = [compare(name, options) for name in options.models.split(",")]
    right = sum(row["is_right"] for row in rows)
    print(f"{right} of {len(rows)} probes chose the fastest strategy or one at most 5 % slower")
    if options.json:
        options.json.write_text(json.dumps({"cpus": os.cpu_count(), "rows": rows}, indent=1) + "\n")
    return 0


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of full runs and of a probe of one model, and whether the probe is right."""
    flags = ["--probe", f"--workers={options.workers}", "--ps=1", "-m", "benchmarks.probe"]
    flags += ["--train", name, "--seconds"]
    with tempfile.TemporaryDirectory() as scratch:
        full = {s: full_run(s, name, options, Path(scratch)) for s in STRATEGIES}
        probed = parse([*flags, "3600"])
        assert probed is not None
        found = list(measured(probed, environ=os.environ, scratch=Path(scratch) / "probe"))
    chosen = fastest(found)[0].strategy
    is_right = full[chosen] >= max(full.values()) * (1 - _MOST_SLOWER)
    print(f"{name}: {verdict(found)}")
    for row in found:
        print(f"  {row.strategy}: full {full[row.strategy]:,.0f}, probe {row.rate:,.0f}")
    print(f"  {'right' if is_right else 'WRONG'}", flush=True)
    rates = {row.strategy: row.rate for row in found}
    return {"model": name, "full": full, "probe": rates, "chosen": chosen, "is_right": is_right}


def full_run(strategy: str, name: str, options: argparse.Namespace, scratch: Path) -> float:
    """Return the median examples per second of the epochs after the first."""
    several = [f"--workers={options.workers}"] if strategy in ("multiworker", "ps") else []
    command = [sys.executable, "-m", "tfdist.launch", "--verbosity=-1", f"--strategy={strategy}"]
    command += [*several, f"--run_dir={scratch / strategy}", "-m", "benchmarks.probe"]
    command += ["--train", name, "--seconds", str(options.seconds)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = RunDirectory(scratch / strategy).read_metrics()
    return statistics.median(line["examples_per_second"] for line in lines[1:] or lines)


def train(name: str, seconds: float) -> None:
    """Train one of the models for some seconds."""
    import keras

    import tfdist
    from benchmarks import models

    kind, data, batch_size = MODELS[name]
    strategy = tfdist.make_strategy()
    x, y = models.vectors(_EXAMPLES) if data == "vectors" else models.images(_EXAMPLES)
    with strategy.scope():
        model = getattr(models, kind)(keras)
        model.compile(models.sgd(keras), models.loss(keras))
    x = x.reshape(len(x), -1) if data == "pixels" else x
    options: dict[str, Any] = {"batch_size": batch_size, "epochs": 10**6, "verbose": 0}
    model.fit(x, y, callbacks=[tfdist.Run(max_time=seconds)], **options)


if __name__ == "__main__":
    sys.exit(main())
