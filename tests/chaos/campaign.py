"""The undisturbed run of a case, then the placed faults and the random kills."""

import itertools
import json
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.chaos.plan import Case, Fault, Placed, random_faults
from tests.chaos.run import TFDIST, ChaosRun, Launcher, Outcome

CHOICES = "choices.json"


class Campaign:
    """Runs a case below `directory`; a line to `say` and to `results` for each fault."""

    def __init__(
        self,
        case: Case,
        directory: Path,
        *,
        seed: int,
        say: Callable[[str], None],
        results: IO[str],
        launcher: Launcher = TFDIST,
    ) -> None:
        self._case = case
        self._directory = directory
        self._seed = seed
        self._draw = random.Random(f"{seed} {case.name}")
        self._say = say
        self._results = results
        self._launcher = launcher
        self._base: Outcome | None = None
        self._alike: dict[str, Outcome] = {}
        self._numbers = itertools.count(1)
        self.lines: list[dict[str, Any]] = []
        self.kept: list[Path] = []

    def placed(self, entries: Sequence[Placed]) -> None:
        """Runs the faults that a plan places."""
        for entry in entries:
            if faults := self._faults_of(entry):
                self.disturbed(faults)

    def random_kills(self, kills: int) -> None:
        """Kills at random times until so many have hit; a run that ended too early adds none."""
        hit = tried = 0
        while hit < kills and tried < 2 * kills:
            base = self.undisturbed()
            times = {"startup_s": base.startup_s, "training_s": base.training_s}
            faults = random_faults(self._case, self._draw, **times)
            tried += len(faults)
            hit += len(self.disturbed(faults[: kills - hit]))
        if hit < kills:
            self._say(f"only {hit} of {kills} kills hit")

    def undisturbed(self) -> Outcome:
        """The run without a fault, made once."""
        if self._base is None:
            began_s = time.monotonic()
            directory = self._directory / f"{self._case.name}-undisturbed"
            outcome = self._base = self._run(directory, ())
            if outcome.broken:
                raise RuntimeError(f"{directory}: without a fault: {outcome.broken}")
            self._say(
                f"{self._case.name}: undisturbed in {time.monotonic() - began_s:.1f} s: first step"
                f" after {outcome.startup_s:.1f} s, training {outcome.training_s:.1f} s"
            )
        return self._base

    def _chosen_alike(self, verdict: Mapping[str, Any]) -> Mapping[str, Any]:
        """The verdict of an undisturbed run with the same cut, which goes by measured times."""
        base, choices = self.undisturbed().verdict or {}, verdict.get("choices")
        if choices == base.get("choices"):
            return base
        key = json.dumps(choices)
        if key not in self._alike:
            directory = self._directory / f"{self._case.name}-undisturbed-{len(self._alike) + 1}"
            kept = directory / "checkpoints" / CHOICES
            kept.parent.mkdir(parents=True)
            kept.write_text(key)  # the job begins with these choices
            outcome = self._alike[key] = self._run(directory, ())
            if outcome.broken:
                raise RuntimeError(f"{directory}: without a fault: {outcome.broken}")
            self._say(f"{self._case.name}: undisturbed with {key}")
        return self._alike[key].verdict or {}

    def disturbed(self, faults: Sequence[Fault]) -> list[dict[str, Any]]:
        """Runs the case with these faults and returns the results of those that happened."""
        name = self._case.name
        directory = self._directory / f"{name}-{next(self._numbers)}"
        outcome = self._run(directory, faults)
        found = [outcome.broken] if outcome.broken else []
        if outcome.verdict is not None:
            found += differences(outcome.verdict, self._chosen_alike(outcome.verdict))
        lines = []
        for record in outcome.records:
            record.identical = not found
            self._say(record.line())
            lines.append({"seed": self._seed, **record.as_dict()})
        self.lines += lines
        self._results.writelines(json.dumps(line) + "\n" for line in lines)
        self._results.flush()
        for line in found:
            self._say(f"{name}: DIFFERENT: {line}")
        for fault in outcome.left:
            self._say(f"{name}: {fault}: did not happen")
        if found:
            self.kept.append(directory)
        else:
            shutil.rmtree(directory)
        return lines

    def _run(self, directory: Path, faults: Sequence[Fault]) -> Outcome:
        return ChaosRun(self._case, directory, faults, launcher=self._launcher).run()

    def _faults_of(self, entry: Placed) -> Sequence[Fault]:
        if (of := entry.each_write) is None:
            return entry.faults
        points = (mark for mark in self.undisturbed().marks if mark["event"] == "points")
        most = max((mark["count"] for mark in points if mark["of"] == of), default=0)
        self._say(f"{self._case.name}: a save of {of} is {most} operations on files")
        moments = ["half write"] if "before" not in of else []
        moments += [f"write {n}" for n in range(1, most + 1)]
        return [*entry.faults, *(Fault(do="kill", at=at, of=of) for at in moments)]


def differences(found: Any, expected: Any, at: str = "") -> list[str]:
    """A line for each part of the end state that is not as it is in the undisturbed run.

    Of a part it is the first difference.
    """
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        keys = [k for k in sorted({*found, *expected}) if found.get(k) != expected.get(k)]
        lines = [differences(found.get(k), expected.get(k), f"{at}{k}: ") for k in keys]
        return [line for each in lines[: 1 if at else None] for line in each]
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return [f"{at}{len(found)} entries, expected {len(expected)}"]
        i = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        return differences(found[i], expected[i], f"{at}[{i}]: ")
    return [f"{at}{found!r:.200}, expected {expected!r:.200}"]
