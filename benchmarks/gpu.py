"""``python -m benchmarks.gpu``: try every strategy and feature on one GPU, in at most ten minutes.

It needs only tfdist, TensorFlow and the GPU's driver. Each part runs in its own process with its
own deadline, and has one line of result. A part that fails does not stop the other parts. The exit
code is 1 if a part failed. On a GPU it writes `benchmarks/GPU.md`. With ``--cpu`` it tries the
same parts on CPUs, and writes `build/gpu-on-cpu.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ON_CPU = os.environ.get("GPU_KIT") == "cpu"  # in the process of a part
TOLERANCE = 1e-4
EPOCHS, BATCH = 4, 64
TIMEOUT_S = 5.0  # of a collective whose peer hangs
PACKAGES = ("tensorflow", "keras", "numpy", "tfdist", "nvidia-nccl-cu12", "nvidia-cudnn-cu12")
Figures = Mapping[str, object]


def work() -> Path:
    """Return the folder of this run, which its processes share."""
    return Path(os.environ["GPU_KIT_DIR"])


class Different(Exception):
    """A result that is not as expected."""


def require(condition: object, problem: str) -> None:
    if not condition:
        raise Different(problem)


# What the parts train: a small CNN on random images, without TF32 unless said. A ReLU would turn
# rounding into a difference of 1e-4 where an input changes its sign.


def images(count: int = 1024) -> tuple[Any, Any]:
    draw = np.random.default_rng(1)
    return draw.normal(size=(count, 16, 16, 1)).astype("float32"), draw.integers(10, size=count)


def compiled(optimizer: str = "sgd", *, width: int = 64) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((16, 16, 1)),
            layers.Conv2D(16, 3, activation="tanh"),
            layers.Conv2D(16, 3, activation="tanh"),
            layers.Flatten(),
            layers.Dense(width, activation="tanh"),
            layers.Dense(10, dtype="float32"),
        ],
        name="kit",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


def trained(strategy: Any, *, epochs: int = EPOCHS, **options: Any) -> Any:
    """Return a model after training with full float32 precision, and its losses."""
    import tensorflow as tf

    import tfdist

    tf.config.experimental.enable_tensor_float_32_execution(False)
    with strategy.scope():
        model = compiled(options.pop("optimizer", "sgd"), width=options.pop("width", 64))
    history = tfdist.fit(
        model, *images(), batch_size=BATCH, epochs=epochs, seed=1, verbose=0, **options
    )
    return model, history.history["loss"]


def flat(model: Any) -> Any:
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def compared(model: Any, *, replicas: int = 1, device: str = "") -> Figures:
    """Require the weights of one CPU, and variables on a GPU."""
    import tensorflow as tf

    difference = float(np.abs(flat(model) - np.load(work() / "reference.npy")).max())
    require(difference <= TOLERANCE, f"weights differ from one CPU by {difference:.1e}")
    device = device or model.trainable_variables[0].value.device
    require(ON_CPU or "GPU" in device, f"the first variable is on {device}, not on a GPU")
    found = len(tf.config.list_logical_devices("GPU"))
    return {"largest difference": f"{difference:.1e}", "replicas": replicas, "GPUs seen": found}


def strategy_of(name: str, **options: Any) -> Any:
    import tfdist

    return tfdist.make_strategy(name, **options)


# Processes that a part starts.


def environment(**more: str) -> dict[str, str]:
    cluster = ("TF_CONFIG", "TFDIST_STRATEGY")
    kept = {name: value for name, value in os.environ.items() if name not in cluster}
    return {**kept, **more}


@contextmanager
def started(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a Python in its own process group, and kill the whole group at the end."""
    log = work() / f"{'-'.join(words)[-60:].replace('/', '_')}-{time.monotonic_ns()}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(**variables),
            start_new_session=True,
            text=True,
        )
    process.log = log  # type: ignore[attr-defined]
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(process: Any) -> str:
    """Return the last line of its output, without the launcher's own lines."""
    text = process.log.read_text().splitlines()
    lines = [line for line in text if line.strip() and not line.startswith("[launch]")]
    return lines[-1] if lines else "no output"


