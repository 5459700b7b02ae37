"""Environments of jobs that schedulers have started, as they were recorded, and what is read."""

import json
from pathlib import Path

from tests import refusals
from tfdist.cluster import TaskConfig, read_environment
from tfdist.errors import UsageError

FOLDER = Path(__file__).parent / "environments"
Environ = dict[str, str]


def recorded(name: str) -> list[Environ]:
    """The environment of each task of a recorded job, in order of rank."""
    record = json.loads((FOLDER / f"{name}.json").read_text())
    return [{**record["common"], **own} for own in record["tasks"]]


def read(environ: Environ) -> TaskConfig:
    """What is read of a task of a job."""
    config = read_environment(environ)
    assert config is not None
    return config


def read_all(environs: list[Environ]) -> list[TaskConfig]:
    configs = [read_environment(environ) for environ in environs]
    return [config for config in configs if config is not None]


def refusal(environ: Environ, variable: str, *, code: str = "") -> UsageError:
    """The error of an environment that is refused because of a variable."""
    error = refusals.refusal(lambda: read_environment(environ))
    assert error.where == variable
    assert error.code == code if code else error.code
    assert str(error).isprintable()
    assert len(str(error)) < 500
    return error
