"""Exports: the SavedModel answers as the model does, or nothing is published."""

import io
import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from fsspec.implementations.memory import MemoryFileSystem
from google.protobuf import text_format
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog
from tensorflow_serving.config.model_server_config_pb2 import ModelServerConfig

import tfdist
from tests.refusals import refusal
from tfdist import export
from tfdist.checkpoint.publish import _written
from tfdist.errors import TfdistError
from tfdist.files import FileLock
from tfdist.serving import export as exports

layers = keras.layers
RNG = np.random.RandomState(0)
IMAGES = (RNG.rand(48, 8, 8, 1) * 255).astype("float32")
LABELS = np.arange(48) % 4


def line(layer=None, *, of=keras.Model, dtype="float32"):
    """A model of one input `x` of three numbers."""
    x = keras.Input((3,), dtype=dtype, name="x")
    return of(x, (layer or layers.Dense(2, name="y"))(x), name="line")


class Halves(keras.Model):
    """Takes a dict and returns one; only a call says so."""

    def __init__(self):
        super().__init__(name="halves")
        self.dense = layers.Dense(3)

    def call(self, inputs, training=False):
        x = self.dense(inputs["left"]) + inputs["right"]
        return {
            "names": inputs["names"],
            "sum": x,
            "is_training": keras.ops.full((keras.ops.shape(x)[0],), float(training)),
        }


class Centred(keras.Model):
    """Answers by the mean of the batch."""

    def __init__(self, scale=1.0):
        super().__init__(name="centred")
        self.scale = scale

    def call(self, x):
        x = keras.ops.cast(x, "float32")
        return (x - keras.ops.mean(x, axis=0, keepdims=True)) * self.scale


class Drawing(layers.Layer):
    """Draws although it is not training."""

    def call(self, x):
        return x + keras.random.uniform(keras.ops.shape(x))


def call(place, **inputs):
    """The signature's answer to one request."""
    signature = tf.saved_model.load(str(place)).signatures["serving_default"]
    return {n: v.numpy() for n, v in signature(**inputs).items()}


def manifest_of(place):
    return json.loads((place / "manifest.json").read_text())


