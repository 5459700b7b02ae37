"""The chief of a sweep, and 500 simulated runners that all ask it for a trial at the same moment.

``--steps N`` has N runners come instead.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import secrets
import selectors
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import harness
import row

from tfdist.launch.multihost.agreement import TOKEN_VARIABLE
from tfdist.launch.multihost.rendezvous import Channel
from tfdist.tuning import protocol
from tfdist.tuning.config_sweep import program_of
from tfdist.tuning.options import SweepOptions, parse
from tfdist.tuning.protocol import sweep_address_of
from tfdist.tuning.trial_job import Completed

NAME = "sweep_chief"
RUNNERS = 500
DEADLINE_S = 400.0


class Runner:
    """A runner that asks once, and says of the trial that it gets that it has ended."""

    def __init__(self, rank: int, address: tuple[str, int], *, token: bytes) -> None:
        sock = socket.create_connection(address)
        self.channel = Channel(sock, token, accepts=False, clock=time.monotonic)
        self.rank = rank
        self.has_come = self.is_in = self.is_done = False
        self.asked_s = self.served_s = 0.0
        self.trial = ""
        self._ended: protocol.Message = {}

    def read(self, terms: dict[str, str]) -> None:
        """Takes in what the chief says, and keeps the moment at which it gives a trial."""
        try:
            heard = self.channel.read()
        except ConnectionError:
            self.is_done = True
            return
        if self.channel.is_open and not self.has_come:
            self.has_come = True
            self.channel.send({"hello": {"rank": self.rank, "terms": terms}})
        for message in heard:
            self.is_in |= "sweep" in message
            self.is_done |= "end" in message
            if "run" in message:
                self.served_s = time.perf_counter()
                told = message["run"]
                self.trial = told["trial"]
                metrics = {"virtual_epoch": 1, "val_accuracy": 0.5}
                done = Completed(history=(metrics,), score=0.5, best_virtual_epoch=1)
                outcome = protocol.encode_outcome(done)
                self._ended = {"lease": [told["trial"], told["lease"]], "outcome": outcome}

    def ask(self) -> None:
        self.asked_s = time.perf_counter()
        name = f"simulated:{self.rank}"
        self.channel.send({"runner": {"name": name, "slots": 1, "holds": []}})

    def end(self) -> None:
        self.channel.send({"ended": self._ended})


def measure(side: str, args: argparse.Namespace) -> None:
    """Times each runner from its question to its trial."""
    count = args.steps or RUNNERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * count)), hard))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with tempfile.TemporaryDirectory() as scratch:
        flags = [
            *("--config", str(harness.ROOT / "configs" / "digits_sweep.py")),
            *("--max_trials", str(count), "--seed", "1", "--parallel_trials", "0"),
            *("--serve", f"127.0.0.1:{address[1]}", "--sweep_dir", scratch),
        ]
        path = f"{harness.ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        environ = {**os.environ, TOKEN_VARIABLE: secrets.token_hex(16), "PYTHONPATH": path}
        with open(Path(scratch).with_suffix(".log"), "w") as log:
            chief = subprocess.Popen(
                [harness.PROJECT_PYTHON, "-m", "tfdist.tune", *flags],
                env=environ,
                stdout=log,
                stderr=log,
            )
        try:
            runners = _run(count, flags, environ, address)
            if chief.wait(DEADLINE_S):
                raise harness.MeasurementError(Path(log.name).read_text()[-2000:])
        finally:
            chief.kill()
            chief.wait()
            os.unlink(log.name)
    if len({runner.trial for runner in runners}) != count:
        raise harness.MeasurementError("not each runner had a trial of its own")
    waited = sorted(runner.served_s - runner.asked_s for runner in runners)
    harness.emit(
        NAME,
        side,
        runners=count,
        p50_s=statistics.median(waited),
        p99_s=waited[int(0.99 * count) - 1],
        max_s=waited[-1],
    )


def _run(
    count: int, flags: list[str], environ: dict[str, str], address: tuple[str, int]
) -> list[Runner]:
    """Has all come, then ask at once, then end their trials; returns when the sweep is over."""
    options = parse(flags)
    assert isinstance(options, SweepOptions)
    sweep_address = sweep_address_of(options, program_of(options), environ)
    assert sweep_address is not None
    runners = [_come(number, address, sweep_address.token) for number in range(1, count + 1)]
    with selectors.EpollSelector() as selector:
        crowd = Crowd(runners, selector, terms=dict(sweep_address.terms))
        while not all(one.is_in for one in runners):
            crowd.turn()
        for one in runners:
            one.ask()
        while not all(one.trial for one in runners):
            crowd.turn()
        for one in runners:
            one.end()
        while not all(one.is_done for one in runners):
            crowd.turn()
    return runners


class Crowd:
    """All runners, which read what comes and show each second that they live."""

    def __init__(
        self, runners: list[Runner], selector: selectors.EpollSelector, *, terms: dict[str, str]
    ) -> None:
        self._selector = selector
        self._of_fd = {selector.register(r.channel, selectors.EVENT_READ).fd: r for r in runners}
        self._terms = terms
        self._beat_s = time.monotonic()

    def turn(self) -> None:
        for key, _ in self._selector.select(0.5):
            runner = self._of_fd[key.fd]
            runner.read(self._terms)
            if runner.is_done:
                self._selector.unregister(runner.channel)
                del self._of_fd[key.fd]
        if time.monotonic() - self._beat_s > 1.0:
            self._beat_s = time.monotonic()
            for runner in self._of_fd.values():
                runner.channel.beat()


def _come(rank: int, address: tuple[str, int], token: bytes) -> Runner:
    end_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return Runner(rank, address, token=token)
        except ConnectionRefusedError:  # the chief imports
            if time.monotonic() > end_s:
                raise
            time.sleep(0.2)


ROW = row.Row(
    name=NAME,
    title=f"sweep on several hosts: {RUNNERS} runners ask the chief for a trial at once",
    sides={
        "chief": functools.partial(row.script, f"{NAME}.py", "chief", timeout_s=DEADLINE_S + 60)
    },
    claims=(
        row.Claim(
            what="seconds from the question to the trial, 99 of 100 runners",
            value=lambda pair: row.figure(pair, "chief", "p99_s"),
            target=1.0,
            at_least=False,
            unit="s",
            expected="0.6: an answer of KerasTuner and two lines of the journal take a "
            "millisecond, and the disk is waited for once",
        ),
        row.Claim(
            what="the same, half of the runners",
            value=lambda pair: row.figure(pair, "chief", "p50_s"),
            target=None,
            at_least=False,
            unit="s",
            expected="0.5: nearly all are answered together",
        ),
    ),
    notes="The chief is `tfdist.tune` with random search and no trial of its own; the runners are "
    "connections of one other process on the same cores. Nothing is trained or pinned.",
)


if __name__ == "__main__":
    row.main(ROW, {side: functools.partial(measure, side) for side in ("chief",)})
