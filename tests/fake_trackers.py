"""A tracker as W&B is: its Keras callback, with the calls that W&B's has.

It is put into `sys.modules`, and notes with `note(run, **what)` what its server would be told.
"""

import itertools
import sys
import types

import keras
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def board(note):
    """Return the class of the tracker's callback; each start of a program begins a run."""
    numbers = itertools.count(len(sys.modules))
    module = types.ModuleType("wandb")

    def init(id=None, **options):
        module.run = types.SimpleNamespace(
            id=id or f"run-{next(numbers)}",
            project="p",
            entity="",
            settings=types.SimpleNamespace(root_dir="."),
        )

    def finish():
        module.run = None

    module.init, module.finish = init, finish
    sys.modules["wandb"] = module

    class Board(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            init()

        def on_train_batch_end(self, batch, logs=None):
            note(module.run.id, block=batch, names=sorted(logs or ()))

        def on_epoch_end(self, epoch, logs=None):
            note(module.run.id, epoch=epoch, names=sorted(logs))

    Board.__module__ = "wandb.integration.keras"
    return Board


def steps_in_events(directory, tag):
    """The steps under the one tag of TensorBoard that ends so, in order, each once.

    Files of one second are read by a number in their names as a text, the tenth before the ninth.
    """
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()
    (found,) = [name for name in events.Tags()["tensors"] if name.endswith(tag)]
    return sorted({event.step for event in events.Tensors(found)})
