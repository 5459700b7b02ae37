"""Trackers that are not installed: their Keras callbacks, with the calls that their sources have.

Each is put into `sys.modules`, and notes with `note(run, **what)` what its server would be told.
"""

import itertools
import sys
import types
import uuid

import keras
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def aim(note):
    """The class of Aim's callback: it begins a run when it is made, and opens one by its hash."""

    class Run:
        def __init__(self, run_hash=None):
            self.hash = run_hash or uuid.uuid4().hex

        def close(self):
            self.hash = None

    class AimCallback(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self._run = Run()
            self._run_hash = self._run.hash

        @property
        def experiment(self):
            if not self._run:
                self._run = Run(self._run_hash)
            return self._run

        def close(self):
            if self._run:
                self._run.close()
                self._run = None

        def on_train_batch_end(self, batch, logs=None):
            note(self._run.hash, block=batch, names=sorted(logs or ()))

        def on_epoch_end(self, epoch, logs=None):
            note(self._run.hash, epoch=epoch, names=sorted(logs))

    sys.modules["aim"] = types.ModuleType("aim")
    AimCallback.__module__ = "aim.sdk.adapters.keras"
    return AimCallback


def comet(note):
    """A maker of Comet's callback, which counts its calls: steps and epochs since it was made."""

    class Experiment:
        auto_metric_step_rate = 5

        def __init__(self, previous_experiment=None):
            self.key = previous_experiment or uuid.uuid4().hex

        def get_key(self):
            return self.key

        def end(self):
            self.key = None

    class CometKerasCallback(keras.callbacks.Callback):
        def __init__(self, experiment):
            super().__init__()
            self.experiment = experiment
            self.our_step = self.our_epoch = 0

        def on_epoch_end(self, epoch, logs=None):
            note(self.experiment.key, epoch=self.our_epoch, at=self.our_step)
            self.our_epoch += 1

        def on_train_batch_end(self, batch, logs=None):
            self.our_step += 1
            if batch % self.experiment.auto_metric_step_rate == 0:
                note(self.experiment.key, step=self.our_step)

    sys.modules["comet_ml"] = module = types.ModuleType("comet_ml")
    module.ExistingExperiment = Experiment
    CometKerasCallback.__module__ = "comet_ml.callbacks._keras"
    return lambda: CometKerasCallback(Experiment())


def clearml(note):
    """The `Task` of ClearML, which has no callback: it sees what TensorBoard writes."""
    numbers = itertools.count()

    class Task:
        current = None

        def __init__(self, task_id):
            self.id = task_id

        @classmethod
        def current_task(cls):
            return cls.current

        @classmethod
        def init(cls, continue_last_task=None):
            cls.current = cls(continue_last_task or f"task-{next(numbers)}")
            note(cls.current.id, begun=True)
            return cls.current

        def set_initial_iteration(self, offset):
            note(self.id, offset=offset)

        def close(self):
            note(self.id, closed=True)
            type(self).current = None

    sys.modules["clearml"] = module = types.ModuleType("clearml")
    module.Task = Task
    return Task


def steps_in_events(directory, tag):
    """The steps under the one tag of TensorBoard that ends so, in order.

    Files of one second are read by a number in their names as a text, the tenth before the ninth.
    """
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()
    (found,) = [name for name in events.Tags()["tensors"] if name.endswith(tag)]
    return sorted(event.step for event in events.Tensors(found))
