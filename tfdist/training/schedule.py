"""The learning rate as a function of the step: a rise, then constant, a cosine, or a line."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="tfdist")
class WarmupThenDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Rises from 0 to `peak` over `warmup_steps`, then goes to 0 at `total_steps`, or stays.

    Args:
      peak: the highest learning rate.
      kind: ``constant``, ``cosine`` (Loshchilov and Hutter, "SGDR", 2016) or ``linear``.
      warmup_steps: steps of the rise; 0 begins at `peak`.
      total_steps: where ``cosine`` and ``linear`` reach 0.
    """

    def __init__(self, peak: float, *, kind: str, warmup_steps: int, total_steps: int) -> None:
        self.peak = peak
        self.kind = kind
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of the update that begins at `step`, float32."""
        step = ops.cast(step, "float32")
        decay_steps = max(self.total_steps - self.warmup_steps, 1)
        done = ops.clip((step - self.warmup_steps) / decay_steps, 0.0, 1.0)
        rate = ops.cast(self.peak, "float32")
        if self.kind == "cosine":
            rate = rate * 0.5 * (1.0 + ops.cos(math.pi * done))
        elif self.kind == "linear":
            rate = rate * (1.0 - done)
        if not self.warmup_steps:
            return rate
        # The first update is not of size 0: step 0 takes the first of `warmup_steps` parts.
        return rate * ops.minimum((step + 1.0) / self.warmup_steps, 1.0)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for saving."""
        return {
            "peak": self.peak,
            "kind": self.kind,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.total_steps,
        }


@keras.saving.register_keras_serializable(package="tfdist")
class InExamples(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that is asked by examples consumed, whatever the batch size.

    ``InExamples(CosineDecay(0.1, decay_steps=1_000_000), global_batch_size=256)`` reaches its end
    after a million examples.

    Args:
      schedule: asked with the number of examples consumed before the step.
      global_batch_size: examples of a step; a step that an epoch's end cuts counts as a whole one.
    """

    def __init__(
        self,
        schedule: keras.optimizers.schedules.LearningRateSchedule | dict[str, Any],
        *,
        global_batch_size: int,
    ) -> None:
        if isinstance(schedule, dict):
            schedule = keras.saving.deserialize_keras_object(schedule)
        self.schedule = schedule
        self.global_batch_size = global_batch_size

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of the update that begins at `step`."""
        return self.schedule(ops.cast(step, "float32") * float(self.global_batch_size))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for saving."""
        return {
            "schedule": keras.saving.serialize_keras_object(self.schedule),
            "global_batch_size": self.global_batch_size,
        }
