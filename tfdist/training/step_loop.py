"""`StepLoop`: a step function of the user's own, under every strategy; the engine without `fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import require, require_int
from tfdist.strategy import broadcast, current_job, job_of
from tfdist.training import building, inputs
from tfdist.training.blocks import naming_bad_data
from tfdist.training.engines import engine_for, naming_a_lost_server
from tfdist.training.inputs import Length
from tfdist.training.program import StepProgram, as_number, flat_logs, plain

_ENDLESS_STEPS = 2**40


class StepLoop:
    """Runs a step function over data, many steps in one compiled call, under every strategy.

    For what `fit` does not know: several models, several optimizers. The step function is called
    with one replica's batch, in replica context; it computes losses with `keras.losses` (or by
    hand: a gradient of a loss that nobody scaled is weighted at the gradient hook), applies
    gradients with Keras optimizers, and returns a dict of scalars. Models and optimizers are made
    and built (``optimizer.build(model.trainable_variables)``) inside ``strategy.scope()``.

    Args:
      step: the step function.
      data: what `tfdist.fit` takes as ``x``, or a tuple ``(x, y)`` of arrays.
      global_batch_size: examples of a step over all replicas; under ps, of one worker's step.
      seed: of the order of the examples and of random layers; the chief draws one if None.
      metrics: Keras metrics that the step updates; `results` reads them.
      first_step: where to go on.
      max_staleness: as in `tfdist.fit`.
      sharded_optimizers: optimizers that are not built, each with its variables. They are built
        here, under multiworker as `sharded_optimizer` of `tfdist.fit` does it.

    Every training task makes one with the same arguments and calls it equally often.
    """

    @naming_a_lost_server()
    def __init__(
        self,
        step: Callable[[Any], Mapping[str, Any]],
        data: Any,
        *,
        global_batch_size: int | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        metrics: Sequence[keras.metrics.Metric] = (),
        first_step: int = 0,
        max_staleness: int | None = None,
        sharded_optimizers: Sequence[tuple[keras.optimizers.Optimizer, Sequence[Any]]] = (),
    ) -> None:
        building.require_compiled_functions(doing="StepLoop")
        require_int("first_step", first_step, least=0)
        if seed is not None:
            seed = require_int("seed", seed, least=0)
        if max_staleness is not None:
            require_int("max_staleness", max_staleness, least=0)
        self._job = current_job() or job_of(tf.distribute.get_strategy())
        require(
            self._job.kind != "pipeline",
            "StepLoop",
            received="a step function under strategy pipeline",
            expected="a model and Keras' own step, which stages compute",
            fix="call tfdist.fit, or use another strategy",
            code="own-step",
        )
        self._metrics = list(metrics)
        for optimizer, variables in sharded_optimizers:
            building.build_in_parts(optimizer, variables, self._job)
        seed = int(broadcast(int(np.random.randint(2**31)) if seed is None else seed))
        length = Length(batch_size=global_batch_size, steps_per_epoch=_ENDLESS_STEPS)
        x, y = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        feed = inputs.prepare(x, y, None, job=self._job, length=length, shuffle=shuffle, seed=seed)
        self._engine = engine_for(self._job)
        self._program = StepProgram(
            function=plain(step, self._job, where="StepLoop"),
            feed=feed,
            seed=seed,
            training=True,
            keras_metrics=tuple(metrics),
            keep_logs=True,
            max_staleness=max_staleness,
        )
        self.step = first_step

    @naming_a_lost_server()
    def run(self, steps: int) -> dict[str, Any]:
        """Run the next `steps` steps; return what the last one returned, over all replicas.

        Scalars come as floats, other tensors as arrays.
        """
        require_int("steps", steps, least=1)
        with naming_bad_data(self._program.feed):
            logs = self._engine.run(self._program, self.step, self.step + steps)
        self.step += steps
        return logs

    @naming_a_lost_server()
    def results(self, *, reset: bool = True) -> dict[str, Any]:
        """Return each metric over all replicas, and set it to zero. A collective.

        Scalars come as floats, other results as arrays; of a metric whose result is a dict, each of
        its parts by its own name.
        """
        self._engine.publish_metrics(self._program)
        results = flat_logs({metric.name: metric.result() for metric in self._metrics})
        found = {name: as_number(tf.convert_to_tensor(result)) for name, result in results.items()}
        if reset:
            self._engine.reset_metrics()
            for metric in self._metrics:
                metric.reset_state()
        return found
