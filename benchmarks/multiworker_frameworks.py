"""Two workers, the CNN: `tfdist.fit` beside Lightning, Accelerate and Ray Train.

The three train by torch's DistributedDataParallel on gloo; here each does it by its own loop and
loader, without logs, progress or checkpoints. Each worker has one core and one intra-op thread,
64 examples a step, float32, a new permutation each epoch, the data in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import multiworker_cnn
import row
from clock import per_second
from multiworker_cnn import BATCH, STEPS, WORKERS

NAME = "multiworker_frameworks"
MEMORY_FORMATS = ("contiguous", "channels_last")


def measure_lightning(args: argparse.Namespace) -> None:
    """One rank that torchrun has started; Lightning finds its place by itself."""
    harness.pin(int(os.environ["LOCAL_RANK"]))
    import lightning
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    torch.set_num_threads(1)

    class Cnn(lightning.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model
            self.loss = torch.nn.CrossEntropyLoss()
            self.epochs_s: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return self.loss(self.model(x), y)

        def configure_optimizers(self) -> Any:
            return _sgd(self.model)

        def on_train_epoch_start(self) -> None:
            self.start = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            self.epochs_s.append(time.perf_counter() - self.start)

    for memory_format in MEMORY_FORMATS:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=WORKERS,
            strategy=DDPStrategy(
                process_group_backend="gloo", gradient_as_bucket_view=True, static_graph=True
            ),
            max_epochs=args.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Cnn(_model(memory_format))
        trainer.fit(module, _loader(args, memory_format))
        if trainer.is_global_zero:
            _emit(args, "lightning", memory_format, module.epochs_s)


def measure_accelerate(args: argparse.Namespace) -> None:
    """One rank that torchrun has started, as `accelerate launch` does it."""
    harness.pin(int(os.environ["LOCAL_RANK"]))
    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs

    torch.set_num_threads(1)
    flags = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)
    for memory_format in MEMORY_FORMATS:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[flags])
        assert accelerator.num_processes == WORKERS
        model = _model(memory_format)
        model, optimizer, loader = accelerator.prepare(
            model, _sgd(model), _loader(args, memory_format)
        )
        epochs_s = _epochs(args, model, optimizer, loader, backward=accelerator.backward)
        if accelerator.is_main_process:
            _emit(args, "accelerate", memory_format, epochs_s)
    accelerator.end_training()


def measure_ray_train(args: argparse.Namespace) -> None:
    """The driver of Ray Train, on a Ray of this machine alone."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # which keeps it to loopback
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(
        num_cpus=WORKERS,
        object_store_memory=100 << 20,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(harness.HERE), "OMP_NUM_THREADS": "1"}},
    )
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            ray_train_loop,
            train_loop_config={"epochs": args.epochs, "steps": args.steps, "folder": folder},
            scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=folder, name="run"),
        ).fit()
        for memory_format in MEMORY_FORMATS:
            epochs_s = json.loads(Path(folder, memory_format).read_text())
            _emit(args, "ray_train", memory_format, epochs_s)
    ray.shutdown()


def ray_train_loop(config: dict[str, Any]) -> None:
    """One worker of Ray Train; the first writes the seconds of its epochs into a folder."""
    from ray import train

    rank = train.get_context().get_world_rank()
    harness.pin(rank)
    import torch
    from ray.train.torch import prepare_data_loader, prepare_model

    torch.set_num_threads(1)
    args = argparse.Namespace(epochs=config["epochs"], steps=config["steps"])
    for memory_format in MEMORY_FORMATS:
        flags = {"gradient_as_bucket_view": True, "static_graph": True}
        model = prepare_model(_model(memory_format), parallel_strategy_kwargs=flags)
        loader = prepare_data_loader(_loader(args, memory_format))
        epochs_s = _epochs(args, model, _sgd(model), loader, backward=torch.Tensor.backward)
        if rank == 0:
            Path(config["folder"], memory_format).write_text(json.dumps(epochs_s))


