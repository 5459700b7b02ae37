"""Starting `tfdist.preflight.servers` beside this process, and hearing what came of it in time."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from tfdist.preflight.facts import Exchange
from tfdist.preflight.reading import read

DEADLINE_S = 40.0

_MAX_SAID_BYTES = 64 << 10
_LOOK_EVERY_S = 0.05
# What TensorFlow says on every machine without GPUs.
_NOISE = re.compile(r"WARNING: All log messages before absl|[IW]\d{4} |E\d{4} .*cuInit")


class Servers:
    """TensorFlow's server of each index that is given, in a process of its own each."""

    def __init__(self, addresses: Sequence[str], *, environ: Mapping[str, str]) -> None:
        self._addresses = addresses
        # What is tried is what tasks on CPUs do: no GPU is taken from whoever has them.
        self._environ = {**environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        self._environ.pop("TF_CONFIG", None)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._printed.close()
        self._said.close()

    def start(self, index: int) -> None:
        """Starts one of them."""
        command = [sys.executable, "-m", "tfdist.preflight.servers", str(index), *self._addresses]
        self._processes.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._printed,
                stderr=self._said,
                env=self._environ,
            )
        )

    def result(self) -> Exchange:
        """Waits for what the first one prints; only where it was started."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._processes[0].poll() is None:
            if failed := self.failure():
                return Exchange(error=failed)
            if time.monotonic() > deadline_s:
                return Exchange(error=self._why(f"no result after {DEADLINE_S:.0f} s"))
            time.sleep(_LOOK_EVERY_S)
        if failed := self.failure():
            return Exchange(error=failed)
        self._printed.seek(0)
        return read(Exchange, json.loads(self._printed.read(_MAX_SAID_BYTES)))

    def failure(self) -> str:
        """Returns why a server of this host has ended; empty while none has failed."""
        codes = [process.poll() for process in self._processes]
        return next((self._why(_ended(code)) for code in codes if code), "")

    def _why(self, what: str) -> str:
        """Returns what happened, and the last line that the servers of this host have printed."""
        size = self._said.seek(0, 2)
        self._said.seek(max(0, size - _MAX_SAID_BYTES))
        lines = self._said.read().decode(errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip() and not _NOISE.match(line)]
        return f"{what}: {lines[-1][:500]}" if lines else what


def _ended(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}"
