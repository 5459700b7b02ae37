"""A sweep on several hosts: no trial is lost, run twice or counted twice, whoever dies or hangs."""

import inspect
import itertools
import json
import os
import re
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.processes import python, until
from tests.refusals import refused
from tests.unit.sweep_world import (
    FAILED,
    OWNERSHIP,
    READABLE,
    FakeSearch,
    Mishaps,
    Slots,
    World,
    top_of,
)
from tfdist.errors import TfdistError
from tfdist.launch.multihost.rendezvous import Lost, MessageReceived, News, PeerJoined, listen
from tfdist.outputs.sweep_journal import Journal, Slot, read
from tfdist.tuning import guard, protocol
from tfdist.tuning.chief import Chief
from tfdist.tuning.guard import KILL_AFTER_S, SAVE_AFTER_S, LeaseGuard
from tfdist.tuning.options import RunOptions, SweepOptions, parse
from tfdist.tuning.protocol import LEASE_S, SweepAddress, apply_tf_config, sweep_address_of
from tfdist.tuning.remote_runner import ChiefClient, RemoteRunner
from tfdist.tuning.serving import RunnerServer, ServingRunner
from tfdist.tuning.trial_job import Completed, Failed, Goal, Killed, TrialJob, TrialProgram

TOKEN = b"correct horse battery staple"
TERMS = {"tfdist": "1"}
DEADLINE_S = 200.0
DONE = Completed(history=(), score=0.5, best_virtual_epoch=1)
FAILS = "3"
"""A trial that raises when it is half through."""


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def hosts_of(path: Path, *, hosts: int = 2, trials: int = 5, **options: Any) -> World:
    """A world whose trials take longer than a lease."""
    options = {"slots": 0, **options}
    world = World(path, trials=trials, epochs=9, ticks=3, **options)
    half = world.epochs * world.ticks // 2
    world.fate_of = lambda run: FAILED if run == FAILS and world.done[run] >= half else None
    for _ in range(hosts):
        world.add_host()
    return world


def require_all_once(world: World, chief: Chief, *, trials: int = 5) -> None:
    """Each trial has ended once, as it was to, and no step of any was done twice."""
    lines = read(world.path / "journal.jsonl")
    names = [str(number) for number in range(trials)]
    for event in ("asked", "ended"):
        told = Counter(one["trial"] for one in lines if one["event"] == event and one["trial"])
        assert told == Counter(names), event
    for name in names:
        trial = chief.state.trials[name]
        if name == FAILS:
            assert (trial.status, trial.reason) == ("failed", FAILED.reason)
        else:
            assert (trial.status, trial.score) == ("completed", top_of(name)), trial.reason
            assert world.done[name] == world.epochs * world.ticks, f"{name} was trained on"


def once(world: World, when: Callable[[], object], then: Callable[[], object]) -> list[bool]:
    """Has something happen the first time that something holds; returns whether it has."""
    had: list[bool] = []

    def events() -> None:
        if not had and when():
            had.append(True)
            then()

    world.events = events
    return had


@pytest.mark.parametrize("how", ["before", "within", "after"])
def test_a_chief_that_dies_at_any_write_costs_its_runners_nothing(tmp_path, how):
    """The runners go on, and what ended meanwhile they keep: a failed trial fails once, too."""
    for at in range(15):
        world = hosts_of(tmp_path / str(at), seed=at)
        require_all_once(world, world.run(at=at, how=how, pause=4))
        assert world.chiefs == 2
        assert sorted(world.started) == list("01234"), f"write {at}"


@pytest.mark.parametrize("happens", ["held_up", "cut", "asleep"])
@pytest.mark.parametrize("ticks", [18, 19, 20, 21, 22, 30])
def test_a_runner_that_lives_on_and_reports_after_its_lease_is_not_heard(tmp_path, happens, ticks):
    """Around the lease's end, and long after it."""
    world = hosts_of(tmp_path, trials=2)
    had = once(
        world,
        lambda: world.done["0"] == 5 and world.started.count("0") == 1,
        lambda: setattr(world.hosts[1], happens, ticks),
    )
    require_all_once(world, world.run(), trials=2)
    assert had
    if ticks == 30:
        assert world.started.count("0") == 2, "the lease was not given to another"


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_trial_is_lost_run_twice_or_counted_twice(tmp_path, seed, monkeypatch):
    monkeypatch.setattr("tfdist.tuning.chief.KILLS_AT_MOST", 99)  # which is another test's
    world = hosts_of(tmp_path, seed=seed, slots=seed % 2)
    Mishaps(world, count=30)
    require_all_once(world, world.run(pause=60))


