"""One run of a case: the job, the faults in their order, and another start until it is done."""

import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.faults import Faults, SmallDisk, own_network
from tests.chaos.marks import Tail
from tests.chaos.plan import Case, Fault
from tests.chaos.processes import Told, Watched, from_tf_config, tasks_of
from tests.chaos.record import Record

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")
HANG_TIMEOUT_S = 20.0
QUIET_S = 180.0  # without a mark or a line: the job hangs
GONE_S = 20.0  # for the tasks of a launcher that was killed
ORPHANED_S = 3.0  # for those of one that does not end them
_POLL_S = 0.01
_SMALL_DISK_BYTES = 1 << 20
_EXAMPLES = {"single": 48_000, "mirrored": 30_000, "multiworker": 24_000, "pipeline": 6_000}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended. `broken` says what went wrong other than the verdict; empty if nothing."""

    records: Sequence[Record]
    left: Sequence[Fault]
    """Those that have not happened."""
    verdict: dict[str, Any] | None
    broken: str
    marks: Sequence[dict[str, Any]]
    startup_s: float
    training_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """What starts a job: its command, how it names a failure, and what it tells its tasks."""

    command: Callable[[Case, Path, int], Sequence[str]]
    """Of a case, the directory of its run, and the number of this start by the runner, from 1 on.

    Tasks write their marks and the verdict into `out` there.
    """
    named: re.Pattern[str]
    told: Told = from_tf_config
    ends_its_tasks: bool = True
    """Whether tasks that outlive it are an error; they are killed before the next start."""
    may_fail_again: bool = False
    """Whether a restart that fails by itself, and is followed by another, is no error."""


def _command(case: Case, directory: Path, start: int) -> list[str]:
    command = [sys.executable, "-m", "tfdist.launch", *case.flags]
    command += ["--run_dir", str(directory / "run"), "--hang_timeout_s", f"{HANG_TIMEOUT_S:g}"]
    command += ["--max_restarts", "100", "--restart_window_s", "3600"]
    command += [str(JOB), "--out", str(directory / "out"), "--variant", case.variant]
    command += ["--checkpoints", str(directory / "checkpoints")]
    return [*command, "--examples", str(_EXAMPLES[case.strategy])]


TFDIST = Launcher(command=_command, named=re.compile(r"^\[launch\] .*failed first"))


class ChaosRun:
    """A run in a directory of its own."""

    def __init__(
        self, case: Case, directory: Path, faults: Sequence[Fault], *, launcher: Launcher = TFDIST
    ) -> None:
        self._case = case
        self._launcher = launcher
        self._directory = directory
        self._out, self._checkpoints = directory / "out", directory / "checkpoints"
        self._out.mkdir(parents=True)
        self._tail = Tail(self._out)
        self._marks: list[dict[str, Any]] = []
        self._watched = Watched()
        self._process: subprocess.Popen[bytes] | None = None
        at, told = self._checkpoints, launcher.told
        self._faults = Faults(case, self._out, faults, checkpoints=at, told=told)
        self._starts = 0
        self._left_behind = False
        self._heard_s = 0.0

    def run(self) -> Outcome:
        """Runs the job to its end, however often it must be started."""
        began_s = time.monotonic()
        disk = None
        if self._faults.has("fill_disk"):
            disk = SmallDisk(self._checkpoints, size_bytes=_SMALL_DISK_BYTES)
        self._faults.disk = disk
        try:
            broken = self._until_done()
        finally:
            self._end()
            if disk is not None:
                disk.close()
        return self._outcome(broken, began_s=began_s)

    def _until_done(self) -> str:
        faults = self._faults
        for _ in range(len(faults.faults) + 3):
            done_before = len(faults.records)
            code = self._start_and_watch()
            if code is None:
                return f"hung: nothing for {QUIET_S:g} s"
            if code == 0:
                return ""
            if len(faults.records) == done_before and not faults.pending_restart():
                return f"ended with exit code {code} without a fault"
            faults.restarted_by_runner()
        return "did not come to its end"

    def _start_and_watch(self) -> int | None:
        """Returns the launcher's exit code, None if the job hangs."""
        process = self._start()
        self._faults.begin(process.pid)
        output = process.stdout
        assert output is not None
        os.set_blocking(output.fileno(), False)
        rest = b""
        path = self._directory / "launcher.log"
        with selectors.DefaultSelector() as selector, open(path, "ab") as log:
            selector.register(output, selectors.EVENT_READ)
            while process.poll() is None:
                if selector.select(_POLL_S):
                    data = output.read() or b""
                    log.write(data)
                    log.flush()
                    *lines, rest = (rest + data).split(b"\n")
                    self._hear(lines)
                    if not data:
                        selector.unregister(output)
                self._look(process.pid)
                if time.monotonic() - self._heard_s > QUIET_S:
                    return None
            log.write(output.read() or b"")
        self._await_tasks()
        self._look(process.pid)
        self._faults.ended(process.returncode)
        return process.returncode

    def _start(self) -> subprocess.Popen[bytes]:
        self._heard_s = time.monotonic()
        self._starts += 1
        quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            list(self._launcher.command(self._case, self._directory, self._starts)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | quiet,
            preexec_fn=own_network if self._faults.has("cut_network") else None,
        )
        return self._process

    def _hear(self, lines: Sequence[bytes]) -> None:
        now_s = time.monotonic()
        self._heard_s = now_s
        for line in lines:
            text = line.decode(errors="replace")
            if self._launcher.named.search(text):
                self._take_marks()  # a task that killed itself has said so before
                self._faults.named(text.removeprefix("[launch] "), now_s)

    def _look(self, launcher_pid: int) -> None:
        """Takes the new marks, and lets the next fault happen if it is time."""
        self._take_marks()
        self._faults.tick(launcher_pid)

    def _take_marks(self) -> None:
        for mark in self._tail.read():
            self._heard_s = time.monotonic()
            self._marks.append(mark)
            self._faults.saw(mark)
            if mark["event"] == "program":
                self._watched.add(mark["pid"])

    def _await_tasks(self) -> None:
        ours = self._launcher.ends_its_tasks
        if not self._watched.gone(within_s=GONE_S if ours else ORPHANED_S):
            self._faults.tasks_went_on()
            self._left_behind |= ours
            self._watched.kill()

    def _end(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            for task in tasks_of(process.pid, told=self._launcher.told).values():
                self._watched.add(task.pid)
            process.kill()
            self._watched.kill()
            process.wait()

    def _outcome(self, broken: str, *, began_s: float) -> Outcome:
        verdict = None
        if not broken:
            verdict = json.loads((self._out / "verdict.json").read_text())
            shas = {m["weights_sha256"] for m in self._marks if m["event"] == "done"}
            if len(shas) > 1:
                broken = "the tasks ended with different weights"
        if self._faults.unexpected and not self._launcher.may_fail_again:
            broken = broken or f"without a fault: {self._faults.unexpected[0]}"
        if self._left_behind:
            broken = broken or "tasks outlived their launcher"
        first = [m["at"] for m in self._marks if m["event"] == "first_step"]
        done = [m["at"] for m in self._marks if m["event"] == "done"]
        return Outcome(
            records=self._faults.records,
            left=self._faults.faults[len(self._faults.records) :],
            verdict=verdict,
            broken=broken,
            marks=self._marks,
            startup_s=first[0] - began_s if first else 0.0,
            training_s=done[-1] - first[0] if first and done else 0.0,
        )
