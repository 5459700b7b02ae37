"""Who has gone, by how long they have not answered."""

from __future__ import annotations

from tfdist.ps.workers import HeartbeatTimeout


def test_gone_is_who_is_silent_at_each_look_for_so_long() -> None:
    clock = iter([0.0, 2.0, 3.9, 4.0, 5.0, 6.0, 9.0])
    silence: HeartbeatTimeout[str] = HeartbeatTimeout(4.0, clock=lambda: next(clock))
    assert silence.too_long(["ps-0"]) == []
    assert silence.too_long(["ps-0", "ps-1"]) == []
    assert silence.too_long(["ps-0", "ps-1"]) == []
    assert silence.too_long(["ps-0", "ps-1"]) == ["ps-0"]
    assert silence.too_long([]) == []
    assert silence.too_long(["ps-1"]) == []  # it has answered in between
    assert silence.too_long(["ps-1"]) == []
