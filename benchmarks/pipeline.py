"""``python -m benchmarks.pipeline [--only ROW ...]``: a model in two stages against its targets.

Beside one core that accumulates over micro-batches, and torch.distributed.pipelining (1F1B, gloo).
Each process has a core of its own, all run a step in turn, and a figure is the median of `--steps`;
memory is that of processes of their own. Writes `benchmarks/PIPELINE.md` and a picture. Rows that
are not measured keep the figures of the last run.

Expected before measuring, of ResNet-50 (128x128, batch 120): one core 13.3 s a step, two stages 7.7
(1.7, of at most 1.82 with ten micro-batches), torch the same to 2 %; without micro-batches 0.97 of
one core, as 1 MiB an example crosses; the size found within 2 % of the best, as its candidates
15 and 8 are on both sides of it; with fused_kernels 1.1 of torch. A transformer: 1.0 of torch,
1.15 with fused_kernels and all passes compiled as one; 1.04 where 0.95 was measured, since
fused_kernels take products and attention too.
Memory of its own: 0.63, as 290 MiB of each process are what TensorFlow and Keras take, and 0.72
with the 410 MiB of their files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # where its modules look for each other

import harness  # noqa: E402
import machine  # noqa: E402

from benchmarks import split_sizes  # noqa: E402
from benchmarks.split_sizes import StepperJob, StepTimes  # noqa: E402

PAGE = ROOT / "benchmarks" / "PIPELINE.md"
PICTURE = ROOT / "docs" / "images" / "pipeline.png"
RAW = ROOT / "benchmarks" / "pipeline.json"
TRANSFORMER = f"{ROOT / 'benchmarks' / 'pipeline_models.py'}:transformer"
TIMEOUT_S = 600.0
MICROS = 10
_MALLOC = "glibc.malloc."
GIVING_BACK = {
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
    "GLIBC_TUNABLES": f"{_MALLOC}hugetlb=1:{_MALLOC}mmap_threshold=65536:"
    f"{_MALLOC}trim_threshold=1048576",
}


def sweep(args: argparse.Namespace) -> list[str]:
    """ResNet-50 in two stages over the split sizes, one core, and torch."""
    size = ("--image_size", str(args.image_size), "--batch_size", str(args.batch_size))
    words = [*size, "--sizes", f"auto,{args.sizes}", "--one_device", args.one_device]
    options = split_sizes.parse_pipeline([*words, "--steps", str(args.steps)])
    torch_size = args.torch_size
    request = {"model": "resnet50", "image": args.image_size, "batch": args.batch_size}
    measured, (torch_s, fused_s) = _beside_torch(options, {**request, "size": torch_size})
    split_sizes.draw_pipeline(measured, PICTURE)
    staged = [one for one in measured if one.stages > 1 and not one.found]
    found = next(one for one in measured if one.found)
    core = [one for one in measured if one.stages == 1]
    best = min(staged, key=lambda one: one.median_s)
    alone = min((one for one in core if one.size < one.batch), key=lambda one: one.median_s)
    same = _of_size(staged, torch_size)
    fused = dataclasses.replace(same, seconds=tuple(fused_s))
    whole, one_whole = _of_size(staged, args.batch_size), _of_size(core, args.batch_size)
    side = args.image_size
    return [
        f"{side}x{side} images, {args.batch_size} examples a step",
        _claim("best split size / one core with accumulation", alone, best, 1.7),
        _claim("split size found by itself / the best of the sweep", best, found, 0.97),
        _claim(f"split size {torch_size} / torch's 1F1B", torch_s, same, 1.0),
        _claim("the same with fused_kernels / torch's 1F1B", torch_s, fused, 1.0),
        _claim("without micro-batches / one core without them", one_whole, whole, 0.93),
        *_lines(measured, torch_s, torch_size),
        f"2 stages, split size {torch_size}, fused_kernels: {_seconds(fused_s)}",
    ]


def transformer(args: argparse.Namespace) -> list[str]:
    """A transformer of eight blocks in two stages, and torch's."""
    batch, size = args.transformer_batch, args.transformer_batch // MICROS
    words = [TRANSFORMER, "--batch_size", str(batch), "--sizes", str(size)]
    words += ["--one_device", str(size), "--steps", str(args.steps)]
    options = split_sizes.parse_pipeline(words)
    request = {"model": "transformer", "batch": batch, "size": size}
    measured, (torch_s, fused_s) = _beside_torch(options, request, fused_keep="compiled")
    same = _of_size([one for one in measured if one.stages > 1], size)
    fused = dataclasses.replace(same, seconds=tuple(fused_s))
    return [
        f"{batch} examples a step",
        _claim(f"{MICROS} micro-batches / torch's 1F1B", torch_s, same, 1.0),
        _claim("the same, fused_kernels, keep=compiled / torch's 1F1B", torch_s, fused, 1.0),
        *_lines(measured, torch_s, size),
        f"2 stages, split size {size}, fused_kernels, keep=compiled: {_seconds(fused_s)}",
    ]


