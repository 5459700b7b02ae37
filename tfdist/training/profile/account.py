"""What the steps of each worker cost, put together by the chief."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.training.profile.phases import NAMES
from tfdist.training.profile.traffic import Links

Times = np.ndarray[Any, Any]


@dataclasses.dataclass(kw_only=True, slots=True)
class _Worker:
    """One worker's steps: what `Phases.end` gave, the first piece left out, which warms up."""

    pieces: int = 0
    times: list[Times] = dataclasses.field(default_factory=list)
    outside_s: float = 0.0
    """Of ranges in which it was warm: the time that it spent in no step."""
    outside_steps: int = 0


class PsProfile:
    """The account of a job: an engine adds each range of steps as it is done."""

    def __init__(self) -> None:
        self.links: Links = {}
        """What a step sends, of the program that was traced last."""
        self._workers: dict[int, _Worker] = {}

    def add(self, pieces: Sequence[tuple[int, Times]], *, wall_s: float) -> None:
        """Adds a range: each piece's worker and its steps' times ``[steps, 6]``, in any order.

        `wall_s` is the chief's time from the first piece given out to the last one returned.
        """
        by_worker: dict[int, list[Times]] = {}
        for number, times in pieces:
            by_worker.setdefault(number, []).append(times)
        for index, listed in by_worker.items():
            worker = self._workers.setdefault(index, _Worker())
            listed.sort(key=lambda times: float(times[0, 4]))
            if worker.pieces:
                worker.outside_s += wall_s - sum(float(t[-1, 5] - t[0, 4]) for t in listed)
                worker.outside_steps += sum(map(len, listed))
            worker.times += listed if worker.pieces else listed[1:]
            worker.pieces += len(listed)

    def summary(self) -> dict[str, Any]:
        """JSON: milliseconds a step by worker, means that add up, and what a step sends."""
        workers = {
            f"worker-{index}": _costs(worker)
            for index, worker in sorted(self._workers.items())
            if worker.times
        }
        links = {
            f"{sender} to {receiver}": dataclasses.asdict(link)
            for (sender, receiver), link in sorted(self.links.items())
        }
        return {"workers": workers, "links": links}


def _costs(worker: _Worker) -> dict[str, Any]:
    times = np.concatenate(worker.times) * 1e3
    means = {f"{name}_ms": float(times[:, i].mean()) for i, name in enumerate(NAMES)}
    # From one step's end to the next one's begin, where both are of one piece.
    gaps = [float(np.diff(np.ravel(t[:, 4:]))[1::2].sum()) for t in worker.times]
    means["between_ms"] = sum(gaps) * 1e3 / len(times)
    if worker.outside_steps:
        means["waiting_ms"] = worker.outside_s * 1e3 / worker.outside_steps
    step_ms = times[:, 5] - times[:, 4]
    return {
        "steps": len(times),
        **means,
        "step_ms": sum(means.values()),
        "median_ms": float(np.median(step_ms)),
        "p95_ms": float(np.percentile(step_ms, 95)),
    }


_profiles: weakref.WeakKeyDictionary[tf.distribute.Strategy, PsProfile]
_profiles = weakref.WeakKeyDictionary()


def profile_of(strategy: tf.distribute.Strategy) -> PsProfile:
    """The one account of a strategy's job."""
    return _profiles.setdefault(strategy, PsProfile())
