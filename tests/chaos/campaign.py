"""The undisturbed run of each case of a plan, then the placed faults and the random kills."""

import itertools
import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tests.chaos.plan import Case, Fault, Placed, Plan, in_turn, random_faults
from tests.chaos.run import TFDIST, ChaosRun, Launcher, Outcome
from tests.chaos.verdict import differences


class Campaign:
    """Runs what a plan says below `directory`; a line to `say` and to `results` for each fault."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        *,
        seed: int,
        say: Callable[[str], None],
        results: IO[str] | None = None,
        launcher: Launcher = TFDIST,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._seed = seed
        names = (case.name for case in plan.cases)
        self._draw = random.Random(f"{seed} {' '.join(names)}")  # each case draws its own
        self._say = say
        self._results = results
        self._launcher = launcher
        self._undisturbed: dict[str, Outcome] = {}
        self._numbers = itertools.count(1)
        self.lines: list[dict[str, Any]] = []
        self.kept: list[Path] = []

    def placed(self) -> None:
        """Runs the faults that the plan places."""
        cases = {case.name: case for case in self._plan.cases}
        for entry in self._plan.placed:
            case = cases[entry.case]
            if faults := self._faults_of(entry, case):
                self.disturbed(case, faults)

    def random_kills(self, kills: int) -> None:
        """Kills at random times until so many have hit; a run that ended too early adds none."""
        hit = tried = 0
        cases = in_turn(self._plan.cases)
        while hit < kills and tried < 2 * kills:
            for case in cases:
                if hit >= kills:
                    break
                base = self.undisturbed(case)
                faults = random_faults(
                    case, self._draw, startup_s=base.startup_s, training_s=base.training_s
                )
                tried += len(faults)
                hit += len(self.disturbed(case, faults[: kills - hit]))
        if hit < kills:
            self._say(f"only {hit} of {kills} kills hit")

    def undisturbed(self, case: Case) -> Outcome:
        """Returns the run of this case without a fault, made once."""
        if case.name not in self._undisturbed:
            began_s = time.monotonic()
            directory = self._directory / f"{case.name}-undisturbed"
            outcome = self._run(case, directory, ())
            if outcome.broken:
                raise RuntimeError(f"{directory}: without a fault: {outcome.broken}")
            self._undisturbed[case.name] = outcome
            self._say(
                f"{case.name}: undisturbed in {time.monotonic() - began_s:.1f} s: first step after"
                f" {outcome.startup_s:.1f} s, training {outcome.training_s:.1f} s"
            )
        return self._undisturbed[case.name]

    def disturbed(self, case: Case, faults: Sequence[Fault]) -> list[dict[str, Any]]:
        """Runs a case with these faults and returns the results of those that happened."""
        base = self.undisturbed(case)
        directory = self._directory / f"{case.name}-{next(self._numbers)}"
        outcome = self._run(case, directory, faults)
        found = [outcome.broken] if outcome.broken else []
        if outcome.verdict is not None and base.verdict is not None:
            found += differences(outcome.verdict, base.verdict)
        lines = []
        for record in outcome.records:
            record.identical = not found
            self._say(record.line())
            lines.append({"seed": self._seed, **record.as_dict()})
        self.lines += lines
        if self._results is not None:
            self._results.writelines(json.dumps(line) + "\n" for line in lines)
            self._results.flush()
        for difference in found:
            self._say(f"{case.name}: DIFFERENT: {difference}")
        if found:
            self.kept.append(directory)
        else:
            shutil.rmtree(directory)
        return lines

    def _run(self, case: Case, directory: Path, faults: Sequence[Fault]) -> Outcome:
        run = ChaosRun(case, directory, faults, say=self._say, launcher=self._launcher)
        return run.run()

    def _faults_of(self, entry: Placed, case: Case) -> Sequence[Fault]:
        if entry.each_write is None:
            return entry.faults
        base = self.undisturbed(case)
        counted = [
            mark["count"]
            for mark in base.marks
            if mark["event"] == "points" and mark["of"] == entry.each_write
        ]
        most = max(counted, default=0)
        self._say(f"{case.name}: a save of {entry.each_write} is {most} operations on files")
        halves = []
        if "before" not in entry.each_write:
            halves.append(Fault(do="kill", at="half write", of=entry.each_write))
        writes = [
            Fault(do="kill", at=f"write {n}", of=entry.each_write) for n in range(1, most + 1)
        ]
        return [*entry.faults, *halves, *writes]
