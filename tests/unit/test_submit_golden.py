"""What is rendered, whole: the scripts and manifests in tests/golden and in launch/."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdist.submit import main

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
IMAGE = "--image registry.example.org/train:1.0 "

# To renew one: python -m tfdist.submit --dry_run ARGUMENTS > FILE, and read the difference.
CASES = {
    "single.sbatch": "--to slurm --gpus 1 train.py",
    "mirrored.sbatch": "--to slurm --strategy mirrored --gpus 4 --time 90m train.py",
    "everything.sbatch": "--to slurm --name my_run.2 --python '/opt/my env/bin/python' --nodes 2 "
    "--workers 4 --cpus 8 --memory 30G --gpus 2 --devices_per_worker 2 --time 2-00:30:00 "
    "--partition gpu --account physics --qos long --node_selector a100 --node_selector ib "
    "--env 'NOTE=it'\"'\"'s $HOME' --secret HF_TOKEN=/home/me/.hf --grace_s 120 --max_restarts 5 "
    "--hang_timeout_s 600 --threads_per_task 6 --run_dir /scratch/run --startup_timeout_s 90 "
    "-m my.program --lr 0.1 --text 'two words; $(date)'",
    "ps_hetjob.sbatch": "--to slurm --strategy ps --workers 3 --ps 2 --gpus 1 --min_workers 2 "
    "--cpus 2 --memory 3G train.py",
    "single_job.yaml": "--to kubernetes " + IMAGE + "train.py",
    "everything_job.yaml": "--to kubernetes --name my-run --namespace ml --workers 3 --cpus 8 "
    "--memory 1500M --gpus 2 --node_selector disk=ssd --node_selector example.org/pool=a "
    "--volume runs=/runs --volume data=/data:ro --volume /mnt/cache=/cache "
    "--secret HF_TOKEN=hub/token --env 'NOTE=$(x) 1e3' --env ONE=1e3 --service_account trainer "
    "--image_pull_secret registry --time 4h --grace_s 120 --max_restarts 5 "
    "--toleration nvidia.com/gpu:NoSchedule --toleration pool=ml:NoExecute --toleration spot "
    "--priority_class high --run_as_user 1000:2000 --label kueue.x-k8s.io/queue-name=ml "
    + IMAGE
    + "train.py --text 'two words; $(date) $$' --no -y",
    "ps_job.yaml": "--to kubernetes --strategy ps --workers 2 --ps 2 " + IMAGE + "train.py",
    "multiworker_jobset.yaml": "--to kubernetes --kind jobset --workers 2 --gpus 1 --time 1h "
    + IMAGE
    + "train.py",
    "multiworker_tfjob.yaml": "--to kubernetes --kind tfjob --workers 2 --gpus 1 --time 1h "
    + IMAGE
    + "train.py",
}


def rendered(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    words = shlex.split(arguments)
    assert main([*["--dry_run"] * ("--dry_run" not in words), *words]) == 0
    return capsys.readouterr().out


def examples() -> Iterator[tuple[str, str]]:
    """The arguments and the file of each command in the pages of launch/."""
    for page in ("slurm", "kubernetes"):
        for line in (ROOT / "launch" / page / "README.md").read_text().splitlines():
            if line.startswith("python -m tfdist.submit "):
                arguments, _, path = line.removeprefix("python -m tfdist.submit ").partition(" > ")
                yield path, arguments


@pytest.mark.parametrize("name", CASES)
def test_what_is_rendered_is_what_it_was(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rendered(CASES[name], capsys) == (GOLDEN / name).read_text()


def test_every_golden_file_is_compared() -> None:
    assert {path.name for path in GOLDEN.glob("*.*") if path.suffix in (".yaml", ".sbatch")} == set(
        CASES
    )


@pytest.mark.parametrize(("path", "arguments"), list(examples()))
def test_the_examples_are_what_the_command_renders_now(
    path: str, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rendered(arguments, capsys) == (ROOT / path).read_text()


def test_every_example_is_rendered_by_a_command_of_its_page() -> None:
    there = {
        str(path.relative_to(ROOT))
        for page in ("slurm", "kubernetes")
        for path in (ROOT / "launch" / page).iterdir()
        if path.name != "README.md"
    }
    assert there == {path for path, _ in examples()}


@pytest.mark.parametrize(
    "path", [*GOLDEN.glob("*.sbatch"), *(ROOT / "launch" / "slurm").glob("*.sbatch")], ids=str
)
def test_bash_can_read_the_scripts(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
