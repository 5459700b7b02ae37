"""A runner's guard, as the runner sees it: see `tfdist.tuning.guard`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import TracebackType

from tfdist.errors import TfdistError
from tfdist.tuning import guard


class Guarding:
    """The guard, from when this is entered; it goes when it is left and its trials have ended."""

    def __enter__(self) -> Guarding:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def renew(self, at_s: float) -> None:
        """Says until when the chief leaves our trials to us: from this moment of its clock on."""
        self._say(f"renew {at_s}")

    def watch(self, pid: int) -> None:
        """Has the launcher of a trial ended in time."""
        self._say(f"watch {pid}")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise TfdistError("the runner's guard has ended: the runner ends too") from error
