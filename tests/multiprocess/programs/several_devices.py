"""Several devices in each of several workers: ``several_devices.py OUT``.

TensorFlow takes all GPUs of a worker and one CPU; here it takes two logical CPUs.
"""

import json
import pathlib
import sys

import keras
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

import tfdist
from tests.multiprocess.programs import zoo
from tfdist.strategy import current_job

DEVICES = 2


def local_devices(self, cluster_resolver, worker_device):
    """Stands in for a method of TensorFlow's that counts GPUs."""
    return tuple(f"{worker_device}/device:CPU:{i}" for i in range(DEVICES)), "CPU"


(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(DEVICES)]
)
extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
extended._initialize_local_devices = local_devices
strategy = tf.distribute.MultiWorkerMirroredStrategy()
seen = {"replicas": strategy.num_replicas_in_sync}
for shared in (False, True):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = zoo.with_activities(shared=shared)
    history = tfdist.fit(
        model, zoo.X[:57], zoo.CALM[:57], batch_size=16, epochs=3, seed=3, verbose=0
    )
    seen[f"shared={shared}"] = history.history["loss"], zoo.flat(model)
task = current_job().name
(pathlib.Path(sys.argv[1]) / f"seen-{task}.json").write_text(json.dumps(seen))
tfdist.barrier()
