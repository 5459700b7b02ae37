"""Engine interface, as the training loop uses it, and its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf

from tfdist.errors import PeerLost
from tfdist.strategy import current_job
from tfdist.training.program import StepProgram


class Engine(Protocol):
    """Runs ranges of steps of a program. Every training task calls it alike."""

    def run(
        self, program: StepProgram, first: int, last: int, *, goes_on: bool = False
    ) -> dict[str, float]:
        """Run the steps ``[first, last)``; return the last step's logs if the program keeps them.

        Returns once every step is done, or where the next range `goes_on` from here before anybody
        looks, maybe with some steps under way.
        """

    def finish(self, program: StepProgram) -> dict[str, float]:
        """Wait for what `run` has left under way; return the last step's logs, as `run` does."""

    def close(self) -> None:
        """Forget what `run` has dispatched and nobody has begun; wait until the rest has ended.

        Where a training ends with an error: nothing changes the model after it.
        """

    @property
    def steps_under_way(self) -> int:
        """How many steps `run` has left under way."""

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yield each step's outputs as a nest of arrays ``[examples of the step, ...]``.

        Every task yields the whole of it, in the order of the examples.
        """

    def reset_metrics(self) -> None:
        """Set to zero what the engine itself keeps of the metrics."""

    def publish_metrics(self, program: StepProgram) -> None:
        """Put what the engine itself keeps of the metrics into `program.metrics`."""

    def take_metrics(self, program: StepProgram) -> None:
        """Take over what was restored into `program.metrics`, to go on from there."""


@contextlib.contextmanager
def naming_a_lost_server() -> Iterator[None]:
    """Raise PeerLost with the name of a ps that is gone, where TensorFlow says what failed.

    So it is when a model is built, a learning rate or a metric is read, and a checkpoint is made.
    Around a block, or a function as its decorator.
    """
    try:
        yield
    except tf.errors.OpError as error:
        job = current_job()
        if job is None or job.kind != "ps":
            raise
        from tfdist.ps.members import Members
        from tfdist.ps.workers import is_of_the_network

        if not is_of_the_network(error):
            raise
        gone = Members.of(job.strategy).missing()
        if not gone:
            raise
        raise PeerLost(f"{gone[0]} does not answer any more") from error
