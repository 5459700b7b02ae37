"""`find_batch_size`: the largest batch that fits into memory, tried in child processes.

Sizes are doubled until one does not fit, then bisected. Each is tried in a process of its own: what
runs out of memory is that process. A child is ended when it takes more than there is for it, and
asks the kernel to be the first to go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tfdist.check import available_bytes
from tfdist.errors import TfdistError, UsageError, require, require_int, require_number
from tfdist.launch.guardian import die_with

_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.05
_REGISTER = "register the model's own classes with Keras in a module that can be imported"
_CLUSTER = ("TF_CONFIG", "TFDIST_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "JOB_COMPLETION_INDEX")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchTrial:
    """One batch size that was tried.

    Attributes:
      batch_size: of one replica.
      fits: whether the steps were done.
      peak_bytes: the most that the process had in memory; None where it did not tell.
      gpu_peak_bytes: the most that it had on its GPU; None without one.
      examples_per_second: of one replica; None where it did not fit.
      cores: how many the steps kept busy; None likewise.
      parameters: of the model; None likewise.
      cause: why it did not fit.
    """

    batch_size: int
    fits: bool
    peak_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    examples_per_second: float | None = None
    cores: float | None = None
    parameters: int | None = None
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """What was tried, and what fits.

    Attributes:
      per_replica: the largest batch of one replica that fits.
      global_batch_size: of all replicas, as `tfdist.fit` takes it.
      limit_bytes: what there was for the process of one replica.
      gpu_limit_bytes: what there was for it on a GPU; None without one.
      trials: in the order in which they were made.
    """

    per_replica: int
    global_batch_size: int
    limit_bytes: int
    gpu_limit_bytes: int | None
    trials: tuple[BatchTrial, ...]

    def __str__(self) -> str:
        of = f" ({self.per_replica} a replica)" if self.global_batch_size > self.per_replica else ""
        room = f"{self.limit_bytes >> 20} MiB"
        if self.gpu_limit_bytes is not None:
            room += f", {self.gpu_limit_bytes >> 20} MiB of a GPU"
        size = f"batch size {self.global_batch_size}{of}"
        return f"{size} fits into {room}, by {len(self.trials)} trials"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimits:
    """Bytes that one replica may take: its process, and on its GPU, None without one."""

    process: int
    gpu: int | None

    @classmethod
    def of_this_machine(cls, use: float, *, replicas: int = 1) -> MemoryLimits:
        """Return `use` of what is left; replicas without GPUs share the machine's memory."""
        gpus = gpu_bytes()
        share = 1 if gpus else replicas
        gpu = int(use * min(gpus)) if gpus else None
        return cls(process=int(use * available_bytes()) // share, gpu=gpu)


def largest(fits: Callable[[int], bool], *, first: int, most: int) -> int:
    """Return the largest size that fits, by doubling and bisection; 0 where not even 1 does.

    To an eighth of it: `fits` is asked a few times only, and memory is not known better.
    """
    low, size = 0, min(first, most)
    while fits(size):
        low = size
        if size == most:
            return most
        size = min(2 * size, most)
    high = size
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSearch:
    """Settings of a search, the arguments of `find_batch_size`; raises UsageError."""

    first: int = 8
    most: int = 65_536
    steps: int = 3
    use: float = 0.9
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("first", "most", "steps"):
            require_int(name, getattr(self, name), least=1)
        require_number("use", self.use, above=0)
        require_number("timeout_s", self.timeout_s, above=0, unit="seconds")

    def run(self, request: Mapping[str, Any], *, replicas: int = 1, here: int = 1) -> BatchSizes:
        """Return what fits, for a job of so many replicas, of which so many are on this machine.

        Raises TfdistError where a batch of 1 does not fit.
        """
        limits = MemoryLimits.of_this_machine(self.use, replicas=here)
        trials: list[BatchTrial] = []

        def fits(size: int) -> bool:
            options = {"batch_size": size, "steps": self.steps, "least_s": 0.0}
            trial = try_out({**request, **options}, limits, timeout_s=self.timeout_s)
            what = f"took {(trial.peak_bytes or 0) >> 20} MiB" if trial.fits else trial.cause
            _LOG.info("batch size %d: %s", size, what)
            trials.append(trial)
            return trial.fits

        found = largest(fits, first=self.first, most=self.most)
        if not found:
            raise TfdistError(
                f"find_batch_size: a batch of 1 does not fit into {limits.process >> 20} MiB "
                f"({trials[-1].cause}). Fix: use a smaller model, or a machine with more memory"
            )
        return BatchSizes(
            per_replica=found,
            global_batch_size=found * replicas,
            limit_bytes=limits.process,
            gpu_limit_bytes=limits.gpu,
            trials=tuple(trials),
        )


def try_out(request: Mapping[str, Any], limits: MemoryLimits, *, timeout_s: float) -> BatchTrial:
    """Run one trial in a child; raise TfdistError where it fails for something else than memory.

    Args:
      request: ``batch_size``; ``steps`` of a round, and ``least_s`` for which rounds are repeated;
        and the values of `request_of`.
      limits: of its memory.
      timeout_s: of the child.
    """
    size = int(request["batch_size"])
    more = {"parent": os.getpid(), "gpu_limit_bytes": limits.gpu}
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "tfdist.find.batch_size"],
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=output,
            env=_environment(os.environ),
            text=True,
        )
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(json.dumps({**request, **more}))
            cause = _watch(child, limits.process, timeout_s=timeout_s)
        finally:
            child.kill()
            child.wait()
        answer.seek(0)
        output.seek(0)
        trial = _trial(size, child.returncode, cause, answer.read(), output.read())
    if trial.fits and (trial.peak_bytes or 0) > limits.process:  # between two looks at it
        return BatchTrial(batch_size=size, fits=False, cause=_too_much(limits.process))
    return trial