def memory(args: argparse.Namespace) -> list[str]:
    """The peak of each stage of ResNet-50, against one process."""
    size = max(1, args.batch_size // MICROS)
    own, whole = {}, {}
    for name, stages, environ in (("one", 1, {}), ("two", 2, {}), ("back", 2, GIVING_BACK)):
        command = [harness.PROJECT_PYTHON, "-m", "tfdist.launch", "--strategy=pipeline"]
        command += ["--start=exec", f"--stages={stages}", __file__, f"--sizes={size}"]
        command += ["--keep=recompute" if stages > 1 else "--keep=tape"]
        command += [f"--image_size={args.image_size}", f"--batch_size={args.batch_size}"]
        with unittest.mock.patch.dict(os.environ, environ):
            found = harness.measure(command, timeout_s=TIMEOUT_S)
        whole[name] = [record["peak_mib"] for record in found]
        own[name] = [record["peak_mib"] - record["file_mib"] for record in found]
    shown, back = (" and ".join(f"{peak:.0f}" for peak in own[name]) for name in ("two", "back"))
    files = " and ".join(f"{peak:.0f}" for peak in whole["two"])
    return [
        f"{args.image_size}x{args.image_size} images, {args.batch_size} examples a step",
        f"memory of its own: target at most 0.65; measured: {max(own['two']) / own['one'][0]:.2f} "
        f"(the larger stage / one process; {shown} MiB / {own['one'][0]:.0f})",
        "the stages with freed memory given back (docs/pipeline.md, Memory), which takes time: "
        f"{max(own['back']) / own['one'][0]:.2f} ({back} MiB)",
        "with pages of TensorFlow's files, which the processes of a host share: "
        f"{max(whole['two']) / whole['one'][0]:.2f} ({files} MiB / {whole['one'][0]:.0f})",
    ]


def measure_memory(args: argparse.Namespace) -> None:
    """One task of a job that trains two steps."""
    harness.pin(int(json.loads(os.environ["TF_CONFIG"])["task"]["index"]))
    import keras
    import numpy as np

    import tfdist

    options = tfdist.PipelineOptions(split_size=int(args.sizes), keep=args.keep)
    strategy = tfdist.make_strategy(pipeline=options, threads=1)
    side = args.image_size
    with strategy.scope():
        model = keras.applications.ResNet50(
            weights=None, input_shape=(side, side, 3), classifier_activation=None
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3), loss)
    x, y = np.zeros((args.batch_size, side, side, 3), "float32"), np.zeros(args.batch_size, "int32")
    tfdist.fit(model, x, y, batch_size=args.batch_size, steps_per_epoch=2, verbose=0)
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    mib = {line[0]: int(line[1]) / 1024 for line in lines if line[-1] == "kB"}
    harness.emit("pipeline", "memory", peak_mib=mib["VmHWM:"], file_mib=mib["RssFile:"])


