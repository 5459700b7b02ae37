"""Leases, fencing and the guard, with a clock that is turned by hand; and many runners at once."""

import inspect
import itertools
import os
import re
import shutil
import signal
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.processes import python, until
from tests.refusals import refused
from tests.unit.sweep_world import Disk, FakeRunner, FakeSearch, sweep_of
from tfdist.errors import TfdistError, UsageError
from tfdist.launch.multihost.rendezvous import (
    Link,
    Lost,
    MessageReceived,
    News,
    PeerJoined,
    listen,
)
from tfdist.outputs.sweep_journal import Journal, Slot
from tfdist.tuning import directory, guard, protocol
from tfdist.tuning.chief import Chief
from tfdist.tuning.guard import KILL_AFTER_S, SAVE_AFTER_S, LeaseGuard
from tfdist.tuning.options import RunOptions, SweepOptions, parse
from tfdist.tuning.protocol import (
    LEASE_S,
    Message,
    SweepAddress,
    apply_tf_config,
    listener_of,
    sweep_address_of,
)
from tfdist.tuning.remote_runner import ChiefClient, RemoteRunner
from tfdist.tuning.runner import TrialProgram
from tfdist.tuning.serving import RunnerServer, ServingRunner
from tfdist.tuning.trial_job import Completed, Failed, Goal, Killed, Outcome, TrialJob

A, B = 11, 22
DONE = Completed(history=({"virtual_epoch": 1, "loss": 0.5},), score=0.5, best_virtual_epoch=1)
TOKEN = b"correct horse battery staple"
TERMS = {"tfdist": "1"}
DEADLINE_S = 200.0
OWNERSHIP = directory.Ownership(sweep="s", address="a:1")
GREETING = {"sweep": "s"}


# --- the guard


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


# --- messages


def test_a_trial_and_its_outcomes_are_the_same_on_the_other_side():
    for goal in (
        Goal(objective="loss", direction="min", until=3, medians=(None, 0.25)),
        Goal(objective="loss", direction="min"),
    ):
        job = TrialJob(run_dir=Path("trials/0"), flags=("--config.x=1",), goal=goal)
        sent = protocol.decode_job(_sent(protocol.encode_job(job)), sweep_dir=Path())
        assert sent == job
    outcomes: list[Outcome] = [
        DONE,
        Failed(reason="no", last_lines=("a", "b")),
        Killed(reason="gone", counts=False),
    ]
    for outcome in outcomes:
        assert protocol.decode_outcome(_sent(protocol.encode_outcome(outcome))) == outcome


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": ["--program=evil.py"]},
        {"variables": {"PATH": "/evil"}},
        *({"run": run} for run in ("", ".", "../evil")),
    ],
)
def test_a_trial_that_would_run_anything_else_ends_the_runner(tmp_path, changes):
    goal, variables = Goal(objective="loss", direction="min"), {"WANDB_RUN_GROUP": "g"}
    job = TrialJob(run_dir=tmp_path / "trials" / "0", flags=(), goal=goal, variables=variables)
    message = protocol.encode_job(job)
    assert protocol.decode_job(message, sweep_dir=tmp_path) == job
    with pytest.raises(TfdistError, match="what is no trial of this sweep"):
        protocol.decode_job({**message, **changes}, sweep_dir=tmp_path)


def _sent(message: Message) -> Any:
    there, here = Link(b"t", accepts=True), Link(b"t", accepts=False)
    for _ in range(2):
        for one, other in ((there, here), (here, there)):
            data, one.outgoing = bytes(one.outgoing), bytearray()
            other.receive(data)
    there.send(message)
    return here.receive(bytes(there.outgoing))[0]


# --- the chief's side