def ended(*words: str, timeout_s: float, code: int = 0, **variables: str) -> str:
    """Run a Python to its end, and return its last line."""
    with started(*words, **variables) as process:
        found = process.wait(timeout_s)
        last = last_line(process)
    require(found == code, f"exit code {found} instead of {code}: {last}")
    return last


def result_of(name: str, *, timeout_s: float = 100.0, code: int = 0, **variables: str) -> Any:
    """Run a function of this file, whose last line is its result, in a new process."""
    last = ended(
        "-m", "benchmarks.gpu", f"--job={name}", timeout_s=timeout_s, code=code, **variables
    )
    return json.loads(last) if code == 0 else last


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def two_workers(name: str, *, timeout_s: float = 100.0, code: int = 0) -> str:
    """Run a job in two processes that share the GPU, and return worker 0's last line."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    words = ("-m", "benchmarks.gpu", f"--job={name}")
    configs = [
        json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
        for index in range(2)
    ]
    with started(*words, TF_CONFIG=configs[1]), started(*words, TF_CONFIG=configs[0]) as chief:
        found = chief.wait(timeout_s)
        last = last_line(chief)
    require(found == code, f"exit code {found} instead of {code}: {last}")
    return last


# Jobs: functions that run in such a process, and return their result.


def worker_job(**options: Any) -> Figures:
    import tensorflow as tf

    communication = tf.distribute.experimental.CommunicationOptions(
        implementation="RING", timeout_seconds=options.pop("timeout_s", 60.0)
    )
    strategy = strategy_of("multiworker", communication_options=communication)
    model, _ = trained(strategy, **options)
    return compared(model, replicas=strategy.num_replicas_in_sync)


def hanging_worker_job() -> Figures:
    import keras

    import tfdist

    class Hangs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2 and not tfdist.is_chief():
                time.sleep(600)  # the peer's own timeout ends the job

    return worker_job(timeout_s=TIMEOUT_S, callbacks=[Hangs()])


def ps_chief_job() -> Figures:
    import tensorflow as tf

    strategy = strategy_of("ps")
    model, _ = trained(strategy)
    devices = [each.name for each in tf.config.list_logical_devices("GPU")]
    workers = [name for name in devices if "job:worker" in name]
    require(ON_CPU or workers, "the chief sees no GPU of a worker")
    figures = compared(model, device=workers[0] if workers else "CPU")
    (work() / "ps.json").write_text(json.dumps(figures))
    return figures


def resumed_job() -> str:
    """Train with deterministic operations, or die after the third epoch."""
    import keras
    import tensorflow as tf

    import tfdist

    class Dies(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 3 and os.environ.get("DIES"):
                os._exit(9)

    tf.config.experimental.enable_op_determinism()
    backup = tfdist.BackupAndRestore(os.environ["BACKUP"])
    strategy = strategy_of("single")
    model, _ = trained(strategy, optimizer="adam", callbacks=[backup, Dies()])
    state = [*model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables)]
    return hashlib.sha256(b"".join(each.tobytes() for each in state)).hexdigest()


def saving_job() -> Figures:
    import tensorflow as tf

    import tfdist

    strategy = strategy_of("single")
    saves = bool(os.environ.get("BACKUP"))
    callbacks = [tfdist.BackupAndRestore(os.environ["BACKUP"])] if saves else []
    width = 2048 if ON_CPU else 16_384
    model, _ = trained(strategy, width=width, optimizer="adam", callbacks=callbacks, epochs=2)
    status = Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    gpus = tf.config.list_logical_devices("GPU")
    gpu = tf.config.experimental.get_memory_info("GPU:0")["peak"] if gpus else 0
    state = sum(v.value.numpy().nbytes for v in [*model.variables, *model.optimizer.variables])
    return {"process": peak_kib >> 10, "gpu": gpu >> 20, "state": state >> 20}


# Parts. Each returns its figures, or raises.


def part_reference() -> Figures:
    """Weights and losses of one CPU, which the other parts compare with."""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    model, losses = trained(strategy_of("single"))
    np.save(work() / "reference.npy", flat(model))
    (work() / "losses.json").write_text(json.dumps(losses))
    return {"last loss": f"{losses[-1]:.6f}"}


def part_single() -> Figures:
    """`single`: weights of one CPU."""
    return compared(trained(strategy_of("single"))[0])


def part_mirrored_1() -> Figures:
    """`mirrored` on one device: weights of one CPU."""
    return compared(trained(strategy_of("mirrored", devices_per_worker=1))[0])


def part_mirrored_2() -> Figures:
    """`mirrored` on two logical devices of one GPU (without NCCL): weights of one CPU."""
    import tensorflow as tf

    if not ON_CPU:
        gpu = tf.config.list_physical_devices("GPU")[0]
        half = tf.config.LogicalDeviceConfiguration(memory_limit=2048)
        tf.config.set_logical_device_configuration(gpu, [half, half])
    strategy = strategy_of("mirrored", devices_per_worker=2)
    return compared(trained(strategy)[0], replicas=strategy.num_replicas_in_sync)


def part_multiworker() -> Figures:
    """`multiworker`, two processes on one GPU, TensorFlow's ring over gRPC: weights of one CPU."""
    return {**json.loads(two_workers("worker")), "collectives": "RING (gRPC)"}


