"""Jobs of tfdist.train through the launcher: what the tests wait for, and all they said."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.multiprocess.warm import Start, forked, tasks_of
from tfdist.outputs.run_directory import RunDirectory

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE_S = 150
STEPS, EPOCH_STEPS = 360, 60
FLAGS = (
    f"--config.total_examples={50 * STEPS}", f"--config.checkpoints={STEPS // EPOCH_STEPS}",
    "--config.global_batch_size=50", "--config.seed=3", "--config.backup_every_steps=7",
)  # fmt: skip


def started(
    run_dir: Path, *arguments: str, start: Start, env: Mapping[str, str], **more: Any
) -> subprocess.Popen[str]:
    """Starts a job, whose output is a pipe."""
    command = [sys.executable, "-m", "tfdist.launch", "--run_dir", str(run_dir)]
    with start() as (flags, fds, variables):
        return subprocess.Popen(
            [*command, *flags, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=fds,
            env={**os.environ, **variables, **env},
            **more,
        )


def ended(
    run_dir: Path, *arguments: str, timeout_s: float, start: Start = forked, **env: str
) -> tuple[int, str]:
    """Runs a job to its end; returns its exit code and what it said, of all tasks."""
    process = started(run_dir, *arguments, start=start, env=env)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"{' '.join(arguments)}: not done in {timeout_s} s\n{output[-20000:]}")
    return process.returncode, output


def launch(run_dir: Path, *arguments: str, timeout_s: float, start: Start = forked) -> str:
    """Runs a job to its end; on failure or past its deadline, shows every task's log."""
    code, output = ended(run_dir, *arguments, timeout_s=timeout_s, start=start)
    assert code == 0, output[-20000:]
    return output


class TrainingJob:
    """A job in a run directory, of tfdist.train if not said; on failure, shows all its logs."""

    def __init__(
        self,
        run_dir: Path,
        *launch: str,
        program: Sequence[str] = ("--", *FLAGS),
        start: Start = forked,
    ) -> None:
        self.run_dir = run_dir
        self.directory = RunDirectory(run_dir)
        self.process = started(
            run_dir,
            *(*launch, "--grace_s", "60", *program),
            start=start,
            env={},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.said: list[str] = []
        # Its output is read all the while, so that it never waits for us.
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stdout or ()))
        self._reader.start()

    def trained_beyond(self, step: int) -> None:
        """Returns when there is a checkpoint of a later step, inside an epoch."""
        self.until(lambda: any(s > step and s % EPOCH_STEPS for s in self.saved_steps()))

    def saved_steps(self) -> list[int]:
        """The steps of the checkpoints that are there."""
        names = [path.name for path in self.directory.checkpoints.glob("step-*")]
        return [int(re.findall(r"\d+", name)[0]) for name in names]

    def until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not true():
            assert self.process.poll() is None, self.logs()
            if time.monotonic() > deadline_s:
                self._give_up("it did not happen")
            time.sleep(0.01)

    def task(self, name: str) -> int:
        """The process of a task."""
        for pid, title in tasks_of(self.process.pid).items():
            if name in title:
                return pid
        raise AssertionError(f"no process of {name}\n{self.logs()}")

    def kill(self, name: str) -> None:
        """Ends a task at once."""
        os.kill(self.task(name), signal.SIGKILL)

    def end(self) -> int:
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._give_up("it did not end")
        self._reader.join(DEADLINE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def _give_up(self, what: str) -> NoReturn:
        """Fails with the stacks of all tasks in their logs, and leaves none of them."""
        for pid in tasks_of(self.process.pid):
            os.kill(pid, signal.SIGQUIT)
        time.sleep(1)
        launcher = Path(f"/proc/{self.process.pid}/stat").read_text().split()
        told = f"launcher in state {launcher[2]} with {launcher[13]} ticks of its own"
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        pytest.fail(f"{what}; {told}; checkpoints {self.saved_steps()}\n{self.logs()}")

    def logs(self) -> str:
        files = sorted(self.run_dir.glob("logs/*/*.log"))
        return "\n".join(["".join(self.said), *(f"== {f}\n{f.read_text()}" for f in files)])

    def chiefs_words(self) -> list[str]:
        """What the tasks have said about a stop; the chief alone should."""
        *_, attempt = sorted(self.run_dir.glob("logs/*"), key=lambda path: path.stat().st_mtime)
        text = "\n".join(file.read_text() for file in attempt.glob("*.log"))
        return re.findall(r"(?m)stopped by (\w+ at step \d+, state saved)$", text)


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary
