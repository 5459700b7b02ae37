"""Three replicas of torchft on gloo train the CNN, and one is killed; see `benchmarks.elastic`.

Each kill is a job of its own. The examples of a step that is not committed are lost. The replicas
call `Manager.allreduce` for each gradient. The survivors of a kill exit in torchft 0.2.0's
DistributedDataParallel on gloo, with an AssertionError (``ddp.py``, line 76).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness

BATCH, REPLICAS, VICTIM, WARM_STEPS, KILLS = 120, 3, 2, 10, 3
# Milliseconds of the lighthouse, and seconds of an operation. The first side has the defaults of
# the command torchft_lighthouse.
TIMEOUTS = {
    "defaults": ({"join_timeout_ms": 60_000, "heartbeat_timeout_ms": 5_000}, 60),
    "heartbeat timeout of 1 s": ({"join_timeout_ms": 60_000, "heartbeat_timeout_ms": 1_000}, 60),
}
PATIENCE_S = 70.0


def train(replica: int, notes: Path, timeout_s: int) -> None:
    """Train as one replica group of one process, and note each step until the parent kills it."""
    import models
    import torch
    import torchft
    from multiworker_cnn import torch_cnn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    net = torch_cnn()
    sgd = torch.optim.SGD(net.parameters(), lr=models.LEARNING_RATE, momentum=models.MOMENTUM)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        sgd.load_state_dict(state["sgd"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=timeout_s)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=timeout_s),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica_{replica}",
    )
    optimizer = torchft.Optimizer(manager, sgd)
    pixels, labels = (torch.from_numpy(array) for array in models.images(BATCH))
    own = slice(replica * BATCH // REPLICAS, (replica + 1) * BATCH // REPLICAS)
    x, y = pixels.permute(0, 3, 1, 2).contiguous()[own], labels[own]
    loss = torch.nn.CrossEntropyLoss()
    with (notes / str(replica)).open("w", buffering=1) as file:
        while True:
            before = manager.current_step()
            optimizer.zero_grad()
            loss(net(x), y).backward()
            for work in [manager.allreduce(each.grad) for each in net.parameters()]:
                work.wait()
            optimizer.step()
            is_committed = int(manager.current_step() > before)
            file.write(f"{is_committed} {manager.num_participants()} {time.monotonic()}\n")


def measure(side: str) -> None:
    """Kill a replica of a new job, and print the survivors' next step and the lost examples."""
    from torchft.coordination import LighthouseServer

    options, timeout_s = TIMEOUTS[side]
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS - 1, **options)
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    with tempfile.TemporaryDirectory() as scratch:
        notes = Path(scratch)
        command = [sys.executable, __file__, "--notes", scratch, "--timeout_s", str(timeout_s)]
        jobs = [
            subprocess.Popen([*command, "--replica", str(replica)], env=environ)
            for replica in range(REPLICAS)
        ]
        try:
            _wait(lambda: sum(n == REPLICAS for _, n, _ in _read(notes, 0)) >= WARM_STEPS)
            jobs[VICTIM].send_signal(signal.SIGKILL)
            killed_s = time.monotonic()
            committed_s = _wait(
                lambda: [t for ok, n, t in _read(notes, 0) if ok and n < REPLICAS and t > killed_s]
            )[0]
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        lost = sum(not ok for each in (0, 1) for ok, _, t in _read(notes, each) if t > killed_s)
    # The killed replica's part of the first step without it is lost, too.
    harness.emit(
        "elastic",
        f"torchft, {side}",
        next_s=committed_s - killed_s,
        lost_examples=(lost + 1) * BATCH // REPLICAS,
    )
    lighthouse.shutdown()


def _read(notes: Path, replica: int) -> list[tuple[int, int, float]]:
    file = notes / str(replica)
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(int(ok), int(size), float(at_s)) for ok, size, at_s in lines]


def _wait(until: Any) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := until()):
        if time.monotonic() > deadline_s:
            raise TimeoutError("torchft's replicas make no progress")
        time.sleep(0.01)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=list(TIMEOUTS))
    parser.add_argument("--replica", type=int)
    parser.add_argument("--notes", type=Path)
    parser.add_argument("--timeout_s", type=int)
    args = parser.parse_args()
    if args.replica is not None:
        train(args.replica, args.notes, args.timeout_s)
    for _ in range(KILLS):
        measure(args.side)


if __name__ == "__main__":
    main()
