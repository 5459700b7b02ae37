"""The chief of a sweep with trials that are no processes: every order of events, every crash."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tfdist.errors import UsageError
from tfdist.tuning.chief import IDLE, RUNNING, STOPPED, Chief, NextTrial, SweepPlan
from tfdist.tuning.journal import Journal, Slot, SweepState, Trial, fold, read
from tfdist.tuning.runner import LauncherRunner
from tfdist.tuning.trial_job import Completed, Failed, Goal, Killed, Outcome, TrialJob

GOAL = Goal(objective="val_accuracy", direction="max")
BEGUN = {"objective": "val_accuracy", "direction": "max", "tuner": "random", "seed": 1}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Crash(BaseException):
    """The chief is killed: nothing of it runs any more."""


class CrashingJournal(Journal):
    """Dies at the write with number `at`: before it, within it, or after it."""

    def __init__(self, path: Path, *, at: int | None = None, how: str = "before") -> None:
        super().__init__(path, time_of_day=itertools.count(1.0).__next__)
        self._left, self._how = at, how

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        if self._left is None or self._left > 0:
            if self._left is not None:
                self._left -= 1
            return super().add(event, **fields)
        if self._how != "before":
            super().add(event, **fields)
        if self._how == "within":
            os.truncate(self.path, self.path.stat().st_size - 5)
        raise Crash


@dataclass
class FakeSearch:
    """Asks for `count` trials; IDLE while more than `ahead` are going on."""

    lines: Sequence[Mapping[str, Any]]
    count: int = 4
    ahead: int = 99
    told: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        asked = [line["trial"] for line in self.lines if line["event"] == "asked"]
        self.asked = [trial for trial in asked if trial is not None]
        for line in self.lines:
            if line["event"] == "ended":
                self.told[line["trial"]] = line["status"]

    def ask(self) -> NextTrial:
        going_on = set(self.asked) - set(self.told)
        if len(self.asked) >= self.count:
            return NextTrial(status=STOPPED, asker="r")
        if len(going_on) >= self.ahead:
            return NextTrial(status=IDLE, asker="r")
        name = str(len(self.asked))
        self.asked.append(name)
        return NextTrial(status=RUNNING, asker="r", trial=name, values={"x": int(name) + 1})

    def tell(
        self, trial: str, *, status: str, history: Iterable[Mapping[str, float]], reason: str
    ) -> None:
        assert trial not in self.told, "told twice"
        self.told[trial] = status

    def publish(self, trials: Iterable[str] | None = None) -> None:
        pass


@dataclass
class Disk:
    """What trials leave behind, whoever started them; a trial needs `length` polls to its end."""

    length: int = 2
    done: dict[str, int] = field(default_factory=dict)
    """Run to the polls that it has had: where a trial that is started again goes on."""
    work: int = 0
    fates: dict[str, list[Outcome]] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    most_at_once: int = 0
    running: set[str] = field(default_factory=set)


def completed(job: TrialJob) -> Completed:
    score = 1 / (1 + int(job.flags[0].rpartition("=")[2]))
    history = ({"virtual_epoch": 1, "val_accuracy": score},)
    return Completed(history=history, score=score, best_virtual_epoch=1)


class FakeTrial:
    def __init__(self, disk: Disk, job: TrialJob) -> None:
        self.disk, self.job, self.name = disk, job, job.run_dir.name
        self.is_asked_to_stop = False
        disk.started.append(self.name)
        assert self.name not in disk.running, "two jobs in one directory"
        disk.running.add(self.name)
        disk.most_at_once = max(disk.most_at_once, len(disk.running))

    def poll(self) -> Outcome | None:
        outcome = self._outcome()
        if outcome is not None:
            self.disk.running.discard(self.name)
        return outcome

    def _outcome(self) -> Outcome | None:
        if self.is_asked_to_stop:
            return Killed(reason="asked to stop")
        if fates := self.disk.fates.get(self.name):
            return fates.pop(0)
        self.disk.done[self.name] = self.disk.done.get(self.name, 0) + 1
        self.disk.work += 1
        return completed(self.job) if self.disk.done[self.name] >= self.disk.length else None

    def stop(self) -> None:
        self.is_asked_to_stop = True

    def taken(self) -> None:
        pass


class FakeRunner:
    def __init__(self, disk: Disk, places: int) -> None:
        self.disk = disk
        self.places = places
        self.taken_over: list[tuple[str, int, int]] = []
        self.on_wait: Callable[[], None] = lambda: None

    def outcome(self, job: TrialJob) -> Completed | Failed | None:
        is_done = self.disk.done.get(job.run_dir.name, 0) >= self.disk.length
        return completed(job) if is_done else None

    def metrics(self, run_dir: Path) -> Sequence[Mapping[str, Any]]:
        return [{}] * self.disk.done.get(run_dir.name, 0)

    def free_slots(self, taken: Collection[Slot]) -> list[Slot]:
        places = [Slot(number=number) for number in range(self.places)]
        return [place for place in places if place not in taken]

    def start(self, job: TrialJob) -> FakeTrial:
        return FakeTrial(self.disk, job)

    def take_over(self, job: TrialJob) -> FakeTrial:
        self.taken_over.append((job.trial, job.lease, job.runner))
        return FakeTrial(self.disk, job)

    def wait(self, running: Sequence[Any], timeout_s: float) -> None:
        self.on_wait()


class Nobody:
    def changed(self, state: SweepState, trial: Trial) -> None:
        pass

    def tick(self, state: SweepState) -> None:
        pass


def flags_of(trial: Trial) -> tuple[str, ...]:
    return (f"--config.x={trial.values['x']}",)


def make_chief(
    tmp_path: Path,
    disk: Disk,
    *,
    at: int | None = None,
    how: str = "before",
    parallel: int = 1,
    ahead: int = 99,
    max_failed: int | None = None,
    flags: Callable[[Trial], tuple[str, ...]] = flags_of,
) -> Chief:
    disk.running.clear()  # a trial dies with its chief
    path = tmp_path / "journal.jsonl"
    journal = CrashingJournal(path, at=at, how=how)
    if not journal.lines:
        journal._left, left = None, journal._left
        journal.add("begun", **BEGUN)
        journal._left = left
    plan = SweepPlan(
        sweep_dir=tmp_path,
        objective="val_accuracy",
        direction="max",
        max_epochs=9,
        max_failed_trials=max_failed,
        flags_of=flags,
    )
    search = FakeSearch(list(journal.lines), ahead=ahead)
    return Chief(
        plan, search=search, journal=journal, runner=FakeRunner(disk, parallel), observer=Nobody()
    )


def outcome_of(tmp_path: Path) -> dict[str, tuple[str, float | None]]:
    state = fold(read(tmp_path / "journal.jsonl"))
    return {trial.id: (trial.status, trial.score) for trial in state.trials.values()}


def test_all_trials_run_once_and_the_best_is_first(tmp_path: Path) -> None:
    disk = Disk()
    chief = make_chief(tmp_path, disk)
    assert chief.run() == 0
    assert disk.started == ["0", "1", "2", "3"]
    assert [trial.id for trial in chief.state.ranked()] == ["0", "1", "2", "3"]
    assert chief.state.is_complete
    assert disk.most_at_once == 1


def test_several_trials_run_at_once_and_no_more_than_asked(tmp_path: Path) -> None:
    disk = Disk()
    assert make_chief(tmp_path, disk, parallel=3).run() == 0
    assert disk.most_at_once == 3
    assert len(disk.started) == 4


def test_a_search_that_is_idle_is_asked_again_when_a_trial_has_ended(tmp_path: Path) -> None:
    disk = Disk()
    assert make_chief(tmp_path, disk, parallel=3, ahead=1).run() == 0
    assert disk.most_at_once == 1
    assert len(disk.started) == 4
    idle = [line for line in read(tmp_path / "journal.jsonl") if line.get("status") == IDLE]
    assert len(idle) <= 4, "asked once for each change, not at every look"


@pytest.mark.parametrize("how", ["before", "within", "after"])
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_crash_at_any_write_changes_nothing(tmp_path: Path, how: str, parallel: int) -> None:
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    work = Disk()
    make_chief(undisturbed, work, parallel=parallel).run()
    writes = len(read(undisturbed / "journal.jsonl")) - 1
    assert writes > 10
    for at in range(writes):
        place = tmp_path / f"at-{at}"
        place.mkdir()
        disk = Disk()
        chief = make_chief(place, disk, at=at, how=how, parallel=parallel)
        with pytest.raises(Crash):
            chief.run()
        assert make_chief(place, disk, parallel=parallel).run() == 0
        assert outcome_of(place) == outcome_of(undisturbed)
        assert disk.work == work.work, "a finished trial was run again, or a step was"


def test_a_crash_at_every_third_write_in_a_row_still_comes_to_the_end(tmp_path: Path) -> None:
    disk = Disk()
    for _ in range(50):
        try:
            exit_code = make_chief(tmp_path, disk, at=2, how="within").run()
        except Crash:
            continue
        assert exit_code == 0
        break
    else:
        pytest.fail("no end after 50 chiefs")
    assert {status for status, _ in outcome_of(tmp_path).values()} == {"completed"}
    assert disk.work == 4 * disk.length


def test_a_failed_trial_is_written_down_and_the_sweep_goes_on(tmp_path: Path) -> None:
    failed = Failed(reason="worker-0: ValueError: too wide", last_lines=("Traceback", "ValueError"))
    chief = make_chief(tmp_path, Disk(fates={"1": [failed]}))
    assert chief.run() == 0
    trial = chief.state.trials["1"]
    assert (trial.status, trial.reason) == ("failed", failed.reason)
    assert trial.last_lines == failed.last_lines
    assert len(chief.state.ranked()) == 3


def test_a_sweep_of_which_no_trial_was_completed_has_failed(tmp_path: Path) -> None:
    fates: dict[str, list[Outcome]] = {name: [Failed(reason="no")] for name in "0123"}
    chief = make_chief(tmp_path, Disk(fates=fates))
    assert chief.run() == 1
    assert chief.state.finished == "all trials have failed"
    assert chief.state.is_complete, "there is nothing to go on with"


def test_values_that_make_no_configuration_fail_their_trial_only(tmp_path: Path) -> None:
    def flags(trial: Trial) -> tuple[str, ...]:
        if trial.id == "2":
            raise UsageError("config.dropout", received=2, expected="less than 1", fix="lower it")
        return flags_of(trial)

    disk = Disk()
    chief = make_chief(tmp_path, disk, flags=flags)
    assert chief.run() == 0
    assert "config.dropout: received 2" in chief.state.trials["2"].reason
    assert disk.started == ["0", "1", "3"]


def test_too_many_failed_trials_end_the_sweep_with_the_reason(tmp_path: Path) -> None:
    fates = {name: [Failed(reason="no")] for name in "012"}
    chief = make_chief(tmp_path, Disk(fates=fates), max_failed=2)
    assert chief.run() == 1
    assert chief.state.finished == "2 failed trials (--max_failed_trials)"
    assert not chief.state.is_complete
    more = make_chief(tmp_path, Disk(fates=fates), max_failed=4)
    assert more.run() == 0
    assert more.state.is_complete
    assert [t.status for t in more.state.trials.values()] == ["failed"] * 3 + ["completed"]


def test_a_killed_trial_goes_on_and_one_that_is_always_killed_fails(tmp_path: Path) -> None:
    killed: Outcome = Killed(reason="chief-0: killed by SIGKILL")
    disk = Disk(fates={"0": [killed, killed], "1": [killed] * 9})
    chief = make_chief(tmp_path, disk)
    assert chief.run() == 0
    assert chief.state.trials["0"].status == "completed"
    assert chief.state.trials["0"].starts == 3
    assert chief.state.trials["1"].status == "failed"
    assert "killed 4 times without progress" in chief.state.trials["1"].reason


def test_kills_with_progress_in_between_are_not_counted(tmp_path: Path) -> None:
    disk = Disk(length=20)
    chief = make_chief(tmp_path, disk)
    polls = itertools.count()

    def kill_at_every_second_look() -> None:
        if next(polls) % 2 and disk.running:
            disk.fates.setdefault(next(iter(disk.running)), []).append(Killed(reason="SIGKILL"))

    chief._runner.on_wait = kill_at_every_second_look  # type: ignore[attr-defined]
    assert chief.run() == 0
    assert {status for status, _ in outcome_of(tmp_path).values()} == {"completed"}
    assert chief.state.trials["0"].starts > 5


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_chief_that_is_asked_to_stop_leaves_trials_to_go_on(
    tmp_path: Path, signum: int, code: int
) -> None:
    disk = Disk()
    chief = make_chief(tmp_path, disk, parallel=2)
    chief._runner.on_wait = lambda: chief.stop(signum)  # type: ignore[attr-defined]
    assert chief.run() == code
    assert not disk.running
    assert {t.status for t in chief.state.trials.values()} <= {"running", "waiting"}
    assert make_chief(tmp_path, disk, parallel=2).run() == 0
    assert len(outcome_of(tmp_path)) == 4
    assert disk.work == 4 * disk.length


def test_trials_left_by_a_chief_with_more_at_once_wait_for_their_turn(tmp_path: Path) -> None:
    disk = Disk()
    with pytest.raises(Crash):  # three have been asked for and started, none has ended
        make_chief(tmp_path, disk, at=6, parallel=3).run()
    disk.most_at_once = 0
    assert make_chief(tmp_path, disk, parallel=1).run() == 0
    assert disk.most_at_once == 1
    assert len(outcome_of(tmp_path)) == 4


def test_a_trial_that_a_runner_elsewhere_has_is_not_started_but_taken_over(tmp_path: Path) -> None:
    book = Journal(tmp_path / "journal.jsonl", time_of_day=lambda: 1.0)
    book.add("begun", **BEGUN)
    for name in ("0", "1"):
        more = {"values": {"x": 1}, "run": name, "until": None}
        book.add("asked", asker="r", status=RUNNING, trial=name, **more)
    book.add("started", trial="0")
    book.add("killed", trial="0", reason="", kills=1, reached=0)
    book.add("started", trial="0", runner=7, place=0)
    book.add("started", trial="1")
    disk = Disk()
    chief = make_chief(tmp_path, disk, parallel=2)
    assert chief.run() == 0
    assert chief._runner.taken_over == [("0", 2, 7)]  # type: ignore[attr-defined]
    assert [trial.starts for trial in chief.state.trials.values()] == [2, 2, 1, 1]
    assert disk.most_at_once == 3, "its place is not one of those here"


def test_a_chief_that_does_not_serve_leaves_trials_elsewhere_alone(tmp_path: Path) -> None:
    runner = LauncherRunner(
        program=(), launch_flags=(), gpus=(), places=1, environ={}, timeout_s=1.0
    )
    job = TrialJob(run_dir=tmp_path, flags=(), goal=GOAL, trial="0")
    with pytest.raises(UsageError, match=r"^--serve: received nothing, while trial 0 is with"):
        runner.take_over(job)
