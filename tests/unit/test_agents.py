"""Agents without a remote shell: the pipe to one, and the hub that keeps one on each host."""

import contextlib
import os
import stat
from functools import partial
from unittest.mock import Mock

import pytest

from tests.clock import Clock
from tests.refusals import refused
from tfdist.launch.agent import lock_host
from tfdist.launch.multihost.agents import Hub
from tfdist.launch.multihost.pipe import BEAT_EVERY_S, SILENT_S, Pipe


@pytest.fixture
def pipes():
    """The launcher's end and the agent's, by a clock that only the test sets."""
    (there, to_here), (here, to_there) = os.pipe(), os.pipe()
    clock = Clock()
    launcher = Pipe(there, to_there, timeout_s=SILENT_S, awaits_greeting=True, clock=clock)
    agent = Pipe(here, to_here, timeout_s=SILENT_S, clock=clock)
    yield launcher, agent, clock
    for fd in (there, to_here, here, to_there):
        with contextlib.suppress(OSError):  # a test has closed it
            os.close(fd)


def heard(pipe):
    pipe.turn()
    return pipe.take_messages()


def test_shell_output_is_skipped_and_long_messages_arrive_whole(pipes):
    launcher, agent, _ = pipes
    os.write(agent._write_fd, b'Welcome!\r\n{"hello": "no"}\n')
    agent.greet()
    agent.send({"hello": "x"})
    long = {"lines": ["y" * 300_000]}
    agent.send(long)
    assert heard(launcher) == [{"hello": "x"}]
    for _ in range(20):
        agent.turn()
        if messages := heard(launcher):
            break
    assert messages == [long]
    launcher.send({"end": 0})
    assert heard(agent) == [{"end": 0}]


def test_the_timeout_of_a_silent_peer_excludes_idle_time(pipes):
    launcher, agent, clock = pipes
    for _ in range(20):
        clock.now_s += BEAT_EVERY_S
        agent.turn()
        launcher.turn()
    assert launcher.lost == ""
    clock.now_s += 100
    launcher.turn()
    assert launcher.lost == ""
    for _ in range(int(SILENT_S) + 1):
        clock.now_s += BEAT_EVERY_S
        launcher.turn()
    assert launcher.lost == "no message for 8 s"


@pytest.mark.parametrize("line", [b"\xff{", b"[" * 100_000, b"7"])
def test_an_invalid_message_ends_the_connection(line, pipes):
    launcher, agent, _ = pipes
    os.set_blocking(agent._write_fd, True)
    agent.greet()
    rest = line + b"\n"
    while rest and not launcher.lost:
        rest = rest[os.write(agent._write_fd, rest[:4096]) :]
        launcher.turn()
    assert launcher.lost == "received an invalid message"


def test_the_end_of_the_other_side_is_seen(pipes):
    launcher, agent, _ = pipes
    os.close(agent._write_fd)
    assert heard(launcher) == []
    assert launcher.lost == "the connection was closed"


class FakeAgent:
    def __init__(self):
        self.lost, self.incoming, self.sent, self.ending = "", [], [], ("it ended", "")
        self.fd = os.eventfd(0)

    def filenos(self):
        return (self.fd,)

    def turn(self):
        """Nothing."""

    def joined(self):
        """Nothing."""

    def send(self, message):
        self.sent.append(message)
        if "end" in message:
            self.lost = "ended"

    def take_messages(self):
        taken, self.incoming = self.incoming, []
        return taken

    def close(self):
        os.close(self.fd)
        return self.ending


@pytest.fixture
def world(monkeypatch):
    clock, agents, said = Clock(), [], []
    monkeypatch.setattr("tfdist.launch.multihost.agents.time", Mock(monotonic=clock))

    def start(rank):
        agents.append(FakeAgent())
        return agents[-1]

    hub = Hub({1: "b"}, start, terms={"keras": "3"}, say=said.append)
    hub.turn()
    yield hub, agents, clock, said
    hub.end({"end": 0})


def news(hub, agent=None, *messages):
    if agent is not None:
        agent.incoming += messages
    hub.turn()
    return hub.take_news()


HELLO = {"hello": "10.0.0.2", "terms": {"keras": "3"}}


def test_a_lost_agent_is_reported_and_started_again(world):
    hub, agents, clock, _ = world
    assert news(hub, agents[0], HELLO, {"ready": [1]}) == [(1, {"ready": [1]})]
    assert (hub.present, hub.address_of(1)) == ({1}, "10.0.0.2")
    agents[0].lost = "closed"
    assert news(hub) == [(1, "it ended")]
    assert (hub.present, hub.turned_away) == (set(), ("b: it ended",))
    assert len(agents) == 1
    clock.now_s += 0.5
    assert news(hub) == []
    assert news(hub, agents[1], HELLO) == []
    assert hub.present == {1}


def test_a_differing_agent_is_refused_without_a_restart(world):
    hub, agents, clock, _ = world
    there = {**HELLO, "terms": {"keras": "2"}}
    ((rank, refused),) = news(hub, agents[0], there)
    assert rank == 1
    assert str(refused).startswith("b: it differs from the launcher's host: keras 2 there, 3 here.")
    assert agents[0].sent == [{"end": 2}]
    clock.now_s += 100
    assert news(hub) == []
    assert len(agents) == 1


def test_refusals_of_agents_and_shells_have_a_fix(world):
    hub, agents, clock, said = world
    agents[0].lost, agents[0].ending = "closed", ("no route", "")
    assert news(hub) == []
    assert said == ["b: no route; retrying"]
    clock.now_s += 1
    hub.turn()
    agents[1].lost, agents[1].ending = "closed", ("Permission denied", "add a key")
    ((_, first),) = news(hub)
    assert str(first).startswith("b: cannot start an agent: Permission denied. ")
    assert str(first).endswith("Fix: add a key")


def test_a_lock_file_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    lock = partial(lock_host, "run", "a", within_s=1.0, pipe=Mock(lost=False))
    os.close(lock())
    (path,) = tmp_path.iterdir()
    with monkeypatch.context() as other:
        other.setattr(os, "fstat", lambda fd: Mock(st_mode=stat.S_IFREG, st_uid=-1, st_nlink=1))
        assert refused(lock) == (str(path), "not-writable")
    kept = tmp_path / "kept"
    kept.write_text("text")
    for link in (path.symlink_to, path.hardlink_to):
        path.unlink()
        link(kept)
        assert refused(lock) == (str(path), "not-writable")
    path.unlink()
    os.mkfifo(path)
    assert refused(lock) == (str(path), "not-writable")
    assert kept.read_text() == "text"
