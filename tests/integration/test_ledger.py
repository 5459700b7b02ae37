"""What a run consumes of its examples, against what the model was given."""

import keras
import numpy as np
import pytest

import tfdist
from tests.tools.ledger import Ledger, prove, seen_by_pass
from tfdist.data.python_indexed import PythonSource

EXAMPLES = 50
X = np.arange(EXAMPLES, dtype="float32")[:, None]
Y = np.zeros(EXAMPLES, "float32")


def make(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    return model


def fit(model, directory, *, data=(X, Y), callbacks=(), **options):
    options = {"batch_size": 8, "epochs": 3, "seed": 4, "verbose": 0, **options}
    return tfdist.fit(model, *data, callbacks=[Ledger(directory), *callbacks], **options)


UNEVEN = {"virtual_epochs": tfdist.VirtualEpochs(total_examples=130, checkpoints=4), "epochs": 1}
FEWER = {"data": (X[:3], Y[:3]), "steps_per_epoch": 3, "epochs": 1}


@pytest.mark.parametrize(
    ("replicas", "options", "passes"),
    [
        (3, {"data": (PythonSource(list(zip(X, Y, strict=True))),)}, [50, 50, 50]),
        (3, UNEVEN, [50, 50, 30]),  # a pass ends inside a step, one is cut
        (1, FEWER, [3] * 8),  # than there are in a batch
    ],
)
def test_each_example_of_each_pass_is_consumed_once(
    strategies, tmp_path, replicas, options, passes
):
    fit(make(strategies[replicas]), tmp_path, **options)
    assert prove(tmp_path) == []
    assert seen_by_pass(tmp_path) == passes


def test_a_missing_changed_or_duplicate_record_is_found(strategies, tmp_path):
    fit(make(strategies[1]), tmp_path / "run")
    (path,) = (tmp_path / "run").iterdir()
    head, *lines = path.read_text().splitlines()
    for changed, problem in (
        ([*lines[:-1], lines[-1].replace('"passes": [[[2', '"passes": [[[1')], "missed"),
        ([*lines[:-1], lines[-1].replace('"begun": 1', '"begun": 2')], "begun 2 times"),
        (lines[1:], "no record of step"),
    ):
        assert changed != lines
        path.write_text("\n".join([head, *changed]) + "\n")
        assert any(problem in line for line in prove(tmp_path / "run"))
