"""The versions of a model: which one is served, which is loaded beside it, which are refused.

Pure: `Model` is what is known, its methods return it changed, and `actions` says what to do next.
Told the same twice it does nothing more, so that a lost message is made good by the next look.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from tfdist.serving.protocol import INT64_MAX, VersionState

MAX_DEATHS = 3  # of replicas that end while they load a version that was never served
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A process that has a version, or is loading it."""

    id: int
    version: int
    index: int
    ready: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class StartReplica:
    """Start a replica of a version in a place, no sooner than `wait_s` after the last one's end."""

    version: int
    index: int
    wait_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Drain:
    """Give a replica no more requests; end it when it has none left."""

    id: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is known of a model.

    Attributes:
      replicas_wanted: of the version that is served.
      found: the versions on the disk, each with what tells one from another of the same number.
      refused: versions that do not load, with the reason.
      serving: the version that gets the requests.
      replicas: the living ones that are not draining.
      deaths: ends in a row of replicas by version and index.
    """

    replicas_wanted: int
    found: Mapping[int, str] = dataclasses.field(default_factory=dict)
    refused: Mapping[int, str] = dataclasses.field(default_factory=dict)
    serving: int | None = None
    replicas: tuple[Replica, ...] = ()
    deaths: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    @property
    def target(self) -> int | None:
        """The newest version that is there and not refused, else the one that is served."""
        return max((v for v in self.found if v not in self.refused), default=self.serving)

    def scanned(self, found: Mapping[int, str]) -> Model:
        """Take what is on the disk now; a version whose files are others is tried again."""
        same = {v for v, mark in self.found.items() if found.get(v) == mark}
        refused = {v: why for v, why in self.refused.items() if v in same}
        return dataclasses.replace(self, found=dict(found), refused=refused)._settled()

    def started(self, replica: Replica) -> Model:
        """Take a replica that was started."""
        return dataclasses.replace(self, replicas=(*self.replicas, replica))

    def loaded(self, id: int) -> Model:
        """Take that a replica has loaded and warmed its version."""
        replicas = tuple(
            dataclasses.replace(one, ready=True) if one.id == id else one for one in self.replicas
        )
        deaths = {
            key: count
            for key, count in self.deaths.items()
            if key not in {(one.version, one.index) for one in replicas if one.id == id}
        }
        return dataclasses.replace(self, replicas=replicas, deaths=deaths)._settled()

    def failed(self, id: int, reason: str) -> Model:
        """Take that a replica could not load its version: it is refused unless it is served."""
        one = self._replica(id)
        if one is None or one.version == self.serving:
            return self
        return self._refusing(one.version, reason)

    def ended(self, id: int, how: str) -> Model:
        """Take that the process of a replica has ended."""
        one = self._replica(id)
        if one is None:
            return self
        key = (one.version, one.index)
        deaths = {**self.deaths, key: self.deaths.get(key, 0) + 1}
        left = tuple(other for other in self.replicas if other.id != id)
        model = dataclasses.replace(self, replicas=left, deaths=deaths)
        count = sum(n for (version, _), n in deaths.items() if version == one.version)
        if not one.ready and one.version != self.serving and count >= MAX_DEATHS:
            return model._refusing(one.version, f"its replica {how} while it was loaded, {count}x")
        return model

    def draining(self, id: int) -> Model:
        """Take that a replica is being drained."""
        left = tuple(one for one in self.replicas if one.id != id)
        return dataclasses.replace(self, replicas=left)

    def actions(self) -> list[StartReplica | Drain]:
        """Return what is to be done now."""
        kept = {version for version in (self.target, self.serving) if version is not None}
        drains = [Drain(one.id) for one in self.replicas if one.version not in kept]
        starts = [
            StartReplica(version, index, self._wait_s(version, index))
            for version in sorted(kept & self.found.keys())
            for index in range(self.replicas_wanted)
            if not any((one.version, one.index) == (version, index) for one in self.replicas)
        ]
        return [*drains, *starts]

    def states(self) -> list[VersionState]:
        """Return how each version is; of those on the disk the older ones are not loaded."""
        states = [
            VersionState(version=version, state="END", message=why)
            for version, why in self.refused.items()
        ]
        if self.serving is not None:
            states.append(VersionState(version=self.serving, state="AVAILABLE"))
        if self.target is not None and self.target != self.serving:
            states.append(VersionState(version=self.target, state="LOADING"))
        return states

    def _replica(self, id: int) -> Replica | None:
        return next((one for one in self.replicas if one.id == id), None)

    def _refusing(self, version: int, reason: str) -> Model:
        return dataclasses.replace(self, refused={**self.refused, version: reason})

    def _settled(self) -> Model:
        """Serve the target once all of its replicas are ready."""
        ready = sum(one.ready for one in self.replicas if one.version == self.target)
        if self.target == self.serving or ready < self.replicas_wanted:
            return self
        return dataclasses.replace(self, serving=self.target)

    def _wait_s(self, version: int, index: int) -> float:
        deaths = self.deaths.get((version, index), 0)
        if not deaths:
            return 0.0
        return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 4.0 ** (min(deaths, 10) - 1))


def find_versions(directory: Path) -> dict[int, str]:
    """Return the versions in a model's directory; of one number, other files have another mark.

    A version is a directory whose name is a number and that has a ``saved_model.pb``. Raises
    OSError where the directory cannot be read.
    """
    found: dict[int, str] = {}
    for path in directory.iterdir():
        if not re.fullmatch(r"[0-9]{1,19}", path.name) or int(path.name) > INT64_MAX:
            continue
        if (path / "saved_model.pb").is_file():
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                found[int(path.name)] = _mark(path)
    return found


def _mark(version: Path) -> str:
    """Return what changes when the files of a version do, as while they are still copied."""
    files = [version / "saved_model.pb", *sorted((version / "variables").glob("*"))]
    stats = [(file.name, file.stat()) for file in files]
    marks = [f"{name}:{s.st_ino}:{s.st_mtime_ns}:{s.st_size}" for name, s in stats]
    return " ".join([version.name, *marks])


def find_models(directory: Path, name: str | None = None) -> dict[str, Path]:
    """Return the models in a directory: itself, where it holds versions, else those below it."""
    if find_versions(directory):
        return {name or directory.resolve().name: directory}
    below = sorted(path for path in directory.iterdir() if path.is_dir())
    models = {path.name: path for path in below if not path.name.startswith(".")}
    return {n: path for n, path in models.items() if name in (None, n) and find_versions(path)}
