"""Wait for peers with a deadline, naming those that are missing; compare versions; watch the chief.

TensorFlow waits for ever for a task that never starts, and names nobody
(https://github.com/tensorflow/tensorflow/issues/46169). Under multiworker it does so with Python's
lock held, so that no thread of Python could tell: so the tasks wait for each other here first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

import tensorflow as tf

from tfdist.cluster import ClusterSpec, Task, TaskConfig
from tfdist.cluster.address import split_address
from tfdist.cluster.local_only import are_local, is_local, listen
from tfdist.errors import (
    EXIT_OK,
    EXIT_PEER_MISSING,
    EXIT_STOPPED,
    StartupTimeout,
    UsageError,
    named,
    require,
)

_LOG = logging.getLogger(__name__)

LATER_S = 10.0
"""How much longer a task waits inside TensorFlow than for its peers to answer. One that does not
reach this task gives up before, and names it with its address."""

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What begins a connection of HTTP/2, and so of gRPC: a server must answer it at once."""

_PROBE_EVERY_S = 1.0
_PROBE_ONE_EVERY_S = 0.02  # of a few
_LOG_EVERY_S = 10.0
_ANSWER_S = 0.5
_LOCAL_ANSWER_S = 0.05
"""Loopback answers at once, or drops the request while a server starts there (`local_only`)."""


def answers(address: str) -> bool:
    """Return True when something accepts connections at ``host:port``."""
    try:
        with _connection(address, timeout_s=_ANSWER_S):
            return True
    except OSError:
        return False


def _connection(address: str, *, timeout_s: float) -> socket.socket:
    most_s = _LOCAL_ANSWER_S if are_local([address]) else timeout_s
    return socket.create_connection(split_address(address), timeout=min(timeout_s, most_s))


def missing_peers(cluster: ClusterSpec, peers: Iterable[Task]) -> list[Task]:
    """Return the tasks of `peers` at whose address nothing answers now."""
    return [task for task in peers if not answers(cluster.address(task))]


def wait_for_answers(config: TaskConfig, tasks: Sequence[Task], *, timeout_s: float) -> list[Task]:
    """Return once something answers at the address of each task; after `timeout_s`, those missing.

    Logs now and then whom it waits for.
    """
    missing, start_s = list(tasks), time.monotonic()
    logged_s = start_s
    while missing := missing_peers(config.cluster, missing):
        now_s = time.monotonic()
        remaining_s = start_s + timeout_s - now_s
        if remaining_s <= 0:
            break
        if now_s - logged_s >= _LOG_EVERY_S:
            logged_s = now_s
            _LOG.warning("%s", waited_for(config, missing, now_s - start_s, timeout_s))
        # The fewer are missing the sooner: the last to come is what all wait for.
        time.sleep(min(_PROBE_ONE_EVERY_S * len(missing), _PROBE_EVERY_S, remaining_s))
    return missing


def at_addresses(cluster: ClusterSpec, tasks: Sequence[Task]) -> str:
    """Report the tasks with their addresses, not too many of them."""
    return named(f"{task} ({cluster.address(task)})" for task in tasks)


def await_peers(config: TaskConfig, *, timeout_s: float) -> None:
    """Return when every other training task has been seen at its address.

    Meanwhile this task answers at its own address, in place of the server that TensorFlow starts
    there afterwards. The chief, whose server is where all others register, is the first to go on:
    a client that comes before there is a server is refused, and gRPC tries again a second later.
    Every task of a multiworker job calls it.

    Raises:
      StartupTimeout: naming those that did not come within `timeout_s`, or the chief where its
        server has not come in `LATER_S` more.
      UsageError: this task's own port is in use.
    """
    others = [task for task in config.cluster.training_tasks() if task != config.task]
    chief, start_s, most_s = config.cluster.chief_task, time.monotonic(), timeout_s + LATER_S
    with answering(config):
        missing = wait_for_answers(config, others, timeout_s=timeout_s)
        if missing:
            raise StartupTimeout(waited_for(config, missing, timeout_s, timeout_s))
        if config.task == chief:
            return
        while (waited_s := time.monotonic() - start_s) < most_s:
            if serves(config.cluster.address(chief), timeout_s=most_s - waited_s):
                return
            time.sleep(_PROBE_ONE_EVERY_S)
    raise StartupTimeout(waited_for(config, [chief], waited_s, most_s))


def serves(address: str, *, timeout_s: float) -> bool:
    """True when a server of gRPC is at ``host:port``; waits for it while something listens there.

    False as soon as nothing does.
    """
    try:
        with _connection(address, timeout_s=timeout_s) as server:
            server.settimeout(timeout_s)
            server.sendall(_HELLO)
            return bool(server.recv(1))
    except OSError:
        return False


