"""``python -m tests.chaos.elastic``: random kills, pairs and stops of workers of elastic jobs.

Jobs of 1 to 4 workers train the same model. While a job runs, workers are killed or stopped at
random times, also the chief and workers that join. Each job must end with the digests of an
undisturbed job. Exit code 1 if one does not.
"""

import argparse
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.processes import send
from tfdist.launch.guardian import bound_command

PROGRAM = Path(__file__).parents[1] / "multiprocess/programs/elastic.py"
FLAGS = ("--strategy=multiworker", "--elastic", "--threads_per_task=1", "--start=fork")
PATIENCE = ("--max_restarts=10000", "--hang_timeout_s=8")
EPOCHS = 60
DEADLINE_S = 400.0
_FIRST_STEP_S = 8.0  # after the start of a program


class Job:
    """An elastic job, with `events` that happened to it."""

    def __init__(self, run_dir: Path, workers: int) -> None:
        words = [*FLAGS, *PATIENCE, f"--workers={workers}", f"--run_dir={run_dir}", str(PROGRAM)]
        env = os.environ | {"EPOCHS": str(EPOCHS), "BACKUP": "1"}
        self.events = {"kill": 0, "pair": 0, "stop": 0, "of the chief": 0, "views": 0}
        self._run_dir = run_dir
        self._workers = workers
        self._log = run_dir.with_suffix(".log")
        with self._log.open("wb") as log:
            command = bound_command([sys.executable, "-m", "tfdist.launch", *words])
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def disturb(self, draw: random.Random) -> None:
        """Kill or stop workers at random times until the job ends."""
        end_s = time.monotonic() + DEADLINE_S
        while self._process.poll() is None:
            time.sleep(draw.uniform(1.0, 4.0) + 3.0 * (self._workers == 1))
            pids = {
                path.stem: int(path.read_text() or 0)
                for path in self._run_dir.glob("*.pid")
                # A job ends if its chief is lost twice before the first step.
                if path.stem != "worker-0" or time.time() - path.stat().st_mtime > _FIRST_STEP_S
            }
            running = {name: pid for name, pid in pids.items() if pid and _runs(pid)}
            what = draw.choices(("kill", "pair", "stop"), (0.7, 0.2, 0.1))[0]
            chosen = draw.sample(sorted(running), min(len(running), 1 + (what == "pair")))
            for name in chosen:
                send(running[name], signal.SIGSTOP if what == "stop" else signal.SIGKILL)
                self.events[what] += 1
                self.events["of the chief"] += name == "worker-0"
            if time.monotonic() > end_s:
                self._process.terminate()
                raise SystemExit(f"no end after {DEADLINE_S:g} s\n{self.output()[-20000:]}")

    def digests(self) -> set[str]:
        """Wait for the end, and return the digests of all workers and of the files."""
        code = self._process.wait(DEADLINE_S)
        output = self.output()
        if code:
            raise SystemExit(f"exit code {code}\n{output[-20000:]}")
        self.events["views"] = output.count("restarting only this task")
        return set(re.findall(r"(DIGEST \w+|FILES \w+)", output))

    def output(self) -> str:
        """Return the output of the job so far."""
        return self._log.read_text()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZT"
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.elastic", description=__doc__)
    parser.add_argument("--events", type=int, default=200, help="kills and stops in all (200)")
    parser.add_argument("--seed", type=int, help="of the random times (a new one)")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    draw, done, bad, number = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="elastic-", ignore_cleanup_errors=True) as scratch:
        expected = Job(Path(scratch, "undisturbed"), 2).digests()
        print(f"seed {seed}, undisturbed: {sorted(expected)}", flush=True)
        while done < args.events:
            workers = 1 + number % 4
            number += 1
            job = Job(Path(scratch, f"{number}"), workers)
            job.disturb(draw)
            found = job.digests()
            done += sum(job.events[what] for what in ("kill", "pair", "stop"))
            bad += found != expected
            print(
                f"{workers} workers: {job.events}, {'identical' if found == expected else found}",
                flush=True,
            )
    print(f"seed {seed}: {done} kills and stops in {number} jobs, {bad} not identical")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
