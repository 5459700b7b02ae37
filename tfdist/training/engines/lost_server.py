"""A ps that dies while the chief itself reads it or writes to it, and no worker is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist.errors import PeerLost
from tfdist.strategy import Job
from tfdist.strategy.members import Members
from tfdist.training.engines.piece import is_of_the_network


@contextlib.contextmanager
def naming_a_lost_server(job: Job) -> Iterator[None]:
    """Raises PeerLost with the name of a ps that is gone, where TensorFlow says what failed.

    So it is when a learning rate or a metric is read, and when a checkpoint is made.
    """
    try:
        yield
    except tf.errors.OpError as error:
        is_lost = job.kind == "ps" and is_of_the_network(error)
        gone = Members.of(job.strategy).missing() if is_lost else []
        if not gone:
            raise
        raise PeerLost(f"{gone[0]} does not answer any more") from error