@contextlib.contextmanager
def answering(config: TaskConfig) -> Iterator[socket.socket]:
    """Accept connections at this task's port."""
    address = config.cluster.address(config.task)
    try:
        listener = listen(split_address(address)[1], only_local=is_local(config.cluster))
    except OSError as error:
        raise UsageError(
            f"{config.task}",
            received=f"{address}, which cannot be listened at ({error.strerror})",
            expected="a free port of this machine",
            fix="end what listens there, or give the task another port in TF_CONFIG",
            code="port-in-use",
        ) from error
    with listener:
        yield listener


def answer_until_the_end(config: TaskConfig) -> None:
    """Accept connections at this task's port as long as the process lives, from a thread.

    For a chief without a server of TensorFlow, which the evaluator watches.
    """

    def answer() -> None:
        with answering(config) as listener:
            while True:
                listener.accept()[0].close()

    threading.Thread(target=answer, name="tfdist-chief-answers", daemon=True).start()


@contextlib.contextmanager
def last_resort(*, timeout_s: float) -> Iterator[None]:
    """End the process, with its Python stacks, when the block takes longer than `timeout_s`.

    For a call into TensorFlow that holds Python's lock: the timer behind it needs none. It is
    for the peer that was there and died before TensorFlow had seen it; the exit code is 1.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def waited_for(
    config: TaskConfig, missing: Sequence[Task], waited_s: float, timeout_s: float
) -> str:
    """Return the line that names the tasks this one has waited for."""
    return (
        f"{config.task}: waited {waited_s:.0f} s of {timeout_s:.0f} s for "
        f"{at_addresses(config.cluster, missing)}. Fix: start them, or raise --startup_timeout_s"
    )


# Versions of TensorFlow and tfdist, compared where the tasks of a job meet.
#
# Two versions may understand each other, or end with an error that names neither, or wait. Under ps
# the chief compares them as the others come (`tfdist.ps.members`), under multiworker all do as they
# join the ring (`tfdist.strategy.ring`).


def own_versions() -> str:
    """Return this process's, as tasks send them: ``TensorFlow 2.21.0, tfdist 0.1.0``."""
    return f"TensorFlow {tf.__version__}, tfdist {sys.modules['tfdist'].__version__}"


def require_same_versions(theirs: str, *, task: str, own: str, own_task: str) -> None:
    """Raise UsageError with the names of both tasks where `theirs` are not this task's `own`."""
    pairs = itertools.zip_longest(theirs.split(", "), own.split(", "), fillvalue="nothing")
    for found, expected in pairs:
        require(
            found == expected,
            task,
            received=found,
            expected=f"{expected.partition(' ')[2]}, as {own_task} has",
            fix="install the same version on every machine",
            code="version",
        )


# Whether the chief of a job is there: for tasks that it does not lead through the training.


_GONE_AFTER_S = 5.0


def wait_for_chief_to_end(
    config: TaskConfig,
    *,
    stop: threading.Event,
    timeout_s: float,
    met: threading.Event | None = None,
) -> int:
    """Return the exit code once the chief came and went, never came, or `stop` was set.

    Where `met` is set once the chief was seen, even if later polls miss it.
    """
    address = config.cluster.address(config.cluster.chief_task)
    seen, last = False, time.monotonic()
    while not stop.wait(_PROBE_EVERY_S):
        if answers(address) or (not seen and met is not None and met.is_set()):
            seen, last = True, time.monotonic()
        elif seen and time.monotonic() - last > _GONE_AFTER_S:
            _LOG.info("the chief at %s has ended; so does %s", address, config.task)
            return EXIT_OK
        elif not seen and time.monotonic() - last > timeout_s:
            waited = waited_for(config, [config.cluster.chief_task], timeout_s, timeout_s)
            print(f"tfdist: {waited}", file=sys.stderr, flush=True)
            return EXIT_PEER_MISSING
    return EXIT_STOPPED


@functools.cache
def chief_watch(config: TaskConfig, *, timeout_s: float) -> Future[int]:
    """Return this task's exit code, known once the chief has ended or has not come in time.

    For a task that the chief knows nothing of. One thread of the process watches the chief's port,
    from the first call on.
    """
    code: Future[int] = Future()

    def watch() -> None:
        code.set_result(wait_for_chief_to_end(config, stop=threading.Event(), timeout_s=timeout_s))

    threading.Thread(target=watch, name="tfdist-chief-watch", daemon=True).start()
    return code
