"""What a user writes reaches the task as it was, through YAML, Kubernetes and a shell."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tfdist.ops.submit.kubernetes import text_of
from tfdist.ops.submit.pods import literal
from tfdist.submit import main

NASTY = (
    "two words",
    "",
    "it's",
    '"',
    "$HOME",
    "$(date)",
    "$$",
    "`date`",
    "a\nb",
    "\\n",
    "*",
    "é",
    "-x",
)
DOUBTFUL = (
    *("yes", "No", "on", "y", "N", "true", "~", "null", "1", "1e3", "0x1f", "0o17"),
    *("1_000", "12:30", ".5", "-", "=", "<<", "2026-01-01", "a:b", "#c"),
)


def expanded(text: str) -> str:
    """What Kubernetes makes of an argument: $$ is a dollar, and $(NAME) the variable's value."""
    return re.sub(r"\$(?:\$|\(([^)]*)\))", lambda m: "VALUE" if m[1] is not None else "$", text)


@given(st.dictionaries(st.text(min_size=1), st.one_of(st.text(), st.integers(), st.booleans())))
def test_yaml_is_read_as_it_was_written(document: dict[str, object]) -> None:
    assert yaml.safe_load(text_of([document])) == document


@pytest.mark.parametrize("text", DOUBTFUL)
def test_what_a_reader_might_take_for_something_else_is_quoted(text: str) -> None:
    assert text_of([{"name": text}]) == f'name: "{text}"\n'


def test_what_occurs_twice_is_written_twice() -> None:
    labels = {"job": "train"}
    assert text_of([{"one": labels, "two": labels}]).count("job: train") == 2


@given(st.text(alphabet="$()aB {", max_size=12))
def test_kubernetes_replaces_nothing_in_what_a_user_wrote(text: str) -> None:
    assert expanded(literal(text)) == text


def test_arguments_and_variables_reach_the_tasks_of_slurm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, body in {"python": "exit 0", "srun": r'printf "%s\0" "$NOTE" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    note = "".join(NASTY).replace("\n", "")
    assert main(["--to=slurm", "--dry_run", f"--env=NOTE={note}", "train.py", *NASTY]) == 0
    done = subprocess.run(
        ["bash"],
        input=capsys.readouterr().out.encode(),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    words = done.stdout.decode().split("\0")[:-1]
    assert words[0] == note
    assert words[-len(NASTY) - 2 :] == ["python", "train.py", *NASTY]
