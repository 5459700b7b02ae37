"""What the launcher hears."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tfdist.launch.events import SAME_REQUEST_S, SignalPipe


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def handlers_as_at_a_terminal() -> Iterator[None]:
    """A test run in the background may have been started to ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_request_that_is_delivered_twice_is_one_and_a_later_one_another(again: int) -> None:
    clock = Clock()
    with SignalPipe(clock=clock) as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(again)
        assert signals.read() == [signal.SIGTERM]
        clock.now_s += 0.9 * SAME_REQUEST_S
        signal.raise_signal(again)
        assert signals.read() == []
        clock.now_s += 0.2 * SAME_REQUEST_S
        signal.raise_signal(again)
        assert signals.read() == [again]


def test_ends_of_processes_are_all_told() -> None:
    with SignalPipe(clock=Clock()) as signals:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGCHLD)
        assert signals.read() == [signal.SIGTERM, signal.SIGCHLD, signal.SIGCHLD]
