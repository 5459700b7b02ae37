"""`find_batch_size`: the largest batch that fits into memory, tried in child processes.

Sizes double until a size does not fit, followed by bisection. Each size runs in its own child
process, so that running out of memory ends only the child. A child that exceeds the limit is
killed, and children ask the kernel to kill them before other processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tfdist.check import available_bytes
from tfdist.errors import TfdistError, UsageError, require, require_int, require_number
from tfdist.launch.guardian import bootstrap_command, die_with
from tfdist.launch.machine import nvidia_smi
from tfdist.options import CLUSTER

_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.05
_REGISTER = "register the model's classes with Keras in an importable module"
_CLUSTER = ("TF_CONFIG", "TFDIST_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "JOB_COMPLETION_INDEX")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchTrial:
    """Result of a trial with one batch size.

    Attributes:
      batch_size: Examples of one replica.
      fits: Whether the trial finished its steps within the limits.
      peak_bytes: Peak memory of the process, `None` if it did not report it.
      gpu_peak_bytes: Peak memory on its GPU, `None` without a GPU.
      examples_per_second: Throughput of one replica, `None` if the batch does not fit.
      cause: Reason why the batch does not fit, "" if it fits.
    """

    batch_size: int
    fits: bool
    peak_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    examples_per_second: float | None = None
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Largest batch size that fits, and all trials.

    Attributes:
      per_replica: Largest batch of one replica that fits.
      global_batch_size: Batch size for `tfdist.fit`, over all replicas.
      limit_bytes: Memory limit of one replica's process.
      gpu_limit_bytes: Memory limit of one replica on its GPU, `None` without GPUs.
      trials: All trials in the order of their runs.
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


Limits = tuple[int, int | None]
"""Memory limits of one replica in bytes: its process, and its GPU (`None` without GPUs)."""


def memory_limits(use: float, *, replicas: int = 1) -> Limits:
    """Return the fraction `use` of the free memory. Replicas without GPUs share the memory."""
    gpus = gpu_bytes()
    gpu = int(use * min(gpus)) if gpus else None
    return int(use * available_bytes()) // (1 if gpus else replicas), gpu


def largest(fits: Callable[[int], bool], *, first: int, most: int) -> int:
    """Return the largest size that fits, by doubling and bisection, or 0 if size 1 does not fit.

    The result is exact to an eighth, to keep calls of `fits` few. Memory is not known better.
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


def search(
    request: Mapping[str, Any],
    limits: Limits,
    *,
    first: int,
    most: int,
    steps: int,
    timeout_s: float,
) -> tuple[int, list[BatchTrial]]:
    """Return the largest batch size that fits, and all trials.

    Raises TfdistError if a batch of 1 does not fit.
    """
    trials: list[BatchTrial] = []

    def fits(size: int) -> bool:
        options = {"batch_size": size, "steps": steps}
        trial = try_out({**request, **options}, limits, timeout_s=timeout_s)
        what = f"took {(trial.peak_bytes or 0) >> 20} MiB" if trial.fits else trial.cause
        _LOG.info("batch size %d: %s", size, what)
        trials.append(trial)
        return trial.fits

    found = largest(fits, first=first, most=most)
    if not found:
        raise TfdistError(
            f"find_batch_size: a batch of 1 does not fit into {limits[0] >> 20} MiB "
            f"({trials[-1].cause}). Fix: use a smaller model, or a machine with more memory"
        )
    return found, trials


def try_out(request: Mapping[str, Any], limits: Limits, *, timeout_s: float) -> BatchTrial:
    """Run one trial in a child. Raise TfdistError if it fails for a reason other than memory.

    Args:
      request: Values of `request_of`, ``batch_size``, and ``steps`` of a round.
      limits: Memory limits of the child.
      timeout_s: Seconds until the trial is given up.
    """
    size, (limit_bytes, gpu_limit_bytes) = int(request["batch_size"]), limits
    more = {"parent": os.getpid(), "gpu_limit_bytes": gpu_limit_bytes}
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            bootstrap_command(__name__),
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=output,
            env=_environment(os.environ),
        )
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(pickle.dumps({**request, **more}))
            cause = _watch(child, limit_bytes, timeout_s=timeout_s)
        finally:
            child.kill()
            child.wait()
        answer.seek(0)
        output.seek(0)
        trial = _trial(size, child.returncode, cause, answer.read(), output.read())
    if trial.fits and (trial.peak_bytes or 0) > limit_bytes:  # a peak between two checks
        return BatchTrial(batch_size=size, fits=False, cause=_too_much(limit_bytes))
    return trial


