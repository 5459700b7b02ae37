"""A runner's connection to its chief, which it comes back to when it is lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.cluster.address import split_address
from tfdist.errors import UsageError
from tfdist.launch.multihost.connection import Violation, WrongToken
from tfdist.launch.multihost.member import Joining, Member
from tfdist.tuning import guard, mark
from tfdist.tuning.hosts import Meeting
from tfdist.tuning.leases import LEASE_S
from tfdist.tuning.messages import ALIVE, Message

logger = logging.getLogger(__name__)

_ALIVE_EVERY_S = 1.0
_RETRY_S = 0.5


class Contact:
    """Comes to the chief and stays in touch; `turn` does what there is to do.

    Args:
      renew: is told of each moment from which on the chief is known to leave us our trials. It has
        heard of us then; or nobody listened at its address, so that there was no chief, and one
        that starts later waits as long for us. A chief that does not answer may be there.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        rank: int,
        sweep_dir: Path,
        renew: Callable[[float], None],
        clock: Callable[[], float] = guard.now_s,
    ) -> None:
        self.address = meeting.address
        self.why = ""
        self._rank = rank
        self._meeting = meeting
        self._sweep_dir = sweep_dir
        self._renew = renew
        self._clock = clock
        self._member: Member | None = None
        self._sweep: str | None = None
        self.is_there = False
        self._lost_s = self._renewed_s = clock()
        self._next_s = self._said_s = 0.0

    @property
    def fds(self) -> list[int]:
        """Returns what to watch."""
        return [self._member.fileno()] if self._member else []

    @property
    def unrenewed_s(self) -> float:
        """Returns how long ago the last such moment was."""
        return self._clock() - self._renewed_s

    @property
    def away_s(self) -> float:
        """Returns for how long there has been no chief."""
        return self._clock() - self._lost_s if self._member is None else 0.0

    def turn(self, wake_fds: Sequence[int] = ()) -> list[Message]:
        """Returns what the chief says; its first word is ``sweep``, when it is known to be ours.

        Raises:
          UsageError: it has another token, or directory, or differs from us.
        """
        if self._member is None:
            if self._clock() >= self._next_s:
                self._come(wake_fds)
            return []
        self._member.turn()
        heard = [one for one in self._member.take_messages() if not self._is_beat(one)]
        for message in heard:
            if "sweep" in message:
                self._check(str(message["sweep"]), chief=str(message.get("chief")))
        if self._clock() - self._said_s >= _ALIVE_EVERY_S:
            self._said_s = self._clock()
            self._member.send({ALIVE: self._said_s})
        if self._member.lost:
            logger.info("the chief at %s is gone: %s", self.address, self._member.lost)
            self.close()
        return heard

    def send(self, message: Message) -> None:
        """Sends a message; nothing happens if the chief is gone."""
        if self._member is not None:
            self._member.send(message)

    def close(self) -> None:
        """Ends the connection, if there is one."""
        if self._member is not None:
            self._member.close()
            self._member = None
            self._lost_s = self._clock()
        self.is_there = False

    def _is_beat(self, message: Message) -> bool:
        if ALIVE not in message:
            return False
        with contextlib.suppress(TypeError, ValueError):
            self._renewed(float(message[ALIVE]))
        return True

    def _come(self, wake_fds: Sequence[int]) -> None:
        began_s = self._clock()
        host, port = split_address(self.address)
        joining = Joining(
            host,
            port,
            source=None,
            token=self._meeting.token,
            rank=self._rank,
            terms=self._meeting.terms,
            timeout_s=LEASE_S,
            clock=self._clock,
        )
        try:
            self._member = joining.attempt(wake_fds)
        except WrongToken:
            raise joining.wrong_token() from None
        except (OSError, Violation) as error:
            self.why = str(getattr(error, "strerror", None) or error)
            if isinstance(error, ConnectionRefusedError):
                self._nobody_was_there(began_s)
            self._next_s = self._clock() + _RETRY_S
        else:
            self._renewed(began_s)

    def _nobody_was_there(self, at_s: float) -> None:
        found = mark.read(self._sweep_dir)
        if found is None or found.address == self.address:
            self._renewed(at_s)
        elif found.sweep == self._sweep:
            logger.info("the chief is at %s now", found.address)
            self.address = found.address

    def _renewed(self, at_s: float) -> None:
        self._renewed_s = max(self._renewed_s, at_s)
        self._renew(at_s)

    def _check(self, sweep: str, *, chief: str) -> None:
        """Makes sure that the chief has the directory that we have, and our sweep."""
        found = mark.read(self._sweep_dir)
        if found is None or (found.sweep, found.chief) != (sweep, chief):
            raise UsageError(
                "--sweep_dir",
                received=f"{self._sweep_dir}, which is not that of the chief at {self.address}",
                expected="the same directory, which the hosts share; no copy",
                fix="mount it at this path on this host too",
            )
        if self._sweep not in (None, sweep):
            raise UsageError(
                "--sweep_dir",
                received=f"{self._sweep_dir}, where another sweep has begun meanwhile",
                expected="the sweep that this runner had come to",
                fix="start the runner again",
            )
        self._sweep = sweep
        self.is_there = True