def test_a_runner_is_given_trials_for_its_slots_until_it_leaves(tmp_path):
    world = hosts_of(tmp_path, hosts=0)
    for slots in (2, 1):
        world.add_host(slots=slots)
    leaves, stays = world.hosts.values()
    once(world, lambda: len(world.started) == 3, lambda: leaves.runner.leave(signal.SIGTERM))
    chief = world.run()
    require_all_once(world, chief)
    first = {process.run: process.host for process in world.processes[:3]}
    assert first == {"0": leaves, "1": stays, "2": leaves}, "one of each, then what is left"
    assert {process.host for process in world.processes[3:]} == {stays}
    assert leaves.runner.code() == 143
    given_back = [trial for trial in chief.state.trials.values() if trial.starts == 2]
    assert [(trial.id, trial.kills) for trial in given_back] == [("0", 0), ("2", 0)]


class Line:
    """What two runners say to a serving chief, as a test has it, and what they are told upon it."""

    def __init__(self) -> None:
        self.now_s, self.news, self.sent = 1000.0, [], []
        self.runner = ServingRunner(
            Mock(), self, ownership=OWNERSHIP, clock=lambda: self.now_s
        )

    def fileno(self) -> int:
        return READABLE

    def take_news(self) -> list[News]:
        news, self.news = self.news, []
        return news

    def send(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))

    def hear(self, *news: News) -> list[tuple[int, Any]]:
        self.news += news
        self.sent.clear()
        self.runner.wait([], 0.0)
        return [*self.sent]

    def come(self, rank: int, *holds: tuple[str, int]) -> list[tuple[int, Any]]:
        told = {"runner": {"name": f"r{rank}", "slots": 1, "holds": [list(one) for one in holds]}}
        return self.hear(PeerJoined(rank=rank), MessageReceived(rank=rank, message=told))

    def lose(self, rank: int, *, for_s: float) -> None:
        self.hear(Lost(rank=rank, cause="no word", heard_s=self.now_s))
        self.now_s += for_s
        self.hear()

    def start(self, lease: tuple[str, int], *, rank: int) -> Any:
        goal, slot = Goal(objective="loss", direction="min"), Slot(runner=rank)
        job = TrialJob(run_dir=Path(lease[0]), flags=(), goal=goal, slot=slot, trial=lease[0])
        return self.runner.start(replace(job, lease=lease[1]))

    def ended(self, rank: int, lease: tuple[str, int], outcome: Any = DONE) -> list[Any]:
        told = {"lease": list(lease), "outcome": protocol.encode_outcome(outcome)}
        return self.hear(MessageReceived(rank=rank, message={"ended": told}))


def test_a_report_counts_under_the_lease_that_its_runner_has_and_the_first_one_alone():
    line = Line()
    for rank in (1, 2):
        assert line.come(rank) == [(rank, {"sweep": "s"})]
    lost = line.start(("0", 1), rank=1)
    line.lose(1, for_s=LEASE_S - 0.1)
    assert lost.poll() is None
    line.now_s += 0.2
    line.hear()
    assert lost.poll() == Killed(reason=f"runner r1 was not heard of for {LEASE_S:g} s")
    assert line.come(1, ("0", 1))[1:] == [(1, {"drop": ["0", 1]})]
    for rank, other in ((2, 1), (1, 2)):
        again = line.start(("0", 4 - rank), rank=rank)
        for who, lease in ((1, 1), (other, 4 - rank)):
            assert line.ended(who, ("0", lease)) == [(who, {"drop": ["0", lease]})]
        assert again.poll() is None
        line.ended(rank, ("0", 4 - rank))
        line.ended(rank, ("0", 4 - rank), FAILED)
        assert again.poll() == DONE


def test_a_trial_that_is_to_stop_while_its_runner_is_away_is_stopped_when_it_is_back():
    line = Line()
    line.come(1)
    trial = line.start(("0", 1), rank=1)
    line.lose(1, for_s=1.0)
    trial.stop()
    assert line.come(1, ("0", 1))[1:] == [(1, {"stop": ["0", 1]})]


