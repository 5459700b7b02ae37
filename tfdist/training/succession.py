"""Takeover of the chief's callbacks in an elastic job that has lost its chief.

Every task keeps the states that the chief's own callbacks had before the last step block, and the
hooks since then. Weights change only in blocks, so a successor repeats the hooks on equal weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from keras.src.callbacks import CallbackList

from tfdist import phases
from tfdist.checkpoint import callback_state
from tfdist.checkpoint.backup import BackupAndRestore
from tfdist.errors import PeerLost, named
from tfdist.strategy import Job, broadcast
from tfdist.strategy.native import engine_runs
from tfdist.strategy.ring import Members
from tfdist.training import resume
from tfdist.training.callbacks import chiefs_of, counting_steps
from tfdist.training.trackers import prepare_trackers

_LOG = logging.getLogger(__name__)


class Succession:
    """State from which another task can continue the chief's callbacks.

    Attributes:
      shared: epoch and first step of the last block, and states of the chief's own callbacks.
    """

    def __init__(self, job: Job) -> None:
        self.shared: dict[str, Any] = {"epoch": 0, "step": 0, "states": {}}
        self._job, self._was_chief = job, job.is_chief
        self._hooks: list[tuple[str, Any]] = []

    def note(self, hook: str, args: Sequence[Any]) -> None:
        """Note a call of a hook."""
        self._hooks.append((hook, args))

    def has_news(self, callbacks: Sequence[Any]) -> bool:
        """Return whether states of the chief's own callbacks have changed."""
        return self._states(callbacks) != self.shared["states"]

    def share(self, callbacks: Sequence[Any], *, epoch: int, step: int, has_news: bool) -> None:
        """Keep the states before a block. A collective.

        If the chief is lost meanwhile, keep the earlier states, which its successor continues.
        """
        try:
            states = broadcast(self._states(callbacks)) if has_news else self.shared["states"]
        except PeerLost:
            if self._job.ring is None or self._job.ring.lost:
                raise
            return
        self.take({"epoch": epoch, "step": step, "states": states})

    def take(self, shared: dict[str, Any]) -> None:
        """Keep the states that other tasks have shared."""
        self.shared = shared
        self._hooks.clear()

    @property
    def is_due(self) -> bool:
        """True if this task is the successor of a lost chief, until `take_over`."""
        return self._job.is_chief and not self._was_chief

    def take_over(
        self, callbacks: CallbackList, backups: Sequence[BackupAndRestore], *, step: int
    ) -> None:
        """Continue the chief's own callbacks in a new list at `step`."""
        _LOG.warning("the chief is lost: %s takes over at step %d", self._job.name, step)
        self._was_chief = True
        listed, shared = callbacks.callbacks, self.shared
        own = callbacks.callbacks = chiefs_of(listed)
        states = self._states_of_same(own)
        with engine_runs(), phases.entered("callback"):
            for backup in backups:
                backup.repeat_save()
                resume.acquire(backup, self._job, previous="the lost chief")
                backup.on_train_begin()
            prepare_trackers(own, backups, states)
            callback_state.prepare_to_resume(own, epoch=shared["epoch"])
            callbacks.on_train_begin()
            callbacks.on_epoch_begin(shared["epoch"])
            callback_state.set_states(own, states)
            for callback in own:
                if hasattr(callback, "resumed_at"):
                    callback.resumed_at(shared["step"])
            with counting_steps(own, shared["step"], step):
                for hook, args in self._hooks:
                    getattr(callbacks, hook)(*args)
        callbacks.callbacks = listed

    def _states_of_same(self, own: Sequence[Any]) -> dict[str, Any]:
        """Return the shared states of callback classes that both tasks have in equal numbers."""
        shared, mine = self.shared["states"], {name for name, _ in callback_state.with_names(own)}
        others = {name.rpartition("-")[0] for name in mine.symmetric_difference(shared)}
        lost = {n for n, s in shared.items() if s is not None and n.rpartition("-")[0] in others}
        if lost:
            _LOG.warning(
                "%s: other callbacks than in the lost chief, so they begin without a state. Fix: "
                "create the same callbacks in all workers",
                named(sorted(lost)),
            )
        return {name: state for name, state in shared.items() if name not in lost}

    def _states(self, callbacks: Sequence[Any]) -> dict[str, Any]:
        """Return the state of each of the chief's own callbacks, `None` without a state."""
        if not isinstance(self._job.ring, Members):
            return {}
        own = chiefs_of(callbacks)
        names = dict.fromkeys(name for name, _ in callback_state.with_names(own))
        return names | callback_state.get_states(own)
