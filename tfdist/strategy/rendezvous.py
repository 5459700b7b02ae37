"""Startup checks between tasks: wait for peers, compare versions, and watch the chief.

TensorFlow waits for ever for a task that never starts, and does not name the task
(https://github.com/tensorflow/tensorflow/issues/46169). Under multiworker this wait holds Python's
lock, so no Python thread can report it. The tasks therefore wait for each other here first.
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
    named,
    opening_port,
    require,
)

_LOG = logging.getLogger(__name__)

LATER_S = 10.0
"""Additional seconds that a task waits inside TensorFlow. A peer that cannot reach this task times
out before this task, and reports the address."""

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 (and gRPC) connection. A server must answer them at once."""

_PROBE_EVERY_S = 1.0
_PROBE_ONE_EVERY_S = 0.02  # for each missing task
_LOG_EVERY_S = 10.0
_ANSWER_S = 0.5
_LOCAL_ANSWER_S = 0.05
"""Timeout in seconds on loopback (`local_only`). Only a server that is starting answers later."""


def answers(address: str) -> bool:
    """Return True if a process accepts connections at ``host:port``."""
    try:
        with _connection(address, timeout_s=_ANSWER_S):
            return True
    except OSError:
        return False


def _connection(address: str, *, timeout_s: float) -> socket.socket:
    most_s = _LOCAL_ANSWER_S if are_local([address]) else timeout_s
    return socket.create_connection(split_address(address), timeout=min(timeout_s, most_s))


def missing_peers(cluster: ClusterSpec, peers: Iterable[Task]) -> list[Task]:
    """Return the tasks of `peers` that do not accept a connection now."""
    return [task for task in peers if not answers(cluster.address(task))]


def wait_for_answers(config: TaskConfig, tasks: Sequence[Task], *, timeout_s: float) -> list[Task]:
    """Wait until each task accepts connections. Return the tasks missing after `timeout_s` seconds.

    Every 10 seconds, log the missing tasks.
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
        # With fewer missing tasks, probe more often: all tasks wait for the last task.
        time.sleep(min(_PROBE_ONE_EVERY_S * len(missing), _PROBE_EVERY_S, remaining_s))
    return missing


def at_addresses(cluster: ClusterSpec, tasks: Sequence[Task]) -> str:
    """Return a text with the first tasks and their addresses."""
    return named(f"{task} ({cluster.address(task)})" for task in tasks)


def await_peers(config: TaskConfig, *, timeout_s: float) -> None:
    """Wait until every other training task accepts connections at its address.

    During the wait this task accepts connections at its own address. TensorFlow starts its server
    there afterwards. The chief returns first, because all tasks register at the chief's server.
    gRPC retries only after a second, so the other tasks first wait for this server.
    Every task of a multiworker job calls it.

    Raises:
      StartupTimeout: tasks are missing after `timeout_s` seconds, or the chief's server is missing
        after `LATER_S` more seconds.
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
    """Return True once a gRPC server answers at ``host:port``.

    Return False if the connection fails, closes or times out.
    """
    try:
        with _connection(address, timeout_s=timeout_s) as server:
            server.settimeout(timeout_s)
            server.sendall(_HELLO)
            return bool(server.recv(1))
    except OSError:
        return False


def listening(name: str, address: str, *, only_local: bool) -> socket.socket:
    """Return a socket that listens at a task's address."""
    with opening_port(name, address):
        return listen(split_address(address)[1], only_local=only_local)


@contextlib.contextmanager
def answering(config: TaskConfig) -> Iterator[socket.socket]:
    """Accept connections at this task's port."""
    address, only_local = config.cluster.address(config.task), is_local(config.cluster)
    with listening(str(config.task), address, only_local=only_local) as listener:
        yield listener


def answer_until_the_end(config: TaskConfig) -> None:
    """Accept connections at this task's port from a thread, until the process exits.

    A chief without a TensorFlow server calls it, so that the evaluator can watch the chief.
    """

    def answer() -> None:
        with answering(config) as listener:
            while True:
                listener.accept()[0].close()

    threading.Thread(target=answer, name="tfdist-chief-answers", daemon=True).start()


@contextlib.contextmanager
def last_resort(*, timeout_s: float) -> Iterator[None]:
    """Print the Python stacks and exit with code 1, if the block runs for over `timeout_s` seconds.

    Use it for a TensorFlow call that holds Python's lock: the timer works without the lock. The
    call hangs if a peer dies after it answered and before TensorFlow connects to the peer.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def waited_for(
    config: TaskConfig, missing: Sequence[Task], waited_s: float, timeout_s: float
) -> str:
    """Return the message that names the missing tasks."""
    return (
        f"{config.task}: waited {waited_s:.0f} s of {timeout_s:.0f} s for "
        f"{at_addresses(config.cluster, missing)}. Fix: start these tasks, or raise "
        "--startup_timeout_s"
    )


# Versions of TensorFlow and tfdist, compared when the tasks of a job connect.
#
# Tasks with different versions may work, fail with an unclear error, or hang. Under ps the chief
# compares the versions of tasks that connect (`tfdist.ps.connections`). Under multiworker every
# task compares them when it joins the ring (`tfdist.strategy.ring`).


def own_versions() -> str:
    """Return the versions of this process, such as ``TensorFlow 2.21.0, tfdist 0.1.0``."""
    return f"TensorFlow {tf.__version__}, tfdist {sys.modules['tfdist'].__version__}"


def require_same_versions(theirs: str, *, task: str, own: str, own_task: str) -> None:
    """Raise UsageError with the names of both tasks if their versions differ."""
    pairs = itertools.zip_longest(theirs.split(", "), own.split(", "), fillvalue="no version")
    for found, expected in pairs:
        require(
            found == expected,
            task,
            f"{found} differs from {expected} in {own_task}",
            fix="install the same version on all hosts",
            code="version",
        )


# Watch of the chief, for tasks that the chief does not coordinate.


_GONE_AFTER_S = 5.0


def wait_for_chief_to_end(
    config: TaskConfig,
    *,
    stop: threading.Event,
    timeout_s: float,
    met: threading.Event | None = None,
) -> int:
    """Wait until the chief exits, times out, or `stop` is set. Return this task's exit code.

    `met` is set after another thread has seen the chief, which may exit between two polls.
    """
    address = config.cluster.address(config.cluster.chief_task)
    seen, last = False, time.monotonic()
    while not stop.wait(_PROBE_EVERY_S):
        if answers(address) or (not seen and met is not None and met.is_set()):
            seen, last = True, time.monotonic()
        elif seen and time.monotonic() - last > _GONE_AFTER_S:
            _LOG.info("the chief at %s exited; %s exits too", address, config.task)
            return EXIT_OK
        elif not seen and time.monotonic() - last > timeout_s:
            waited = waited_for(config, [config.cluster.chief_task], timeout_s, timeout_s)
            print(f"tfdist: {waited}", file=sys.stderr, flush=True)
            return EXIT_PEER_MISSING
    return EXIT_STOPPED


@functools.cache
def chief_watch(config: TaskConfig, *, timeout_s: float) -> Future[int]:
    """Return a future of this task's exit code, set when the chief exits or does not start in time.

    Use it in a task that the chief does not coordinate. The first call starts a thread that
    watches the chief's port.
    """
    code: Future[int] = Future()

    def watch() -> None:
        code.set_result(wait_for_chief_to_end(config, stop=threading.Event(), timeout_s=timeout_s))

    threading.Thread(target=watch, name="tfdist-chief-watch", daemon=True).start()
    return code
