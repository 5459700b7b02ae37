"""Range test of learning rates: the rates to try, and what their losses suggest.

After Smith, "Cyclical learning rates for training neural networks" (2017,
https://arxiv.org/abs/1506.01186), section 3.3, with rates that grow exponentially, a smoothed loss,
and an end where that diverges.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

from tfdist.outputs.plot import empty_panels

DIVISOR = 10.0
"""What the rate of the lowest loss is divided by: there the loss is about to rise again."""
_LEFT_OUT = 10
"""One of so many points at the beginning tells nothing: the smoothed loss has few behind it."""


def exponential_rates(lowest: float, highest: float, *, steps: int) -> list[float]:
    """Return so many rates from `lowest` to `highest`, each by the same factor above the last."""
    factor = math.log(highest / lowest) / (steps - 1)
    return [lowest * math.exp(factor * step) for step in range(steps)]


def smoothed(losses: Sequence[float], *, smoothing: float) -> list[float]:
    """Return the exponential moving average of losses, corrected for how few there are."""
    mean, result = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = smoothing * mean + (1 - smoothing) * loss
        result.append(mean / (1 - smoothing**number))
    return result


def has_diverged(losses: Sequence[float], *, smoothing: float, diverges_at: float) -> bool:
    """Return whether the last loss is not finite, or the smoothed one far above its lowest.

    That is, by more than `diverges_at - 1` times the size of the lowest, which may be negative.
    """
    if not losses:
        return False
    if not math.isfinite(losses[-1]):
        return True
    curve = smoothed(losses, smoothing=smoothing)
    return curve[-1] - min(curve) > (diverges_at - 1) * abs(min(curve))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LearningRates:
    """Learning rates that were tried, and the losses of their steps.

    Attributes:
      rates: one for each step, growing; a step that diverged is the last.
      losses: of each step's batch, before its update.
      smoothed: moving average of `losses`.
      steepest: the rate at which the smoothed loss falls fastest against the logarithm of the rate;
        None where it never falls.
      lowest: the rate of the lowest smoothed loss.
      diverged: whether the test ended because the loss diverged.
      suggestion: the smaller one of `steepest` and a tenth of `lowest`; None where the loss never
        falls.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float | None
    lowest: float
    diverged: bool

    @property
    def suggestion(self) -> float | None:
        return None if self.steepest is None else min(self.steepest, self.lowest / DIVISOR)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw losses over rates into a PNG or PDF; return its path.

        Raises UsageError where matplotlib is not installed.
        """
        figure, (axes,) = empty_panels("LearningRates.plot")
        many = len(self.smoothed)
        axes.plot(self.rates[:many], self.losses[:many], color="#9bb8d8", lw=0.8, label="step")
        axes.plot(self.rates[:many], self.smoothed, color="#1f5fa8", label="smoothed")
        if self.suggestion is not None:
            label = f"suggestion {self.suggestion:.3g}"
            axes.axvline(self.suggestion, color="#d1661a", ls="--", label=label)
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(path)
        return Path(path)

    def __str__(self) -> str:
        tried = f"{len(self.rates)} steps from {self.rates[0]:.3g} to {self.rates[-1]:.3g}"
        if self.suggestion is None:
            return f"no suggestion: the loss never fell in {tried}"
        return (
            f"learning rate {self.suggestion:.3g} (the loss falls fastest at {self.steepest:.3g}, "
            f"is lowest at {self.lowest:.3g}; {tried})"
        )


def read(rates: Sequence[float], losses: Sequence[float], *, smoothing: float) -> LearningRates:
    """Return what the losses of a test say; `losses` may be fewer, and the last not finite."""
    diverged = len(losses) < len(rates) or not math.isfinite(losses[-1])
    finite = [loss for loss in losses if math.isfinite(loss)]
    curve = smoothed(finite, smoothing=smoothing)
    used = list(rates[: len(losses)])
    lowest = min(range(len(curve)), key=curve.__getitem__, default=0)
    steepest = _steepest(curve, last=lowest)
    return LearningRates(
        rates=tuple(used),
        losses=tuple(losses),
        smoothed=tuple(curve),
        steepest=None if steepest is None else used[steepest],
        lowest=used[lowest],
        diverged=diverged,
    )


def _steepest(curve: Sequence[float], *, last: int) -> int | None:
    """Return where the curve falls fastest up to its lowest point, None where it never falls."""
    first = max(1, len(curve) // _LEFT_OUT)
    slopes = {i: curve[i + 1] - curve[i - 1] for i in range(first, min(last, len(curve) - 2) + 1)}
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    return steepest if steepest is not None and slopes[steepest] < 0 else None
