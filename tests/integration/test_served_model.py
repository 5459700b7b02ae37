"""A version that is loaded answers as the model does, in TensorFlow Serving's forms."""

import json
from random import Random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    predict_pb2,
    regression_pb2,
)

import tfdist
from tests.mutations import mutated
from tfdist.serving.model import ServedModel
from tfdist.serving.protocol import Code, Kind, RequestError

X = np.random.default_rng(0).random((5, 3)).astype("float32")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,), name="features")
    model = keras.Model(inputs, keras.layers.Dense(2, name="scores")(inputs), name="small")
    return model, tfdist.export_model(model, tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def served(exported):
    _, place = exported
    model = ServedModel(place, "small", batch_sizes=(1, 4, 8))
    model.warm_up(place)
    return model


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A model of text, of two inputs, with an output that has no rows, and one that fails."""
    module = tf.Module()
    text, number = tf.TensorSpec([None], tf.string), tf.TensorSpec([None], tf.int64)
    signatures = {
        "text": tf.function(lambda t: {"raw_bytes": t, "size": tf.strings.length(t)}, [text]),
        "pair": tf.function(lambda a, b: {"sum": a + b}, [number, number]),
        "total": tf.function(lambda a: {"total": tf.reduce_sum(a)}, [number]),
        "named": tf.function(lambda a: {"a": a, "names": tf.constant([*"abcd"])}, [number]),
        "picky": tf.function(_picky, [number]),
    }
    place = tmp_path_factory.mktemp("odd") / "1"
    concrete = {key: function.get_concrete_function() for key, function in signatures.items()}
    tf.saved_model.save(module, str(place), concrete)
    return ServedModel(place, "odd", batch_sizes=(1, 4))


def _picky(a: tf.Tensor) -> dict[str, tf.Tensor]:
    with tf.control_dependencies([tf.debugging.assert_less(a, tf.constant(9, tf.int64))]):
        return {"a": tf.identity(a)}


def rest(model: ServedModel, *documents: Any) -> list[Any]:
    answers = model.answer([(Kind.REST_PREDICT, json.dumps(d).encode()) for d in documents])
    return [a if isinstance(a, RequestError) else json.loads(a) for a in answers]


def grpc_request(**inputs: np.ndarray) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "small"
    for name, array in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    return request


def test_requests_of_one_batch_get_their_own_rows(exported, served):
    model, _ = exported
    wanted = tfdist.predict(model, X, batch_size=5, verbose=0)
    answers = rest(served, {"inputs": X[:1].tolist()}, {"instances": X[1:3].tolist()}, {"x": 1})
    np.testing.assert_allclose(answers[0]["outputs"], wanted[:1], atol=1e-6)
    np.testing.assert_allclose(answers[1]["predictions"], wanted[1:3], atol=1e-6)
    assert "Missing 'inputs' or 'instances' key" in str(answers[2])


def test_both_protocols_give_one_answer(exported, served):
    (data,) = served.answer([(Kind.GRPC_PREDICT, grpc_request(features=X).SerializeToString())])
    assert isinstance(data, bytes)
    response = predict_pb2.PredictResponse.FromString(data)
    (by_rest,) = rest(served, {"instances": X.tolist()})
    np.testing.assert_array_equal(
        tf.make_ndarray(response.outputs["scores"]), np.float32(by_rest["predictions"])
    )
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("small", 1, "serving_default")


def test_values_are_in_the_field_of_their_type(odd):
    """Where clients that read no `tensor_content` look for them, as TensorFlow Serving has it."""
    numbers, texts = np.array([1, 2]), np.array([b"ab", b"c"], object)
    requests = [grpc_request(a=numbers, b=numbers), grpc_request(t=texts)]
    for request, name in zip(requests, ("pair", "text"), strict=True):
        request.model_spec.signature_name = name
    found = odd.answer([(Kind.GRPC_PREDICT, one.SerializeToString()) for one in requests])
    pair, text = (predict_pb2.PredictResponse.FromString(data).outputs for data in found)
    assert list(pair["sum"].int64_val) == [2, 4]
    assert list(text["raw_bytes"].string_val) == [b"ab", b"c"]
    assert list(text["size"].int_val) == [2, 1]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"x": X}, "Sent extra: {x}. Missing but required: {features}."),
        ({"features": X.astype("float64")}, "type float64 does not match signature: float32"),
        ({"features": X[:, :2]}, "shape [5,2] does not match signature: [?,3]"),
    ],
)
def test_grpc_requests_are_checked(served, inputs, text):
    (answer,) = served.answer([(Kind.GRPC_PREDICT, grpc_request(**inputs).SerializeToString())])
    assert isinstance(answer, RequestError)
    assert answer.code is Code.INVALID_ARGUMENT
    assert text in str(answer)


def test_a_batch_has_no_more_examples_than_it_may(served, monkeypatch):
    sizes = list[int]()
    run_batch = ServedModel._run_batch

    def noting(model: ServedModel, signature: Any, calls: Any) -> Any:
        sizes.append(sum(call.rows for call in calls))
        return run_batch(model, signature, calls)

    monkeypatch.setattr(ServedModel, "_run_batch", noting)
    counts = (3, 5, 1, 9, 2)
    requests = [grpc_request(features=np.tile(X[:1], (n, 1))) for n in counts]
    answers = served.answer([(Kind.GRPC_PREDICT, one.SerializeToString()) for one in requests])
    assert sizes == [8, 1, 9, 2]
    assert not any(isinstance(answer, RequestError) for answer in answers)


@pytest.mark.parametrize("rows", [2**24, 10**12])
def test_a_small_request_cannot_ask_for_much_memory(served, rows):
    """Many of them are one batch, so a part of the machine's memory is too much for one."""
    request = grpc_request(features=X)
    tensor = request.inputs["features"]
    tensor.ClearField("tensor_content")
    tensor.float_val.append(1.0)
    tensor.tensor_shape.dim[0].size = rows
    (answer,) = served.answer([(Kind.GRPC_PREDICT, request.SerializeToString())])
    assert "more than a request can hold" in str(answer)


def test_text_and_bytes(odd):
    document = {"signature_name": "text", "instances": ["ab", {"b64": "/w=="}]}
    (answer,) = rest(odd, document)
    assert answer["predictions"] == [
        {"raw_bytes": {"b64": "YWI="}, "size": 2},
        {"raw_bytes": {"b64": "/w=="}, "size": 1},
    ]


def test_a_batch_of_which_one_request_fails_answers_the_others(odd):
    documents = [{"signature_name": "picky", "instances": [value]} for value in (1, 9, 3)]
    first, second, third = rest(odd, *documents)
    assert (first, third) == ({"predictions": [1]}, {"predictions": [3]})
    assert isinstance(second, RequestError)
    assert second.code is Code.INVALID_ARGUMENT


def test_outputs_without_rows_are_computed_for_each_request(odd):
    documents = [{"signature_name": "total", "inputs": values} for values in ([1, 2], [5])]
    assert rest(odd, *documents) == [{"outputs": 3}, {"outputs": 5}]


def test_an_output_of_as_many_rows_as_a_batch_is_whole_for_each_request(odd):
    documents = [{"signature_name": "named", "inputs": values} for values in ([1, 2], [3, 4])]
    answers = [answer["outputs"] for answer in rest(odd, *documents)]
    assert answers == [{"a": a, "names": [*"abcd"]} for a in ([1, 2], [3, 4])]


def test_inputs_of_different_length_are_refused(odd):
    (answer,) = rest(odd, {"signature_name": "pair", "inputs": {"a": [1], "b": [1, 2]}})
    assert "inputs differ in their first dimension (a: 1, b: 2)" in str(answer)


def test_metadata(served):
    as_json, as_message = served.answer([(Kind.REST_METADATA, b""), (Kind.GRPC_METADATA, b"")])
    assert isinstance(as_json, bytes)
    assert isinstance(as_message, bytes)
    document = json.loads(as_json)
    assert document["model_spec"]["version"] == "1"
    signatures = document["metadata"]["signature_def"]["signature_def"]
    assert signatures["serving_default"]["inputs"]["features"]["dtype"] == "DT_FLOAT"
    response = get_model_metadata_pb2.GetModelMetadataResponse.FromString(as_message)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert "serving_default" in signatures.signature_def


@pytest.fixture(scope="module")
def of_examples(tmp_path_factory):
    """A model with signatures of the methods classify and regress, as estimators export them."""
    features = {
        "age": tf.io.FixedLenFeature([], tf.float32),
        "city": tf.io.FixedLenFeature([], tf.string, default_value=""),
    }

    def classify(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        age = tf.io.parse_example(inputs, features)["age"]
        labels = tf.repeat(tf.constant([["young", "old"]]), tf.shape(age)[0], axis=0)
        return {"classes": labels, "scores": tf.stack([1 - age / 100, age / 100], axis=1)}

    def regress(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        parsed = tf.io.parse_example(inputs, features)
        size = tf.cast(tf.strings.length(parsed["city"]), tf.float32)
        return {"outputs": (parsed["age"] + size)[:, None]}

    place = tmp_path_factory.mktemp("examples") / "1"
    graph = tf.Graph()
    with graph.as_default(), tf.compat.v1.Session(graph=graph) as session:
        text = tf.compat.v1.placeholder(tf.string, [None])
        classes, value = classify(text), regress(text)
        definitions = {
            "serving_default": tf.compat.v1.saved_model.classification_signature_def(
                text, classes["classes"], classes["scores"]
            ),
            "value": tf.compat.v1.saved_model.regression_signature_def(text, value["outputs"]),
        }
        builder = tf.compat.v1.saved_model.Builder(str(place))
        builder.add_meta_graph_and_variables(session, ["serve"], definitions)
        builder.save()
    return ServedModel(place, "people", batch_sizes=(1, 4))


def asked(model: ServedModel, kind: Kind, document: Any) -> Any:
    (answer,) = model.answer([(kind, json.dumps(document).encode())])
    return answer if isinstance(answer, RequestError) else json.loads(answer)


def test_examples_are_classified(of_examples):
    answer = asked(of_examples, Kind.REST_CLASSIFY, {"examples": [{"age": 25.0}, {"age": [75.0]}]})
    assert answer == {
        "results": [[["young", 0.75], ["old", 0.25]], [["young", 0.25], ["old", 0.75]]]
    }
    request = classification_pb2.ClassificationRequest()
    request.input.example_list.examples.add().features.feature["age"].float_list.value.append(25.0)
    (data,) = of_examples.answer([(Kind.GRPC_CLASSIFY, request.SerializeToString())])
    response = classification_pb2.ClassificationResponse.FromString(data)
    (row,) = response.result.classifications
    assert [(one.label, one.score) for one in row.classes] == [("young", 0.75), ("old", 0.25)]
    assert (response.model_spec.name, response.model_spec.version.value) == ("people", 1)


def test_examples_have_a_value_and_a_context(of_examples):
    document = {
        "signature_name": "value",
        "context": {"city": {"b64": "YWI="}},
        "examples": [{"age": 1.0}, {"age": 2.0, "city": "abcd"}],
    }
    assert asked(of_examples, Kind.REST_REGRESS, document) == {"results": [3.0, 6.0]}
    request = regression_pb2.RegressionRequest()
    request.model_spec.signature_name = "value"
    listed = request.input.example_list_with_context
    listed.context.features.feature["city"].bytes_list.value.append(b"ab")
    listed.examples.add().features.feature["age"].float_list.value.append(1.0)
    (data,) = of_examples.answer([(Kind.GRPC_REGRESS, request.SerializeToString())])
    response = regression_pb2.RegressionResponse.FromString(data)
    assert [one.value for one in response.result.regressions] == [3.0]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({}, "Expecting key 'examples' with a list/array"),
        ({"examples": []}, "Expecting key 'examples' with a list/array"),
        ({"examples": [3]}, "Example must be JSON object but got JSON Number"),
        ({"examples": [{"age": [1.0, 2]}]}, "Feature: age has elements of different types"),
        ({"examples": [{"age": None}]}, "Feature: age has element with unexpected JSON type: Null"),
        ({"examples": [{"age": 2**63}]}, "Value out of range: 9223372036854775808"),
        ({"examples": [{"city": "x"}]}, "Feature: age (data type: float) is required"),
        (
            {"examples": [{"age": 1.0}], "signature_name": "value"},
            "Expected classification signature method_name to be tensorflow/serving/classify. Was",
        ),
        ({"examples": [{"age": 1.0}], "signature_name": "x"}, "No signature was found"),
    ],
)
def test_examples_are_checked(of_examples, document, text):
    answer = asked(of_examples, Kind.REST_CLASSIFY, document)
    assert isinstance(answer, RequestError)
    assert answer.code is Code.INVALID_ARGUMENT
    assert text in str(answer)


def test_mutated_requests_are_answered_or_refused(served, odd, of_examples):
    random = Random(0)
    example = classification_pb2.ClassificationRequest()
    example.input.example_list.examples.add().features.feature["age"].float_list.value.append(2.0)
    document = json.dumps({"instances": X[:2].tolist(), "signature_name": "serving_default"})
    text = b'{"signature_name": "text", "inputs": ["ab", {"b64": "/w=="}]}'
    by_grpc = grpc_request(features=X[:2])
    in_fields = grpc_request(features=X[:2])
    in_fields.inputs["features"].ClearField("tensor_content")
    in_fields.inputs["features"].float_val.extend(X[:2].ravel().tolist())
    seeds = [
        (served, Kind.REST_PREDICT, document.encode()),
        (odd, Kind.REST_PREDICT, text),
        (served, Kind.GRPC_PREDICT, by_grpc.SerializeToString()),
        (served, Kind.GRPC_PREDICT, in_fields.SerializeToString()),
        (served, Kind.GRPC_METADATA, b"\x0a\x07\x0a\x05small\x12\x0dsignature_def"),
        (of_examples, Kind.REST_CLASSIFY, b'{"context": {"a": 1}, "examples": [{"age": [1.5]}]}'),
        (of_examples, Kind.GRPC_CLASSIFY, example.SerializeToString()),
    ]
    inserts = (b"[", b"]", b"{", b"-", b"NaN", b"1e999", b'"b64"', b"null", b"\x80\xff\xff\x7f")
    for _ in range(300):
        for model, kind, valid in seeds:
            first, second = model.answer([(kind, mutated(valid, random, inserts)), (kind, valid)])
            assert isinstance(second, bytes), f"{kind.name}: a neighbour was refused: {second}"
            if isinstance(first, RequestError):
                assert first.code is not Code.OK
                assert str(first)
