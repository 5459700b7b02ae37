"""torchrun as a launcher that the chaos runner can start, watch and do things to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.plan import Case
from tests.chaos.run import Launcher

HERE = Path(__file__).resolve().parent
PYTHON = str(HERE.parent / ".venv" / "bin" / "python")
EPOCHS = 45
MAX_RESTARTS = 100


def launcher(*, random_states: bool) -> Launcher:
    """Returns torchrun with the job of this folder."""

    def command(case: Case, directory: Path, start: int) -> list[str]:
        run = ["env", f"CHAOS_START={start}", PYTHON, "-m", "torch.distributed.run", "--standalone"]
        run += [f"--nproc_per_node={case.workers}", f"--max-restarts={MAX_RESTARTS}"]
        program = [str(HERE / "torch_job.py"), "--out", str(directory / "out")]
        program += ["--checkpoints", str(directory / "checkpoints")]
        program += ["--epochs", str(EPOCHS), *(["--random_states"] if random_states else [])]
        return [*run, *program]

    # What the agent logs when it has seen that a worker ended.
    named = re.compile(r"failed \(exitcode")
    return Launcher(
        command=command, named=named, told=_told, ends_its_tasks=False, may_fail_again=True
    )


def _told(environ: Mapping[str, str]) -> tuple[str, int]:
    start, restart = environ["CHAOS_START"], environ["TORCHELASTIC_RESTART_COUNT"]
    return f"worker-{environ['RANK']}", 1000 * int(start) + int(restart)
