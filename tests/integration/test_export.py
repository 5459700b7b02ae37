"""Exports: the SavedModel answers as the model does, or nothing is published."""

import io
import itertools
import json
import shutil
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow_serving.config.model_server_config_pb2 import ModelServerConfig

import tfdist
from tests.refusals import refusal
from tfdist import export
from tfdist.checkpoint.publish import _written
from tfdist.errors import TfdistError
from tfdist.files import FileLock
from tfdist.serving import sources

layers = keras.layers
RNG = np.random.RandomState(0)
IMAGES = (RNG.rand(48, 8, 8, 1) * 255).astype("float32")
LABELS = np.arange(48) % 4


def cnn():
    image = keras.Input((8, 8, 1), name="image")
    x = layers.RandomRotation(0.2)(layers.RandomFlip()(image))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3)(layers.Rescaling(1 / 255)(x)))
    x = layers.Dropout(0.5)(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(4, activation="softmax", name="class")(x), name="cnn")


class Halves(keras.Model):
    """Takes a dict and returns one; only a call says so."""

    def __init__(self):
        super().__init__(name="halves")
        self.dense = layers.Dense(3)

    def call(self, inputs, training=False):
        x = self.dense(inputs["left"]) + inputs["right"]
        return {"sum": x, "is_training": keras.ops.full((keras.ops.shape(x)[0],), float(training))}


class Drawing(layers.Layer):
    """Draws although it is not training."""

    def call(self, x):
        return x + keras.random.uniform(keras.ops.shape(x))


def call(place, **inputs):
    """The signature's answer to one request."""
    signature = tf.saved_model.load(str(place)).signatures["serving_default"]
    return {n: v.numpy() for n, v in signature(**inputs).items()}


@pytest.fixture(scope="module")
def trained(strategies):
    """A model with random layers, trained on two replicas."""
    with strategies[2].scope():
        model = cnn()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    tfdist.fit(model, IMAGES, LABELS, batch_size=16, epochs=2, verbose=0, seed=1)
    return model


def test_a_model_of_two_replicas(trained, tmp_path):
    place = tfdist.export_model(trained, tmp_path)
    assert place == tmp_path / "cnn" / "1"
    wanted = tfdist.predict(trained, IMAGES, verbose=0)
    for batch in (1, 5, 48):
        found = call(place, image=tf.constant(IMAGES[:batch]))
        np.testing.assert_allclose(found["class"], wanted[:batch], atol=1e-6)
    assert "max_batch_size { value: 32 }" in (tmp_path / "batching.config").read_text()
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["inputs"] == {"image": ["float32", [None, 8, 8, 1]]}
    assert manifest["outputs"] == {"class": ["float32", [None, 4]]}
    assert manifest["tensorflow"] == tf.__version__
    (record,) = tf.data.TFRecordDataset(str(place / "assets.extra/tf_serving_warmup_requests"))
    from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

    request = PredictionLog.FromString(record.numpy()).predict_log.request
    assert (request.model_spec.name, list(request.inputs)) == ("cnn", ["image"])


def test_two_exports_into_one_directory_follow_each_other(trained, tmp_path, monkeypatch):
    """They would take the same number, or write ``models.config`` without the other's model."""
    monkeypatch.setattr("tfdist.serving.export._OTHERS_S", 0.0)
    with FileLock(tmp_path).acquire(), pytest.raises(TfdistError, match="is locked by process"):
        tfdist.export_model(trained, tmp_path, name="m")
    assert not list(tmp_path.glob("m/*"))
    assert tfdist.export_model(trained, tmp_path, name="m").name == "1"


def test_the_next_version_and_one_that_is_there(trained, tmp_path):
    (tmp_path / "m" / "7").mkdir(parents=True)
    assert tfdist.export_model(trained, tmp_path, name="m").name == "8"
    caught = refusal(lambda: tfdist.export_model(trained, tmp_path, name="m", version=7))
    assert caught.code == "version-exists"
    assert refusal(lambda: tfdist.export_model(trained, tmp_path, name="../m")).code == "not-a-name"


