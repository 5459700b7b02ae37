"""How long it takes from the command to the first step."""

import re
import sys
import time

import pytest

from tests.slurm.jobs import DEADLINE_S, PROGRAM, Slurm

ROUNDS = 6
MORE_S = 3.0  # 0.7 to 1.1 as measured; a machine of a third of the speed meets it
CONFIG = ("--config.total_examples=64", "--config.checkpoints=1")


@pytest.mark.alone
@pytest.mark.timeout(2 * ROUNDS * DEADLINE_S)
def test_it_comes_soon_after_the_one_under_the_launcher(slurm, capsys):
    commands = {
        "the launcher": ("-m", "tfdist.launch", "--strategy=multiworker", "--workers=2"),
        "srun": ("srun", "--nodes=2", "--ntasks=2", sys.executable),
    }
    commands["the launcher"] = (sys.executable, *commands["the launcher"])
    best_s = dict.fromkeys(commands, float("inf"))
    for number in range(ROUNDS):  # other work on the machine only ever makes it longer
        for name, command in commands.items():
            best_s[name] = min(best_s[name], first_step_s(slurm, f"{name}-{number}", command))
        if best_s["srun"] <= best_s["the launcher"] + MORE_S:
            break
    with capsys.disabled():
        print(", ".join(f"{name} {took_s:.1f} s" for name, took_s in best_s.items()), end=" ")
    assert best_s["srun"] <= best_s["the launcher"] + MORE_S


def first_step_s(slurm: Slurm, run_dir: str, command: tuple[str, ...]) -> float:
    start_s = time.time()
    done = slurm.run(*command, PROGRAM, *CONFIG, f"--config.run_dir={run_dir}", FIRST_STEP="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return float(re.findall(r"first step at ([\d.]+)", done.stdout)[0]) - start_s