class FakeLine:
    """What runners say, as a test puts it, and what they are told."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self.sent: list[tuple[int, Message]] = []
        self._fd = os.eventfd(0)

    def fileno(self) -> int:
        return self._fd

    def take_news(self) -> list[News]:
        news, self.news = self.news, []
        return news

    def send(self, rank: int, message: Message) -> None:
        self.sent.append((rank, message))

    def take_sent(self) -> list[tuple[int, Message]]:
        sent, self.sent = self.sent, []
        return sent

    def close(self) -> None:
        os.close(self._fd)


class Served:
    """A serving runner with a clock and a line of the test's own, and no place here."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.line = FakeLine()
        here = FakeRunner(Disk(), 0)
        self.runner = ServingRunner(here, self.line, ownership=OWNERSHIP, clock=lambda: self.now_s)

    def hear(self, *news: News) -> list[tuple[int, Message]]:
        """Takes in news; returns what is said to the runners upon it."""
        self.line.news += news
        self.runner.wait([], 0.0)
        return self.line.take_sent()

    def come(self, rank: int, *holds: tuple[str, int], slots: int = 1) -> Any:
        told = {"name": f"r{rank}", "slots": slots, "holds": [list(one) for one in holds]}
        return self.hear(
            PeerJoined(rank=rank), MessageReceived(rank=rank, message={"runner": told})
        )

    def job(self, trial: str, lease: int, *, runner: int = A) -> TrialJob:
        goal = Goal(objective="loss", direction="min")
        run_dir = Path("trials") / trial
        return TrialJob(
            run_dir=run_dir,
            flags=(),
            goal=goal,
            trial=trial,
            lease=lease,
            slot=Slot(number=0, runner=runner),
        )

    def ended(self, rank: int, lease: tuple[str, int], outcome: Outcome = DONE) -> Any:
        told = {"lease": list(lease), "outcome": protocol.encode_outcome(outcome)}
        return self.hear(MessageReceived(rank=rank, message={"ended": told}))


def test_a_runner_is_given_trials_for_its_places_until_it_leaves():
    served = Served()
    assert list(served.runner.free_slots(set())) == []
    assert served.come(A, slots=2) == [(A, GREETING)]
    served.come(B)
    free = list(served.runner.free_slots(set()))
    one_each = [Slot(number=0, runner=A), Slot(number=0, runner=B)]
    assert free == [*one_each, Slot(number=1, runner=A)]
    assert list(served.runner.free_slots({free[0], free[2]})) == [free[1]]
    served.hear(MessageReceived(rank=B, message={"leaving": True}))
    served.hear(Lost(rank=A, cause="reset", heard_s=served.now_s))
    assert list(served.runner.free_slots(set())) == []


def test_a_late_report_under_a_lost_lease_does_not_count():
    served = Served()
    served.come(A)
    served.come(B)
    lost = served.runner.start(served.job("0", 1))
    served.hear(Lost(rank=A, cause="no word", heard_s=served.now_s))
    served.now_s += LEASE_S - 0.1
    served.hear()
    assert lost.poll() is None
    served.now_s += 0.2
    served.hear()
    assert lost.poll() == Killed(reason=f"runner r{A} was not heard of for 10 s")
    again = served.runner.start(served.job("0", 2, runner=B))
    served.hear()
    said = served.come(A, ("0", 1))
    assert said == [(A, GREETING), (A, {"drop": ["0", 1]})]
    worse = Completed(history=(), score=0.9, best_virtual_epoch=1)
    assert served.ended(A, ("0", 1), worse) == [(A, {"drop": ["0", 1]})]
    assert served.ended(A, ("0", 2), worse) == [(A, {"drop": ["0", 2]})], "not its own number"
    assert again.poll() is None
    served.ended(B, ("0", 2))
    assert again.poll() == DONE


def test_a_runner_that_has_a_trial_again_may_not_report_by_its_lease_before():
    served = Served()
    served.come(A)
    served.runner.start(served.job("0", 1))
    served.hear(Lost(rank=A, cause="no word", heard_s=served.now_s))
    served.now_s += LEASE_S + 0.1
    served.come(A)
    again = served.runner.start(served.job("0", 2))
    served.hear()
    assert served.ended(A, ("0", 1)) == [(A, {"drop": ["0", 1]})]
    assert again.poll() is None
    served.ended(A, ("0", 2))
    assert again.poll() == DONE


