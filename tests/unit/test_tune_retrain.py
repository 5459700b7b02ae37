"""Training the best trial again: until it is done, has failed, or is told to stop."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tfdist.tuning import sweep_run
from tfdist.tuning.journal import Journal, fold, read
from tfdist.tuning.sweep_run import Retraining
from tfdist.tuning.trial_job import Completed, Failed, Goal, Killed, Outcome, TrialJob

DONE = Completed(history=(), score=0.5, best_virtual_epoch=1)
KILLED = Killed(reason="SIGKILL")
JOB = TrialJob(
    run_dir=Path("best"), flags=(), goal=Goal(objective="loss", direction="min"), place=0
)


class Fates:
    """A runner whose starts end one after the other as told, at the second look."""

    def __init__(self, *outcomes: Outcome, before: Outcome | None = None) -> None:
        self.outcomes = list(outcomes)
        self.before = before
        self.starts = 0
        self.is_told = False
        self.on_wait: Any = lambda: None

    def outcome(self, job: TrialJob) -> Any:
        return self.before

    def metrics(self, run_dir: Path) -> Sequence[Any]:
        return []

    def start(self, job: TrialJob) -> Any:
        self.starts += 1
        looks = iter([None, self.outcomes.pop(0)])
        fates = self

        class Running:
            def poll(self) -> Outcome | None:
                return next(looks)

            def stop(self) -> None:
                fates.is_told = True

        return Running()

    def wait(self, running: Any, timeout_s: float) -> None:
        self.on_wait()


@pytest.mark.parametrize(
    ("fates", "code", "starts"),
    [
        (Fates(DONE), 0, 1),
        (Fates(before=DONE), 0, 0),
        (Fates(KILLED, KILLED, DONE), 0, 3),
        (Fates(Failed(reason="ValueError: no")), 1, 1),
        (Fates(*[KILLED] * 9), 1, 4),
    ],
    ids=["done", "done_before", "killed", "failed", "killed_too_often"],
)
def test_it_is_started_until_it_has_an_end(fates: Fates, code: int, starts: int) -> None:
    assert Retraining(fates, JOB).run() == code
    assert fates.starts == starts


def test_a_better_trial_that_is_found_later_is_trained_in_place_of_the_first(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)

    def begin(best: str) -> None:
        sweep_run.begin_retraining(tmp_path, journal, fold(journal.lines), best=best)

    begin("1")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "of").write_text("1")
    begin("1")  # the same command again
    assert (tmp_path / "best" / "of").exists()
    begin("3")
    assert not (tmp_path / "best").exists(), "it would be taken for that of the better one"
    assert (tmp_path / "best-1" / "of").read_text() == "1"
    assert fold(read(journal.path)).retrained == "3"
    begin("3")
    assert len(journal.lines) == 2


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_is_told_to_stop_once_and_the_same_command_goes_on(signum: int, code: int) -> None:
    fates = Fates(Killed(reason="the sweep was asked to stop"))
    retraining = Retraining(fates, JOB)
    fates.on_wait = lambda: retraining.stop(signum)
    fates.outcomes = [KILLED]
    looks = iter([None, None, KILLED])
    start = fates.start

    def slow(job: TrialJob) -> Any:
        running = start(job)
        running.poll = lambda: next(looks)
        return running

    fates.start = slow  # type: ignore[method-assign]
    assert retraining.run() == code
    assert fates.is_told
    assert fates.starts == 1
