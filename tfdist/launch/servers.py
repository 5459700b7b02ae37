"""When the workers and ps of a ps job have nobody left to serve."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from tfdist.cluster import Task
from tfdist.launch.alone import EVALUATOR
from tfdist.launch.ending import Ending


class Servers:
    """Ends them once the chief is done, and its evaluator; `running` are the tasks that run."""

    def __init__(
        self, running: Mapping[Task, None], *, is_ps: bool, ending: Ending, grace_s: float
    ) -> None:
        self._running = running
        self._is_ps = is_ps
        self._ending = ending
        self._grace_s = grace_s
        self._are_told = False
        self.is_over = False
        """Whether the chief has ended as it should."""

    def serve_nobody(self, task: Task) -> bool:
        """Returns whether a task is a worker or ps of a job that is over."""
        return self._is_ps and self.is_over and task != EVALUATOR

    def end(self) -> None:
        """Tells them to end if the job is over, once."""
        is_evaluated = self._ending.has_begun or EVALUATOR not in self._running
        if self._is_ps and self.is_over and is_evaluated and not self._are_told:
            self._are_told = True
            self._ending.stop(signal.SIGTERM, within_s=self._grace_s)

    def end_all(self) -> None:
        """Tells the evaluator to end too."""
        self._are_told = True
        self._ending.stop(signal.SIGTERM, within_s=self._grace_s)