def _watch(child: subprocess.Popen[bytes], limit_bytes: int, *, timeout_s: float) -> str:
    """Wait for the child's exit and return the cause if it exceeds its memory limit."""
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
                "Fix: raise timeout_s, or pass most=..., the largest size to try"
            )


def _too_much(limit_bytes: int) -> str:
    return f"took more than {limit_bytes >> 20} MiB"


def _trial(size: int, status: int, cause: str, answer: str, output: str) -> BatchTrial:
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
        return BatchTrial(batch_size=size, fits=False, cause="out of memory (killed)")
    last = found.get("error") or next(iter(reversed(output.strip().splitlines())), "")
    raise TfdistError(
        f"find_batch_size: the trial with {size} examples failed: {last or f'status {status}'}. "
        f"Fix: {_REGISTER}"
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if not name.startswith(_CLUSTER)}
    kept["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    kept[CLUSTER] = "none"
    return kept


def find_batch_size(  # noqa: D417
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
    """Return the largest batch size that fits into memory when `model` trains.

    A collective: every training task makes the same call and gets the same `BatchSizes`. Only the
    chief runs trials, on its host.

    Args:
      model: Compiled and built model. The child reads it from a ``.keras`` file, so the program's
        own classes must be registered with Keras in a module that can be imported.
      x, y: Data as in `tfdist.fit`. Only their shapes and types are used.
      first: First batch size of one replica to try (default: 8).
      most: Largest batch size to try (default: 65,536).
      steps: Steps of each trial (default: 3).
      use: Fraction of the free memory that the replicas may use (default: 0.9).
      timeout_s: Seconds for one trial (default: 600).

    Raises:
      UsageError: The model is not built, or a file cannot hold it.
      TfdistError: A batch of 1 does not fit, or a trial fails for a reason other than memory.
    """
    from tfdist.strategy import broadcast
    from tfdist.training import building

    job = building.job_for(model, doing="find_batch_size")
    building.require_compiled(model, doing="find_batch_size")
    require(
        model.built,
        "find_batch_size",
        "the model is not built",
        fix="make the model with keras.Input, or call it once",
        code="not-built",
    )
    sizes = {"first": first, "most": most, "steps": steps}
    for name, value in sizes.items():
        require_int(name, value, least=1)
    require_number("use", use, above=0)
    require_number("timeout_s", timeout_s, above=0, unit="seconds")
    answer, failure = dict[str, Any](), None
    if job.is_chief:
        try:
            with tempfile.TemporaryDirectory(prefix="tfdist-find-") as directory:
                path = Path(directory) / "model.keras"
                request = request_of(model, x, y, path)
                limits = memory_limits(use, replicas=replicas_here(job))
                found, trials = search(request, limits, **sizes, timeout_s=timeout_s)
                answer = {
                    "per_replica": found,
                    "limit_bytes": limits[0],
                    "gpu_limit_bytes": limits[1],
                    "trials": list(map(dataclasses.asdict, trials)),
                }
        except TfdistError as error:  # the other tasks wait for the result
            answer, failure = {"error": str(error)}, error
    result = broadcast(answer if job.is_chief else None)
    if "error" in result:
        raise failure or TfdistError(result["error"])
    result["trials"] = tuple(BatchTrial(**trial) for trial in result["trials"])
    return BatchSizes(**result, global_batch_size=result["per_replica"] * job.num_replicas)


def replicas_here(job: Any) -> int:
    if job.config is None or not job.kind.has_whole_workers:
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
    """Save a model as ``.keras``. Return a request with its path, data spec and dtype policy."""
    import keras

    from tfdist.checkpoint.publish import saveable
    from tfdist.data.resolve import as_source
    from tfdist.data.source import spec_of_batches

    spec = spec_of_batches(as_source(x, y))
    parts = [part for part in keras.tree.flatten(spec) if part is not None]
    require(
        all(part.shape[1:].is_fully_defined() for part in parts),
        "find_batch_size",
        "the examples have a dimension of unknown size",
        fix="pass a few batches of the largest size, such as arrays of padded examples",
        code="unsupported-data",
    )
    with saveable(model, where="find_batch_size", fix=_REGISTER):
        model.save(path)
    policy = keras.config.dtype_policy().name
    return {"model": str(path), "spec": spec, "dtype_policy": policy}


# Free memory for a new process: in its control groups, on the machine, on its GPUs.


def gpu_bytes() -> tuple[int, ...]:
    """Return the free memory of each GPU of this machine, or () without GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ()
    listed = nvidia_smi("--query-gpu=memory.free", "--format=csv,noheader,nounits")
    return tuple(int(line) << 20 for line in listed.split() if line.isdecimal())


# The child process: trains a few steps with one batch size and reports its memory and speed.
#
# ``python -m tfdist.find.batch_size`` reads a pickled request from its parent's pipe, its standard
# input, and writes a JSON object to its standard output. The data are zeros in the shape of the
# real data. The model is a ``.keras`` file, read in Keras' safe mode.

_OUT_OF_MEMORY = re.compile(r"ResourceExhausted|\bOOM\b|bad_alloc|out of memory|MemoryError")


def main(argv: Sequence[str]) -> int:
    """Run a trial, write its answer and return 0."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the program's output out of the answer
    request = pickle.load(sys.stdin.buffer)
    die_with(int(request["parent"]))
    with contextlib.suppress(OSError):  # /proc may be read-only in a container
        Path("/proc/self/oom_score_adj").write_text("1000")  # killed first if memory runs out
    try:
        answer = _run(request)
    except UsageError as error:
        parts = ("where", "problem", "fix", "code")
        answer = {"refused": {part: str(getattr(error, part)) for part in parts}}
    except Exception as error:
        answer = failure(error)
    with output:
        json.dump(answer, output)
    return 0


def failure(error: Exception) -> dict[str, str]:
    """Return the answer of a failed trial: out of memory, or another error."""
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
    examples_per_second = _train(request)
    gpu = tf.config.experimental.get_memory_info("GPU:0") if gpus else {"peak": None}
    return {
        "peak_bytes": _peak_bytes(),
        "gpu_peak_bytes": gpu["peak"],
        "examples_per_second": examples_per_second,
    }


def _train(request: dict[str, Any]) -> float:
    """Train two rounds of `steps` steps. Return the second round's examples per second."""
    import keras

    from tfdist.training.fitting import fit

    keras.config.set_dtype_policy(request["dtype_policy"])
    model = keras.models.load_model(request["model"])
    batch_size, steps = int(request["batch_size"]), int(request["steps"])
    ends_s: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: ends_s.append(time.perf_counter())
    )
    x, y, weight = zeros(request["spec"], batch_size)
    fit(
        model,
        x,
        y,
        batch_size=batch_size,
        sample_weight=weight,
        epochs=2,  # the first traces
        steps_per_epoch=steps,
        callbacks=[clock],
        verbose=0,
    )
    return batch_size * steps / (ends_s[1] - ends_s[0])


def zeros(spec: Any, batch_size: int) -> tuple[Any, Any, Any]:
    """Return x, y and sample weights of zeros or empty strings, `None` for each missing part."""
    import tensorflow as tf

    def make(part: Any) -> Any:
        return part if part is None else tf.zeros((batch_size, *part.shape[1:]), part.dtype).numpy()

    data = tf.nest.map_structure(make, spec)
    x, y, weight = (*(data if isinstance(data, tuple) else (data,)), None, None)[:3]
    return x, y, weight


def _peak_bytes() -> int:
    """Return this process's peak memory. (getrusage would include the parent before the exec.)"""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