def _watch(child: subprocess.Popen[str], limit_bytes: int, *, timeout_s: float) -> str:
    """Wait for the child's end; end it where it takes too much, and return that."""
    process, deadline_s = psutil.Process(child.pid), time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LOOK_EVERY_S)
            return ""
        with contextlib.suppress(psutil.Error):
            if process.memory_info().rss > limit_bytes:
                return _too_much(limit_bytes)
        if time.monotonic() > deadline_s:
            raise TfdistError(
                f"find_batch_size: a trial took more than {timeout_s:g} s. "
                "Fix: pass timeout_s, or most for the largest size to try"
            )


def _too_much(limit_bytes: int) -> str:
    return f"took more than {limit_bytes >> 20} MiB"


def _trial(size: int, status: int, cause: str, answer: str, output: str) -> BatchTrial:
    """Return what became of a child."""
    if cause:
        return BatchTrial(batch_size=size, fits=False, cause=cause)
    found = json.loads(answer) if answer else {}
    if "peak_bytes" in found:
        return BatchTrial(batch_size=size, fits=True, **found)
    if "out_of_memory" in found:
        return BatchTrial(batch_size=size, fits=False, cause=found["out_of_memory"])
    if "refused" in found:
        raise UsageError(**found["refused"])
    killed = status in (-9, -6) and not found
    if killed and (status == -9 or "bad_alloc" in output):
        return BatchTrial(batch_size=size, fits=False, cause="ended by the kernel or the allocator")
    last = found.get("error") or next(iter(reversed(output.strip().splitlines())), "")
    raise TfdistError(
        f"find_batch_size: the trial with {size} examples failed: {last or f'status {status}'}. "
        f"Fix: {_REGISTER}"
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that stands alone."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_CLUSTER)}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    kept["TFDIST_CLUSTER"] = "none"
    return kept


def find_batch_size(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    first: int = 8,
    most: int = 65_536,
    steps: int = 3,
    use: float = 0.9,
    timeout_s: float = 600.0,
) -> BatchSizes:
    """Return the largest batch with which training `model` fits into memory.

    A collective: every training task calls it alike; the chief tries, alone and on its machine.

    Args:
      model: compiled and built; the child reads it from a ``.keras`` file, so classes of the
        program's own must be registered with Keras in a module that can be imported.
      x, y: as in `tfdist.fit`; only their shapes and types matter.
      first: the batch of one replica to begin with.
      most: the largest to try.
      steps: of each trial.
      use: the part of the memory that is left now which the replicas may take.
      timeout_s: of one trial.

    Raises:
      UsageError: the model is not compiled or not built, or holds what a file cannot.
      TfdistError: a batch of 1 does not fit, or a trial fails for something else than memory.
    """
    from tfdist.strategy import broadcast
    from tfdist.training import building

    job = building.job_for(model, doing="find_batch_size")
    building.require_compiled(model, doing="find_batch_size")
    require(
        model.built,
        "find_batch_size",
        received="a model that is not built",
        expected="a built model, of which a file can be made",
        fix="make the model with keras.Input, or call it once",
        code="not-built",
    )
    search = BatchSearch(first=first, most=most, steps=steps, use=use, timeout_s=timeout_s)
    answer, failure = dict[str, Any](), None
    if job.is_chief:
        replicas = 1 if job.kind == "ps" else job.num_replicas
        try:
            with tempfile.TemporaryDirectory(prefix="tfdist-find-") as directory:
                path = Path(directory) / "model.keras"
                request = request_of(model, x, y, path)
                found = search.run(request, replicas=replicas, here=replicas_here(job))
                answer = dataclasses.asdict(found)
        except TfdistError as error:  # the others wait to hear of it
            answer, failure = {"error": str(error)}, error
    result = broadcast(answer if job.is_chief else None)
    if "error" in result:
        raise failure or TfdistError(result["error"])
    trials = tuple(BatchTrial(**trial) for trial in result["trials"])
    return BatchSizes(**{**result, "trials": trials})


def replicas_here(job: Any) -> int:
    """Return how many replicas are on this machine."""
    if job.config is None or job.kind not in ("multiworker", "ps"):
        return int(job.num_replicas)
    cluster, mine = job.config.cluster, job.config.task
    hosts = [
        cluster.address(task).rpartition(":")[0]
        for task in cluster.tasks()
        if task.type in ("chief", "worker")
    ]
    here = hosts.count(cluster.address(mine).rpartition(":")[0])
    return max(1, here) * len(job.replica_ids)


def request_of(model: Any, x: Any, y: Any, path: Path) -> dict[str, Any]:
    """Save a model as ``.keras``; return what a trial needs of it and of the data."""
    import keras

    from tfdist.checkpoint.publish import saveable
    from tfdist.find.spec import encode_spec, spec_of

    with saveable(model, where="find_batch_size", fix=_REGISTER):
        model.save(path)
    policy = keras.config.dtype_policy().name
    return {"model": str(path), "spec": encode_spec(spec_of(x, y)), "dtype_policy": policy}


# Memory that is left for a new process: of its control groups, of the machine, of its GPUs.

_NVIDIA_SMI_TIMEOUT_S = 20.0
_MIB = 1 << 20


def gpu_bytes() -> tuple[int, ...]:
    """Return the free memory of each GPU of this machine; empty where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ()
    query = [command, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(int(line) * _MIB for line in done.stdout.split() if line.isdecimal())


# The child: trains a few steps of one batch size, and says what it took.
#
# ``python -m tfdist.find.batch_size`` reads one JSON object from its standard input and writes one
# to its standard output. Data are zeros in the shape of the real ones. Nothing is unpickled: the
# model is a ``.keras`` file, read in Keras' safe mode.

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
    examples_per_second, cores, parameters = _train(request)
    gpu = tf.config.experimental.get_memory_info("GPU:0") if gpus else {"peak": None}
    return {
        "peak_bytes": _peak_bytes(),
        "gpu_peak_bytes": gpu["peak"],
        "examples_per_second": examples_per_second,
        "cores": cores,
        "parameters": parameters,
    }


def _train(request: dict[str, Any]) -> tuple[float, float, int]:
    """Train rounds of so many steps; return examples per second, busy cores, and parameters.

    The first round, which traces, is left out; the others go on for `least_s`.
    """
    import keras

    from tfdist.find.spec import decode_spec, zeros
    from tfdist.training.fitting import fit

    keras.config.set_dtype_policy(request["dtype_policy"])
    model, spec = keras.models.load_model(request["model"]), decode_spec(request["spec"])
    batch_size, steps = int(request["batch_size"]), int(request["steps"])
    began, took = list[float](), list[float]()

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            now = (time.perf_counter(), time.process_time())
            began.extend(() if began else now)
            took[:] = epoch, now[0] - began[0], now[1] - began[1]
            self.model.stop_training = bool(epoch) and took[1] >= request["least_s"]

    x, y, weight = zeros(spec, batch_size)
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
    return batch_size * steps * rounds / wall_s, busy_s / wall_s, model.count_params()


def _peak_bytes() -> int:
    """Return the most that this process had in memory; getrusage has what made it in it, too."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


if __name__ == "__main__":
    sys.exit(main())
