"""Membership of an elastic job: which tasks compute together, decided by the launcher.

The launcher knows the members, not their training. Each change of the members makes a new view. All
members leave the old view and answer with their number of finished operations. When all have
answered, the launcher lets them go on, with new sockets between them. Each operation, such as a sum
of gradients, needs a part from every member. So the numbers of the members differ by at most 1. A
member that is behind gets the last operation's result from another member.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

MOST_BREAKS = 10
"""Views after broken connections in which no operation finishes, before a member is killed."""


@dataclass(frozen=True, slots=True)
class View:
    """Tell the members to leave the old view and to answer."""

    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Go:
    """Connect the members and let them go on.

    Attributes:
      epoch: Number of the view.
      members: Members of the view.
      done: Highest number of finished operations of a member.
      source: Member that sends the last result to the members behind.
      behind: Members that lack the last result.
      joining: Members that lack the state.
    """

    epoch: int
    members: tuple[int, ...]
    done: int
    source: int
    behind: tuple[int, ...]
    joining: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Welcome:
    """Connect a joining task to a member that knows the program's earlier results."""

    joining: int
    teacher: int


@dataclass(frozen=True, slots=True)
class Knock:
    """Tell the first member that a task waits to join."""

    joining: int
    first: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Kill a member that cannot go on with the others."""

    member: int
    reason: str


Step = View | Go | Welcome | Knock | Fence


@dataclass(kw_only=True, slots=True)
class Membership:
    """State of the members. Each method takes an event and returns the next steps.

    Attributes:
      expected: Number of members before the first view.
      epoch: Number of the last view, 0 before the first.
      members: Members of the last view. The first has been a member for the longest time.
    """

    expected: int
    epoch: int = 0
    members: tuple[int, ...] = ()
    _present: set[int] = field(default_factory=set)
    _acks: dict[int, int] = field(default_factory=dict)
    _with_state: set[int] = field(default_factory=set)
    _waiting: set[int] = field(default_factory=set)
    _teachers: dict[int, int] = field(default_factory=dict)
    _done: int = 0
    _breaks: int = 0

    def ready(self, member: int) -> list[Step]:
        """A member has started."""
        self._present.add(member)
        self._waiting.discard(member)
        if self.epoch:
            return [self._welcome(member)]
        return self._view(self._present) if len(self._present) >= self.expected else []

    def knocked(self, member: int) -> list[Step]:
        """A task that joins is ready to take the state."""
        self._waiting.add(member)
        self._teachers.pop(member, None)
        return [Knock(member, self.members[0])]

    def admitted(self, joining: int, epoch: int) -> list[Step]:
        """The members of a view let a task join, and wait for the next view."""
        if epoch != self.epoch:
            return []
        return self._view({*self.members, *({joining} & self._waiting)} & self._present)

    def broken(self, member: int, epoch: int) -> list[Step]:
        """A member has lost its connection to another member, which may still run."""
        if epoch != self.epoch or member not in self.members:
            return []
        self._breaks += 1
        if self._breaks <= MOST_BREAKS:
            return self._view(self.members)
        self._breaks = 0
        return [Fence(member, f"{MOST_BREAKS + 1} broken connections since the last operation")]

    def lost(self, member: int) -> list[Step]:
        """A member's process has exited."""
        self._present.discard(member)
        self._waiting.discard(member)
        self._teachers.pop(member, None)
        if member not in self.members:
            return []
        left = [other for other in self.members if other in self._present]
        if not left:
            return []
        view = self._view(left)
        pupils = [pupil for pupil, teacher in self._teachers.items() if teacher == member]
        return [*view, *map(self._welcome, pupils)]

    def acked(self, member: int, epoch: int, done: int, *, has_state: bool = False) -> list[Step]:
        """A member has left the old view, with this number of finished operations.

        `has_state` says whether it can send the state to the tasks that join.
        """
        if epoch != self.epoch or member not in self.members:
            return []
        self._acks[member] = done
        if has_state:
            self._with_state.add(member)
        if len(self._acks) < len(self.members):
            return []
        most = max(self._acks.values())
        if most > self._done:
            self._done, self._breaks = most, 0
        if most < 0:
            return [Fence(member, "no worker has the state of the job") for member in self.members]
        joining = tuple(other for other in self.members if self._acks[other] < 0)
        late = [m for m in self.members if 0 <= self._acks[m] < most - 1]
        if late:
            return [Fence(other, "lacks more than one result of the others") for other in late]
        ahead = [m for m in self.members if self._acks[m] == most]
        if joining and self._with_state.isdisjoint(ahead):  # the old members decide again
            self._waiting.update(joining)  # they may have left it at a view whose source is lost
            return self._view(set(self.members).difference(joining))
        ahead = [m for m in ahead if m in self._with_state or not joining]
        behind = tuple(m for m in self.members if 0 <= self._acks[m] < most)
        self._waiting.difference_update(self.members)
        knocks = [Knock(other, self.members[0]) for other in sorted(self._waiting)]
        return [Go(self.epoch, self.members, most, ahead[0], behind, joining), *knocks]

    def _welcome(self, joining: int) -> Welcome:
        self._teachers[joining] = self.members[0]
        return Welcome(joining, self.members[0])

    def _view(self, members: Collection[int]) -> list[Step]:
        self.epoch += 1
        old = [member for member in self.members if member in members]
        self.members = (*old, *sorted(set(members).difference(old)))
        self._acks = {}
        self._with_state.clear()
        return [View(self.epoch, self.members)]
