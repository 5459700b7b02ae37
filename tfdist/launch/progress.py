"""How far an attempt has come, by what its tasks say of themselves, and whether it stands still."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Protocol

from tfdist.cluster import Task
from tfdist.errors import EXIT_PEER_MISSING
from tfdist.launch.blame import is_lost_peer
from tfdist.launch.events import Beat, Started
from tfdist.launch.report import Failure

_SILENT_S = 3.0  # a task that has said nothing for so long does not speak any more


class Hang(Protocol):
    """A task that stands still, why it is blamed, and whose stacks would tell more."""

    @property
    def task(self) -> Task: ...
    @property
    def cause(self) -> str: ...
    @property
    def stuck(self) -> tuple[Task, ...]: ...


class Watcher(Protocol):
    """Finds tasks that stand still, from what it is told of them; `Watchdog` is one."""

    def started(self, task: Task, *, at_s: float) -> None: ...
    def ended(self, task: Task) -> None: ...
    def beat(self, beat: Beat) -> None: ...
    def next_check_s(self) -> float: ...
    def verdict(self, now_s: float) -> Hang | None: ...
    def stopped(self) -> Task | None: ...
    def absent(self, now_s: float) -> tuple[Task, str] | None: ...


class Progress:
    """The last word of each task of an attempt."""

    def __init__(self, watchdog: Watcher) -> None:
        self._watchdog = watchdog
        self._beats: dict[Task, Beat] = {}
        self._started_s: dict[Task, float] = {}
        self._step: int | None = None
        self._first_step_s: float | None = None

    @property
    def first_step_s(self) -> float | None:
        """Returns when the first step of this attempt was done, None if that is not known."""
        return self._first_step_s

    @property
    def step(self) -> int | None:
        """Returns the last step that any task has told; None before the training."""
        return self._step

    def asked_for(self, task: Task, *, at_s: float) -> None:
        """Takes down that a task is to start: that it never does is a hang, too."""
        self._watchdog.started(task, at_s=at_s)

    def started(self, event: Started) -> None:
        """Takes down that a task has a process, which has said nothing yet."""
        self._beats.pop(event.task, None)
        self._started_s[event.task] = event.at_s
        self._watchdog.started(event.task, at_s=event.at_s)

    def ended(self, task: Task) -> None:
        """Takes down that a task is not expected to get on any more."""
        self._watchdog.ended(task)

    def beat(self, beat: Beat) -> None:
        """Takes down what a task says."""
        self._beats[beat.task] = beat
        self.reached(beat.step)
        known_s, first_s = self._first_step_s, beat.first_step_s
        if first_s is not None:
            self._first_step_s = first_s if known_s is None else min(known_s, first_s)
        self._watchdog.beat(beat)

    def reached(self, step: int | None) -> None:
        """Takes down a step that a task has reached."""
        if step is not None:
            self._step = step if self._step is None else max(self._step, step)

    def next_check_s(self) -> float:
        """Returns when `hang` may answer without another event."""
        return self._watchdog.next_check_s()

    def hang(
        self, now_s: float, *, among: Container[Task]
    ) -> tuple[Failure, tuple[Task, ...]] | None:
        """Returns the failure of one of the tasks `among` that stands still, and who is stuck."""
        if now_s < self._watchdog.next_check_s():
            return None
        hang = self._watchdog.verdict(now_s)
        if hang is None or hang.task not in among:
            return None
        sign_s = self._last_sign_s(hang.task, now_s=now_s)
        failure = Failure(task=hang.task, cause=hang.cause, exit_code=1, at_s=sign_s)
        return self.dated(failure, now_s=now_s), hang.stuck

    def behind(self, failure: Failure) -> Failure:
        """Returns that of another task where `failure` is of one that has lost or missed a peer.

        TensorFlow gives up a peer that is stopped and does not answer, and the tasks wait for one
        that does not come, which both may be over before it counts as hanging.
        """
        has_missed = failure.exit_code == EXIT_PEER_MISSING
        if not has_missed and not is_lost_peer(failure.cause):
            return failure
        if stopped := self._watchdog.stopped():
            cause = f"stopped (SIGSTOP), and {failure.task} lost it: {failure.cause}"
            return dataclasses.replace(failure, task=stopped, cause=cause, kind="stopped")
        absent = self._watchdog.absent(failure.at_s) if has_missed else None
        if absent is None:
            return failure
        task, looks = absent
        cause = f"{looks}, and {failure.task} gave up: {failure.cause}"
        return dataclasses.replace(failure, task=task, cause=cause, kind="absent")

    def dated(self, failure: Failure, *, now_s: float) -> Failure:
        """Returns `failure` with the step it happened at and how long it took to be seen."""
        return dataclasses.replace(failure, step=self._step, detect_s=now_s - failure.at_s)

    def _last_sign_s(self, task: Task, *, now_s: float) -> float:
        """Returns when a task last got on: its last word, or what that says of its phase."""
        beat = self._beats.get(task)
        if beat is None:
            return self._started_s.get(task, now_s)
        return beat.at_s if now_s - beat.at_s > _SILENT_S else beat.since_s