def _beside_torch(
    options: Any, request: dict[str, Any], *, fused_keep: str = "tape"
) -> tuple[list[StepTimes], list[list[float]]]:
    """Measure the cells of `benchmarks.split_sizes`, and torch's in the same rounds.

    And a job in stages with fused_kernels, at torch's split size.
    """
    script = str(ROOT / "benchmarks" / "pipeline_torch.py")
    request = {**request, "steps": options.steps + 1}
    command = [harness.PEER_PYTHON, script, json.dumps(request)]
    with contextlib.ExitStack() as stack:
        torch = StepperJob(command, timeout_s=TIMEOUT_S)
        stack.callback(torch.close)
        torch.wait()  # it times its parts before that, and nothing else may run then
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-bench-"))
        own = argparse.Namespace(**{**vars(options), "fused_kernels": True, "keep": fused_keep})
        cell = {"stages": options.stages, "sizes": [request["size"]], "run_dir": run_dir}
        fused = split_sizes.stepper(own, **cell)
        stack.callback(fused.close)
        fused.wait()
        fused.step()  # finds the cut
        return split_sizes.measure_pipeline(options, beside=[torch, fused])


def _of_size(measured: Sequence[StepTimes], size: int) -> StepTimes:
    return next(one for one in measured if one.size == size)


def _claim(what: str, against: StepTimes | list[float], one: StepTimes, target: float) -> str:
    other = against.seconds if isinstance(against, StepTimes) else against
    ratio = statistics.median(other) / one.median_s
    pairs = ", ".join(f"{a / b:.2f}" for a, b in zip(other, one.seconds, strict=True))
    return f"{what}: target at least {target}; measured: {ratio:.2f} (round by round {pairs})"


def _lines(measured: Sequence[StepTimes], torch_s: Sequence[float], size: int) -> Iterator[str]:
    """Yield a line for each cell."""
    for one in measured:
        where = "one core" if one.stages == 1 else f"{one.stages} stages"
        found = " (found by itself)" if one.found else ""
        yield f"{where}, split size {one.size}{found}: {_seconds(one.seconds)}"
    yield f"torch, 2 stages, split size {size}: {_seconds(torch_s)}"


def _seconds(taken: Sequence[float]) -> str:
    each = ", ".join(f"{seconds:.2f}" for seconds in taken)
    return f"{statistics.median(taken):.2f} s a step ({each})"


ROWS = {
    "sweep": ("ResNet-50", sweep),
    "transformer": ("A transformer of 8 blocks, 128 words of 256 values", transformer),
    "memory": ("Peak memory of ResNet-50, 1F1B, ten micro-batches, recomputation", memory),
}


def main() -> int:
    """Measure the rows asked for, and write the page."""
    args = _arguments()
    if "TF_CONFIG" in os.environ:
        measure_memory(args)
        return 0
    os.environ.update(harness.QUIET_ENVIRON)
    found = json.loads(RAW.read_text()) if RAW.exists() else {}
    for name in args.only:
        described, start = machine.describe(), time.perf_counter()
        lines = ROWS[name][1](args)
        minutes = (time.perf_counter() - start) / 60
        found[name] = {"lines": lines, "machine": {**described, "minutes": f"{minutes:.1f}"}}
        print(name, *lines, sep="\n  ", flush=True)
        RAW.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text("\n".join(page(found)) + "\n")
    return 0


def page(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from (
        "# Pipeline",
        "",
        "Written by `python -m benchmarks.pipeline`; not by hand. Figures",
    )
    yield from ("are medians of steps; ratios are of speeds, unless they say otherwise.", "")
    yield from ((__doc__ or "").rpartition("\n\n")[2].strip().splitlines())
    for name, (title, _) in ROWS.items():
        if name in found:
            described = [f"{key}: {value}" for key, value in found[name]["machine"].items()]
            yield from ("", f"## {title}", "", *_listed(found[name]["lines"]), "")
            yield from _listed(described)


def _listed(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted(ROWS), default=list(ROWS))
    parser.add_argument("--batch_size", type=int, default=120)
    parser.add_argument("--image_size", type=int, default=128)
    parser.add_argument("--sizes", default="8,10,12,20,40", help="of micro-batches, two stages")
    parser.add_argument("--one_device", default="12,40", help="of micro-batches, one core")
    parser.add_argument("--torch_size", type=int, default=12, help="of micro-batches, torch")
    parser.add_argument("--transformer_batch", type=int, default=40)
    parser.add_argument("--keep", default="recompute", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
