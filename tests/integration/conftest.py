"""One process, three logical devices: every strategy that needs no second process."""

import functools
import gc
import logging
import os

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "4")

import pytest


def pytest_collectstart():
    """Here, and not in the process that has others run the tests, TensorFlow is imported."""
    _three_devices()


@functools.cache
def _three_devices():
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)


def pytest_collection_finish():
    """Takes all that was imported out of the collector's sight: going through it takes 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def what_tensorflow_keeps():
    """Does the same with the graphs that TensorFlow keeps for good: a hundred take seconds."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_keras():
    """Each test starts from the same names, seeds and precision."""
    import keras

    keras.backend.clear_session(free_memory=False)  # a full collection takes 0.3 s
    keras.utils.set_random_seed(1)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def warnings(caplog):
    """What tfdist has warned of, each once in the process."""
    from tfdist.training.keras_compat.trace import warn_once

    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="tfdist")
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("tfdist")]


@functools.cache
def _strategies():
    """Made once a process: another one on the same devices would have the same collective keys."""
    import tensorflow as tf

    return {1: tf.distribute.OneDeviceStrategy("/CPU:0"), 2: mirrored(2), 3: mirrored(3)}


@pytest.fixture(scope="session")
def strategies():
    """The strategies of one process, by the number of replicas; in tests/field too."""
    return _strategies()


def mirrored(replicas):
    """A MirroredStrategy whose collectives are not those of another in the same process."""
    import tensorflow as tf

    class Strategy(tf.distribute.MirroredStrategy):
        _collective_key_base = 100 * replicas

    return Strategy([f"/CPU:{i}" for i in range(replicas)])