def _epochs(
    args: argparse.Namespace,
    model: Any,
    optimizer: Any,
    loader: Any,
    *,
    backward: Callable[[Any], None],
) -> list[float]:
    import torch

    loss = torch.nn.CrossEntropyLoss()
    epochs_s = []
    for epoch in range(args.epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            backward(loss(model(x), y))
            optimizer.step()
        epochs_s.append(time.perf_counter() - start)
    return epochs_s


def _model(memory_format: str) -> Any:
    import torch

    torch.manual_seed(0)
    return multiworker_cnn.torch_cnn().to(memory_format=_format(memory_format))


def _sgd(model: Any) -> Any:
    import models
    import torch

    return torch.optim.SGD(
        model.parameters(), lr=models.LEARNING_RATE, momentum=models.MOMENTUM, fused=True
    )


def _loader(args: argparse.Namespace, memory_format: str) -> Any:
    """Return a DataLoader whose dataset indexes a whole batch at once, the fastest that it has."""
    import models
    import torch

    pixels, labels = models.images((args.steps or STEPS) * BATCH * WORKERS)
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    x = x.contiguous(memory_format=_format(memory_format))
    y = torch.from_numpy(labels)

    class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(y)

        def __getitem__(self, index: int) -> Any:
            return x[index], y[index]

        def __getitems__(self, indices: list[int]) -> Any:
            return x[indices], y[indices]

    return torch.utils.data.DataLoader(
        Images(), batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=_as_it_is
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _format(name: str) -> Any:
    import torch

    return torch.channels_last if name == "channels_last" else torch.contiguous_format


def _emit(args: argparse.Namespace, side: str, memory_format: str, epochs_s: list[float]) -> None:
    examples = (args.steps or STEPS) * BATCH * WORKERS
    rate = per_second(examples, epochs_s[1:])
    harness.emit(NAME, side, examples_per_s=rate, memory_format=memory_format)


def _torchrun(side: str) -> list[row.Record]:
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORKERS}"]
    program = [str(harness.HERE / f"{NAME}.py"), "--side", side]
    return harness.measure([harness.PEER_PYTHON, *run, *program], timeout_s=300.0)


def _claim(side: str, title: str, expected: str) -> row.Claim:
    def ratio(pair: row.Pair) -> float:
        ours = row.figure(pair, "tfdist", "examples_per_s")
        return ours / row.best(pair, side, "examples_per_s")

    return row.Claim(
        what=f"examples/s of tfdist.fit / of {title}",
        value=ratio,
        target=1.3,
        at_least=True,
        unit="x",
        expected=expected,
    )


ROW = row.Row(
    name=NAME,
    title="multiworker: the same, beside Lightning, Accelerate and Ray Train",
    sides={
        "tfdist": multiworker_cnn.ROW.sides["tfdist"],
        "lightning": lambda: _torchrun("lightning"),
        "accelerate": lambda: _torchrun("accelerate"),
        "ray_train": lambda: row.script(
            f"{NAME}.py", "ray_train", python=harness.PEER_PYTHON, timeout_s=300.0
        ),
    },
    claims=(
        _claim(
            "lightning",
            "Lightning",
            "1.5: DDP by hand is at 1/1.44, and a step of 45 ms has about 1 ms of the "
            "trainer's hooks",
        ),
        _claim("accelerate", "Accelerate", "1.45: a loop by hand around DDP, and its loader"),
        _claim("ray_train", "Ray Train", "1.45: the same, in Ray's actors"),
    ),
    notes="Each of the three is measured with contiguous tensors and with channels_last; the "
    "better one counts. Ray's workers are no children of what starts them, so that they count as "
    "others' cores. The optimizer is torch's fused one, the loader indexes whole batches.",
)


if __name__ == "__main__":
    row.main(
        ROW,
        {
            "lightning": measure_lightning,
            "accelerate": measure_accelerate,
            "ray_train": measure_ray_train,
        },
    )
