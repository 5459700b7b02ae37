"""`find_learning_rate`: a range test under every strategy that leaves the model unchanged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import numpy as np

from tfdist import phases
from tfdist.checkpoint import model_state
from tfdist.errors import PeerLost, Stopped, require, require_int, require_number
from tfdist.renamed import instead_of
from tfdist.strategy import Job
from tfdist.training import building, inputs
from tfdist.training.blocks import BlockRunner, Decision, decide
from tfdist.training.engines import naming_a_lost_server
from tfdist.training.inputs import Length
from tfdist.training.program import engine_class, program_of
from tfdist.training.stop_requests import StopRequests

_LOG = logging.getLogger(__name__)


@naming_a_lost_server()
def find_learning_rate(  # noqa: D417, PLR0913
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int = 32,
    *,
    sample_weight: Any = None,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
    smoothing: float = 0.9,
    diverges_at: float = 4.0,
    seed: int = 0,
) -> LearningRates:
    """Run a learning rate range test: return rates, losses and a suggested learning rate.

    The rate grows with each step, as in Smith (2017, https://arxiv.org/abs/1506.01186). Afterwards
    weights, optimizer, learning rate and metrics are restored bit by bit, also after an error or a
    signal. A collective: every training task makes the same call and gets the same `LearningRates`
    (under ps only the chief runs).

    Args:
      x, y, batch_size, sample_weight: Data as in `tfdist.fit`. `batch_size` is the global batch.
      lowest, highest: First and last rate (default: 1e-7 and 10).
      steps: Number of rates to try, each for one batch (default: 100).
      smoothing: Weight of the previous mean in the smoothed loss, from 0 to below 1 (default: 0.9).
      diverges_at: Multiple of the lowest smoothed loss that ends the test (default: 4).
      seed: Seed of the order of the examples and of random layers (default: 0).

    Raises:
      UsageError: The model is of another scope, its optimizer has several learning rates, or the
        strategy cannot use the data.
      Stopped: A task received a signal that requests a stop.
    """
    job = building.job_for(model, doing="find_learning_rate")
    building.require_compiled(model, doing="find_learning_rate")
    lowest = require_number("lowest", lowest, above=0, fix="pass the first rate, such as 1e-7")
    require_number("highest", highest, above=lowest, fix="pass a rate above lowest, such as 10.0")
    require_int("steps", steps, least=10)
    require_number("diverges_at", diverges_at, above=1)
    require_number("smoothing", smoothing, least=0)
    require(
        smoothing < 1,
        "smoothing",
        f"{smoothing} is not below 1",
        fix="pass the weight of the previous mean, such as 0.9",
        code="not-a-number",
    )
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    require(
        not getattr(optimizer, "optimizers", ()),
        "find_learning_rate",
        f"the optimizer {type(optimizer).__name__} does not have a single learning rate",
        fix="compile the model with the optimizer to tune",
        code="unsupported-optimizer",
    )
    seed = require_int("seed", seed, least=0)
    length = Length(batch_size=batch_size, steps_per_epoch=steps)
    feed = inputs.prepare(
        x, y, sample_weight, job=job, length=length, shuffle=True, seed=seed, model=model
    )
    building.build(model, job, feed)
    rates: list[float] = np.geomspace(lowest, highest, steps).tolist()
    engine = engine_class(job)(job)
    program = program_of(model, job, "train_step", feed, seed=seed)
    with (
        StopRequests() as requests,
        contextlib.closing(feed),
        _unchanged(model, job, publish=functools.partial(engine.publish_state, program)),
        contextlib.closing(engine),
        _settable_rate(model, job),
    ):
        blocks = BlockRunner(model, job, engine, program, phase="step")
        losses = _losses(
            blocks, rates, requests=requests, smoothing=smoothing, diverges_at=diverges_at
        )
    found = read(rates, losses, smoothing=smoothing)
    if job.is_chief:
        _LOG.info("%s", found)
    return found


def _losses(
    blocks: BlockRunner,
    rates: Sequence[float],
    *,
    requests: StopRequests,
    smoothing: float,
    diverges_at: float,
) -> list[float]:
    """Return the loss of each step, up to the first that diverges. A collective."""
    losses: list[float] = []
    for step, rate in enumerate(rates):
        diverged = has_diverged(losses, smoothing=smoothing, diverges_at=diverges_at)
        mine: dict[str, Any] = {"last": step + 1, "stop": diverged, "learning_rate": rate}
        of = "the next step of a range test"
        decision = decide(blocks.job, functools.partial(Decision, **mine), requests=requests, of=of)
        if decision.signum is not None:
            name = signal.Signals(decision.signum).name
            raise Stopped(decision.signum, f"stopped by {name}; the model is restored")
        if decision.stop:
            break
        blocks.learning_rate = decision.learning_rate
        blocks.reset_metrics()
        blocks.run(step, step + 1, looked_at=True)
        losses.append(float(blocks.metrics(blocks.logs)["loss"]))
    return losses


@contextlib.contextmanager
def _unchanged(model: keras.Model, job: Job, *, publish: Callable[[], None]) -> Iterator[None]:
    """Restore all variables of weights, optimizer and metrics after the block. A collective.

    `publish` copies state that the engine keeps elsewhere, as pipelines do, to the variables.
    """
    publish()
    before = model_state.capture(model, job)
    is_lost = False
    try:
        yield
    except PeerLost:  # the lost task cannot take part in the restore
        is_lost = True
        raise
    finally:
        phases.enter("save")
        if not is_lost:
            publish()
            model_state.restore(model, job, before if job.is_chief else None)
        phases.enter("done")


@contextlib.contextmanager
def _settable_rate(model: keras.Model, job: Job) -> Iterator[None]:
    """Replace a schedule or a function by a variable learning rate during the block."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    before = optimizer._learning_rate
    if isinstance(before, keras.Variable):
        yield
        return
    with job.strategy.scope():
        variable = keras.Variable(
            0.0, trainable=False, aggregation="only_first_replica", name="learning_rate"
        )
    optimizer._learning_rate = variable
    try:
        yield
    finally:
        optimizer._learning_rate = before
        optimizer._untrack_variable(variable)  # tracked attributes are part of its state


# Suggestions from the losses of a range test: section 3.3 of Smith, but with rates that grow
# exponentially, a smoothed loss, and an end of the test if the loss diverges.

_DIVISOR = 10.0  # of the rate with the lowest loss, which is close to divergence
_LEFT_OUT = 10  # skip a tenth of the points: the first are smoothed over few losses


def smoothed(losses: Sequence[float], *, smoothing: float) -> list[float]:
    """Return the exponential moving average of losses, corrected for bias."""
    mean, result = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = smoothing * mean + (1 - smoothing) * loss
        result.append(mean / (1 - smoothing**number))
    return result


def has_diverged(losses: Sequence[float], *, smoothing: float, diverges_at: float) -> bool:
    """Return whether the last loss is not finite or the smoothed loss is far above its minimum.

    "Far" is `diverges_at - 1` times the absolute value of the minimum, which may be negative.
    """
    if not losses:
        return False
    if not math.isfinite(losses[-1]):
        return True
    curve = smoothed(losses, smoothing=smoothing)
    return curve[-1] - min(curve) > (diverges_at - 1) * abs(min(curve))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LearningRates:
    """Learning rates of a range test, and the losses of their steps.

    Attributes:
      rates: Rate of each step, growing. A step that diverged is the last.
      losses: Loss of each step's batch before the update.
      smoothed: Moving average of `losses`.
      steepest: Rate with the fastest fall of the smoothed loss against the logarithm of the rate,
        `None` if the loss never falls.
      lowest: Rate with the lowest smoothed loss.
      diverged: Whether the test ended because the loss diverged.
      suggestion: Minimum of `steepest` and a tenth of `lowest`, `None` if the loss never falls.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float | None
    lowest: float
    diverged: bool

    @property
    def suggestion(self) -> float | None:
        return None if self.steepest is None else min(self.steepest, self.lowest / _DIVISOR)

    @property
    def plot(self) -> NoReturn:
        raise AttributeError(f"plot was removed. Fix: {instead_of('LearningRates.plot')}")

    def __str__(self) -> str:
        tried = f"{len(self.rates)} steps from {self.rates[0]:.3g} to {self.rates[-1]:.3g}"
        if self.suggestion is None:
            last = self.losses[-1]
            problem = "never fell" if math.isfinite(last) else f"became {last}"
            return f"no suggestion: the loss {problem} in {tried}"
        return (
            f"learning rate {self.suggestion:.3g} (the loss falls fastest at {self.steepest:.3g}, "
            f"is lowest at {self.lowest:.3g}; {tried})"
        )


def read(rates: Sequence[float], losses: Sequence[float], *, smoothing: float) -> LearningRates:
    """Return the result of a test. `losses` may be shorter than `rates`, the last not finite."""
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
    """Return the index of the steepest fall before the lowest point, `None` if there is no fall."""
    first = max(1, len(curve) // _LEFT_OUT)
    slopes = {i: curve[i + 1] - curve[i - 1] for i in range(first, min(last, len(curve) - 2) + 1)}
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    return steepest if steepest is not None and slopes[steepest] < 0 else None
