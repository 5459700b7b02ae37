"""What is known of a fault afterwards, and the table of all: by kind, how soon the job was back."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.plan import Fault

TIMES = ("detect_s", "restart_s", "import_s", "restore_s", "first_step_s")


@dataclass(kw_only=True, slots=True)
class Record:
    """One fault. Times are of the clock that all processes share, None for what did not happen."""

    fault: Fault
    case: str
    at_s: float
    attempt: int
    step: int | None = None
    place: str = ""
    tasks: int = 1
    detected_s: float | None = None
    said: str = ""
    restarted_by: str = ""
    marks: list[dict[str, Any]] = field(default_factory=list)
    """Those of the attempt that came after it."""
    identical: bool | None = None
    failed_again: int = 0
    """How often the launcher named another failure before the next fault."""

    def saw(self, mark: dict[str, Any]) -> None:
        """Takes a mark, if a task that was started after the fault made it."""
        if mark["attempt"] > self.attempt:
            self.marks.append(mark)
            self.restarted_by = self.restarted_by or "launcher"

    def named(self, line: str, at_s: float) -> bool:
        """The launcher has said what failed; False if it had already: this is another failure."""
        if self.detected_s is not None:
            self.failed_again += 1
            return False
        self.detected_s, self.said = at_s, line
        return True

    def last(self, event: str) -> float | None:
        """When the last task was there again; None while one is missing."""
        moments = {mark["task"]: mark["at"] for mark in self.marks if mark["event"] == event}
        return max(moments.values()) if len(moments) == self.tasks else None

    def times(self) -> dict[str, float | None]:
        """From the fault to the launcher's line (`detect_s`) and to all first steps after it.

        Between them: from the line to the first line of the last task's program (`restart_s`), from
        there until it has imported, and what the chief took to read and set a checkpoint.
        """
        program_s = self.last("program")
        took = [
            float(mark["took_s"])
            for mark in self.marks
            if mark["event"] in ("read", "restored") and mark["task"] == "worker-0"
        ]
        return {
            "detect_s": _between(self.at_s, self.detected_s),
            "restart_s": _between(self.detected_s, program_s),
            "import_s": _between(program_s, self.last("imported")),
            "restore_s": sum(took) if len(took) == 2 else None,
            "first_step_s": _between(self.at_s, self.last("first_step")),
        }

    def as_dict(self) -> dict[str, Any]:
        """The line of the results file."""
        names = ("step", "place", "said", "restarted_by", "identical", "failed_again")
        known = {name: getattr(self, name) for name in names}
        return {"case": self.case, **asdict(self.fault), **known, **self.times()}

    def line(self) -> str:
        """What a person reads of it."""
        step = "" if self.step is None else f" (step {self.step})"
        place = f" [{self.place}]" if self.place else ""
        shown = {n: "-" if s is None else f"{s:.2f} s" for n, s in self.times().items()}
        figures = ", ".join(f"{n[:-2]} {shown[n]}" for n in TIMES if n != "import_s")
        by = f", restarted by the {self.restarted_by}" if self.restarted_by else ""
        verdict = {True: "identical", False: "DIFFERENT", None: "no verdict"}[self.identical]
        return f"{self.case}: {self.fault}{step}{place}: {figures}{by}: {verdict}"


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """The results by case and kind of fault, as lines of aligned columns."""
    head = ("case", "fault", "n", *(f"{name[:-2]} p50/p95" for name in TIMES), "identical")
    rows = [head]
    for (case, do), group in sorted(grouped(results).items()):
        times = [_both([r[name] for r in group if r[name] is not None]) for name in TIMES]
        same = sum(r["identical"] is True for r in group)
        rows.append((case, do, str(len(group)), *times, f"{same} of {len(group)}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def grouped(results: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Any]]:
    """The results of each case and kind of fault; kills inside a save or a start are kinds."""
    where = {"write": " in a save", "half": " in a save", "start": " while starting"}
    groups: dict[tuple[str, str], list[Any]] = {}
    for result in results:
        moment = result["at"].partition(" ")[0]
        kind = str(result["do"]).replace("_", " ") + where.get(moment, "")
        groups.setdefault((result["case"], kind), []).append(result)
    return groups


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _both(known: Sequence[float]) -> str:
    return f"{percentile(known, 0.5):.2f}/{percentile(known, 0.95):.2f}" if known else "-"


def _between(first_s: float | None, then_s: float | None) -> float | None:
    return None if first_s is None or then_s is None else then_s - first_s
