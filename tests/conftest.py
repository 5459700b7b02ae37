"""What all tests have in common: one process that has imported TensorFlow, and their order."""

import itertools
import os
import signal
from pathlib import Path

# Here and in all that is started: no GPU, and what TensorFlow says only where it fails.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

from tests import forked_python

JOBS = (
    *("test_training_ps", "test_hosts", "test_training", "test_ps_job"),
    *("test_tune", "test_deadlocks", "test_tune_python", "test_placement"),
    *("test_pipeline_jobs", "test_sharded_optimizer", "test_serve_exported", "test_notebook"),
    *("test_hangs", "test_preemption", "test_launcher", "test_evaluator", "test_missing_peer"),
    *("test_train_program", "test_examples", "test_restarts"),
)
FITS = (
    *("test_one_process", "test_conformance", "test_keras_callbacks"),
    *("test_resume", "test_inputs", "test_equivalence", "test_saving"),
    *("test_randomness", "test_bad_input", "test_stream_graph", "test_keras_compat"),
    *("test_find", "test_docs_python", "test_pipeline"),
)
"""Files whose tests take long: none is left for the end, and jobs that wait run beside fits."""
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().split())
"""Tests and files that `make test` leaves out, by their measured time."""


def pytest_configure(config: pytest.Config) -> None:
    """Names the process that imports in the one that starts all workers; they inherit that."""
    if forked_python.FOLDER not in os.environ:
        run = forked_python.of_this_run()
        run.__enter__()
        config.add_cleanup(lambda: run.__exit__(None, None, None))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow tests, and puts the files that take longest first, jobs and fits in turn."""
    for item in items:
        if {item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]} & SLOW:
            item.add_marker("slow")
    in_turn = [name for pair in itertools.zip_longest(JOBS, FITS) for name in pair]
    place = {name: number for number, name in enumerate(in_turn)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture
def at_a_terminal():
    """Ctrl-C is not ignored, as it is in what a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def disk_events(monkeypatch):
    """What is brought to the disk, and what is renamed to what, from now on."""
    events: list[tuple[str, Path]] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        events.append(("rename", Path(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return events
