"""The tasks of all hosts as the supervisor on host 0 works with them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from tfdist.cluster import Task
from tfdist.errors import EXIT_PEER_MISSING
from tfdist.launch.events import Asked, Ended, Event, Started
from tfdist.launch.messages import NO_SENSE, heard, task_of
from tfdist.launch.plan import ProcessSpec
from tfdist.launch.processes import JobProcesses
from tfdist.launch.screen import JobScreen
from tfdist.launch.team import Team
from tfdist.rendezvous.hub import Differs, Heard, Lost
from tfdist.rendezvous.link import Message
from tfdist.rendezvous.terms import summary

_MAX_LINES, _MAX_LINE_CHARS = 20, 1000


class TeamProcesses:
    """The processes of one attempt on all hosts, for the supervisor."""

    def __init__(
        self,
        local: JobProcesses,
        team: Team,
        *,
        screen: JobScreen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._team = team
        self._screen = screen
        self._clock = clock
        self._news: list[Event] = []
        self._alive: dict[Task, int] = {}
        self._lost: dict[int, str] = {}
        self._states: dict[Task, str | None] = {}
        self._mute: set[Task] = set()
        self._askers: set[int] = set()
        local.watch(team.hub.fileno())

    def start(self, spec: ProcessSpec) -> None:
        """Starts a task on its host. Raises OSError if it cannot."""
        rank = self._team.host_of[spec.task]
        if not rank:
            self._local.start(spec)
            return
        self._alive[spec.task] = rank
        self._mute.discard(spec.task)
        self._send(spec.task, {"start": str(spec.task), "log": spec.log_path.name})
        if not self.can_start(spec.task):
            self._end(spec.task, self._lost.get(rank, "it is not there"))

    def signal(self, task: Task, signum: int) -> None:
        """Sends a signal to a task's whole process group."""
        if not self._team.host_of[task]:
            self._local.signal(task, signum)
        elif task in self._alive:
            self._send(task, {"signal": str(task), "number": int(signum)})

    def ask_for_stacks(self, task: Task) -> None:
        """Has a task print its Python stacks."""
        if not self._team.host_of[task]:
            self._local.ask_for_stacks(task)
        else:
            self._send(task, {"stacks": str(task)})

    def kill_alone(self, task: Task) -> None:
        """Ends one task, and what it has left behind, while the job goes on."""
        if not self._team.host_of[task]:
            self._local.kill_alone(task)
        else:
            self._send(task, {"kill_alone": str(task)})

    def can_start(self, task: Task) -> bool:
        """Returns whether the host of a task has been there all the time."""
        rank = self._team.host_of[task]
        return not rank or (rank in self._team.hub.present and rank not in self._lost)

    def state_of(self, task: Task) -> str | None:
        """Returns the state letter of a task's process, as its host last told it."""
        if not self._team.host_of[task]:
            return self._local.state_of(task)
        return self._states.get(task, "S")

    def can_speak(self, task: Task) -> bool:
        """Returns whether a task still has the pipe on which it tells what it does."""
        if not self._team.host_of[task]:
            return self._local.can_speak(task)
        return task not in self._mute

    def show_failure(self, task: Task, cause: str) -> None:
        """Has every host show what failed first."""
        for rank in self._team.hub.present:
            self._team.hub.send(rank, {"failed": str(task), "cause": cause})

    def wait(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns what has happened, after `timeout_s` at the latest."""
        self._turn()
        left_s = max(0.0, self._team.hub.next_s - self._clock())
        limit_s = left_s if timeout_s is None else min(left_s, timeout_s)
        events = [*self._local.wait(0.0 if self._news else limit_s)]
        self._turn()
        news, self._news = self._news, []
        return [*news, *(event for event in events if self._counts(event, rank=0))]

    def finish(self) -> None:
        """Ends what the tasks have left behind, on all hosts."""
        for rank in self._team.hub.present:
            self._team.hub.send(rank, {"finish": True})
        self._local.unwatch(self._team.hub.fileno())
        self._local.finish()

    def _send(self, task: Task, message: Message) -> None:
        self._team.hub.send(self._team.host_of[task], message)

    def _turn(self) -> None:
        self._team.hub.turn()
        for news in self._team.hub.take_news():
            match news:
                case Heard(rank=rank, message=message):
                    self._heard(rank, message)
                case Lost(rank=rank, cause=cause):
                    self._lost_host(rank, cause)
                case Differs(rank=rank, what=what):
                    self._screen.say(f"rank {rank} was sent away: {summary(what)}")

    def _lost_host(self, rank: int, cause: str) -> None:
        self._team.lost(rank)
        self._lost[rank] = cause
        for task in [task for task, host in self._alive.items() if host == rank]:
            self._end(task, cause)

    def _end(self, task: Task, why: str) -> None:
        """Has a task end with its host."""
        rank = self._alive.pop(task)
        cause = f"host {self._team.name(rank)} is gone: {why}"
        now_s = self._clock()
        self._news.append(Ended(task=task, status=EXIT_PEER_MISSING, at_s=now_s, cause=cause))

    def _heard(self, rank: int, message: Message) -> None:
        """Takes a message; what makes no sense is left out, as it has no meaning for the job."""
        try:
            if "event" in message:
                self._event(rank, message)
            elif "asked" in message:
                asked = Asked(signum=int(signal.Signals(message["asked"])))
                self._news += [asked] if self._counts(asked, rank=rank) else []
            elif "states" in message:
                self._watched(rank, message)
            elif "lines" in message:
                self._screen.told(task_of(message["task"]), _lines(message["lines"]))
            else:
                self._team.ready(rank, message)
        except NO_SENSE:
            return

    def _event(self, rank: int, message: Message) -> None:
        event = heard(message, now_s=self._clock())
        if self._alive.get(event.task) != rank:
            return
        if isinstance(event, Ended):
            del self._alive[event.task]
            self._screen.told(event.task, _lines(message["lines"]))
        if isinstance(event, Started):
            self._states[event.task] = "R"
        self._news.append(event)

    def _watched(self, rank: int, message: Message) -> None:
        for name, state in dict(message["states"]).items():
            if self._alive.get(task := task_of(name)) == rank:
                self._states[task] = None if state is None else str(state)
        self._mute |= {task_of(name) for name in message["mute"]}

    def _counts(self, event: Event, *, rank: int) -> bool:
        """Whether a request to stop counts: of those that several hosts get together, the first.

        A second one from the same host is meant to kill.
        """
        if not isinstance(event, Asked):
            return True
        is_new = rank not in self._askers
        is_first = not self._askers
        self._askers.add(rank)
        return is_first or not is_new


class TeamScreen:
    """The screen of host 0, of which the others show what failed first too."""

    def __init__(self, screen: JobScreen, processes: TeamProcesses) -> None:
        self._screen = screen
        self._processes = processes

    def say(self, text: str) -> None:
        """Shows lines of the launcher's own."""
        self._screen.say(text)

    def show_failure(self, task: Task, cause: str) -> None:
        """Shows what failed first, here and on the other hosts."""
        self._screen.show_failure(task, cause)
        self._processes.show_failure(task, cause)

    def last_lines(self, task: Task) -> tuple[str, ...]:
        """Returns the last lines of a task's output."""
        return self._screen.last_lines(task)


def _lines(lines: object) -> tuple[str, ...]:
    if not isinstance(lines, list):
        raise TypeError("no lines")
    return tuple(str(line)[:_MAX_LINE_CHARS] for line in lines[:_MAX_LINES])
