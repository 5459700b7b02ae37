"""Versions of a model: the served version, the version that is loading, and refused versions.

This module is pure. The methods of `Model` return a changed copy, and `plan` returns the next
actions. Repeated updates have no further effect, so the next scan makes up for a lost message.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfdist.errors import require
from tfdist.files import one_line_errors
from tfdist.serving.protocol import ModelStatus, VersionState, version_number

MAX_DEATHS = 3  # replica deaths during loading after which a new version is refused
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """Process that serves or loads a version. `index` is its number among the version's replicas.

    The process starts `wait_s` seconds after `Model.plan` returned it.
    """

    id: int
    version: int
    index: int
    ready: bool = False
    wait_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """State of a model."""

    replicas_wanted: int
    # Fingerprints of the versions on disk, and the reasons of refused versions.
    found: Mapping[int, str] = dataclasses.field(default_factory=dict)
    refused: Mapping[int, str] = dataclasses.field(default_factory=dict)
    served: int | None = None
    replicas: tuple[Replica, ...] = ()  # live replicas that are not draining
    # Number of consecutive deaths, by the replica's version and index.
    deaths: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    @property
    def target(self) -> int | None:
        """Newest version on disk that is not refused, otherwise the served version."""
        return max((v for v in self.found if v not in self.refused), default=self.served)

    def scanned(self, found: Mapping[int, str]) -> Model:
        """Update the versions on disk. Retry a refused version if its files have changed.

        A version that is loading finishes first, so that frequent new versions cannot block all
        serving. A served version without files and replicas is no longer served.
        """
        if self.target != self.served and self.target in found:
            return self
        same = {v for v, fingerprint in self.found.items() if found.get(v) == fingerprint}
        refused = {v: why for v, why in self.refused.items() if v in same}
        there = found.keys() | {one.version for one in self.replicas}
        served = self.served if self.served in there else None
        model = dataclasses.replace(self, found=dict(found), refused=refused, served=served)
        return model._update_served()

    def loaded(self, id: int) -> Model:
        """Record that a replica has loaded and warmed up its version."""
        one = self.replica(id)
        if one is None:
            return self
        ready = dataclasses.replace(one, ready=True)
        replicas = tuple(ready if other is one else other for other in self.replicas)
        deaths = {**self.deaths, (one.version, one.index): 0}
        return dataclasses.replace(self, replicas=replicas, deaths=deaths)._update_served()

    def failed(self, id: int, reason: str) -> Model:
        """Record that a replica failed to load its version. Refuse it unless it is served."""
        one = self.replica(id)
        if one is None or one.version == self.served:
            return self
        return self._refuse(one.version, reason)

    def ended(self, id: int, how: str) -> Model:
        """Record that the process of a replica has exited."""
        one = self.replica(id)
        if one is None:
            return self
        key = (one.version, one.index)
        deaths = {**self.deaths, key: self.deaths.get(key, 0) + 1}
        model = dataclasses.replace(self.without(id), deaths=deaths)
        count = sum(n for (version, _), n in deaths.items() if version == one.version)
        if not one.ready and one.version != self.served and count >= MAX_DEATHS:
            return model._refuse(
                one.version, f"its replica failed to load it {count} times (last: {how})"
            )
        return model

    def without(self, id: int) -> Model:
        left = tuple(one for one in self.replicas if one.id != id)
        return dataclasses.replace(self, replicas=left)

    def plan(self, ids: Iterator[int]) -> tuple[Model, list[Replica], list[int]]:
        """Return the model with its planned replicas, the replicas to start, and ids to drain.

        A draining replica gets no more requests. The supervisor kills it after its last request.
        """
        kept = {self.target, self.served} - {None}
        drains = [one.id for one in self.replicas if one.version not in kept]
        there = {(one.version, one.index) for one in self.replicas}
        starts = []
        for version in sorted(self.found.keys() & kept):
            for index in range(self.replicas_wanted):
                if (version, index) not in there:
                    deaths = min(self.deaths.get((version, index), 0), 10)
                    wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 4.0 ** (deaths - 1))
                    wait_s = wait_s if deaths else 0.0
                    starts.append(Replica(next(ids), version, index, wait_s=wait_s))
        stay = (one for one in self.replicas if one.version in kept)
        return dataclasses.replace(self, replicas=(*stay, *starts)), starts, drains

    @property
    def status(self) -> ModelStatus:
        """States of the versions for clients, without older versions on disk."""
        states = [
            VersionState(version=version, state="END", message=why)
            for version, why in self.refused.items()
        ]
        if self.served is not None:
            states.append(VersionState(version=self.served, state="AVAILABLE"))
        if self.target is not None and self.target != self.served:
            states.append(VersionState(version=self.target, state="LOADING"))
        return ModelStatus(served=self.served, states=states)

    def replica(self, id: int) -> Replica | None:
        return next((one for one in self.replicas if one.id == id), None)

    def _refuse(self, version: int, reason: str) -> Model:
        return dataclasses.replace(self, refused={**self.refused, version: reason})

    def _update_served(self) -> Model:
        ready = sum(one.ready and one.version == self.target for one in self.replicas)
        served = self.target if ready >= self.replicas_wanted else self.served
        return dataclasses.replace(self, served=served)


def find_versions(directory: Path) -> dict[int, str]:
    """Return the fingerprint of each version in a model's directory, made from its files' metadata.

    A version is a directory with a `version_number` as its name and a ``saved_model.pb``. Raises
    OSError if the directory cannot be read.
    """
    found: dict[int, str] = {}
    for path in directory.iterdir():
        version = version_number(path.name)
        if version is not None and (path / "saved_model.pb").is_file():
            with contextlib.suppress(FileNotFoundError):  # another process is deleting the version
                parts = [*path.glob("variables/*"), *path.glob("assets/*")]
                files = [path / "saved_model.pb", *sorted(parts)]
                stats = [(file.name, file.stat()) for file in files]
                prints = [f"{name}:{s.st_ino}:{s.st_mtime_ns}:{s.st_size}" for name, s in stats]
                found[version] = " ".join([path.name, *prints])
    return found


def directory_name(fingerprint: str) -> str:
    """Return the name of a version's directory, with its leading zeros."""
    return fingerprint.partition(" ")[0]


def find_models(directory: Path, name: str | None = None) -> dict[str, Path]:
    """Return the directory as a model if it holds versions, otherwise the models inside it."""
    if find_versions(directory):
        return {name or directory.resolve().name: directory}
    models = {}
    for path in sorted(directory.glob("[!.]*")):
        with contextlib.suppress(NotADirectoryError, PermissionError):  # such as lost+found
            if name in (None, path.name) and find_versions(path):
                models[path.name] = path
    return models


def require_models(directory: Path, name: str | None = None) -> dict[str, Path]:
    """Return the models to serve, or raise UsageError if there are none."""
    with one_line_errors(f"serve: cannot read {directory}"):
        models = find_models(directory, name)
    require(
        models,
        "DIR",
        f"{directory} has no version" + (f" of model {name!r}" if name else "") + " to serve",
        fix="export a model to DIR with python -m tfdist.export or tfdist.export_model",
        code="no-model",
    )
    return models
