"""A ps that dies while the chief itself reads it or writes to it, and no worker is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist.errors import PeerLost
from tfdist.strategy import current_job
from tfdist.strategy.members import Members
from tfdist.training.engines.piece import is_of_the_network


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
        if job is None or job.kind != "ps" or not is_of_the_network(error):
            raise
        gone = Members.of(job.strategy).missing()
        if not gone:
            raise
        raise PeerLost(f"{gone[0]} does not answer any more") from error
