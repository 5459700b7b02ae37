"""What is known of a fault afterwards: when it was noticed, and when the job was back."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.plan import Fault


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

    @property
    def detect_s(self) -> float | None:
        """From the fault to the launcher's line that names what failed."""
        return None if self.detected_s is None else self.detected_s - self.at_s

    @property
    def restart_s(self) -> float | None:
        """From the detection to the first line of the last task's program."""
        program_s = self._last("program")
        if program_s is None or self.detected_s is None:
            return None
        return program_s - self.detected_s

    @property
    def import_s(self) -> float | None:
        """From there until the last task has imported TensorFlow, Keras and tfdist."""
        began_s, done_s = self._last("program"), self._last("imported")
        return None if began_s is None or done_s is None else done_s - began_s

    @property
    def restore_s(self) -> float | None:
        """What the chief took to read the checkpoint and to set everything from it."""
        took = [
            float(mark["took_s"])
            for mark in self.marks
            if mark["event"] in ("read", "restored") and mark["task"] == "worker-0"
        ]
        return sum(took) if len(took) == 2 else None

    @property
    def first_step_s(self) -> float | None:
        """From the fault until the last task has done its first steps again."""
        done_s = self._last("first_step")
        return None if done_s is None else done_s - self.at_s

    def as_dict(self) -> dict[str, Any]:
        """Returns the line of the results file."""
        times = ("detect_s", "restart_s", "import_s", "restore_s", "first_step_s")
        return {
            "case": self.case,
            **asdict(self.fault),
            "step": self.step,
            "place": self.place,
            "said": self.said,
            "restarted_by": self.restarted_by,
            "identical": self.identical,
            "failed_again": self.failed_again,
            **{name: getattr(self, name) for name in times},
        }

    def line(self) -> str:
        """Returns what a person reads of it."""
        step = "" if self.step is None else f" (step {self.step})"
        place = f" [{self.place}]" if self.place else ""
        times = ("detect_s", "restart_s", "restore_s", "first_step_s")
        figures = ", ".join(f"{name[:-2]} {_shown(getattr(self, name))}" for name in times)
        by = f", restarted by the {self.restarted_by}" if self.restarted_by else ""
        verdict = {True: "identical", False: "DIFFERENT", None: "no verdict"}[self.identical]
        return f"{self.case}: {self.fault}{step}{place}: {figures}{by}: {verdict}"

    def _last(self, event: str) -> float | None:
        moments = {mark["task"]: mark["at"] for mark in self.marks if mark["event"] == event}
        return max(moments.values()) if len(moments) == self.tasks else None


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