def test_a_runner_that_is_back_keeps_its_trial_while_the_chief_thinks():
    """An answer of the search takes longer than a lease, in which nobody is asked what he holds."""
    served = Served()
    kept = served.runner.take_over(served.job("0", 3))
    lost = served.runner.take_over(served.job("1", 1, runner=B))
    served.now_s += LEASE_S + 5.0
    assert served.hear(PeerJoined(rank=A), PeerJoined(rank=B)) == [(A, GREETING), (B, GREETING)]
    assert (kept.poll(), lost.poll()) == (None, None)
    told = {"name": "a", "slots": 1, "holds": [["0", 3]]}
    assert served.hear(MessageReceived(rank=A, message={"runner": told})) == []
    served.hear(Lost(rank=B, cause="reset", heard_s=served.now_s))
    served.now_s += LEASE_S
    served.hear()
    assert isinstance(lost.poll(), Killed)
    served.ended(A, ("0", 3))
    assert kept.poll() == DONE


def test_a_trial_that_is_to_stop_while_its_runner_is_away_is_stopped_when_it_is_back():
    served = Served()
    served.come(A)
    trial = served.runner.start(served.job("0", 1))
    served.hear(Lost(rank=A, cause="reset", heard_s=served.now_s))
    trial.stop()
    served.line.take_sent()
    assert (A, {"stop": ["0", 1]}) in served.come(A, ("0", 1))


# --- how they meet


def _config_flags(*flags: str) -> SweepOptions:
    options = parse(["--config", "c.py", *flags])
    assert isinstance(options, SweepOptions)
    return options


def test_tf_config_says_who_serves_and_who_joins():
    cluster = '{"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, "task": %s}'

    def of(type_: str, *flags: str) -> tuple[SweepOptions, dict[str, str]]:
        told = cluster % f'{{"type": "{type_}", "index": 0}}'
        return apply_tf_config(_config_flags(*flags), {"TF_CONFIG": told, "HOME": "/"})

    chief, environ = of("chief")
    assert (chief.serve, chief.join, environ) == ("a:1", None, {"HOME": "/"})
    worker, environ = of("worker")
    assert (worker.serve, worker.join, environ) == (None, "a:1", {"HOME": "/"})
    assert of("worker", "--join", "d:4")[0].join == "d:4"
    alone = apply_tf_config(_config_flags(), {"HOME": "/"})
    assert (alone[0].serve, alone[0].join) == (None, None)
    ps = '{"cluster": {"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}, "task": %s}'
    environ = {"TF_CONFIG": ps % '{"type": "ps", "index": 0}'}
    assert refused(lambda: apply_tf_config(_config_flags(), environ))[1] == "no-part-in-a-sweep"


def test_an_address_that_is_not_of_this_machine_or_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=rf"^--serve: received {address} \(Address already"):
            listener_of(address)
    assert refused(lambda: listener_of("192.0.2.1:2")) == ("--serve", "port-taken")
    assert refused(lambda: listener_of("0.0.0.0:2")) == ("--serve", "unreachable")


def test_a_token_is_needed_on_one_machine_too_and_is_in_no_terms(tmp_path):
    options = RunOptions(sweep_dir=tmp_path, serve="127.0.0.1:2")

    def meet(environ: dict[str, str]) -> SweepAddress | None:
        program = TrialProgram(command=(), name="p", file=__file__, args=("--x=1",))
        return sweep_address_of(options, program, environ)

    assert refused(lambda: meet({}))[0] == "TFDIST_RENDEZVOUS_TOKEN"
    sweep_address = meet({"TFDIST_RENDEZVOUS_TOKEN": TOKEN.decode(), "TF_X": "1"})
    assert sweep_address is not None
    assert sweep_address.token == TOKEN
    assert sweep_address.terms["argument 1"] == "--x=1"
    assert sweep_address.terms["TF_X"] == "1"
    assert TOKEN.decode() not in str(sweep_address)


