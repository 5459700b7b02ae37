"""Other hosts' side of the rendezvous: connects to host 0 and stays connected."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.cluster.placement import join
from tfdist.errors import StartupTimeout, UsageError
from tfdist.launch.multihost.connection import (
    Channel,
    Link,
    Message,
    Violation,
    WrongToken,
    resolve,
)
from tfdist.launch.multihost.messages import Hello, encode
from tfdist.launch.multihost.token import FLAG, VARIABLE

_RETRY_S = 0.05  # then twice as long, up to the next
_MAX_RETRY_S = 0.5

_CONNECT_S = 1.0  # then again: a packet that was lost is sent anew sooner than the system would
_GREETING_S = 10.0


class Member:
    """A connection to host 0 that has not ended until `lost` says why."""

    def __init__(
        self, channel: Channel, *, timeout_s: float, messages: Sequence[Message] = ()
    ) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._messages = list(messages)
        self.lost = ""

    def fileno(self) -> int:
        """Return what to watch."""
        return self._channel.fileno()

    def turn(self) -> None:
        """Read, write, send a heartbeat if it is time, and notice if host 0 is silent."""
        self._with(lambda: self._messages.extend(self._channel.read()))
        self._with(self._channel.beat)
        self._with(self._channel.flush)
        if not self.lost and self._channel.silent_s >= self._timeout_s:
            self.lost = f"no word for {self._timeout_s:g} s"

    def take_messages(self) -> list[Message]:
        """Return what host 0 has said since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: Message) -> None:
        """Send a message; nothing happens if host 0 is gone."""
        self._with(lambda: self._channel.send(message))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _with(self, action: Callable[[], object]) -> None:
        if self.lost:
            return
        try:
            action()
        except (OSError, Violation) as error:
            self.lost = str(error)


@dataclass(frozen=True, slots=True)
class Joining:
    """How this host comes to host 0.

    Attributes:
      host, port: where host 0 listens.
      source: the address of this host; None for the system's choice.
      rank, terms: of this host.
      timeout_s: after how long without a word host 0 counts as gone.
    """

    host: str
    port: int
    source: str | None = field(kw_only=True)
    token: bytes = field(kw_only=True, repr=False)
    rank: int = field(kw_only=True)
    terms: Mapping[str, str] = field(kw_only=True)
    timeout_s: float = field(kw_only=True)
    clock: Callable[[], float] = field(kw_only=True)

    def join(
        self, *, within_s: float, wake_fds: Sequence[int] = (), is_over: Callable[[], bool]
    ) -> Member | None:
        """Try until it works; return None once `is_over`, which each of `wake_fds` has us ask.

        Raises:
            StartupTimeout: host 0 has not let us in; the message says where it was looked for.
            UsageError: it has another token, or this host differs from it.
        """
        began_s, why, pause_s = self.clock(), "", _RETRY_S
        while not is_over():
            try:
                return self.attempt(wake_fds)
            except OSError as error:
                why = error.strerror or str(error)
            except WrongToken:
                raise self.wrong_token() from None
            except Violation as error:
                why = str(error)
            waited_s = self.clock() - began_s
            if waited_s >= within_s:
                raise self._too_late(waited_s, why)
            _wait(wake_fds, timeout_s=min(pause_s, within_s - waited_s))
            pause_s = min(2 * pause_s, _MAX_RETRY_S)
        return None

    def attempt(self, wake_fds: Sequence[int] = ()) -> Member:
        """Try once; a descriptor that can be read ends the wait for an answer.

        Raises OSError and `Violation` where it is worth another try, `WrongToken`, and UsageError
        where this host differs from host 0.
        """
        family, address = resolve(self.host, self.port)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self.source is not None and (":" in self.source) == (family == socket.AF_INET6):
                sock.bind((self.source, 0))
            sock.settimeout(_CONNECT_S)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
        return self.member_over(sock, wake_fds)

    def member_over(self, sock: socket.socket, wake_fds: Sequence[int] = ()) -> Member:
        """Do the rest of `attempt` over a socket that is connected; close it where that fails."""
        try:
            channel = Channel(sock, Link(self.token, accepts=False), clock=self.clock)
            messages = self._greet(channel, wake_fds)
        except BaseException:
            sock.close()
            raise
        return Member(channel, timeout_s=self.timeout_s, messages=messages)

    def _greet(self, channel: Channel, wake_fds: Sequence[int]) -> list[Message]:
        """Report who we are; return what host 0 has said after it has let us in."""
        deadline_s = self.clock() + _GREETING_S
        has_greeted = False
        while self.clock() < deadline_s:
            ready = _wait((channel.fileno(), *wake_fds), timeout_s=_MAX_RETRY_S)
            if channel.fileno() not in ready:
                if ready:
                    raise TimeoutError("asked to stop")
                continue
            messages = channel.read()
            if channel.is_open and not has_greeted:
                hello = Hello(rank=self.rank, terms=dict(self.terms))
                channel.send({"hello": encode(hello)})
                has_greeted = True
            for number, message in enumerate(messages):
                if "welcome" in message:
                    return messages[number + 1 :]
                if "refused" in message:
                    raise self._refusal(message)
        raise TimeoutError("it does not answer")

    def _refusal(self, message: Message) -> Exception:
        if not message.get("differs"):
            return Violation(str(message["refused"]))
        return UsageError(
            f"this host, for {join(self.host, self.port)}",
            received=str(message["refused"]),
            expected="the same on all hosts",
            fix="start the same line, of the same installation, on each of them",
            code="hosts-differ",
        )

    def wrong_token(self) -> UsageError:
        """Return what to say where host 0 has another token."""
        return UsageError(
            "token",
            received=f"one that {join(self.host, self.port)} does not have",
            expected="the same on all hosts of the job",
            fix=f"give all hosts the same {VARIABLE} or {FLAG}",
            code="wrong-token",
        )

    def _too_late(self, waited_s: float, why: str) -> StartupTimeout:
        return StartupTimeout(
            f"{join(self.host, self.port)}: the launcher of host 0 was not reached in "
            f"{waited_s:.0f} s: {why}. Fix: start it, see that its name and port are right and "
            "that no firewall is between, or raise --startup_timeout_s"
        )


def _wait(fds: Sequence[int], *, timeout_s: float) -> list[int]:
    """Return which of the descriptors can be read, after `timeout_s` at the latest."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(timeout_s * 1000)]
