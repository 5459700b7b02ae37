"""torch.distributed.pipelining, 1F1B on gloo, two stages with a core each; run by `pipeline.py`.

    python benchmarks/pipeline_torch.py '{"model": "resnet50", "batch": 120, "size": 12}' SOCKET

Rank 0 runs a step for each line on the socket and answers with its seconds. It cuts the model where
the slower of the two stages is as fast as it can be, by times that it measures of the model's units
at the size of a micro-batch, in the memory format in which the whole is faster.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import harness

RANKS = 2
ROUNDS = 3


def main() -> None:
    request, path = json.loads(sys.argv[1]), sys.argv[2]
    if "rank" in request:
        train(request, path)
        return
    with tempfile.TemporaryDirectory() as scratch:
        found = {**request, "store": f"{scratch}/store"}
        ranks = [
            subprocess.Popen([sys.executable, __file__, json.dumps({**found, "rank": rank}), path])
            for rank in range(RANKS)
        ]
        codes = [rank.wait() for rank in ranks]
    sys.exit(max(map(abs, codes)))


def train(request: dict[str, Any], path: str) -> None:
    rank = request["rank"]
    harness.pin(rank)
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Neither may wait in vain for a step that others of the benchmark are at.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{request['store']}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(hours=1),
    )
    units, x, y = MODELS[request["model"]](request)
    size = request["size"]
    plan = [*_cut(units, x[:size])] if rank == 0 else [0, 0]
    sent = torch.tensor(plan)
    dist.broadcast(sent, src=0)
    position, last_format = map(int, sent)
    own = units[:position] if rank == 0 else units[position:]
    module = _in_format(torch.nn.Sequential(*own), channels_last=bool(last_format))
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, request["batch"] // size, loss_fn=_loss)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    lines = None
    if rank == 0:
        end = socket.socket(socket.AF_UNIX)
        end.connect(path)
        lines = end.makefile("rw")
    for _ in range(request["steps"]):
        if lines is not None and not lines.readline():
            break
        start = time.perf_counter()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
        optimizer.zero_grad()
        if lines is not None:
            seconds = time.perf_counter() - start
            lines.write(json.dumps({"seconds": seconds, "size": size}) + "\n")
            lines.flush()
    os._exit(0)  # a peer's end is no error of this one's


def _loss(outputs: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _in_format(module: Any, *, channels_last: bool) -> Any:
    """A stage whose convolutions see channels last, and whose neighbours see plain tensors."""
    import torch

    if not channels_last:
        return module
    last = torch.channels_last

    class Change(torch.autograd.Function):  # gloo takes plain tensors alone, of gradients too
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.contiguous(memory_format=last)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient.contiguous()

    class Inside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module.to(memory_format=last)

        def forward(self, x: Any) -> Any:
            return self.inner(Change.apply(x) if x.dim() == 4 else x).contiguous()

    return Inside()


def _cut(units: Sequence[Any], x: Any) -> tuple[int, int]:
    """How many units the first stage has, and whether channels go last."""
    import torch

    measured = []
    for channels_last in (False, True) if x.dim() == 4 else (False,):
        given = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        seconds = []
        for unit in units:
            one = copy.deepcopy(unit)
            if channels_last:
                one = one.to(memory_format=torch.channels_last)
            best, given = _seconds(one, given)
            seconds.append(best)
        slower = [max(sum(seconds[:k]), sum(seconds[k:])) for k in range(1, len(units))]
        measured.append((sum(seconds), slower.index(min(slower)) + 1, int(channels_last)))
    return min(measured)[1:]


def _seconds(unit: Any, x: Any) -> tuple[float, Any]:
    """The least seconds of a unit, forward and backward, and what it makes of `x`."""
    taken = []
    for _ in range(ROUNDS):
        given = x.detach().requires_grad_(x.is_floating_point())
        start = time.perf_counter()
        made = unit(given)
        made.sum().backward()
        taken.append(time.perf_counter() - start)
    return min(taken), made.detach()


def _resnet50(request: dict[str, Any]) -> tuple[list[Any], Any, Any]:
    """That of keras.applications: biases, the stride in a block's first convolution."""
    import torch
    from torch import nn

    def conv(before: int, after: int, size: int, stride: int = 1) -> list[Any]:
        norm = nn.BatchNorm2d(after, eps=1.001e-5, momentum=0.01)
        return [nn.Conv2d(before, after, size, stride, padding=size // 2), norm]

    class Block(nn.Module):
        def __init__(self, before: int, width: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(*conv(before, width, 1, stride), nn.ReLU()),
                *(*conv(width, width, 3), nn.ReLU()),
                *conv(width, 4 * width, 1),
            )
            first = before != 4 * width
            self.shortcut = (
                nn.Sequential(*conv(before, 4 * width, 1, stride)) if first else nn.Identity()
            )

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.body(x) + self.shortcut(x))

    units = [nn.Sequential(*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))]
    before = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            units.append(Block(before, width, stride if block == 0 else 1))
            before = 4 * width
    units.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000)))
    side = request["image"]
    x = torch.rand(request["batch"], 3, side, side)
    return units, x, torch.randint(0, 1000, (request["batch"],))


def _transformer(request: dict[str, Any]) -> tuple[list[Any], Any, Any]:
    """That of `pipeline_models.transformer`."""
    import pipeline_models as sizes
    import torch
    from torch import nn

    width, heads, words, length = sizes.WIDTH, sizes.HEADS, sizes.WORDS, sizes.LENGTH

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(width, eps=1e-3), nn.Linear(width, width)
            self.of = nn.Linear(width, 3 * width)

        def forward(self, x: Any) -> Any:
            parts = self.of(self.norm(x)).unflatten(-1, (3, heads, width // heads))
            query, key, value = parts.permute(2, 0, 3, 1, 4)
            found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return x + self.out(found.transpose(1, 2).flatten(2))

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(nn.LayerNorm(width, eps=1e-3), nn.Linear(width, 4 * width), nn.GELU()),
                nn.Linear(4 * width, width),
            )

        def forward(self, x: Any) -> Any:
            return x + self.body(x)

    units: list[Any] = [nn.Embedding(words, width)]
    for _ in range(sizes.BLOCKS):
        units += [Attention(), Dense()]
    units.append(nn.Sequential(nn.LayerNorm(width, eps=1e-3), nn.Linear(width, words)))
    x = torch.randint(0, words, (request["batch"], length))
    return units, x, x.roll(-1, 1)


MODELS = {"resnet50": _resnet50, "transformer": _transformer}


if __name__ == "__main__":
    main()