def test_the_trials_have_ended_before_the_lease_can():
    assert SAVE_AFTER_S < KILL_AFTER_S < LEASE_S
    rule = LeaseGuard(0.0)
    rule.renew(100.0)
    assert rule.due({7}, 100.0 + SAVE_AFTER_S - 0.01) == []
    assert rule.due({7}, 100.0 + SAVE_AFTER_S) == [(7, signal.SIGTERM)]
    assert rule.due({7, 8}, 100.0 + SAVE_AFTER_S + 1) == [(8, signal.SIGTERM)]
    assert rule.due({7}, 100.0 + KILL_AFTER_S) == [(7, signal.SIGKILL)]
    rule.renew(50.0)  # what is heard late says nothing new
    assert rule.due({7}, 100.0 + KILL_AFTER_S) == [(7, signal.SIGKILL)]
    rule.renew(110.0)
    assert rule.due({9}, 110.0) == []
    assert rule.due({9}, 110.0 + SAVE_AFTER_S) == [(9, signal.SIGTERM)]


def test_the_runner_and_its_guard_count_the_time_in_which_the_machine_sleeps(monkeypatch):
    """Another clock would let a runner that wakes up go on with what is another's by now."""
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 5.0}.__getitem__)
    assert guard.now_s() == 5.0
    assert inspect.signature(ChiefClient).parameters["clock"].default is guard.now_s


# Messages, and how they meet.


def test_a_trial_is_the_same_on_the_other_side_and_one_that_would_run_anything_else_ends_it(
    tmp_path,
):
    goal = Goal(objective="loss", direction="min", until=3, medians=(None, 0.25))
    job = TrialJob(
        run_dir=tmp_path / "trials" / "0",
        flags=("--config.x=1",),
        goal=goal,
        slot=Slot(number=2),
        variables={"WANDB_RUN_GROUP": "g"},
        lease=4,
    )
    message = json.loads(json.dumps(protocol.encode_job(job)))
    assert protocol.decode_job(message, sweep_dir=tmp_path) == job
    outcome = Failed(reason="no", last_lines=("a", "b"))
    sent = json.loads(json.dumps(protocol.encode_outcome(outcome)))
    assert protocol.decode_outcome(sent) == outcome
    evil = ({"flags": ["--program=evil.py"]}, {"variables": {"PATH": "/evil"}})
    for changes in (*evil, *({"run": run} for run in ("", ".", "../evil"))):
        with pytest.raises(TfdistError, match="what is no trial of this sweep"):
            protocol.decode_job({**message, **changes}, sweep_dir=tmp_path)


def test_tf_config_says_who_serves_and_who_joins():
    cluster = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]}

    def of(kind: str, *flags: str) -> SweepOptions:
        told = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
        environ = {"TF_CONFIG": told, "HOME": "/"} if kind else {"HOME": "/"}
        options, environ = apply_tf_config(parse(["--config", "c.py", *flags]), environ)
        assert environ == {"HOME": "/"}
        return options

    assert (of("chief").serve, of("chief").join) == ("a:1", None)
    assert (of("worker").serve, of("worker").join) == (None, "a:1")
    assert of("worker", "--join", "d:4").join == "d:4"
    assert (of("").serve, of("").join) == (None, None)
    assert refused(lambda: of("ps"))[1] == "no-part-in-a-sweep"


def test_an_address_that_is_not_of_this_machine_or_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addresses = [f"127.0.0.1:{taken.getsockname()[1]}", "192.0.2.1:2", "0.0.0.0:2"]
        codes = [refused(lambda a=a: protocol.listener_of(a)) for a in addresses]
    assert codes == [("--serve", c) for c in ("port-taken", "port-taken", "unreachable")]


def test_a_token_is_needed_on_one_machine_too_and_is_in_no_terms(tmp_path):
    options = RunOptions(sweep_dir=tmp_path, serve="127.0.0.1:2")
    program = TrialProgram(command=(), name="p", file=__file__, args=("--x=1",))
    assert refused(lambda: sweep_address_of(options, program, {}))[1] == "no-token"
    environ = {"TFDIST_RENDEZVOUS_TOKEN": TOKEN.decode(), "TF_X": "1"}
    sweep_address = sweep_address_of(options, program, environ)
    assert sweep_address is not None
    assert sweep_address.token == TOKEN
    assert sweep_address.terms["argument 1"] == "--x=1"
    assert sweep_address.terms["TF_X"] == "1"
    assert TOKEN.decode() not in str(sweep_address)


