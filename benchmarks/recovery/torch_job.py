"""The job that torchrun starts: DDP on gloo with a checkpoint written by hand.

Like `tests/chaos/job.py`: a small convolution with BatchNormalization and Dropout, Adam, a learning
rate that falls with each epoch, random crops and flips, batches of 24 over all ranks, a checkpoint
every 6 steps and at each epoch's end, validation after each epoch.

What a careful user writes, and this script does:

- rank 0 writes model, optimizer, scheduler, epoch, step and the losses so far with `torch.save`
  beside the file, fsyncs, and renames; all ranks wait for that at a barrier;
- at the start every rank loads that file if it is there;
- the order is that of `DistributedSampler` with `set_epoch`; a run that goes on inside an epoch
  takes the sampler's indices and leaves out the batches that are done, without loading them;
- `torch.manual_seed(seed + rank)` at the start of the program.

With ``--random_states`` it does what few do besides: each rank writes the states of its random
number generators for that step into a file of its own, and goes on with them. The checkpoint names
the step, so that a rank's file of another step is not taken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "chaos"))
from marks import Marks

SEED, BATCH, EVERY_STEPS = 11, 24, 6


def main() -> None:
    args = _arguments()
    rank = int(os.environ["RANK"])
    start, restart = os.environ["CHAOS_START"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    marks = Marks(args.out, task=f"worker-{rank}", attempt=1000 * int(start) + int(restart))
    marks.write("program")
    import torch
    import torch.distributed as dist

    marks.write("imported")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    marks.write("joined")
    args.checkpoints.mkdir(exist_ok=True)
    run = Run(args, marks=marks, rank=rank)
    run.train()
    sha = run.weights_sha256()
    if rank == 0:
        verdict = {"weights_sha256": sha, "optimizer_sha256": run.optimizer_sha256()}
        beside = args.out / "verdict.unfinished"
        beside.write_text(json.dumps({**verdict, "losses": [repr(v) for v in run.losses]}))
        os.replace(beside, args.out / "verdict.json")
    # Running statistics are each rank's own under DDP; rank 0's are the job's result.
    if rank == 0:
        marks.write("done", weights_sha256=sha)
    dist.barrier()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--random_states", action="store_true")
    return parser.parse_args()


class Run:
    """One rank's part of the training."""

    def __init__(self, args: argparse.Namespace, *, marks: Marks, rank: int) -> None:
        import torch
        from torch import nn

        torch.manual_seed(SEED + rank)
        self._args, self._marks, self._rank = args, marks, rank
        self._file = args.checkpoints / "checkpoint.pt"
        self._model = nn.parallel.DistributedDataParallel(_model())
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=3e-3)
        self._scheduler = torch.optim.lr_scheduler.ExponentialLR(self._optimizer, 0.95)
        self._loss = nn.CrossEntropyLoss()
        (self._x, self._y), self._validation = _data()
        self._epoch = self._step = 0
        self._begun = False
        self.losses: list[float] = []
        self._load()

    def train(self) -> None:
        """Runs the epochs from where the checkpoint stands."""
        import torch
        from torch.utils.data import DistributedSampler

        own_batch = BATCH // torch.distributed.get_world_size()
        sampler = DistributedSampler(range(len(self._x)), seed=SEED)
        for epoch in range(self._epoch, self._args.epochs):
            sampler.set_epoch(epoch)
            batches = torch.tensor(list(sampler)).split(own_batch)
            for batch in batches[self._step :]:
                self._train_step(batch)
                if self._step % EVERY_STEPS == 0 and self._step < len(batches):
                    self._save()
            self._scheduler.step()
            self.losses.append(self._validate())
            self._epoch, self._step = epoch + 1, 0
            self._save()

    def weights_sha256(self) -> str:
        """Returns SHA-256 over the model's parameters and buffers in order."""
        return _sha256(self._model.module.state_dict().values())

    def optimizer_sha256(self) -> str:
        """Returns SHA-256 over the optimizer's tensors in order."""
        states = self._optimizer.state_dict()["state"]
        return _sha256(v for state in states.values() for v in state.values())

    def _train_step(self, batch: Any) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        value = self._loss(self._model(_augmented(self._x[batch])), self._y[batch])
        value.backward()
        self._optimizer.step()
        self._step += 1
        # As many marks as the other job makes: about one for six steps.
        if not self._begun or self._step % EVERY_STEPS == 0:
            event = "range" if self._begun else "first_step"
            self._marks.write(event, step=self._epoch * 21 + self._step)
            self._begun = True

    def _validate(self) -> float:
        import torch

        self._model.eval()
        with torch.no_grad():
            x, y = self._validation
            loss = float(self._loss(self._model.module(x), y))
        self._model.train()
        return loss

    def _save(self) -> None:
        import torch

        stamp = f"{self._epoch}-{self._step}"
        if self._args.random_states:
            state = {"stamp": stamp, "torch": torch.get_rng_state()}
            _write(self._file.with_name(f"random-{self._rank}.{stamp}.pt"), state)
            torch.distributed.barrier()
        if self._rank == 0:
            state = {
                "model": self._model.module.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "scheduler": self._scheduler.state_dict(),
                "epoch": self._epoch,
                "step": self._step,
                "losses": self.losses,
            }
            _write(self._file, state)
            for old in self._file.parent.glob("random-*.pt"):
                if f".{stamp}." not in old.name:
                    old.unlink()
        torch.distributed.barrier()

    def _load(self) -> None:
        import torch

        began_s = time.monotonic()
        if not self._file.exists():
            return
        state = torch.load(self._file)
        self._marks.write("read", took_s=time.monotonic() - began_s)
        began_s = time.monotonic()
        self._model.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self._epoch, self._step, self.losses = state["epoch"], state["step"], state["losses"]
        if self._args.random_states:
            stamp = f"{self._epoch}-{self._step}"
            own = torch.load(self._file.with_name(f"random-{self._rank}.{stamp}.pt"))
            torch.set_rng_state(own["torch"])
        self._marks.write("restored", took_s=time.monotonic() - began_s)


def _model() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.BatchNorm2d(6), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(6 * 6 * 6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4),
    )  # fmt: skip


def _data() -> Any:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn((700, 1, 8, 8), generator=generator)
    means = x[:, 0, :4, :4].mean((1, 2)), x[:, 0, 4:, 4:].mean((1, 2))
    y = (means[0] > 0).long() * 2 + (means[1] > 0).long()
    return (x[:500], y[:500]), (x[500:], y[500:])


def _augmented(images: Any) -> Any:
    """Crops at random places out of padded images, and flips half of them."""
    import torch

    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    tops, lefts = torch.randint(3, (2, len(images))).tolist()
    flips = torch.rand(len(images)).lt(0.5).tolist()
    places = zip(padded, tops, lefts, strict=True)
    crops = [p[:, t : t + 8, c : c + 8] for p, t, c in places]
    return torch.stack([c.flip(-1) if f else c for c, f in zip(crops, flips, strict=True)])


def _write(file: Path, state: Any) -> None:
    import torch

    beside = file.with_suffix(".unfinished")
    with open(beside, "wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, file)


def _sha256(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
