"""Selection of the best checkpoint by one metric, at an epoch's end or by an evaluator's lines."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import UsageError, require_one_of

_LOG = logging.getLogger(__name__)
_LESS = ("loss", "error")
_MORE = ("acc", "auc", "precision", "recall", "f1", "iou", "r2", "similarity")


class Best:
    """Follows one metric of the logs; says when it is better than it ever was.

    Args:
      name: of the metric, as in the logs; None follows nothing.
      mode: "min", "max", or "auto", which goes by the name.

    Attributes:
      improved: True between the end of an epoch that was the best so far and the next one's begin.

    Raises:
      UsageError: another mode, or "auto" with a name that does not tell.
    """

    def __init__(self, name: str | None, mode: str) -> None:
        self._name = name
        self._less = name is None or less_is_better(name, mode, where="BackupAndRestore: mode")
        self._value: float | None = None
        self._before: float | None = None
        self.improved = False
        self._warned = False

    def epoch_begins(self) -> None:
        """Forget the end of the epoch before."""
        self.improved = False

    def epoch_ends(self, logs: Mapping[str, Any]) -> None:
        """Look at an epoch's logs; raise UsageError where they can never have the metric."""
        if self._name is None or not self._is_in(logs):
            return
        value = float(logs[self._name])
        self.improved = is_better(value, self._value, less=self._less)
        if self.improved:
            self._before, self._value = self._value, value

    def not_saved(self) -> None:
        """Forget the epoch that has ended: no checkpoint is of it."""
        if self.improved:
            self.improved, self._value = False, self._before

    def get_state(self) -> dict[str, Any] | None:
        """Return what a resumed run needs to go on, as JSON."""
        return None if self._name is None else {"name": self._name, "value": self._value}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, unless that followed another metric."""
        if state.get("name") == self._name:
            self._value = state["value"]

    def _is_in(self, logs: Mapping[str, Any]) -> bool:
        name = self._name
        if name in logs:
            return True
        assert name is not None
        validated = any(key.startswith("val_") for key in logs)
        if validated or not name.startswith("val_"):
            fix = "name a metric that fit logs at an epoch's end"
            require_one_of("BackupAndRestore: best", name, logs, fix=fix)
        if not self._warned:
            _LOG.warning("an epoch without validation has no %s: it is not marked best", name)
            self._warned = True
        return False


def is_better(
    value: float | None, best: float | None, *, less: bool, min_delta: float = 0.0
) -> bool:
    """Return whether a metric beats the best so far by more than `min_delta`.

    None and what is not finite never do; the first value that is finite does.
    """
    if value is None or not math.isfinite(value):
        return False
    return best is None or (best - value if less else value - best) > min_delta


def less_is_better(name: str, mode: str, *, where: str) -> bool:
    """Return which way a metric gets better; UsageError at `where` where nothing tells."""
    less, more = name.endswith(_LESS), any(part in name for part in _MORE)
    if mode == "auto" and less != more:
        return less
    if mode in ("min", "max"):
        return mode == "min"
    raise UsageError(
        where,
        received=f"mode={mode!r} for {name!r}",
        expected='"min" or "max", or "auto" with a name that tells (val_loss, val_accuracy)',
        fix='say mode="min" where less of it is better, else mode="max"',
        code="unknown-direction",
    )


def best_so_far(
    lines: Sequence[Mapping[str, Any]], *, monitor: str, less: bool, min_delta: float = 0.0
) -> tuple[Mapping[str, Any] | None, int]:
    """Return an evaluator's best line, None where no metric was finite, and how many came after it.

    What is not better by more than `min_delta` is no better.

    Raises:
      UsageError: no line has the metric.
    """
    if lines and all(monitor not in line for line in lines):
        names = [name for name in lines[-1] if name.startswith("val_")]
        fix = "name a metric that the evaluation yields"
        require_one_of("Evaluator: monitor", monitor, names, fix=fix)
    best: Mapping[str, Any] | None = None
    since = 0
    for line in lines:
        before = best[monitor] if best else None
        if is_better(line.get(monitor), before, less=less, min_delta=min_delta):
            best, since = line, 0
        else:
            since += 1
    return best, since
