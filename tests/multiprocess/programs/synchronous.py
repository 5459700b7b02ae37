"""One multiworker job that does everything the tests look at; each task writes what it saw."""

import json
import pathlib
import random
import sys

import keras
import keras_tuner
import numpy as np

import tfdist

strategy = tfdist.make_strategy()

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import figures  # noqa: E402
import zoo  # noqa: E402

OUT = pathlib.Path(sys.argv[1])
INDEX = strategy.cluster_resolver.task_id
SEEN = {"drawn without a seed": [random.random(), np.random.rand(), np.random.randn()]}


def equivalence():
    SEEN["every optimizer"] = zoo.by_every_optimizer(strategy, steps=8)
    with strategy.scope():
        model = zoo.dense("loss_scaling")
    history = tfdist.fit(model, zoo.X, zoo.Y, batch_size=8, epochs=2, seed=3, verbose=0)
    SEEN["weights loss scaling"], SEEN["losses"] = zoo.flat(model), history.history["loss"]
    with strategy.scope():
        model = zoo.dense(kind=zoo.CustomStep)
    # The last step has one example: the shares of all replicas but one are empty.
    tfdist.fit(model, zoo.X[:41], zoo.Y[:41], batch_size=4, seed=3, verbose=0)
    SEEN["weights custom step"] = zoo.flat(model)


def overflow():
    with strategy.scope():
        model = zoo.dense("loss_scaling")
    y = zoo.Y[:6].copy()
    y[-1] = 3e38
    before = zoo.sha(model)
    tfdist.fit(model, zoo.X[:6], y, batch_size=6, shuffle=False, verbose=0)
    SEEN["overflow left the weights"] = zoo.sha(model) == before


def grid():
    SEEN.update(zoo.learned(strategy, OUT, seed=3, verbose=0))
    keras.config.set_dtype_policy("mixed_float16")
    with strategy.scope():
        model = zoo.cnn()
    history = tfdist.fit(model, zoo.IMAGES, zoo.LABELS, batch_size=16, epochs=2, verbose=0)
    SEEN["mixed_float16"] = history.history["loss"]
    keras.config.set_dtype_policy("float32")


def callbacks():
    class StopOnOne(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and not tfdist.is_chief():
                self.model.stop_training = True

    with strategy.scope():
        model = zoo.dense()
    history = tfdist.fit(
        model, zoo.X, zoo.Y, batch_size=8, epochs=9, verbose=2, callbacks=[StopOnOne()]
    )
    SEEN["epochs after one task stopped"] = len(history.history["loss"])
    with strategy.scope():
        model = zoo.dense()
    listed = [
        keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e9, factor=0.5),
        keras.callbacks.CSVLogger(OUT / "log.csv"),
        tfdist.ModelCheckpoint(OUT / "saved.keras"),
        keras.callbacks.TensorBoard(OUT / "board"),
    ]
    history = tfdist.fit(model, zoo.X, zoo.Y, batch_size=8, epochs=9, verbose=0, callbacks=listed)
    SEEN["history"] = history.history


def sources():
    models, seen = zoo.evaluated(strategy, zoo.sources(12), seed=3)
    SEEN.update(seen)
    SEEN.update({f"source {name}": zoo.sha(model) for name, model in models.items()})


def own_step():
    loop, model = zoo.own_loop(strategy)
    SEEN["own step"] = [loop.run(3)["loss"], loop.step, loop.results(), zoo.sha(model)]


def metrics():
    SEEN["figures"] = figures.by_tfdist(strategy)


def find():
    SEEN["range test"] = zoo.range_tested(strategy)


def export():
    SEEN["exported"] = zoo.exported(strategy, OUT / "exports")


def methods_of_keras():
    SEEN["methods of Keras"] = zoo.by_methods_of_keras(strategy, OUT / "cut")
    with strategy.scope():
        model = zoo.dense()
    expected = model.predict(zoo.X[:5], verbose=0)
    mlflow = {"__name__": "mlflow.tensorflow"}
    exec("signature = lambda model, x: model.predict(x)", mlflow)  # which only the chief calls
    found = mlflow["signature"](model, zoo.X[:5]) if tfdist.is_chief() else expected
    SEEN["predicted by the chief only"] = bool(np.abs(found - expected).max() < 1e-6)


def search():
    def build(hp):
        units = hp.Int("units", 1, 99)  # no two tasks would draw the same
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units)])
        model.compile("sgd", "mse")
        return model

    tuner = keras_tuner.RandomSearch(
        build, "loss", directory=OUT / f"search-{INDEX}", distribution_strategy=strategy
    )
    try:
        tuner.search(zoo.X, zoo.Y, verbose=0)
    except tfdist.UsageError as error:
        SEEN["search"] = [error.where, error.code]


def group():
    told = tfdist.broadcast({"from": sys.argv, "array": np.arange(3)})
    SEEN["broadcast"] = told["array"].tolist()
    rows = {"rows": np.eye(3)} if INDEX == 1 else None
    SEEN["collectives"] = [
        tfdist.scatter(rows, root=1)["rows"].tolist(),
        tfdist.all_reduce(np.array([INDEX, 1.0]), "mean").tolist(),
        tfdist.all_gather(INDEX).tolist(),
        None if (each := tfdist.gather(INDEX + 1, root=1)) is None else each.tolist(),
        None if (total := tfdist.reduce(INDEX + 1, root=1)) is None else total.tolist(),
    ]
    SEEN["chief"] = tfdist.is_chief()
    tfdist.barrier()


for part in (
    equivalence,
    overflow,
    grid,
    callbacks,
    sources,
    own_step,
    metrics,
    find,
    export,
    methods_of_keras,
    search,
    group,
):
    print(f"doing {part.__name__}", flush=True)
    part()
(OUT / f"seen-{INDEX}.json").write_text(json.dumps(SEEN))
tfdist.barrier()
if tfdist.is_chief():  # the others exit meanwhile
    left = [path.read_text() for path in sorted(OUT.glob("leaving-*"))]
    (OUT / "left.json").write_text(json.dumps(left))
else:
    (OUT / f"leaving-{INDEX}").write_text("done")  # a pipe, at whose other end the chief waits
