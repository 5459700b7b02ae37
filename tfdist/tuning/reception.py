"""Hears the runners of a sweep in a thread of its own, as its chief may think for seconds."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tfdist.launch.multihost.hub import Differs, Heard, Hub, Joined, Lost
from tfdist.tuning.leases import LEASE_S
from tfdist.tuning.messages import ALIVE, Message

ANY_RANK = 1 << 48
"""A runner draws its rank from so many, so that hardly two of them draw the same."""

_MAX_STRANGERS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """The connection to a runner has ended."""

    rank: int
    cause: str
    heard_s: float
    """When it said something last."""


RunnerNews = Joined | Differs | Heard | Gone


class Reception:
    """Listens from its making until `close`; `take_news` and `send` are for another thread.

    Args:
      listener: listening already; it is closed in the end.
      terms: what runners must have in common with the chief.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: bytes,
        terms: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = Hub(
            listener,
            token=token,
            terms=terms,
            num_ranks=ANY_RANK,
            max_strangers=_MAX_STRANGERS,
            timeout_s=LEASE_S,
            clock=clock,
        )
        self._clock = clock
        self._heard_s: dict[int, float] = {}
        self._news: deque[RunnerNews] = deque()
        self._outgoing: deque[tuple[int, Message]] = deque()
        self._has_news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._has_work = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="reception", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Returns what is readable when there is news."""
        return self._has_news

    def take_news(self) -> list[RunnerNews]:
        """Returns what has happened since the last call; raises what has ended the thread."""
        if self._failure is not None:
            raise self._failure
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._has_news)
        return [self._news.popleft() for _ in range(len(self._news))]

    def send(self, rank: int, message: Message) -> None:
        """Sends a message to a runner soon; nothing happens if it is gone."""
        self._outgoing.append((rank, message))
        os.eventfd_write(self._has_work, 1)

    def close(self) -> None:
        """Sends what is left to send and closes everything."""
        self._is_closing = True
        os.eventfd_write(self._has_work, 1)
        self._thread.join()
        os.close(self._has_news)
        os.close(self._has_work)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._hub.fileno(), select.POLLIN)
        poll.register(self._has_work, select.POLLIN)
        try:
            while not self._is_closing:
                poll.poll(max(0.0, self._hub.next_s - self._clock()) * 1000)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._has_work)
                self._turn()
            self._turn()  # what was said last
        except Exception as error:
            self._failure = error
            os.eventfd_write(self._has_news, 1)
        finally:
            self._hub.close()

    def _turn(self) -> None:
        for _ in range(len(self._outgoing)):
            self._hub.send(*self._outgoing.popleft())
        self._hub.turn()
        news = [one for one in map(self._noted, self._hub.take_news()) if one is not None]
        if news:
            self._news.extend(news)
            os.eventfd_write(self._has_news, 1)

    def _noted(self, news: Joined | Differs | Heard | Lost) -> RunnerNews | None:
        """Returns what the chief is to hear of some news, None for a beat, which is answered."""
        now_s = self._clock()
        match news:
            case Joined():
                self._heard_s[news.rank] = now_s
            case Heard():
                self._heard_s[news.rank] = now_s
                if ALIVE in news.message:
                    self._hub.send(news.rank, {ALIVE: news.message[ALIVE]})
                    return None
            case Lost():
                heard_s = self._heard_s.pop(news.rank, now_s)
                return Gone(rank=news.rank, cause=news.cause, heard_s=heard_s)
        return news
