"""Programs start fast: what they import. `make lint` holds which room may import which."""

import os

import grimp
import pytest

from tests import forked_python
from tests.processes import python

HEAVY = {"tensorflow", "keras", "numpy"}

OF_ANOTHER_JOB = """
import sys
import keras, numpy as np
import tfdist
strategy = tfdist.make_strategy("mirrored", devices_per_worker=2)
x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    model.compile(optimizer, "mse", metrics=["mae"])
tfdist.fit(model, x, y, batch_size=4, validation_data=(x, y), verbose=0)
tfdist.evaluate(model, x, y, batch_size=4, verbose=0)
tfdist.predict(model, x, batch_size=4, verbose=0)
loaded = [name for name in sys.modules if name.startswith("tfdist.ps")]
assert not loaded, loaded
"""


def test_a_job_that_is_not_ps_loads_none_of_its_modules():
    done = forked_python.run(
        "-c", OF_ANOTHER_JOB, timeout=120, env={**os.environ, **forked_python.ENVIRON}
    )
    assert done.returncode == 0, done.stderr


BEGINS_WITHOUT = {
    "rooms": (
        "import tfdist.launch.job, tfdist.launch.spawn, tfdist.outputs, tfdist.report.__main__,"
        " tfdist.configs, tfdist.top, tfdist.find.batch_size, tfdist.serve,"
        " tfdist.serving.front, tfdist.serving.supervisor, tfdist.serving.replica; tfdist.spawn",
        {*HEAVY, "cloudpickle"},
    ),
    "tfdist": ("import tfdist; tfdist.errors.near", {*HEAVY, "rich", "tfdist.launch"}),
    "store": ("import tfdist.checkpoint.store", {"tensorflow", "keras"}),
    "launch": ("import tfdist.launch.job", {"absl", "psutil", "importlib.metadata"}),
    "launch --help": (
        "from tfdist.launch.__main__ import main; main(['--help'])",
        {*HEAVY, "ml_collections", "psutil", "tfdist.launch.plan", "subprocess"},
    ),
    "submit": (
        "from tfdist.submit.__main__ import main; main(['--to', 'slurm', '--dry_run', 'a.py'])",
        HEAVY,
    ),
    "tune": (
        "from tfdist.tuning import chief, options, results, sweep; import tfdist.tune",
        {"keras_tuner", "keras", "tensorflow", "tfdist.training"},
    ),
}


@pytest.mark.parametrize(("program", "unwanted"), BEGINS_WITHOUT.values(), ids=BEGINS_WITHOUT)
def test_a_program_begins_without(program, unwanted):
    program += f"\nimport sys; loaded = {unwanted} & set(sys.modules); assert not loaded, loaded"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_no_file_imports_itself_by_way_of_others():
    """Imports inside functions count, those for types do not."""
    graph = grimp.build_graph("tfdist", exclude_type_checking_imports=True, cache_dir=None)
    pairs = [(a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)]
    assert len(pairs) > 500
    assert [(a, b) for a, b in pairs if a != b and graph.find_shortest_chain(b, a)] == []