def part_lost_worker() -> Figures:
    """`multiworker`: a worker that hangs raises PeerLost in the other worker, exit code 75."""
    last = two_workers("hanging_worker", code=75)
    require("no answer in a collective" in last, last)
    return {"exit code": 75, "timeout": f"{TIMEOUT_S:g} s"}


def part_ps() -> Figures:
    """`ps` with one worker: weights of one CPU."""
    words = ["--strategy=ps", "--workers=1", "--ps=1", f"--run_dir={work() / 'ps'}"]
    program = [str(Path(__file__)), "--job=ps_chief"]
    ended("-m", "tfdist.launch", *words, *program, timeout_s=100.0)
    figures: Figures = json.loads((work() / "ps.json").read_text())
    return figures


def part_resume() -> Figures:
    """A killed run resumes with the bits of an undisturbed run (`enable_op_determinism`)."""
    undisturbed = result_of("resumed", BACKUP=str(work() / "undisturbed"))
    result_of("resumed", BACKUP=str(work() / "killed"), DIES="1", code=9)
    require(result_of("resumed", BACKUP=str(work() / "killed")) == undisturbed, "the bits differ")
    return {"bits": "equal"}


def part_speed() -> Figures:
    """Steps per second of tfdist, of Keras' `Model.fit` and of torch, with TF32 as by default."""
    import tensorflow as tf

    import tfdist

    strategy = strategy_of("single")
    with strategy.scope():
        ours = compiled()
    with tf.device("/CPU:0" if ON_CPU else "/GPU:0"):
        theirs = compiled()  # not in the scope: Keras' own loop
    rates = {
        "tfdist": rate_of(lambda **options: tfdist.fit(ours, *images(), **options)),
        "Model.fit": rate_of(lambda **options: theirs.fit(*images(), **options)),
        "torch": torch_rate(),
    }
    return {name: f"{r:.0f} steps/s" if isinstance(r, float) else r for name, r in rates.items()}


