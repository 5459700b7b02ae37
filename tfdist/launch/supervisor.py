"""One attempt of a job: when it is over, what failed first, and who is told to end when.

It acts on events alone. The processes, the screen and the clock are parameters, so that
its tests replay histories without any process.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable, Container, Sequence

from tfdist.cluster import Task
from tfdist.launch.alone import EVALUATOR, Alone
from tfdist.launch.blame import Blame
from tfdist.launch.ending import Ending
from tfdist.launch.events import Asked, Beat, Ended, Event, Raised, Started
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.progress import Progress, Watcher
from tfdist.launch.records import Records
from tfdist.launch.report import Attempt, Failure, signal_name
from tfdist.launch.restarts import RestartPolicy, Verdict
from tfdist.launch.servers import Servers
from tfdist.launch.signals import exit_code_for
from tfdist.launch.supervised import Processes, Screen, named

SERVER_GRACE_S = 3.0
"""How long workers and ps may take to end once the chief has: they hold nothing to save."""

RESTART_GRACE_S = 1.0
"""How long the others may take before a restart: without a peer they wait, deaf, in TensorFlow."""

STRAGGLER_GRACES = 6
"""How many times the grace the other workers may go on after the chief of theirs is done."""

STACKS_S = 0.5
"""How long the stacks of a task that stands still may take to come into its log."""


class Supervisor:
    """Runs one attempt and says how it went. `chief` is the task whose end ends a ps job."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        chief: Task,
        is_ps: bool,
        grace_s: float,
        min_workers: int | None,
        policy: RestartPolicy,
        watchdog: Watcher,
        processes: Processes,
        screen: Screen,
        clock: Callable[[], float],
    ) -> None:
        self._specs = {spec.task: spec for spec in specs}
        self._chief = chief
        self._is_ps = is_ps
        self._grace_s = grace_s
        self._processes = processes
        self._screen = screen
        self._clock = clock
        self._records = Records(self._specs)
        self._progress = Progress(watchdog)
        self._blame = Blame(patience_s=grace_s)
        self._running: dict[Task, None] = {}  # in the order of their start
        self._hang: tuple[Failure, tuple[Task, ...]] | None = None
        self._failure: Failure | None = None
        self._verdict = Verdict()
        self._asked: int | None = None
        self._ending = Ending(
            self._running, processes=processes, records=self._records, clock=clock
        )
        self._servers = Servers(
            self._running,
            is_ps=is_ps,
            ending=self._ending,
            grace_s=min(grace_s, SERVER_GRACE_S),
        )
        self._alone = Alone(
            self._specs,
            is_ps=is_ps,
            min_workers=min_workers,
            policy=policy,
            blame=self._blame,
            progress=self._progress,
            running=self._running,
            processes=processes,
            records=self._records,
            screen=screen,
            start=self._start,
        )
        self._straggler_deadline_s = self._stacks_deadline_s = math.inf
        self._started_s = self._woken_s = clock()

    def run(self) -> Attempt:
        """Starts every task and returns when the last one has ended."""
        for spec in self._specs.values():
            if not self._ending.has_begun:
                self._start(spec)
        while self._running and not self._ending.has_failed:
            events = self._processes.wait(self._timeout_s())
            since_s, self._woken_s = self._woken_s, self._clock()
            for event in events:
                self._handle(event, since_s=since_s)
            self._judge()
            self._servers.end()
            if not self._running:  # the last ones could not even print their stacks
                self._end_hang()
            self._keep_deadlines()
        if self._running:
            self._screen.say(f"cannot be killed: {named(self._running)}")
        return self._attempt()

    def _start(self, spec: ProcessSpec) -> None:
        self._running[spec.task] = None
        self._progress.asked_for(spec.task, at_s=self._clock())
        try:
            self._processes.start(spec)
        except OSError as error:
            cause = f"cannot be started: {error.strerror or error}"
            ended = Ended(task=spec.task, status=1, at_s=self._clock(), cause=cause)
            self._handle(ended, since_s=self._woken_s)
            self._judge()

    def _handle(self, event: Event, *, since_s: float) -> None:
        match event:
            case Started():
                self._records.started(event)
                self._progress.started(event)
            case Beat(task=task) if task in self._running:
                self._progress.beat(event)
            case Raised(task=task) if task in self._running and not self._ending.has_begun:
                self._progress.reached(event.step)
                self._blame.raised(event)
            case Ended(task=task) if task in self._running:
                self._running.pop(task)
                self._records.ended(event)
                self._progress.ended(task)
                self._after_end(event, since_s=since_s)
            case Asked(signum=signum):
                self._ask(signum)

    def _after_end(self, ended: Ended, *, since_s: float) -> None:
        task = ended.task
        if task == self._chief and (self._ending.has_begun or not ended.status):
            self._straggler_deadline_s = self._clock() + STRAGGLER_GRACES * self._grace_s
            self._servers.is_over = True
            self._servers.end()
            for served in filter(self._servers.serve_nobody, self._blame.tasks):
                self._blame.forget(served)  # they have seen it before
        if self._ending.has_begun:
            return
        if self._alone.has_left(task) or self._servers.serve_nobody(task):
            return
        if not ended.status:
            self._blame.forget(task)
            if not self._is_ps or task in (self._chief, EVALUATOR):
                return
            ended = dataclasses.replace(ended, cause="ended before the chief (exit code 0)")
        self._blame.ended(ended, since_s=since_s, now_s=self._clock())

    def _ask(self, signum: int) -> None:
        is_first = self._asked is None and (not self._ending.has_begun or self._verdict.restart)
        if not is_first:
            self._ending.kill()
            return
        self._asked = signum
        is_closed = signum == signal.SIGPIPE
        name = "its output is closed" if is_closed else signal_name(signum)
        if self._verdict.restart:
            self._screen.say(f"{name}: not started again")
            return
        tasks = f"{len(self._running)} tasks" if len(self._running) > 1 else "the task"
        self._screen.say(
            f"{name}: ending {tasks} within {self._grace_s:g} s (a second signal kills at once)"
        )
        # The servers of a ps job go on until the chief has saved; `_after_end` ends them then.
        saving = self._is_ps and self._chief in self._running
        servers = self._running.keys() - {self._chief} if saving else ()
        as_term = is_closed or signum == signal.SIGHUP  # which no program saves at
        signum = signal.SIGTERM if as_term else signum
        self._ending.stop(signum, within_s=self._grace_s, but=servers)

    def _judge(self) -> None:
        """Finds what failed first once anything has ended badly, and stops the rest.

        Not if the same awakening brought a request to stop or the end of the chief: these
        explain the ends around them.
        """
        while not self._ending.has_begun and self._hang is None:
            now_s = self._clock()
            is_complete = not (set(self._running) - self._blame.tasks)
            failure = self._blame.suspect(now_s, is_complete=is_complete)
            if failure is None:
                self._find_hang(now_s)
                return
            failure = self._progress.dated(self._progress.behind(failure), now_s=now_s)
            if not self._alone.take(failure):
                # Its process may still have a traceback to print.
                self._fail(failure, but=(failure.task,))

    def _find_hang(self, now_s: float) -> None:
        serving = [task for task in self._running if not self._servers.serve_nobody(task)]
        self._hang = self._progress.hang(now_s, among=set(serving) - self._alone.leaving)
        if self._hang is None:
            return
        failure, stuck = self._hang
        if self._alone.can_take(failure):  # the others go on, and are not disturbed
            stuck = tuple(task for task in stuck if task == failure.task)
        self._hang = failure, stuck
        self._stacks_deadline_s = now_s + (STACKS_S if stuck else 0.0)
        if stuck:
            self._screen.say(f"{failure.task}: {failure.cause}; the stacks of {named(stuck)}:")
        for task in stuck:
            self._processes.ask_for_stacks(task)

    def _end_hang(self) -> None:
        """Acts on a task that stands still, once the stacks have been printed."""
        if self._hang is None or self._ending.has_begun:
            return
        failure, stuck = self._hang
        self._hang, self._stacks_deadline_s = None, math.inf
        stacks = tuple((task, self._screen.last_lines(task)) for task in stuck)
        failure = dataclasses.replace(failure, stacks=stacks)
        if not self._alone.take(failure):
            self._fail(failure)

    def _fail(self, failure: Failure, *, but: Container[Task] = ()) -> None:
        self._verdict = self._alone.verdict_on(failure)
        self._failure = first = self._alone.first(failure)
        if first is not failure:
            self._screen.say(f"{failure.task} failed: {failure.cause}; no worker is left")
        self._screen.show_failure(first.task, first.cause)
        within_s = self._grace_s
        if self._verdict.restart:
            within_s = min(within_s, RESTART_GRACE_S)
        elif self._verdict.reason:
            self._screen.say(f"not started again: {self._verdict.reason}")
        self._ending.stop(signal.SIGTERM, within_s=within_s, but=but)

    def _keep_deadlines(self) -> None:
        now_s = self._clock()
        if self._ending.is_overdue:
            # The servers of a ps job that is done may be kept from hearing by TensorFlow.
            is_served_out = self._is_ps and self._chief not in self._running
            if not is_served_out and not self._verdict.restart:
                self._screen.say(f"killed, as still running: {named(self._running)}")
            self._ending.kill()
        elif now_s >= self._stacks_deadline_s:
            self._end_hang()
        elif now_s >= self._straggler_deadline_s and not self._ending.has_begun and self._running:
            self._end_stragglers(now_s)

    def _end_stragglers(self, now_s: float) -> None:
        waited_s = STRAGGLER_GRACES * self._grace_s
        late = [t for t in self._running if t != EVALUATOR and not self._servers.serve_nobody(t)]
        cause = f"still running {waited_s:g} s after {self._chief} was done"
        failure = Failure(task=EVALUATOR, cause=cause, exit_code=1, at_s=now_s, detect_s=waited_s)
        if late:
            cause += f": {named(late)}"
            self._fail(dataclasses.replace(failure, task=late[0], cause=cause))
        else:
            self._alone.lose(failure)
            self._servers.end_all()

    def _timeout_s(self) -> float | None:
        if self._ending.has_begun:
            next_s = self._ending.deadline_s
        elif self._hang is not None:
            next_s = self._stacks_deadline_s
        else:
            checks_s = (self._blame.next_s(), self._progress.next_check_s())
            next_s = min(self._straggler_deadline_s, *checks_s)
        return None if math.isinf(next_s) else max(0.0, next_s - self._clock())

    def _attempt(self) -> Attempt:
        failure, code = self._failure, 0
        if failure is not None:
            lines = self._screen.last_lines(failure.task)
            failure = dataclasses.replace(failure, last_lines=lines)
            code = failure.exit_code
        if self._asked is not None:
            code = exit_code_for(self._asked)
        if not code and self._alone.lost:
            self._screen.say(f"done without {named(lost.task for lost in self._alone.lost)}")
        is_worth_it = self._verdict.restart and self._asked is None and not self._running
        return Attempt(
            exit_code=code,
            tasks=self._records.all(),
            first_failure=failure,
            restarts=tuple(self._alone.restarts),
            lost=tuple(self._alone.lost),
            restart=self._verdict.reason if is_worth_it else "",
            started_at_s=self._started_s,
            first_step_at_s=self._progress.first_step_s,
        )
