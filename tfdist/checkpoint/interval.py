"""Checkpoint interval from what a save costs and how often the run fails.

Too many saves cost time, too few lose work. With `save_s` of blocking time for a save and a mean
time between failures of `mtbf_s` the best time of training between two saves is, to first order,
``sqrt(2 save_s mtbf_s)`` (Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17 (9), 1974), and to a higher order what `daly` returns (Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22 (3), 2006). Both take failures for independent, at a constant rate.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

MOST_COST = 0.01
"""The largest part of the time that saving may cost."""
FIRST_S = 60.0
"""Until the first save, when nothing is known of its cost."""
DEFAULT_MTBF_S = 86_400.0
"""Of a run that has not failed yet and is younger."""
_NEWEST = 0.5


def young(save_s: float, mtbf_s: float) -> float:
    """Return Young's interval, in seconds of training between two saves."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, in seconds of training between two saves."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    return young(save_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Time of training between two saves, and what follows from it.

    Attributes:
      interval_s: from the end of a save to the next.
      save_s: for how long a save blocks the training.
      mtbf_s: mean time between failures.
    """

    interval_s: float
    save_s: float
    mtbf_s: float

    @property
    def lost_s(self) -> float:
        """Expected work that a failure loses: half an interval, and the save that ends it."""
        return self.interval_s / 2 + self.save_s

    @property
    def cost(self) -> float:
        """Part of the time that saving takes."""
        return self.save_s / (self.interval_s + self.save_s)

    def __str__(self) -> str:
        return (
            f"a save every {_shown(self.interval_s)} (one blocks for {_shown(self.save_s)}, mean "
            f"time between failures {_shown(self.mtbf_s)}): saving takes {self.cost:.2%} of the "
            f"time, a failure loses {_shown(self.lost_s)} of work"
        )


def _shown(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def choose(save_s: float, mtbf_s: float) -> Interval:
    """Return Daly's interval, or the shortest at which saving costs `MOST_COST` if that is longer.

    Args:
      save_s: for how long a save blocks the training, not negative.
      mtbf_s: mean time between failures, positive.
    """
    least_s = save_s * (1 / MOST_COST - 1)
    chosen_s = max(daly(save_s, mtbf_s), least_s)
    return Interval(interval_s=chosen_s, save_s=save_s, mtbf_s=mtbf_s)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveHistory:
    """What the attempts of a run before this one say of failures."""

    failures: int = 0
    ran_s: float = 0.0

    def mtbf_s(self, now_s: float) -> float:
        """Return the mean time between failures, `now_s` seconds after this attempt began.

        The time that the run took, by its failures; a run without any is taken to fail no more
        often than once in `DEFAULT_MTBF_S`.
        """
        whole_s = self.ran_s + now_s
        return max(whole_s / self.failures, 1e-3) if self.failures else max(whole_s, DEFAULT_MTBF_S)


def history_of(run_dir: str | Path | None) -> SaveHistory:
    """Return what the launcher's report in `run_dir` says; nothing where it cannot be read.

    An attempt that was stopped by a signal counts by its time, and not as a failure: it saved.
    """
    if run_dir is None:
        return SaveHistory()
    try:
        attempts = json.loads((Path(run_dir) / "report.json").read_text())["attempts"]
        read = [(_has_failed(attempt), _ran_s(attempt)) for attempt in attempts]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return SaveHistory()
    return SaveHistory(failures=sum(f for f, _ in read), ran_s=sum(s for _, s in read))


class AutoInterval:
    """Interval of one run, chosen anew after each save; of the chief.

    Attributes:
      interval_s: until the next save.
    """

    def __init__(self, *, mtbf_s: float | None = None) -> None:
        self.interval_s = FIRST_S
        self._given_mtbf_s = mtbf_s
        self._history = SaveHistory()
        self._began_s = 0.0
        self._save_s: float | None = None

    def begin(self, run_dir: str | Path | None, *, now_s: float) -> None:
        """Take in the run's attempts so far, at the beginning of this one."""
        self._history, self._began_s = history_of(run_dir), now_s

    def saved(self, *, blocked_s: float, now_s: float) -> Interval:
        """Take in what a save has cost; return what is chosen for the next."""
        before = blocked_s if self._save_s is None else self._save_s
        self._save_s = before + _NEWEST * (blocked_s - before)
        mtbf_s = self._given_mtbf_s or self._history.mtbf_s(now_s - self._began_s)
        chosen = choose(self._save_s, mtbf_s)
        self.interval_s = chosen.interval_s
        return chosen


def _has_failed(attempt: Mapping[str, Any]) -> bool:
    return attempt["first_failure"] is not None and attempt["exit_code"] not in (130, 143)


def _ran_s(attempt: Mapping[str, Any]) -> float:
    """Return the seconds from the first start of a task to the last end."""
    starts = [_time(task["started_at"]) for task in attempt["tasks"] if task["started_at"]]
    ends = [_time(task["ended_at"]) for task in attempt["tasks"] if task["ended_at"]]
    return max(0.0, max(ends) - min(starts)) if starts and ends else 0.0


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