def client_of(path: Path, address: str = "a:1", **options: Any) -> ChiefClient:
    sweep_address = SweepAddress(address=address, token=TOKEN, terms=TERMS)
    return ChiefClient(sweep_address, sweep_dir=path, **{"renew": lambda at_s: None, **options})


def test_the_ownership_file_is_its_chiefs_and_a_copy_made_before_is_refused(tmp_path):
    here, copy = tmp_path / "here", tmp_path / "copy"
    here.mkdir()
    assert protocol.read_ownership(here) is None
    protocol.write_ownership(here, address="a:1")
    shutil.copytree(here, copy)  # as a backup has it
    now = protocol.write_ownership(here, address="b:2")
    assert protocol.read_ownership(here) == now
    assert now.address == "b:2"
    client_of(here)._check(now.sweep)
    assert refused(lambda: client_of(copy)._check(now.sweep)) == ("--sweep_dir", "not-shared")
    (here / protocol.OWNERSHIP).write_text("{")
    assert refused(lambda: client_of(here)._check(now.sweep)) == ("--sweep_dir", "not-shared")


def test_a_chief_that_does_not_answer_may_be_there_and_one_that_is_refused_is_not(tmp_path):
    """Only what is known of the chief renews a lease on the runner's side."""
    renewed: list[float] = []
    now_s = itertools.count(0.0, 10.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client = client_of(tmp_path, address, renew=renewed.append, clock=lambda: next(now_s))
        client.turn()
        assert client.why == "it does not answer"
        assert renewed == []
    client.turn()
    assert client.why == "Connection refused"
    assert len(renewed) == 1
    protocol.write_ownership(tmp_path, address="127.0.0.1:1")  # it is elsewhere now
    client.turn()
    assert len(renewed) == 1
    assert client.address == "127.0.0.1:1"


def test_a_runner_loads_neither_tensorflow_nor_keras_tuner_and_gives_up_in_one_line():
    program = (
        "import sys; from tfdist.tune import main;"
        "code = main(['--config', 'c.py', '--join', '127.0.0.1:1', '--reconnect_s', '0.6']);"
        "heavy = {'tensorflow', 'keras', 'keras_tuner', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = python("-c", program, env={**os.environ, "TFDIST_RENDEZVOUS_TOKEN": TOKEN.decode()})
    assert done.returncode == 75, done.stderr
    said = r"127\.0\.0\.1:1: no chief of the sweep was there for \d+ s: Connection refused"
    assert re.search(said, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


COUNT = 100


def test_runners_that_come_at_once_are_all_served_and_no_trial_is_run_twice(tmp_path):
    """Over real connections."""
    listener = listen("127.0.0.1", 0)
    address = "{}:{}".format(*listener.getsockname())
    world = World(tmp_path, epochs=20)
    ownership = protocol.write_ownership(tmp_path, address=address)
    line = RunnerServer(listener, token=TOKEN, terms=TERMS)
    serving = ServingRunner(Slots(world, 0), line, ownership=ownership)
    journal = Journal(tmp_path / "journal.jsonl", time_of_day=time.time)
    journal.add("begun", objective="val_accuracy", direction="max", tuner="random", seed=1)
    search = FakeSearch(count=2 * COUNT, ahead=COUNT)
    chief = Chief(world.sweep, search=search, journal=journal, runner=serving, observer=Mock())
    options = RunOptions(sweep_dir=tmp_path, join=address)
    runners = [
        RemoteRunner(
            options, Slots(world), chief=client_of(tmp_path, address), lease_guard=Mock()
        )
        for _ in range(COUNT)
    ]

    def have_ended() -> bool:
        for one in runners:
            one.go_on()
        for process in list(world.processes):
            process.work()
        return all(one.code() == 0 for one in runners)

    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(lambda: serving.close(chief.run()))
        until(have_ended, within_s=DEADLINE_S, why=lambda: f"{len(world.started)} were started")
        sweep.result()
    assert Counter(world.started) == Counter(map(str, range(2 * COUNT)))
    assert world.most_at_once == COUNT, "some were not served"
    assert len(chief.state.completed) == 2 * COUNT
