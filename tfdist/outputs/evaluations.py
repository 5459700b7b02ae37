"""Files of an evaluator: a line per evaluated checkpoint, and a stop request."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.files import one_line_errors, write_text
from tfdist.outputs.run_directory import to_json


class Evaluations:
    """The files of one run's evaluator; creating the object touches nothing.

    They are among the checkpoints, so that they go where those go: the checkpoints of two runs have
    the same names.
    """

    def __init__(self, checkpoints: str | os.PathLike[str]) -> None:
        folder = Path(checkpoints)
        self.metrics_file = folder / "metrics.evaluator.jsonl"
        self.best_file = folder / "best.evaluator.keras"
        self.stop_file = folder / "stop.evaluator.json"

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines, without one that a crash cut short."""
        with self._one_line_errors():
            try:
                text = self.metrics_file.read_text(encoding="utf-8")
            except FileNotFoundError:
                return []
        lines = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def with_line(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the lines with this one and without those of its step and of later ones, which a
        run that went back to a checkpoint does again."""
        return [*(past for past in self.lines() if past["step"] < line["step"]), dict(line)]

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write these lines in place of those there are."""
        with self._one_line_errors():
            write_text(self.metrics_file, "".join(to_json(line) + "\n" for line in lines))

    def ask_to_stop(self, why: Mapping[str, Any]) -> None:
        """Have the chief end the training before its next range of steps."""
        with self._one_line_errors():
            write_text(self.stop_file, to_json(why) + "\n")

    @property
    def is_stop_requested(self) -> bool:
        """Return whether the evaluator has asked for the end of the training."""
        return self.stop_file.exists()

    def _one_line_errors(self) -> contextlib.AbstractContextManager[None]:
        return one_line_errors(f"evaluator, in {self.metrics_file.parent}")