def test_the_files_for_tensorflow_serving_name_all_models_that_are_there(trained, tmp_path):
    for name in ("text/2", "text/3", "unfinished/.partial-1", ".hidden/1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "saved_model.pb").touch()
    (tmp_path / "batching.config").write_text("changed by hand")
    tfdist.export_model(trained, tmp_path)
    config = text_format.Parse((tmp_path / "models.config").read_text(), ModelServerConfig())
    listed = [(one.name, one.base_path) for one in config.model_config_list.config]
    assert listed == [("cnn", "/models/cnn"), ("text", "/models/text")]
    assert (tmp_path / "batching.config").read_text() == "changed by hand"


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_a_lower_precision_is_measured(trained, tmp_path, precision):
    place = tfdist.export_model(
        trained, tmp_path, precision=precision, validation_data=(IMAGES, LABELS)
    )
    found = json.loads((place / "manifest.json").read_text())["precision"]
    assert found["examples"] == 48
    assert 0 < found["largest_difference"] < 0.05
    assert found["same_class"] > 0.9
    assert abs(found["accuracy"] - found["accuracy_before"]) < 0.1
    variables = tf.saved_model.load(str(place)).variables
    assert any(v.dtype.name == precision for v in variables)


def test_a_lower_precision_that_overflows_is_not_published(tmp_path):
    scale = layers.Rescaling(1e6)
    model = keras.Sequential([keras.Input((1,)), scale, layers.Dense(2)], name="income")
    with pytest.raises(TfdistError, match="not finite, where the model's are"):
        tfdist.export_model(model, tmp_path, precision="float16")
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_lower_precision_of_layers_that_have_seen_data_and_of_models_inside(tmp_path):
    values, words = RNG.randn(20, 2) * 1e5 + 3e5, np.array([["a"], ["b"], ["a"]])
    scale, look_up = layers.Normalization(), layers.StringLookup(output_mode="one_hot")
    scale.adapt(values)
    look_up.adapt(words)
    number, word = keras.Input((2,), name="number"), keras.Input((1,), dtype="string", name="word")
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(3)])
    x = inner(layers.Concatenate()([scale(number), look_up(word)]))
    model = keras.Model({"number": number, "word": word}, x, name="mixed")
    asked = {"number": values[:3].astype("float32"), "word": words}
    place = tfdist.export_model(model, tmp_path, precision="float16", samples=asked)
    found = json.loads((place / "manifest.json").read_text())["precision"]
    assert 0 < found["largest_difference"] < 0.01
    kernels = [v for v in tf.saved_model.load(str(place)).variables if len(v.shape) == 2]
    assert {v.dtype for v in kernels[-2:]} == {tf.float16}


def test_outputs_keep_their_names_in_any_order(tmp_path):
    x = keras.Input((3,), name="x")
    z, a = (layers.Dense(2, name=name)(x) for name in "za")
    model = keras.Model(x, [z, a, keras.ops.argmax(a, -1) > 0], name="two")
    asked = np.ones((2, 3), "float32")
    for precision in ("float32", "float16"):
        found = call(tfdist.export_model(model, tmp_path, precision=precision), x=asked)
        for name, wanted in zip("za", model(asked), strict=False):
            np.testing.assert_allclose(found[name], wanted, atol=1e-2)


@pytest.mark.parametrize(
    "samples",
    [np.ones((2, 4)), np.ones(3), np.ones((0, 3)), np.array([["a"] * 3]), [np.ones((2, 3))] * 2],
    ids=["width", "rank", "empty", "text", "count"],
)
def test_samples_that_are_no_inputs_are_refused(tmp_path, samples):
    x = keras.Input((3,), name="x")
    model = keras.Model(x, layers.Dense(2)(x), name="line")
    caught = refusal(lambda: tfdist.export_model(model, tmp_path, samples=samples))
    assert (caught.code, caught.expected) == ("not-samples", "x: float32 [None, 3]")


