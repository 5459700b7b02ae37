"""What the loop asks of an engine, and what an engine may be lost by."""

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
        """Runs the steps ``[first, last)``; returns the last step's logs if the program keeps them.

        Returns once every step is done, or where the next range `goes_on` from here before anybody
        looks, maybe with some steps under way.
        """

    def finish(self, program: StepProgram) -> dict[str, float]:
        """Waits for what `run` has left under way; returns the last step's logs, as `run` does."""

    def let_go(self) -> None:
        """Forgets what `run` has handed out and nobody has begun; waits until the rest has ended.

        Where a training ends with an error: nothing changes the model after it.
        """

    @property
    def steps_under_way(self) -> int:
        """How many steps `run` has left under way."""

    def outputs(self, program: StepProgram, first: int, last: int) -> Iterator[Any]:
        """Yields each step's outputs as a nest of arrays ``[examples of the step, ...]``.

        Every task yields the whole of it, in the order of the examples.
        """

    def reset_metrics(self) -> None:
        """Sets to zero what the engine itself keeps of the metrics."""

    def settle_metrics(self, program: StepProgram) -> None:
        """Puts what the engine itself keeps of the metrics into `program.metrics`."""

    def take_metrics(self, program: StepProgram) -> None:
        """Takes over what was restored into `program.metrics`, to go on from there."""


@contextlib.contextmanager
def naming_a_lost_server() -> Iterator[None]:
    """Raises PeerLost with the name of a ps that is gone, where TensorFlow says what failed.

    So it is when a model is built, a learning rate or a metric is read, and a checkpoint is made.
    Around a block, or a function as its decorator.
    """
    try:
        yield
    except tf.errors.OpError as error:
        job = current_job()
        if job is None or job.kind != "ps":
            raise
        from tfdist.ps.closure import is_of_the_network
        from tfdist.ps.members import Members

        if not is_of_the_network(error):
            raise
        gone = Members.of(job.strategy).missing()
        if not gone:
            raise
        raise PeerLost(f"{gone[0]} does not answer any more") from error
