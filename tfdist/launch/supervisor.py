"""Supervisor of one attempt: its end, its root cause, and the shutdown of its tasks.

`decide` returns actions for the state and the new events, so tests can replay events without any
process. `Supervisor` waits for events, calls `decide`, and performs the returned actions.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable, Container
from dataclasses import replace
from typing import TYPE_CHECKING

from tfdist.cluster import Task
from tfdist.errors import EXIT_USAGE, named
from tfdist.launch.diagnosis import Failure
from tfdist.launch.events import (
    NOT_STEADY,
    Action,
    AnswerResize,
    AskForStacks,
    Awakening,
    Beat,
    Begin,
    Ended,
    Event,
    KillOne,
    Leave,
    MemberSaid,
    Raised,
    Resize,
    Say,
    ShowFailure,
    Signal,
    Start,
    Started,
    StopRequest,
    request_name,
    worker,
)
from tfdist.launch.membership import Fence, Go, Membership, Step, View
from tfdist.launch.screen import JobScreen
from tfdist.launch.state import (
    EVALUATOR,
    RESTART_GRACE_S,
    JobState,
    PendingHang,
    RestartVerdict,
    TaskRecord,
    TaskState,
    ViewRecord,
)

if TYPE_CHECKING:
    from tfdist.launch.multihost.leader import Team
    from tfdist.launch.processes import LocalProcesses

SERVER_GRACE_S = 3.0
"""Seconds that workers and ps have to exit after the chief. They have no state to save."""

STRAGGLER_S, STRAGGLER_GRACES = 90.0, 6
"""Limits for the other workers to exit after the chief: seconds, or a number of grace periods.
The longer limit applies, so that a short grace period does not interrupt a normal exit. If an
iterator of tf.data lived for milliseconds, TensorFlow may wait a minute before it deletes it."""

STACKS_S = 0.5
"""Seconds to wait until a hanging task has printed its stacks."""

_GIVE_UP_S = 10.0  # seconds to wait for a process to exit after SIGKILL


def decide(state: JobState, awakening: Awakening) -> list[Action]:
    """Return the actions for an awakening, and update `state`.

    All events of one awakening are judged together. A stop request, or the chief's exit, explains
    other exits in the same awakening.
    """
    return _Decision(state, awakening).actions()


class _Decision:
    """Decision on one awakening of the supervisor."""

    def __init__(self, state: JobState, awakening: Awakening) -> None:
        self._state = state
        self._events = awakening.events
        self._unreachable = awakening.unreachable
        self._since_s, self._now_s = state.now_s, awakening.at_s
        state.now_s = awakening.at_s
        self._actions: list[Action] = []

    def actions(self) -> list[Action]:
        state = self._state
        for event in self._events:
            self._see(event)
        self._find_failure()
        is_evaluated = state.is_ending or not state.is_running(EVALUATOR)
        if state.has_servers and state.is_done and is_evaluated and not state.are_servers_closed:
            self._end_served()
        if not state.running:  # the last tasks exited before printing their stacks
            self._end_hang()
        self._keep_deadlines()
        return self._actions

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    def _say(self, text: str) -> None:
        self._do(Say(text))

    # events

    def _see(self, event: Event | Begin) -> None:
        state = self._state
        match event:
            case Begin(task=task) if not state.is_ending:
                self._start(task)
            case Started(task=task):
                state.tasks[task].record(pid=event.pid, started_at_s=event.at_s)
                state.watchdog.started(task, at_s=event.at_s)
            case Beat(task=task, first_step_s=first_s) if state.is_running(task):
                state.reached(event.step)
                if first_s is not None:
                    state.first_step_s = min(first_s, state.first_step_s or math.inf)
                state.watchdog.beat(event)
            case Raised(task=task) if state.is_running(task) and not state.is_ending:
                if state.tasks[task].is_leaving:
                    return
                state.reached(event.step)
                state.root_cause.raised(event)
            case Ended(task=task) if state.is_running(task):
                self._see_end(event)
            case StopRequest(signum=signum):
                self._see_stop_request(signum)
            case _:
                if state.membership is not None:
                    self._see_member(event, state.membership)

    def _see_end(self, ended: Ended) -> None:
        state, task = self._state, ended.task
        is_chief, is_member = task == state.chief, state.is_member(task)
        state.tasks[task].is_running = False
        state.tasks[task].record(status=ended.status, ended_at_s=ended.at_s)
        state.watchdog.ended(task)
        goes_on = not state.is_ending or state.stop_signal is not None
        goes_on &= is_member or not is_chief or not ended.status
        if state.membership and task.type == "worker" and goes_on:
            self._change(state.membership.lost(task.index))
        if is_chief and (state.is_ending or not ended.status):
            state.straggler_deadline_s = self._now_s + self._straggler_s
            state.done = task
            for waiting in filter(state.waits_to_join, state.running):
                self._do(KillOne(waiting))
            for served in filter(state.serves_nobody, state.root_cause.tasks):
                state.root_cause.forget(served)  # they failed because the chief exited
        if state.membership and state.num_workers and state.tasks[task].is_leaving:
            if not state.is_ending and not state.is_done:
                self._resize(state.num_workers, state.membership)
            return
        if state.is_ending or self._end_failed_alone(task) or state.serves_nobody(task):
            return
        if not ended.status:
            state.root_cause.forget(task)
            if not state.has_servers or is_chief or task == EVALUATOR:
                return
            ended = replace(ended, cause="exited before the chief (exit code 0)")
        state.root_cause.ended(ended, since_s=self._since_s, now_s=self._now_s)

    def _see_member(self, event: Event | Begin, membership: Membership) -> None:
        """Change the members of an elastic job after a message of a member or of the user."""
        state = self._state
        match event:
            case MemberSaid(task=task, message={"is_replaceable": bool(is_replaceable)}):
                state.tasks[task].is_replaceable = is_replaceable
            case MemberSaid():
                self._change(_steps(event, membership))
            case Resize(workers=workers):
                least = state.min_workers or 1
                why = f"the job needs {least} workers" if workers < least else ""
                if state.is_done or state.is_ending or not membership.epoch:
                    why = NOT_STEADY
                self._do(AnswerResize(why))
                if not why:
                    self._say(f"changing to {workers} workers")
                    state.num_workers = workers
                    self._resize(workers, membership)

    def _change(self, steps: list[Step]) -> None:
        state = self._state
        for step in steps:
            match step:
                case Fence(member=member, reason=reason):
                    self._fence(worker(member), reason)
                    continue
                case View():
                    for task in map(worker, step.members):
                        state.tasks[task].was_member = True
                case Go():
                    tasks = tuple(map(worker, step.members))
                    state.views.append(ViewRecord(members=tasks, step=state.step, at_s=self._now_s))
            self._do(step)

    def _resize(self, workers: int, membership: Membership) -> None:
        """Start workers of an elastic job, or let the last workers leave."""
        state, running = self._state, self._state.running
        stays = sorted(task for task in running if not state.tasks[task].is_leaving)
        others = [task for task in reversed(stays) if task != state.chief]
        for task in others[: max(0, len(stays) - workers)]:
            known = state.tasks[task]
            known.leaves_by_s = self._now_s + state.grace_s
            state.watchdog.ended(task)
            state.root_cause.forget(task)
            self._do(Leave(task) if known.was_member else KillOne(task))
            self._change(membership.lost(task.index))
        if len(stays) < len(running):
            return  # workers that leave still have their numbers
        absent = (t for t in map(worker, itertools.count()) if not state.is_running(t))
        for task in itertools.islice(absent, max(0, workers - len(stays))):
            records = state.tasks.setdefault(task, TaskState(records=[])).records
            records.append(TaskRecord(task=task, restart=len(records)))
            self._start(task)

    def _fence(self, task: Task, reason: str) -> None:
        """Kill a member that cannot go on with the others."""
        known = self._state.tasks[task]
        if not known.is_running or known.failed_alone is not None:
            return
        failure = Failure(task=task, cause=reason, exit_code=1, at_s=self._now_s)
        if not self._go_on(self._dated(failure)):
            self._fail(self._dated(failure))

    def _end_failed_alone(self, task: Task) -> bool:
        """Restart or drop the task if only this task was killed. Return False in any other case."""
        known = self._state.tasks[task]
        failure, known.failed_alone = known.failed_alone, None
        if failure is None:
            return False
        self._state.root_cause.forget(task)
        self._start_again_or_drop(failure)
        return True

    def _see_stop_request(self, signum: int) -> None:
        state = self._state
        is_first = state.stop_signal is None and (not state.is_ending or state.verdict.restart)
        if not is_first:
            self._kill()
            return
        state.stop_signal = signum
        name = request_name(signum)
        if state.verdict.restart:
            self._say(f"{name}: not restarting")
            return
        running, grace_s, chief = state.running, state.grace_s, state.chief
        tasks = f"{len(running)} tasks" if len(running) > 1 else "the task"
        self._say(f"{name}: stopping {tasks} within {grace_s:g} s (a second signal kills at once)")
        # Workers and ps of a ps job keep running until the chief has saved and exited.
        is_saving = state.has_servers and state.is_running(chief)
        servers = set(running) - {chief} if is_saving else set()
        as_term = signum in (signal.SIGPIPE, signal.SIGHUP)  # programs do not save on these signals
        self._stop(signal.SIGTERM if as_term else signum, within_s=grace_s, but=servers)

    # failures

    def _find_failure(self) -> None:
        """Find the root cause of new failures or a hang, and stop the other tasks if needed."""
        state = self._state
        while not state.is_ending and state.hang is None:
            failed = state.root_cause.tasks
            is_complete = bool(failed) and failed.issuperset(state.running)
            failure = state.root_cause.suspect(self._now_s, is_complete=is_complete)
            if failure is None:
                self._find_hang()
                return
            failure = self._dated(failure)
            if not self._go_on(failure):
                # The failed task's process may still print a traceback.
                self._fail(failure, but=(failure.task,))

    def _dated(self, failure: Failure) -> Failure:
        return replace(failure, step=self._state.step, detect_s=self._now_s - failure.at_s)

    def _find_hang(self) -> None:
        state = self._state
        if self._now_s < state.watchdog.next_check_s():
            return
        hang = state.watchdog.find_hang(self._now_s)
        if hang is None:
            return
        failure, stuck = self._dated(hang[0]), hang[1]
        known = state.tasks[failure.task]
        if state.serves_nobody(failure.task) or not known.is_running or known.failed_alone:
            return
        if self._can_go_on(failure):  # the other tasks continue undisturbed
            stuck = tuple(task for task in stuck if task == failure.task)
        self._fail_after_stacks(failure, stuck)

    def _fail_after_stacks(self, failure: Failure, stuck: tuple[Task, ...]) -> None:
        """Ask the stuck tasks to print their Python stacks, and schedule the failure after that."""
        due_s = self._now_s + (STACKS_S if stuck else 0.0)
        self._state.hang = PendingHang(failure=failure, stuck=stuck, due_s=due_s)
        if stuck:
            self._say(f"{failure.task}: {failure.cause}; Python stacks of {named(stuck)}:")
        for task in stuck:
            self._do(AskForStacks(task))

    def _end_hang(self) -> None:
        """Act on a hanging task after the stacks were printed."""
        state = self._state
        if state.hang is None or state.is_ending:
            return
        hang, state.hang = state.hang, None
        if not self._go_on(hang.failure):
            self._fail(hang.failure, stacks=hang.stuck)

    def _fail(
        self, failure: Failure, *, but: Container[Task] = (), stacks: tuple[Task, ...] = ()
    ) -> None:
        state = self._state
        state.verdict = self._verdict_on(failure)
        state.failure = first = failure
        lost = [past for past in state.lost if state.works_for_chief(past.task)]
        is_last = state.works_for_chief(failure.task) and not state.other_workers({failure.task})
        if lost and is_last and failure.exit_code != EXIT_USAGE:
            state.failure = first = lost[0]
            self._say(f"{failure.task} failed: {failure.cause}; no worker is left")
        self._do(ShowFailure(first.task, first.cause, stacks))
        within_s = state.grace_s
        if state.verdict.restart:
            within_s = min(within_s, RESTART_GRACE_S)
        elif state.verdict.reason:
            self._say(f"not restarting: {state.verdict.reason}")
        self._stop(signal.SIGTERM, within_s=within_s, but=but)

    # continue with the task restarted, or without the task

    def _verdict_on(self, failure: Failure) -> RestartVerdict:
        """Return whether to restart: only the failed task if it is expendable, else the job."""
        alone = self._state.is_expendable(failure.task)
        return self._state.policy.verdict(failure, alone=alone)

    def _may_start(self, failure: Failure) -> bool:
        """Return whether only the failed task can restart. Its host must be reachable."""
        return self._verdict_on(failure).restart and failure.task not in self._unreachable

    def _can_go_on(self, failure: Failure) -> bool:
        """Return whether the job can continue without the failed tasks, or restart only them."""
        state = self._state
        failed = {failure.task, *state.root_cause.tasks}
        if not all(map(state.is_expendable, failed)):
            return False
        if state.has_enough_without(failure, failed=failed):
            return True
        is_needed = state.membership is not None and not state.waits_to_join(failure.task)
        return self._may_start(failure) and not (is_needed and failure.task.type == "worker")

    def _go_on(self, failure: Failure) -> bool:
        """Continue the job with the failed task restarted or dropped, and return whether it can."""
        if not self._can_go_on(failure):
            return False
        task = self._state.tasks[failure.task]
        self._state.root_cause.forget(failure.task)
        if task.is_running:
            task.failed_alone = failure
            self._do(KillOne(failure.task))
        else:
            self._start_again_or_drop(failure)
        return True

    def _start_again_or_drop(self, failure: Failure) -> None:
        self._do(KillOne(failure.task))  # its remaining child processes
        if not self._may_start(failure):
            self._lose(failure)
            return
        state, task = self._state, failure.task
        reason = self._verdict_on(failure).reason
        state.policy.restarted(failure)
        state.restarts.append(failure)
        records = state.tasks[task].records
        records.append(TaskRecord(task=task, restart=len(records)))
        log = state.logs / Start(task, records[-1].restart).log_name
        self._say(f"{task} failed: {failure.cause}; restarting only this task, {reason}: {log}")
        self._start(task)

    def _start(self, task: Task) -> None:
        known = self._state.tasks[task]
        known.is_running, known.was_member = True, False
        known.leaves_by_s, known.is_replaceable = math.inf, False
        known.failed_alone = None
        self._state.watchdog.started(task, at_s=self._now_s)  # never starting is a hang
        self._do(Start(task, known.records[-1].restart))

    def _lose(self, failure: Failure) -> None:
        state, task, verdict = self._state, failure.task, self._verdict_on(failure)
        state.lost.append(failure)
        workers = state.other_workers({task})
        others = "without it" if task == EVALUATOR else f"with {named(workers)}"
        reason = "" if verdict.restart else verdict.reason
        why = f" (not restarting: {reason})" if reason else ""
        self._say(f"{task} failed: {failure.cause}; continuing {others}{why}")

    # the end

    def _end_served(self) -> None:
        """Tell all running tasks to exit. They have no state to save."""
        self._state.are_servers_closed = True
        self._stop(signal.SIGTERM, within_s=min(self._state.grace_s, SERVER_GRACE_S))

    def _keep_deadlines(self) -> None:
        state, now_s = self._state, self._now_s
        if not state.running:
            return
        for task in [t for t in state.running if now_s >= state.tasks[t].leaves_by_s]:
            self._say(f"{task} did not exit within the grace period; killed")
            state.tasks[task].leaves_by_s = now_s + _GIVE_UP_S
            self._do(KillOne(task))
        if state.is_ending:
            if now_s >= state.deadline_s and not state.is_killed:
                # After the chief has exited, TensorFlow may block SIGTERM in workers and ps.
                is_served_out = state.has_servers and not state.is_running(state.chief)
                if not is_served_out and not state.verdict.restart:
                    late = named(state.running)
                    self._say(f"{late} did not exit within the grace period; killed")
                self._kill()
        elif state.hang is not None:
            if now_s >= state.hang.due_s:
                self._end_hang()
        elif now_s >= state.straggler_deadline_s:
            self._end_stragglers()

    @property
    def _straggler_s(self) -> float:
        return max(STRAGGLER_S, STRAGGLER_GRACES * self._state.grace_s)

    def _end_stragglers(self) -> None:
        state = self._state
        waited_s = self._straggler_s
        late = [t for t in state.running if t != EVALUATOR and not state.serves_nobody(t)]
        cause = f"still running {waited_s:g} s after {state.done} exited"
        if late:
            cause += f": {named(late)}"
        task = late[0] if late else EVALUATOR
        failure = Failure(task=task, cause=cause, exit_code=1, at_s=self._now_s, detect_s=waited_s)
        if late:
            self._fail_after_stacks(failure, tuple(late))
        else:
            self._lose(failure)
            self._end_served()

    def _stop(self, signum: int, *, within_s: float, but: Container[Task] = ()) -> None:
        self._state.is_ending = True
        self._state.deadline_s = min(self._state.deadline_s, self._now_s + within_s)
        self._signal(signum, but=but)

    def _kill(self) -> None:
        if self._state.is_killed:
            return
        self._state.is_killed = True
        self._state.deadline_s = self._now_s + _GIVE_UP_S
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int, *, but: Container[Task] = ()) -> None:
        for task in self._state.running:
            if task not in but:
                self._state.tasks[task].record(stopped=True)
                self._do(Signal(task, signum))


def _steps(said: MemberSaid, membership: Membership) -> list[Step]:
    """Return the steps after a member's message (none if it is invalid)."""
    member = said.task.index
    match said.message:
        case {"ready": True}:
            return membership.ready(member)
        case {"ack": int(epoch), "done": int(done), "has_state": bool(has_state)}:
            return membership.acked(member, epoch, done, has_state=has_state)
        case {"knock": True}:
            return membership.knocked(member)
        case {"admit": int(joining), "epoch": int(epoch)}:
            return membership.admitted(joining, epoch)
        case {"broken": int(epoch)}:
            return membership.broken(member, epoch)
    return []