@pytest.mark.parametrize(("as_dict", "names"), [(True, ["left", "right"]), (False, ["b", "a"])])
def test_inputs_have_the_names_of_a_dict_or_of_their_own(tmp_path, as_dict, names):
    inputs = {name: keras.Input((3,), name=None if as_dict else name) for name in names}
    with warnings.catch_warnings(action="ignore"):  # Keras has other names in mind
        y = layers.Subtract(name="y")([*inputs.values()])
        model = keras.Model(inputs if as_dict else [*inputs.values()], y, name="named")
    asked = {name: np.full((2, 3), n, "float32") for n, name in enumerate(names)}
    found = call(tfdist.export_model(model, tmp_path, samples=asked), **asked)
    np.testing.assert_array_equal(found["y"], -1)


def test_a_model_in_bfloat16_answers_in_float32(tmp_path):
    x = keras.Input((3,), name="x")
    dense = layers.Dense(2, name="y", dtype="mixed_bfloat16", kernel_initializer="ones")
    model = keras.Model(x, dense(x), name="half")
    asked = RNG.rand(2, 3).astype("float32")
    place = tfdist.export_model(model, tmp_path, samples=asked)
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["outputs"] == {"y": ["float32", [None, 2]]}
    np.testing.assert_array_equal(call(place, x=asked)["y"], np.float32(model(asked)))
    place = tfdist.export_model(model, tmp_path, samples=asked, precision="int8")
    found = json.loads((place / "manifest.json").read_text())["precision"]
    assert found["largest_difference"] < 0.1


def test_a_subclassed_model_with_a_dict_of_inputs(tmp_path):
    model = Halves()
    x = {"left": RNG.rand(6, 5).astype("float32"), "right": RNG.rand(6, 3).astype("float32")}
    model(x)
    assert refusal(lambda: tfdist.export_model(model, tmp_path)).code == "no-samples"
    place = tfdist.export_model(model, tmp_path, samples=x)
    found = call(place, **{name: tf.constant(value[:2]) for name, value in x.items()})
    np.testing.assert_allclose(found["sum"], model(x)["sum"][:2], atol=1e-6)
    np.testing.assert_array_equal(found["is_training"], 0)