def test_the_ownership_file_is_its_chiefs_and_a_copy_made_before_is_refused(tmp_path):
    here, copy = tmp_path / "here", tmp_path / "copy"
    here.mkdir()
    assert directory.read_ownership(here) is None
    directory.write_ownership(here, address="a:1")
    shutil.copytree(here, copy)  # as a backup has it
    now = directory.write_ownership(here, address="b:2")
    assert directory.read_ownership(here) == now
    assert now.address == "b:2"

    def client(path: Path) -> ChiefClient:
        sweep_address = SweepAddress(address="a:1", token=TOKEN, terms=TERMS)
        return ChiefClient(sweep_address, sweep_dir=path, renew=lambda at_s: None)

    assert refused(lambda: client(copy)._check(now.sweep)) == ("--sweep_dir", "not-shared")
    client(here)._check(now.sweep)
    (here / directory.OWNERSHIP).write_text("{")
    assert refused(lambda: client(here)._check(now.sweep)) == ("--sweep_dir", "not-shared")


def test_the_runner_and_its_guard_count_the_time_in_which_the_machine_sleeps(monkeypatch):
    """Another clock would let a runner that wakes up go on with what is another's by now."""
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 5.0}.__getitem__)
    assert guard.now_s() == 5.0
    assert inspect.signature(ChiefClient).parameters["clock"].default is guard.now_s


def test_a_chief_that_does_not_answer_may_be_there_and_one_that_is_refused_is_not(tmp_path):
    """Only what is known of the chief renews a lease on the runner's side."""
    renewed: list[float] = []
    now_s = itertools.count(0.0, 10.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        sweep_address = SweepAddress(address=address, token=TOKEN, terms=TERMS)
        client = ChiefClient(
            sweep_address,
            sweep_dir=tmp_path,
            renew=renewed.append,
            clock=lambda: next(now_s),
        )
        client.turn()
        assert client.why == "it does not answer"
        assert renewed == []
    client.turn()
    assert client.why == "Connection refused"
    assert len(renewed) == 1
    directory.write_ownership(tmp_path, address="127.0.0.1:1")  # it is elsewhere now
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
    said = r"127\.0\.0\.1:1: no chief of the sweep was there for \d+ s: Connection"
    assert re.search(said, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


# --- many at once

COUNT = 100


def test_runners_that_come_at_once_are_all_served_and_no_trial_is_run_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    listener = listen("127.0.0.1", 0)
    address = "{}:{}".format(*listener.getsockname())
    ownership = directory.write_ownership(tmp_path, address=address)
    line = RunnerServer(listener, token=TOKEN, terms=TERMS)
    serving = ServingRunner(FakeRunner(Disk(), 0), line, ownership=ownership)
    journal = Journal(tmp_path / "journal.jsonl", time_of_day=time.time)
    journal.add("begun", objective="loss", direction="min", tuner="random", seed=1)
    chief = Chief(
        sweep_of(tmp_path),
        search=FakeSearch([], count=2 * COUNT, ahead=COUNT),
        journal=journal,
        runner=serving,
        observer=Mock(),
    )
    disk = Disk(length=20)
    sweep_address = SweepAddress(address=address, token=TOKEN, terms=TERMS)

    def runner() -> RemoteRunner:
        return RemoteRunner(
            RunOptions(sweep_dir=tmp_path, join=address, parallel_trials=1),
            FakeRunner(disk),  # type: ignore[arg-type]
            chief=ChiefClient(sweep_address, sweep_dir=tmp_path, renew=lambda at_s: None),
            lease_guard=Mock(),
        )

    runners = [runner() for _ in range(COUNT)]

    def have_ended() -> bool:
        for one in runners:
            one.go_on()
        return all(one.exit_code == 0 for one in runners)

    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(lambda: serving.close(chief.run()))
        until(have_ended, within_s=DEADLINE_S, why=lambda: f"{len(disk.started)} were started")
        sweep.result()
    assert Counter(disk.started) == Counter(map(str, range(2 * COUNT)))
    assert disk.most_at_once == COUNT, "some were not served"
    assert {trial.status for trial in chief.state.trials.values()} == {"completed"}
    assert len(chief.state.trials) == 2 * COUNT
