"""`tfdist.submit` as a user runs it: a command line, and what is printed."""

import contextlib
import io
import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.processes import script
from tfdist.submit.__main__ import main

SLURM = "--to slurm --dry_run "
PODS = "--to kubernetes --dry_run --image train:1 "
PS = "--strategy ps --workers 2 --ps 1 "


Done = subprocess.CompletedProcess[str]


def fakes(folder: Path, **scripts: str) -> dict[str, str]:
    """Return variables of a Slurm job in which these commands are these scripts."""
    for name, text in scripts.items():
        script(folder / name, text)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


def run_batch(folder: Path, text: str, environ: Mapping[str, str]) -> Done:
    """Run the text of a batch script to its end."""
    path = folder / "job.sbatch"
    path.write_text(text)
    return subprocess.run(
        ["bash", path], env=environ, cwd=folder, capture_output=True, text=True, timeout=120
    )


def run(arguments: str) -> tuple[int, str, str]:
    """The exit code, what was printed, and what was printed on standard error."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main(shlex.split(arguments))
    return code, out.getvalue(), err.getvalue()


def printed(arguments: str) -> str:
    code, out, err = run(arguments)
    assert code == 0, err
    return out


def refused(arguments: str) -> str:
    """The one line that refuses the arguments."""
    code, out, err = run(arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("tfdist.submit: ")


def manifest(arguments: str) -> dict[str, Any]:
    """The last of the rendered objects, which is the job."""
    made: dict[str, Any] = list(yaml.safe_load_all(printed(PODS + arguments)))[-1]
    return made