class Supervisor:
    """Event loop of one attempt, which performs the actions of `decide`.

    Attributes:
      stacks: Last output lines of each task that printed its stacks after a hang.
    """

    def __init__(
        self,
        state: JobState,
        *,
        processes: Team | LocalProcesses,
        screen: JobScreen,
        clock: Callable[[], float],
        observe: Callable[[JobState, Awakening], None] = lambda state, awakening: None,
    ) -> None:
        self._state = state
        self._observe = observe
        self._processes = processes
        self._screen = screen
        self._clock = clock
        self.stacks: dict[Task, tuple[str, ...]] = {}

    def run(self) -> None:
        """Start every task and return when the last task has exited."""
        state = self._state
        for task in state.tasks:
            self._awake(Awakening(at_s=self._clock(), events=(Begin(task=task),)))
        while not state.is_over:
            left_s = max(0.0, state.next_s - self._clock())
            events = tuple(self._processes.wait(None if math.isinf(left_s) else left_s))
            gone = (task for task in state.tasks if not self._processes.can_start(task))
            self._awake(Awakening(at_s=self._clock(), events=events, unreachable=frozenset(gone)))
        if state.running:
            self._screen.say(f"cannot kill {named(state.running)}")
        if not state.exit_code and state.lost:
            self._screen.say(f"finished without {named(lost.task for lost in state.lost)}")

    def _awake(self, awakening: Awakening) -> None:
        done = [self._perform(action) for action in decide(self._state, awakening)]
        if failed := tuple(ended for ended in done if ended is not None):
            self._awake(replace(awakening, at_s=self._clock(), events=failed))
        else:
            self._observe(self._state, awakening)

    def _perform(self, action: Action) -> Ended | None:
        """Perform an action, and return an `Ended` event if a task cannot be started."""
        if isinstance(action, Say):
            self._screen.say(action.text)
            return None
        if isinstance(action, ShowFailure):
            self.stacks = {task: self._screen.last_lines(task) for task in action.stacks}
            self._screen.show_failure(action.task, action.cause)
        return self._processes.perform(action)