def rate_of(fit: Callable[..., Any]) -> float:
    """Return the steps per second of the epochs after the first."""
    import keras

    ends: list[float] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends.append(time.perf_counter()))
    fit(batch_size=BATCH, epochs=11, verbose=0, callbacks=[note])
    return 10 * (len(images()[1]) // BATCH) / (ends[-1] - ends[0])


def torch_rate() -> float | str:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch
    from torch import nn

    device = "cpu" if ON_CPU else "cuda"
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(16 * 12 * 12, 64), nn.Tanh(), nn.Linear(64, 10)),
    ).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    x, y = (torch.from_numpy(each).to(device) for each in images())
    x, began_s = x.permute(0, 3, 1, 2).contiguous(), 0.0
    for epoch in range(11):
        for rows in torch.randperm(len(x), device=device).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        if not ON_CPU:
            torch.cuda.synchronize()
        began_s = began_s if epoch else time.perf_counter()
    return 10 * (len(x) // BATCH) / (time.perf_counter() - began_s)


def part_backup_memory() -> Figures:
    """Peak memory with and without BackupAndRestore, in MiB."""
    without, saving = result_of("saving"), result_of("saving", BACKUP=str(work() / "memory"))
    more = {name: saving[name] - without[name] for name in ("process", "gpu")}
    return {
        "model and optimizer": f"{saving['state']} MiB",
        "process": f"{without['process']} MiB, {more['process']:+} MiB",
        "GPU": "not measured" if ON_CPU else f"{without['gpu']} MiB, {more['gpu']:+} MiB",
    }


def part_mixed_precision() -> Figures:
    """`mixed_float16` with loss scaling: float32 variables, and a loss that falls as on one CPU."""
    import keras

    keras.config.set_dtype_policy("mixed_float16")
    model, losses = trained(strategy_of("single"))
    wanted = json.loads((work() / "losses.json").read_text())
    require(model.layers[0].compute_dtype == "float16", "the layers do not compute in float16")
    require(model.layers[0].kernel.dtype == "float32", "the variables are not float32")
    difference = abs(losses[-1] - wanted[-1]) / wanted[-1]
    require(difference < 0.02, f"the last loss differs from one CPU by {difference:.1%}")
    return {"optimizer": type(model.optimizer).__name__, "loss differs by": f"{difference:.2%}"}


def part_find_batch_size() -> Figures:
    """`find_batch_size` meets a real out-of-memory error (on a CPU: its own limit)."""
    import tfdist
    from tfdist.find.batch_size import memory_limits

    with strategy_of("single").scope():
        model = compiled()
    process, gpu = memory_limits(1.0)
    use = 1.2 * 2**30 / (process if ON_CPU else gpu or 1)
    if not ON_CPU:  # CUDA's own memory in the process must not be the limit
        use = min(0.9, max(use, 8 * 2**30 / process))
    found = tfdist.find_batch_size(model, *images(), first=8192, most=2**22, steps=1, use=use)
    causes = {trial.cause for trial in found.trials if not trial.fits}
    wanted = ("more than",) if ON_CPU else ("OOM", "ResourceExhausted", "out of memory")
    require(causes, "every batch fits")
    require(all(any(word in cause for word in wanted) for cause in causes), f"{causes}")
    kind = "limit of tfdist (out of memory: GPU only)" if ON_CPU else "out of memory on the GPU"
    return {"batch size": found.per_replica, "trials": len(found.trials), "cause": kind}


def part_serving() -> Figures:
    """`tfdist serve` answers as `predict` does."""
    import tfdist

    model, _ = trained(strategy_of("single"), epochs=1)
    x = images()[0][:8]
    expected = tfdist.predict(model, x, verbose=0)
    tfdist.export_model(model, work() / "served", name="kit")
    port, other = free_ports(2)
    flags = (f"--rest_port={port}", f"--grpc_port={other}")
    with started("-m", "tfdist.serve", str(work() / "served"), *flags) as server:
        body = json.dumps({"instances": x.tolist()}).encode()
        url = f"http://127.0.0.1:{port}/v1/models/kit:predict"
        while True:
            require(server.poll() is None, last_line(server))
            try:
                answer = urllib.request.urlopen(url, body, timeout=60).read()
                break
            except OSError:
                time.sleep(0.2)
        began_s = time.perf_counter()
        for _ in range(50):
            urllib.request.urlopen(url, body, timeout=60).read()
        rate = 50 / (time.perf_counter() - began_s)
    difference = float(np.abs(np.array(json.loads(answer)["predictions"]) - expected).max())
    require(difference < 1e-2, f"answers differ from predict by {difference:.1e}")
    return {"largest difference": f"{difference:.1e}", "one client": f"{rate:.0f} requests/s"}


PARTS: dict[str, tuple[Callable[[], Figures], float]] = {
    "reference": (part_reference, 60.0),
    "single": (part_single, 60.0),
    "mirrored_1": (part_mirrored_1, 60.0),
    "mirrored_2": (part_mirrored_2, 60.0),
    "multiworker": (part_multiworker, 100.0),
    "lost_worker": (part_lost_worker, 100.0),
    "ps": (part_ps, 100.0),
    "resume": (part_resume, 120.0),
    "speed": (part_speed, 90.0),
    "backup_memory": (part_backup_memory, 90.0),
    "mixed_precision": (part_mixed_precision, 60.0),
    "find_batch_size": (part_find_batch_size, 240.0),
    "serving": (part_serving, 90.0),
}
"""Parts with their deadlines in seconds. All parts together stop after `TOTAL_S`."""
TOTAL_S = 590.0
JOBS: dict[str, Callable[[], Any]] = {
    "worker": worker_job,
    "hanging_worker": hanging_worker_job,
    "ps_chief": ps_chief_job,
    "resumed": resumed_job,
    "saving": saving_job,
}


# The run.


def main() -> int:
    args = _arguments()
    if args.job:
        run = JOBS[args.job] if args.job in JOBS else PARTS[args.job][0]
        print(f"\n{json.dumps(run())}", flush=True)
        return 0
    done = subprocess.run(
        [sys.executable, "-c", "import tensorflow"], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        print(f"TensorFlow cannot be imported: {done.stderr.strip().splitlines()[-1]}")
        return 1
    device = _device(args.cpu)
    if not args.cpu and not device:
        print("TensorFlow finds no GPU. Fix: run make test-gpu CPU=1 to try the parts on CPUs")
        return 1
    os.environ.update(GPU_KIT="cpu" if args.cpu else "gpu", TF_CPP_MIN_LOG_LEVEL="3")
    if args.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    parts = list(dict.fromkeys(["reference", *(args.parts or PARTS)]))
    rows, end_s = [], time.monotonic() + TOTAL_S
    with tempfile.TemporaryDirectory(prefix="tfdist-gpu-") as directory:
        os.environ["GPU_KIT_DIR"] = directory
        for name in parts:
            rows.append(_run_part(name, end_s=end_s))
            print(f"{rows[-1][0]:<16} {rows[-1][1]:<9} {rows[-1][2]}", flush=True)
    _write(rows, device or platform.processor(), on_cpu=args.cpu, is_whole=not args.parts)
    return 1 if any(row[1] == "failed" for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--cpu", action="store_true", help="try the parts on CPUs")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return args


def _device(on_cpu: bool) -> str:
    """Return the name of the GPU, or of the CPU."""
    if on_cpu:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        return f"CPU: {names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    program = (
        "import tensorflow as t; d = t.config.list_physical_devices('GPU');"
        "c = t.config.experimental.get_device_details;"
        "print('\\n' + str(d and [c(e) for e in d][0] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def _run_part(name: str, *, end_s: float) -> tuple[str, str, str]:
    """Return the name of a part, "ok" or "failed", and one line of figures or of the failure."""
    deadline_s = min(PARTS[name][1], end_s - time.monotonic())
    if deadline_s < 5:
        return name, "failed", f"no time is left of {TOTAL_S:.0f} s"
    began_s = time.monotonic()
    with started("-m", "benchmarks.gpu", f"--job={name}") as process:
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return name, "failed", f"not done in {deadline_s:.0f} s: {last_line(process)}"
        last = last_line(process)
    if code:
        return name, "failed", last
    figures = "; ".join(f"{key} {value}" for key, value in json.loads(last).items())
    return name, "ok", f"{figures} ({time.monotonic() - began_s:.0f} s)"


def _write(rows: Any, device: str, *, on_cpu: bool, is_whole: bool) -> None:
    """Write the page of a run of all parts."""
    if not is_whole:
        return
    page = ROOT / "build" / "gpu-on-cpu.md" if on_cpu else ROOT / "benchmarks" / "GPU.md"
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    versions = ", ".join(f"{name} {found[name]}" for name in PACKAGES if name in found)
    lines = ["# Parts tried on a " + ("CPU" if on_cpu else "GPU"), ""]
    lines += ["`make test-gpu" + " CPU=1" * on_cpu + "` writes this page.", ""]
    lines += [f"- device: {device}", f"- versions: Python {platform.python_version()}, {versions}"]
    lines += ["", "| part | tries | result | figures |", "|---|---|---|---|"]
    for name, result, figures in rows:
        about = str(PARTS[name][0].__doc__).partition("\n")[0]
        lines.append(f"| `{name}` | {about} | {result} | {figures.replace('|', '/')} |")
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join(lines) + "\n")
    print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