def test_text_in_and_vocabulary_inside(tmp_path):
    text = keras.Input((), dtype="string", name="text")
    vectorize = layers.TextVectorization(max_tokens=10, output_sequence_length=4)
    vectorize.adapt(["a b c", "b c d"])
    x = layers.GlobalAveragePooling1D()(layers.Embedding(10, 3)(vectorize(text)))
    model = keras.Model(text, layers.Dense(1, name="score")(x), name="text")
    place = tfdist.export_model(model, tmp_path, samples=np.array(["a b", "z"]))
    wanted = model(tf.constant(["d c b", "a"]))
    found = call(place, text=tf.constant(["d c b", "a"]))["score"]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_answers_that_differ_are_not_published(tmp_path):
    x = keras.Input((3,))
    drawing = keras.Model(x, Drawing()(x), name="drawing")
    with pytest.raises(TfdistError, match="differs between two calls"):
        tfdist.export_model(drawing, tmp_path)

    class Shifted(keras.Model):
        def predict_step(self, data):
            return super().predict_step(data) + 1.0

    shifted = Shifted(x, layers.Dense(2)(x), name="shifted")
    with pytest.raises(TfdistError, match=r"1 away from what tfdist.predict gives"):
        tfdist.export_model(shifted, tmp_path)

    class Classes(keras.Model):
        def predict_step(self, data):
            return keras.ops.argmax(super().predict_step(data), -1)

    class Flipped(keras.Model):
        def predict_step(self, data):
            return ~super().predict_step(data)

    classes = Classes(x, layers.Dense(3)(x), name="classes")
    with pytest.raises(
        TfdistError, match=r"shapes \[\(2, 3\)\], those of tfdist.predict \[\(2,\)\]"
    ):
        tfdist.export_model(classes, tmp_path)
    flipped = Flipped(x, keras.ops.sum(x, -1) > 0, name="flipped")
    with pytest.raises(TfdistError, match=r"1 away from what tfdist.predict gives"):
        tfdist.export_model(flipped, tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_model_that_is_not_built_or_that_keras_cannot_save(tmp_path, strategies):
    unbuilt = keras.Sequential([layers.Dense(2)])
    assert refusal(lambda: tfdist.export_model(unbuilt, tmp_path)).code == "not-built"

    class Silent(layers.Layer):
        def call(self, x):
            return x

        def get_config(self):
            raise NotImplementedError

    with strategies[2].scope():
        x = keras.Input((3,))
        model = keras.Model(x, Silent()(x), name="silent")
    caught = refusal(lambda: tfdist.export_model(model, tmp_path))
    assert (caught.where, caught.code) == ("export_model", "not-saveable")


def test_the_program_with_a_file_and_with_checkpoints(tmp_path, capsys):
    x = keras.Input((3,), name="x")
    model = keras.Model(x, layers.Dense(2, name="y")(x), name="line")
    model.compile("sgd", "mse")
    model.save(tmp_path / "line.keras")
    assert export.main([str(tmp_path / "line.keras"), str(tmp_path / "served")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "served" / "line" / "1")

    data, target = RNG.rand(16, 3).astype("float32"), RNG.rand(16, 2).astype("float32")
    backup = tfdist.BackupAndRestore(tmp_path / "backup")
    tfdist.fit(model, data, target, batch_size=4, epochs=2, callbacks=[backup], verbose=0)
    (tmp_path / "my model.py").write_text(
        "import keras\n"
        "from sizes_of_line import WIDTH\n"
        "def make():\n"
        "    x = keras.Input((3,), name='x')\n"
        "    return keras.Model(x, keras.layers.Dense(WIDTH, name='y')(x), name='line')\n"
    )
    (tmp_path / "sizes_of_line.py").write_text("WIDTH = 2\n")
    words = [str(tmp_path / "backup"), str(tmp_path / "served")]
    assert export.main([*words, "--model", f"{tmp_path}/my model.py:make"]) == 0
    place = tmp_path / "served" / "line" / "2"
    np.testing.assert_allclose(call(place, x=tf.constant(data))["y"], model(data), atol=1e-6)
    manifest = json.loads((place / "manifest.json").read_text())
    assert (manifest["run"], manifest["step"]) == (str(tmp_path / "backup"), 8)
    assert export.main([*words, "--model", f"{tmp_path}/my model.py:make", "--best"]) == 2
    assert "received no checkpoint that was marked best" in capsys.readouterr().err


def test_each_new_one_is_published_and_a_failure_ends_nothing():
    found = iter([None, "1", "1", "2", "3", "4"])
    done, pauses = [], iter([False] * 4 + [True])

    def publish():
        done.append(len(done))
        if len(done) == 2:
            raise TfdistError("no room")

    export._publish_each(lambda: next(found), publish, pause=lambda: next(pauses))
    assert len(done) == 4, "what had come until the end too"
    with pytest.raises(TfdistError, match="no room"):
        export._publish_each(lambda: "1", publish_nothing, pause=lambda: True)


def test_a_source_that_cannot_be_read_for_a_while_ends_nothing(caplog):
    found, done, pauses = iter(["1", None, None, "2", "2"]), [], iter([False] * 3 + [True])

    def newest():
        if (step := next(found)) is None:
            raise TfdistError("checkpoints: Stale file handle")
        return step

    export._publish_each(newest, lambda: done.append(1), pause=lambda: next(pauses))
    assert len(done) == 2
    assert caplog.text.count("Stale file handle") == 1


def test_a_source_that_is_not_there_yet_is_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    words = [str(tmp_path / "none"), str(tmp_path), "--follow", "--until_eof"]
    assert export.main(words) == 0
    assert "none is not there yet" in caplog.text


def test_a_checkpoint_that_comes_before_the_one_that_was_found_is_read_is_published_once(
    tmp_path, monkeypatch
):
    def publish(options):
        place = options.directory / "m" / f"{len(list(tmp_path.glob('m/*'))) + 1}"
        place.mkdir(parents=True)
        origin = {"run": str(options.source.absolute()), "step": 2, "saved_at": 2.5}
        (place / "manifest.json").write_text(json.dumps(origin))
        return place

    found = itertools.chain(["1:1.5"], itertools.repeat("2:2.5"))
    monkeypatch.setattr(sources, "newest_in", lambda *_, **__: next(found))
    monkeypatch.setattr(export, "_publish", publish)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert export.main([str(tmp_path / "run"), str(tmp_path), "--follow", "--until_eof"]) == 0
    assert len(list(tmp_path.glob("m/*"))) == 1


def test_the_checkpoints_of_a_run_that_was_begun_anew_are_published(tmp_path):
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(2)(x))
    model.compile("sgd", "mse")
    options = export._parser().parse_args([str(tmp_path / "backup"), str(tmp_path / "served")])
    for served in range(2):
        shutil.rmtree(tmp_path / "backup", ignore_errors=True)
        backup = tfdist.BackupAndRestore(tmp_path / "backup")
        tfdist.fit(model, RNG.rand(4, 3), RNG.rand(4, 2), callbacks=[backup], verbose=0)
        found = sources.newest_in(options.source)
        assert found not in export._published(options)
        _, origin = sources.read_model(options.source, make=f"{__file__}:line")
        place = tmp_path / "served" / "line" / str(served)
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(json.dumps(origin))
        assert found in export._published(options)


def test_what_a_layer_has_learned_by_adapt_is_published_or_refused(tmp_path):
    values = (RNG.randn(16, 3) * 5 + 20).astype("float32")
    scale, look_up = layers.Normalization(), layers.StringLookup(output_mode="one_hot")
    scale.adapt(values)
    look_up.adapt(["a", "b"])
    x, word = keras.Input((3,)), keras.Input((1,), dtype="string")
    model = keras.Model(x, layers.Dense(2)(scale(x)), name="adapted")
    model.compile("sgd", "mse")
    backup = tfdist.BackupAndRestore(tmp_path)
    tfdist.fit(model, values, values[:, :2], callbacks=[backup], verbose=0)
    found, _ = sources.read_model(tmp_path, make=str(_written(model, tmp_path)))
    np.testing.assert_array_equal(found(values), model(values))
    vocabulary = keras.Model(word, layers.Dense(2)(look_up(word)))
    caught = refusal(lambda: _written(vocabulary, tmp_path))
    assert (caught.code, caught.received) == (
        "not-a-model",
        "a model with a vocabulary that StringLookup has learned by adapt",
    )
    known = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    assert _written(keras.Model(word, layers.Dense(2)(known(word))), tmp_path)


def line():
    x = keras.Input((3,))
    return keras.Model(x, layers.Dense(2)(x))


def publish_nothing():
    raise TfdistError("no room")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.keras", "out"], "none.keras: received no such file"),
        (["none", "out"], "none: received no such directory"),
        ([__file__, "out"], "test_export.py: received no such directory"),
        ([".", "out"], ".: received a directory without config.json"),
        ([".", "out", "--model", "none.py:make"], "--model: received none.py:make: no such"),
        ([".", "out", "--step", "3", "--best"], "--step: received --step and --best together"),
        (["a.keras", "out", "--precison", "int8"], "did you mean '--precision'?"),
        (["a.keras", "out", "--samples", "none.npy"], "--samples: received none.npy ("),
    ],
)
def test_a_wrong_command_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert export.main(words) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