def files_in(directory):
    return [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.fixture(scope="module")
def trained(strategies):
    """A model with random layers, trained on two replicas."""
    with strategies[2].scope():
        image = keras.Input((8, 8, 1), name="image")
        x = layers.RandomRotation(0.2)(layers.RandomFlip()(image))
        x = layers.BatchNormalization()(layers.Conv2D(4, 3)(layers.Rescaling(1 / 255)(x)))
        x = layers.Dropout(0.5)(layers.Flatten()(x))
        x = layers.Dense(4, activation="softmax", name="class")(x)
        model = keras.Model(image, x, name="cnn")
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    tfdist.fit(model, IMAGES, LABELS, batch_size=16, epochs=2, verbose=0, seed=1)
    return model


def test_a_model_of_two_replicas_is_exported(trained, tmp_path):
    place = tfdist.export_model(trained, tmp_path)
    assert place == tmp_path / "cnn" / "1"
    wanted = tfdist.predict(trained, IMAGES, verbose=0)
    for batch in (1, 5, 48):
        found = call(place, image=tf.constant(IMAGES[:batch]))
        np.testing.assert_allclose(found["class"], wanted[:batch], atol=1e-6)
    manifest = manifest_of(place)
    assert manifest["inputs"] == {"image": ["float32", [None, 8, 8, 1]]}
    assert manifest["outputs"] == {"class": ["float32", [None, 4]]}
    assert manifest["tensorflow"] == tf.__version__
    (record,) = tf.data.TFRecordDataset(str(place / "assets.extra/tf_serving_warmup_requests"))
    request = PredictionLog.FromString(record.numpy()).predict_log.request
    assert (request.model_spec.name, list(request.inputs)) == ("cnn", ["image"])


def test_an_export_respects_existing_content_of_the_directory(trained, tmp_path, monkeypatch):
    for name in (
        "m/7",
        "text/2",
        "text/3",
        "unfinished/.partial-1",
        ".hidden/1",
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "saved_model.pb").touch()
    monkeypatch.setattr(exports, "_OTHERS_S", 0.0)
    with (
        FileLock(tmp_path / ".lock").acquire(),
        pytest.raises(TfdistError, match="is locked by process"),
    ):
        tfdist.export_model(trained, tmp_path, name="m")
    for options, code in (
        ({"name": "m", "version": 7}, "exists"),
        ({"name": "../m"}, "not-a-name"),
    ):
        caught = refusal(lambda words=options: tfdist.export_model(trained, tmp_path, **words))
        assert caught.code == code
    assert {path.name for path in tmp_path.glob("m/*")} == {"7"}
    assert tfdist.export_model(trained, tmp_path, name="m").name == "8"
    config = text_format.Parse((tmp_path / "models.config").read_text(), ModelServerConfig())
    listed = [(one.name, one.base_path) for one in config.model_config_list.config]
    assert listed == [(name, f"/models/{name}") for name in ("m", "text")]


def test_inputs_and_outputs_keep_their_names_in_any_order(tmp_path):
    b, a = (keras.Input((3,), name=name) for name in "ba")
    x = layers.Dense(2, name="x")(a)
    y = layers.Subtract(name="y")([b, a])
    model = keras.Model([b, a], [y, x, keras.ops.argmax(x, -1) > 0], name="named")
    asked = {"b": np.zeros((2, 3), "float32"), "a": np.ones((2, 3), "float32")}
    found = call(tfdist.export_model(model, tmp_path, samples=asked), **asked)
    np.testing.assert_array_equal(found["y"], -1)
    np.testing.assert_allclose(found["x"], model([*asked.values()])[1], atol=1e-6)


def test_unnamed_inputs_have_the_same_names_in_each_export(tmp_path, warnings):
    """Keras names them by a counter of the process, and by another one in a file."""

    def one():
        x = keras.Input((3,))
        return keras.Model(x, layers.Dense(2, name="y")(x), name="one")

    def two():
        x, z = keras.Input((3,)), keras.Input((3,))
        named = keras.Input((3,), name="named")
        return keras.Model([x, named, z], layers.Add(name="y")([x, named, z]), name="two")

    late = keras.Sequential([layers.Dense(2, name="y")], name="late")
    late.build((None, 3))
    ended = [keras.Sequential([keras.Input((3,)), layers.Dense(2, name="y")], name="s"), late]
    for model in (one(), one(), two(), two(), *ended):
        names = ["inputs_0", "named", "inputs_2"] if model.name == "two" else ["inputs"]
        model.save(tmp_path / "model.keras")
        for exported in (model, exports.read_model(tmp_path / "model.keras")[0]):
            place = tfdist.export_model(exported, tmp_path / "served")
            assert [*manifest_of(place)["inputs"]] == names
    assert warnings() == []


def of_texts(masked):
    """A model of texts, padded to the longest of a batch."""
    text = keras.Input((), dtype="string", name="text")
    x = layers.TextVectorization(vocabulary=["a", "b"])(text)
    x = layers.GlobalAveragePooling1D()(layers.Embedding(9, 2, mask_zero=masked)(x))
    return keras.Model(text, x, name="texts")


@pytest.mark.parametrize(
    ("make", "samples", "by_example"),
    [
        (lambda: Centred(), np.ones((1, 3), "float32"), False),
        (lambda: Centred(), np.zeros((4, 3), "float32"), False),
        (lambda: Centred(1e-4), RNG.rand(4, 3).astype("float32"), False),
        (lambda: line(Centred(), dtype="int64"), None, False),
        (lambda: of_texts(masked=False), None, False),
        (lambda: of_texts(masked=True), None, True),
    ],
    ids=["one", "equal", "small", "integers", "texts", "masked"],
)
def test_a_model_that_depends_on_its_batch_is_detected(make, samples, by_example, tmp_path):
    """Else requests of several clients share a batch, and each gets what depends on the others."""
    model = make()
    if samples is not None:
        model(samples)
    place = tfdist.export_model(model, tmp_path, samples=samples)
    assert manifest_of(place)["by_example"] is by_example


def test_a_model_in_bfloat16_answers_in_float32(tmp_path):
    model = line(layers.Dense(2, name="y", dtype="mixed_bfloat16", kernel_initializer="ones"))
    asked = RNG.rand(2, 3).astype("float32")
    place = tfdist.export_model(model, tmp_path, samples=asked)
    assert manifest_of(place)["outputs"] == {"y": ["float32", [None, 2]]}
    np.testing.assert_array_equal(call(place, x=asked)["y"], np.float32(model(asked)))


def test_a_subclassed_model_with_named_inputs_is_exported(tmp_path):
    model = Halves()
    x = {"left": RNG.rand(6, 5).astype("float32"), "right": RNG.rand(6, 3).astype("float32")}
    x["names"] = np.array([*"abcdef"], object)
    model({name: tf.constant(value) for name, value in x.items()})
    assert refusal(lambda: tfdist.export_model(model, tmp_path)).code == "no-samples"
    place = tfdist.export_model(model, tmp_path, samples=x)
    found = call(place, **{name: tf.constant(value[:2]) for name, value in x.items()})
    assert [*found["names"]] == [b"a", b"b"]
    wanted = model.dense(x["left"]) + x["right"]
    np.testing.assert_allclose(found["sum"], wanted[:2], atol=1e-6)
    np.testing.assert_array_equal(found["is_training"], 0)


def with_predict_step(step):
    """A class of models that change what they predict."""
    changed = lambda self, data: step(keras.Model.predict_step(self, data))  # noqa: E731
    return type("Own", (keras.Model,), {"predict_step": changed})


@pytest.mark.parametrize(
    ("step", "layer", "text"),
    [
        (None, Drawing(), "differs between two calls"),
        (lambda y: y + 1.0, None, "differs from tfdist.predict by 1"),
        (
            *(lambda y: y + 1.0, lambda x: keras.ops.concatenate([x, keras.ops.log(0 * x)])),
            "differs from tfdist.predict by 1",
        ),
        (
            *(lambda y: keras.ops.argmax(y, -1), None),
            r"shapes \[\(2, 2\)\], but tfdist.predict returns \[\(2,\)\]",
        ),
        (lambda y: ~y, lambda x: keras.ops.sum(x, -1) > 0, "differs from tfdist.predict by 1"),
    ],
)
def test_answers_that_differ_are_not_published(tmp_path, step, layer, text):
    model = line(layer, of=with_predict_step(step) if step else keras.Model)
    with pytest.raises(TfdistError, match=text):
        tfdist.export_model(model, tmp_path)
    assert not files_in(tmp_path)


def test_an_unbuilt_or_unsaveable_model_is_refused(tmp_path, strategies):
    unbuilt = keras.Sequential([layers.Dense(2)])
    for samples in (None, np.ones((2, 3), "float32")):
        caught = refusal(lambda x=samples: tfdist.export_model(unbuilt, tmp_path, samples=x))
        assert caught.code == "no-samples"
    inputs = [keras.Input((3,), name=name) for name in ("a-b", "a_b")]  # in a signature
    added = keras.Model(inputs, layers.Add()(inputs))
    assert refusal(lambda: tfdist.export_model(added, tmp_path)).code == "not-a-name"
    fixed = keras.Input((2,), batch_size=3, name="fixed")
    fixed = keras.Model(fixed, keras.ops.reshape(fixed, (3, 1, 2)))
    with pytest.raises(Exception) as error:  # noqa: PT011
        tfdist.export_model(fixed, tmp_path)
    assert "pass samples=" in "".join(error.value.__notes__)
    x = np.ones((2, 3), "float32")
    to_sparse = {"call": lambda self, x: tf.sparse.from_dense(x)}
    sparse = type("Sparse", (keras.Model,), to_sparse)(name="sparse")
    sparse(x)
    caught = refusal(lambda: tfdist.export_model(sparse, tmp_path, samples=x))
    assert caught.code == "not-dense"
    assert caught.problem.startswith("output 'output_0' is a SparseTensor")

    class Silent(layers.Layer):
        def call(self, x):
            return x

        def get_config(self):
            raise NotImplementedError

    with strategies[2].scope():
        model = line(Silent())
    caught = refusal(lambda: tfdist.export_model(model, tmp_path))
    assert (caught.where, caught.code) == ("export_model", "not-saveable")


def test_the_export_program_reads_files_and_checkpoints(tmp_path, capsys):
    model = line()
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
    manifest = manifest_of(place)
    assert (manifest["run"], manifest["step"]) == (str(tmp_path / "backup"), 8)
    assert export.main([*words, "--model", f"{tmp_path}/my model.py:make", "--best"]) == 2
    assert "the run has no best checkpoint" in capsys.readouterr().err


def test_later_failures_do_not_stop_publishing_new_versions(caplog):
    """What has come until the end too; the first failure ends it."""
    found = iter([None, "1", "1", "2", TfdistError("stale"), TfdistError("stale"), "3", "4"])
    done, pauses = [], iter([False] * 6 + [True])

    def newest():
        one = next(found)
        if isinstance(one, TfdistError):
            raise one
        return one

    def publish():
        done.append(len(done))
        if len(done) == 2:
            raise TfdistError("no room")

    export._publish_each(newest, publish, pause=lambda: next(pauses))
    assert (len(done), caplog.text.count("no room"), caplog.text.count("stale")) == (4, 1, 1)
    found, done = iter(["1"]), [0]
    with pytest.raises(TfdistError, match="no room"):
        export._publish_each(newest, publish, pause=lambda: True)


@pytest.fixture
def until_eof(monkeypatch):
    """Of a program whose standard input has ended, in this process."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    return ("--follow", "--until_eof")


def test_export_waits_for_a_missing_source(tmp_path, until_eof, caplog):
    assert export.main([str(tmp_path / "none"), str(tmp_path), *until_eof]) == 0
    assert "none does not exist yet" in caplog.text


def test_a_checkpoint_is_published_once_until_the_run_restarts(tmp_path, monkeypatch, until_eof):
    """Also where it comes between the look at the one before and the export."""
    newest_in, before = exports.newest_in, iter(["1:1.5"])

    def look(*words, **options):
        return next(before, None) or newest_in(*words, **options)

    monkeypatch.setattr(exports, "newest_in", look)
    (tmp_path / "served/other/1").mkdir(parents=True)
    (tmp_path / "served/other/1/manifest.json").write_text("[]")  # somebody else's
    words = [str(tmp_path / "backup"), str(tmp_path / "served"), f"--model={__file__}:line"]
    for is_new, versions in ((True, 1), (False, 1), (True, 2)):
        if is_new:
            shutil.rmtree(tmp_path / "backup", ignore_errors=True)
            backup, model = tfdist.BackupAndRestore(tmp_path / "backup"), line()
            model.compile("sgd", "mse")
            tfdist.fit(model, RNG.rand(4, 3), RNG.rand(4, 2), callbacks=[backup], verbose=0)
        assert export.main([*words, *until_eof]) == 0
        assert len(list(tmp_path.glob("served/line/[0-9]*"))) == versions


def test_a_version_is_written_to_a_url(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    order, original = [], MemoryFileSystem.put_file

    def put_file(self, local, path, **options):
        order.append(path)
        original(self, local, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    url, model = "memory://bucket/served", line()
    assert tfdist.export_model(model, url) == f"{url}/line/1"
    origin = {"run": str(tmp_path / "run"), "step": 4, "saved_at": 1.5}
    assert tfdist.export_model(model, f"{url}/", origin=origin) == f"{url}/line/2"
    names = [path.removeprefix("/bucket/served/line/") for path in order]
    assert names[len(names) // 2 - 2 : len(names) // 2] == ["1/saved_model.pb", "1/manifest.json"]
    assert "2/variables/variables.index" in names
    assert refusal(lambda: tfdist.export_model(model, url, version=2)).code == "exists"
    MemoryFileSystem().get("/bucket/served/line/2", str(tmp_path / "copy"), recursive=True)
    x = RNG.rand(3, 3).astype("float32")
    (found,) = call(tmp_path / "copy", x=x).values()
    np.testing.assert_allclose(found, model(x), atol=1e-6)
    monkeypatch.setattr(MemoryFileSystem, "put_file", Mock(side_effect=ConnectionError("refused")))
    monkeypatch.setattr("tfdist.checkpoint.remote._RETRY_S", 0.001)
    with pytest.raises(
        TfdistError, match=r"/line/3 cannot be written .refused.; the version is in"
    ):
        tfdist.export_model(model, url, origin={**origin, "step": 8})
    options = SimpleNamespace(directory=url, source=tmp_path / "run")
    assert export._published(options) == {"4:1.5"}


def test_a_version_of_a_killed_export_is_not_published(tmp_path):
    origin = {"run": str(tmp_path / "run"), "step": 4, "saved_at": 1.5}
    (tmp_path / "line/.partial-2").mkdir(parents=True)
    (tmp_path / "line/.partial-2/manifest.json").write_text(json.dumps(origin))
    options = SimpleNamespace(directory=str(tmp_path), source=tmp_path / "run")
    assert export._published(options) == set()


class Tokenizer(layers.Layer):
    """With a vocabulary that its configuration never has, as some of KerasHub's."""

    def call(self, x):
        return x

    def get_vocabulary(self):
        return ["a"]


def test_adapted_layers_are_published_or_refused(tmp_path):
    values = (RNG.randn(16, 3) * 5 + 20).astype("float32")
    scale, look_up = layers.Normalization(), layers.StringLookup(output_mode="one_hot")
    scale.adapt(values)
    look_up.adapt(["a", "b"])
    model = line(lambda x: layers.Dense(2)(scale(x)))
    word = keras.Input((1,), dtype="string")
    model.compile("sgd", "mse")
    backup = tfdist.BackupAndRestore(tmp_path)
    tfdist.fit(model, values, values[:, :2], callbacks=[backup], verbose=0)
    found, _ = exports.read_model(tmp_path, make=str(_written(model, tmp_path)))
    np.testing.assert_array_equal(found(values), model(values))
    vocabulary = keras.Model(word, layers.Dense(2)(look_up(word)))
    for damaged in ("{", "{}", '{"class_name": "Dense", "module": "keras.layers", "config": {}}'):
        (tmp_path / "damaged.json").write_text(damaged)
        made = str(tmp_path / "damaged.json")
        caught = refusal(lambda made=made: exports.read_model(tmp_path, make=made))
        assert caught.code in ("unreadable", "not-a-model")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "model.json").unlink()
    (tmp_path / "model.json").symlink_to(tmp_path / "victim")  # by whoever made the checkpoints
    _written(model, tmp_path)
    assert (tmp_path / "victim").read_text() == "mine"
    caught = refusal(lambda: _written(vocabulary, tmp_path))
    assert caught.code == "not-a-model"
    assert f"layer {look_up.name} has a vocabulary from adapt" in caught.problem
    caught = refusal(lambda: _written(line(Tokenizer()), tmp_path))
    assert caught.code == "not-a-model"
    known = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    assert _written(keras.Model(word, layers.Dense(2)(known(word))), tmp_path)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["none.keras", "out"], "no-model"),
        (["none", "out"], "no-model"),
        ([__file__, "out"], "no-model"),
        ([".", "out"], "no-model"),
        ([".", "out", "--model", "none.py:make"], "not-a-model"),
        ([".", "out", "--step", "3", "--best"], "exclusive"),
        (["a.keras", "out", "--versoin", "8"], "unknown-flag"),
        (["a.keras", "out", "--samples", "none.npy"], "no-file"),
    ],
)
def test_invalid_export_commands_are_refused(words, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(lambda: export._export(words)).code == code
