"""``tfdist env``: versions, machine and environment variables, to paste into an issue.

Does not import TensorFlow, so it also works if TensorFlow is broken. Does not print values that may
be secrets.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

from tfdist.argument_parser import Parser, run_program
from tfdist.cluster.settings import may_hold_a_secret, may_name_a_secret
from tfdist.errors import EXIT_OK
from tfdist.versions import PACKAGES, verdict, versions

_PACKAGES = (
    *("protobuf", "grpcio", "h5py", "ml_dtypes", "tensorflow-datasets", "keras-tuner"),
    *("keras-nightly", "tf_keras", "ray", "mlflow", "wandb"),
)
"""Further packages that have caused problems before."""
_VARIABLES = re.compile(
    r"(TFDIST|TF|KERAS|CUDA|NVIDIA|NCCL|GRPC|XLA|OMP|KMP|MKL|OPENBLAS|PMI|OMPI_COMM_WORLD)_\w+"
    r"|SLURM_(JOB|STEP|PROCID|NODEID|LOCALID|NTASKS|NNODES|HET|RESTART)\w*"
    r"|(http|https|grpc|no|no_grpc)_proxy|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON[A-Z]+"
)
_GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report and return the exit code."""
    return run_program("tfdist.env", lambda: _run(argv), is_report=True)


def _run(argv: Sequence[str] | None) -> int:
    _parser().parse_args(argv)
    lines = (f"{name + ':':<21} {value}" for name, value in report(os.environ))
    print("\n".join(lines), flush=True)
    return EXIT_OK


def report(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names and values: versions, the machine, and the relevant variables of `environ`.

    The value of a variable is hidden if its name or its value may be that of a secret.
    """
    found = versions()
    for name in dict.fromkeys([*reversed(PACKAGES), *found]):
        yield name, found.get(name, "not installed")
    others = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            others[name] = metadata.version(name)
    yield "support", verdict({**found, **others})
    yield from others.items()
    yield "system", f"{_distribution()}, {platform.platform()}"
    yield from _machine(environ)
    for name in sorted(environ):
        if _VARIABLES.fullmatch(name):
            value = environ[name]
            is_secret = bool(value) and (may_name_a_secret(name) or may_hold_a_secret(value))
            yield name, "set, not shown" if is_secret else value or "(empty)"


def _machine(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    try:
        from tfdist.check import available_bytes
        from tfdist.launch.machine import memory_groups, this_machine
    except ImportError as error:  # of another system than Linux
        yield "jobs", str(error)
        return
    machine = this_machine(environ)
    yield "CPUs", f"{machine.cpus} of {os.cpu_count()}, {platform.processor() or 'unknown'}"
    yield "GPUs", str(len(machine.gpus))
    yield "memory available", _gib(available_bytes())
    yield "memory limit", _gib(min((limit for limit, _ in memory_groups()), default=None))


def _parser() -> Parser:
    return Parser(
        prog="python -m tfdist.env",
        description="Print versions, the machine and environment variables for an issue, "
        "without secrets.",
    )


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _gib(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else f"{size_bytes / _GIB:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
