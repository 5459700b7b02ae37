"""The package as it is installed: built into an sdist, a wheel of that, and used from outside."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tfdist

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150
OFFLINE = ("--no-isolation", "--skip-dependency-check")


def run(*command: str | Path, cwd: Path, site: Path | None = None, epoch: str = "") -> str:
    environment = os.environ | ({"PYTHONPATH": str(site)} if site else {})
    environment |= {"SOURCE_DATE_EPOCH": epoch} if epoch else {}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Builds from a copy of what is needed, so that the checkout stays as it is; no network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tfdist", source / "tfdist", ignore=ignored)
    run(sys.executable, "-m", "build", *OFFLINE, ".", cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    (built,) = dist.glob(f"tfdist-{tfdist.__version__}-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    flags = ("--no-deps", "--no-index", "--no-compile", "--target", site)
    run(*pip, "install", *flags, wheel, cwd=site)
    return site


def test_the_wheel_holds_exactly_the_package_files(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "tfdist").rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert names == expected


def test_the_installed_demo_trains_the_digits(site, tmp_path):
    where = run(
        sys.executable, "-c", "import tfdist; print(tfdist.__file__)", cwd=tmp_path, site=site
    )
    assert Path(where.strip()).parent == site / "tfdist"
    short = ["--config.total_examples=256", "--config.checkpoints=2"]
    output = run(site / "bin" / "tfdist", "demo", "--workers=1", *short, cwd=tmp_path, site=site)
    assert "done at step" in output
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert (run_dir / "summary.json").exists()


def test_the_console_script_runs_every_program(site, tmp_path):
    program = site / "bin" / "tfdist"
    assert run(program, "--version", cwd=tmp_path, site=site) == f"tfdist {tfdist.__version__}\n"
    flags = run(program, "launch", "--help", cwd=tmp_path, site=site)
    assert "--strategy: <auto|single|mirrored|multiworker|elastic|ps|pipeline>" in flags
    assert "tfdist.train" in run(program, "train", "--help", cwd=tmp_path, site=site)
    assert f"tfdist:               {tfdist.__version__}" in run(
        program, "env", cwd=tmp_path, site=site
    )
    assert "--run_dir" in run(program, "check", "--help", cwd=tmp_path, site=site)
    assert "#SBATCH" in run(
        program, "submit", "--to", "slurm", "--dry_run", "a.py", cwd=tmp_path, site=site
    )
