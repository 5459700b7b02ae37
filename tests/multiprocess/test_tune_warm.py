"""Trials that are forked from one process which imports once: what stays, what ends, what dies."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.multiprocess.test_tune import ROOT, Trial, _logs, until  # noqa: F401  # shows the logs
from tfdist.launch.fork_server import ForkTemplate
from tfdist.tuning.trial_job import Completed, Killed

MODULES = ("decimal", "wave")  # stand for TensorFlow and Keras; nothing else imports them
TELL = """
ppid = os.getppid()
server = int(open(f"/proc/{ppid}/stat").read().rpartition(")")[2].split()[1])
told = {"warm": server, "server": ppid, "is_imported": "wave" in sys.modules, "pid": os.getpid()}
(run_dir / "told.json").write_text(json.dumps(told))
"""


@contextlib.contextmanager
def warmed(tmp_path: Path, source: str, *, more: Sequence[str] = ()) -> Iterator[Trial]:
    trial = Trial(tmp_path, TELL + source)
    trial.runner.launch_flags += ("--start", "fork")
    trial.runner.warm = ForkTemplate(
        MODULES, more=more, environ=trial.runner.environ, log_path=tmp_path / "fork-server.log"
    )
    try:
        yield trial
    finally:
        trial.runner.warm.close()


def told(trial: Trial) -> dict[str, int]:
    return json.loads((trial.run_dir / "told.json").read_text())


def pid_of(trial: Trial) -> int:
    return trial.runner.warm.pid


def rss_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_a_warm_process_is_reused_until_its_owner_ends(tmp_path):
    """It imports before anything is asked of it."""
    with warmed(tmp_path, "x = bytearray(os.urandom(1)) * 50_000_000; done(1); finish()") as trial:
        assert trial.runner.warm.pid is None
        trial.runner.warm.start()
        seen, memory, pid = [], [], pid_of(trial)
        for number in range(5):
            trial.run_dir = tmp_path / "trials" / str(number)
            trial.program = (trial.program[0], str(trial.run_dir))
            trial.runner.program = trial.program
            assert isinstance(trial.run(), Completed)
            seen.append(told(trial))
            memory.append(rss_kib(pid))
        assert {one["warm"] for one in seen} == {pid}
        assert all(one["is_imported"] for one in seen)
        assert len({one["server"] for one in seen}) == 5
        assert len({one["pid"] for one in seen}) == 5
        assert memory[-1] - memory[0] < 1024
    assert not Path(f"/proc/{pid}").exists(), "it outlives the sweep"
    with warmed(tmp_path, "") as trial:
        trial.runner.warm.start()
        pid = pid_of(trial)
    assert not Path(f"/proc/{pid}").exists(), "it goes on importing for nobody"


@pytest.mark.parametrize("victim", ["server", "pid"])
def test_a_killed_task_or_fork_server_is_retried(tmp_path, victim):
    source = f"""
if (run_dir / "again").exists():
    done(1); finish(); sys.exit()
(run_dir / "again").touch()
os.kill(told["{victim}"], signal.SIGKILL)
signal.pause()
"""
    with warmed(tmp_path, source) as trial:
        killed = trial.run()
        assert isinstance(killed, Killed)
        assert victim == "server" or "SIGKILL" in killed.reason
        assert isinstance(trial.run(), Completed)
