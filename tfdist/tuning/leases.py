"""Which runner may run which trial, and until when: pure, with moments handed in.

A lease is a trial and a number, that of the trial's start in the journal, so that a start has one
lease and no later one has it too. While a runner is connected its leases hold: it beats, or the
connection ends. When that has ended they hold for `LEASE_S` from its last word, in which it may
come back. A runner that has lost a lease learns so when it presents it, and what it reports under
it does not count. It ends its trial by itself sooner than its lease can end
(`tfdist.tuning.guard`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LEASE_S = 10.0
"""From the last word of a runner; a trial is given to another within 15 s."""


@dataclass(kw_only=True, slots=True)
class _Lease:
    number: int
    runner: int
    ends_s: float


class Leases:
    """The leases that a chief has granted, or found in its journal."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    def grant(self, trial: str, number: int, *, runner: int, until_s: float = math.inf) -> None:
        """Lets a runner run a trial; until then if it does not come, else while it is there."""
        self._leases[trial] = _Lease(number=number, runner=runner, ends_s=until_s)

    def is_current(self, trial: str, number: int, *, runner: int) -> bool:
        """Returns whether a runner has this lease, and may report under it."""
        lease = self._leases.get(trial)
        return lease is not None and (lease.number, lease.runner) == (number, runner)

    def of(self, runner: int) -> dict[str, int]:
        """Returns the trials that a runner may run, and the numbers of the leases."""
        return {t: lease.number for t, lease in self._leases.items() if lease.runner == runner}

    def connected(self, runner: int) -> None:
        """A runner is there, and will say what it holds: until then it may hold all that it had."""
        for trial in self.of(runner):
            self._leases[trial].ends_s = math.inf

    def gone(self, runner: int, *, heard_s: float) -> None:
        """The connection to a runner has ended; it has been heard last at `heard_s`."""
        for lease in self._leases.values():
            if lease.runner == runner:
                lease.ends_s = heard_s + LEASE_S

    def back(self, runner: int, holds: Iterable[tuple[str, int]]) -> list[str]:
        """A runner is there and presents leases: those hold; returns the trials it has let go."""
        presented = set(holds)
        let_go = [pair for pair in self.of(runner).items() if pair not in presented]
        self.connected(runner)
        for trial, _ in let_go:
            self.end(trial)
        return [trial for trial, _ in let_go]

    def end(self, trial: str) -> None:
        """Ends the lease of a trial, if there is one."""
        self._leases.pop(trial, None)

    def take_over(self, now_s: float) -> list[str]:
        """Ends the leases whose time is up, and returns their trials."""
        trials = [trial for trial, lease in self._leases.items() if lease.ends_s <= now_s]
        for trial in trials:
            self.end(trial)
        return trials
