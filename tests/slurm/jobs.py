"""Jobs of the cluster as a test sees them: given to Slurm, waited for, compared."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "slurm" / "programs" / "train.py")
DEADLINE_S = 300.0  # of a wait: a job takes seconds where nothing else runs

# Eight virtual epochs of eight steps; a checkpoint inside each, too.
CONFIG = (
    "--config.total_examples=2048", "--config.global_batch_size=32", "--config.checkpoints=8",
    "--config.backup_every_steps=3", "--config.seed=3",
)  # fmt: skip
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
PATTERN = re.compile(r"(\w+)=(\S*)")


class Job:
    """A batch job in a folder of its own, by the script that `tfdist.submit` has rendered."""

    def __init__(self, cluster: Cluster, folder: Path, job_id: str, name: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.id = job_id
        self.output = folder / f"{name}-{job_id}.out"

    def fact(self, name: str) -> str:
        """What `scontrol` says of the job: JobState, Restarts, NodeList, ExitCode."""
        shown = self.cluster.ask("scontrol", "show", "job", "--oneliner", self.id)
        return dict(PATTERN.findall(shown.stdout))[name]

    def ran_s(self) -> int:
        """How long the job has run since it was last started."""
        hours, minutes, seconds = map(int, self.fact("RunTime").split(":"))
        return 3600 * hours + 60 * minutes + seconds

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.is_file() else ""

    def said(self, words: str, *, times: int = 1) -> None:
        """Waits until the job has said something that often."""
        self._until(lambda: self.text().count(words) >= times, f"{words!r}, {times} times")

    def is_in_state(self, state: str) -> None:
        """Waits until the job is in a state; not if it has ended in another."""

        def true() -> bool:
            now = self.fact("JobState")
            assert now == state or now not in ENDED, f"{now}\n{self.text()}"
            return now == state

        self._until(true, state)

    def is_started_again(self) -> None:
        """Waits until Slurm has queued the job again for the first time; not if it has ended."""

        def true() -> bool:
            now = self.fact("JobState")
            assert now not in ENDED, f"{now}\n{self.text()}"
            return self.fact("Restarts") == "1"

        self._until(true, "queued again")

    def _until(self, true: Any, what: str) -> None:
        self.cluster.until(true, f"job {self.id}: {what}", within_s=DEADLINE_S)


class Slurm:
    """Gives jobs to a cluster, each with `folder` as its working directory."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.hold = folder / "hold"

    def environ(self, **more: str) -> dict[str, str]:
        ours = {"PYTHONPATH": str(ROOT), "HOLD": str(self.hold)}
        return self.cluster.environ(**ours, **more)

    def submit(self, *flags: str, program: tuple[str, ...], name: str = "job") -> Job:
        """Renders and submits a job by `python -m tfdist.submit`."""
        said = self.asked("--name", name, "--python", sys.executable, *flags, *program)
        found = re.fullmatch(rf"job (\d+) \({name}\); output: {name}-\1.out\n", said)
        assert found, said
        return Job(self.cluster, self.folder, found[1], name)

    def asked(self, *flags: str) -> str:
        """What `python -m tfdist.submit` answers."""
        done = self.run(sys.executable, "-m", "tfdist.submit", "--to", "slurm", *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, as a user would in the folder."""
        return subprocess.run(
            argv,
            cwd=self.folder,
            env=self.environ(**environ),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def logs(self) -> str:
        files = sorted([*self.folder.rglob("*.out"), *self.folder.rglob("*.log")])
        return "\n".join(f"== {file}\n{file.read_text(errors='replace')}" for file in files)


def launched(run_dir: Path, *flags: str, config: tuple[str, ...] = CONFIG) -> dict[str, Any]:
    """What an undisturbed job of the local launcher leaves behind."""
    command = [sys.executable, "-m", "tfdist.launch", "--threads_per_task", "1", *flags]
    done = subprocess.run(
        [*command, "--run_dir", str(run_dir), PROGRAM, *config],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return summary_of(run_dir)


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def assert_same(summary: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails unless two runs ended with the same bits."""
    for name in ("status", "workers", "steps", "metrics", "weights_sha256", "state_sha256"):
        assert summary[name] == expected[name], name
