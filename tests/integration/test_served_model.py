"""A version that is loaded answers as the model does, in TensorFlow Serving's forms."""

import json
from pathlib import Path
from random import Random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import json_format
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, predict_pb2

import tfdist
from tests.mutations import mutated
from tfdist.serving import protocol
from tfdist.serving.model import ServedModel
from tfdist.serving.protocol import Code, FrameKind, ModelStatus, RequestError, Target, VersionState

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


def saved(place: Path, signatures: Any) -> ServedModel:
    """Load a model of functions with the types of their inputs."""
    made = {
        key: tf.function(function, specs).get_concrete_function()
        for key, (function, *specs) in signatures.items()
    }
    tf.saved_model.save(tf.Module(), str(place), made)
    return ServedModel(place, "odd", batch_sizes=(1, 4))


TEXT, NUMBER = tf.TensorSpec([None], tf.string), tf.TensorSpec([None], tf.int64)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A model of text, of two inputs, with an output that has no rows, and one that fails."""
    signatures = {
        "text": (lambda t: {"raw_bytes": t, "size": tf.strings.length(t)}, TEXT),
        "pair": (lambda a, b: {"sum": a + b}, NUMBER, NUMBER),
        "total": (lambda a: {"total": tf.reduce_sum(a)}, NUMBER),
        "named": (lambda a: {"a": a, "names": tf.constant([*"abcd"])}, NUMBER),
        "picky": (_picky, NUMBER),
        "kept": (lambda a: {"kept": tf.boolean_mask(a, a > 1)}, NUMBER),
    }
    return saved(tmp_path_factory.mktemp("odd") / "1", signatures)


def _picky(a: tf.Tensor) -> dict[str, tf.Tensor]:
    with tf.control_dependencies([tf.debugging.assert_less(a, tf.constant(9, tf.int64))]):
        return {"a": tf.identity(a)}


def rest(
    model: ServedModel, *documents: Any, kind: FrameKind = FrameKind.REST_PREDICT
) -> list[Any]:
    answers = model.answer([(kind, json.dumps(d).encode()) for d in documents])
    return [a if isinstance(a, RequestError) else json.loads(a) for a in answers]


def grpc_request(signature: str = "", **inputs: np.ndarray) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = "small", signature
    for name, array in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    return request


def by_grpc(model: ServedModel, *requests: predict_pb2.PredictRequest) -> list[Any]:
    answers = model.answer([(FrameKind.GRPC_PREDICT, one.SerializeToString()) for one in requests])
    response = predict_pb2.PredictResponse
    return [a if isinstance(a, RequestError) else response.FromString(a) for a in answers]


def test_batched_requests_get_their_rows_by_both_protocols(exported, served):
    wanted = tfdist.predict(exported[0], X, batch_size=5, verbose=0)
    documents = ({"inputs": X[:1].tolist()}, {"instances": X[1:3].tolist()}, {"x": 1})
    *answers, refused = rest(served, *documents)
    np.testing.assert_allclose(answers[0]["outputs"], wanted[:1], atol=1e-6)
    np.testing.assert_allclose(answers[1]["predictions"], wanted[1:3], atol=1e-6)
    assert "Missing 'inputs' or 'instances' key" in str(refused)
    (by_rest,) = rest(served, {"instances": X.tolist()})
    (response,) = by_grpc(served, grpc_request(features=X))
    found = tf.make_ndarray(response.outputs["scores"])
    np.testing.assert_array_equal(found, np.float32(by_rest["predictions"]))
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("small", 1, "serving_default")


def test_a_batch_dependent_model_answers_each_request_separately(tmp_path):
    x = keras.Input((3,), name="x")
    model = keras.Model(x, x - keras.ops.mean(x, axis=0, keepdims=True), name="centred")
    place = tfdist.export_model(model, tmp_path)
    centred = ServedModel(place, "centred", batch_sizes=(1, 4))
    asked = [X[:3], X[3:]]
    answers = rest(centred, *({"instances": one.tolist()} for one in asked))
    for one, answer in zip(asked, answers, strict=True):
        wanted = model.predict(one, verbose=0)
        np.testing.assert_allclose(answer["predictions"], wanted, atol=1e-6)
    requests = [(FrameKind.REST_PREDICT, b'{"inputs": [[1, 2, 3]]}')] * 2
    assert [[at for at, _ in some] for some in centred.answers(requests)] == [[], [0], [1]]


def test_values_are_in_the_field_of_their_type(odd):
    """Where clients that read no `tensor_content` look for them, as TensorFlow Serving has it."""
    numbers, texts = np.array([1, 2]), np.array([b"ab", b"c"], object)
    one_output = grpc_request("text", t=texts)
    one_output.output_filter.extend(["size", "size"])
    requests = (grpc_request("pair", a=numbers, b=numbers), grpc_request("text", t=texts))
    pair, text, size = (one.outputs for one in by_grpc(odd, *requests, one_output))
    assert list(pair["sum"].int64_val) == [2, 4]
    assert list(text["raw_bytes"].string_val) == [b"ab", b"c"]
    assert list(text["size"].int_val) == [2, 1]
    assert dict(size) == {"size": text["size"]}


def small_request_of(rows: int) -> predict_pb2.PredictRequest:
    """Many of them are one batch, so a part of the machine's memory is too much for one."""
    request = grpc_request(features=X)
    tensor = request.inputs["features"]
    tensor.ClearField("tensor_content")
    tensor.float_val.append(1.0)
    tensor.tensor_shape.dim[0].size = rows
    return request


def filtered(name: str) -> predict_pb2.PredictRequest:
    request = grpc_request(features=X)
    request.output_filter.append(name)
    return request


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (grpc_request(x=X), "Sent extra: {x}. Missing but required: {features}."),
        (grpc_request(features=X.astype("float64")), "float64 does not match signature: float32"),
        (grpc_request(features=X[:, :2]), "shape [5,2] does not match signature: [?,3]"),
        (grpc_request("none", features=X), '"none" not found in signature def'),
        (filtered("none"), "output tensor alias not found in signature: none"),
        (small_request_of(2**24), "exceeds the size limit of a request"),
        (small_request_of(10**12), "exceeds the size limit of a request"),
        (small_request_of(-1), "has an unknown dimension"),
    ],
)
def test_grpc_requests_are_checked(served, request_, text):
    (answer,) = by_grpc(served, request_)
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
    answers = by_grpc(served, *(grpc_request(features=np.tile(X[:1], (n, 1))) for n in counts))
    assert sizes == [8, 1, 9, 2]
    assert not any(isinstance(answer, RequestError) for answer in answers)


@pytest.mark.parametrize(
    ("signature", "inputs", "outputs"),
    [
        ("picky", ([1], [9], [3]), ([1], Code.INVALID_ARGUMENT, [3])),
        ("total", ([1, 2], [5]), (3, 5)),  # has no rows
        ("kept", ([1], [2], [3]), ([], [2], [3])),  # has other rows
        # An output of as many rows as a batch is whole for each request.
        ("named", ([1], [3, 4]), [{"a": a, "names": [*"abcd"]} for a in ([1], [3, 4])]),
        ("pair", ({"a": [1], "b": [1, 2]}, {"a": [1], "b": [2]}), (Code.INVALID_ARGUMENT, [3])),
    ],
)
def test_a_batch_answers_failing_requests_and_outputs_without_rows(odd, signature, inputs, outputs):
    answers = rest(odd, *({"signature_name": signature, "inputs": one} for one in inputs))
    found = [one.code if isinstance(one, RequestError) else one["outputs"] for one in answers]
    assert found == [*outputs]
    if signature in ("picky", "kept"):  # a replica sends each answer before it runs the next
        asked = [{"signature_name": signature, "inputs": one} for one in inputs]
        requests = [(FrameKind.REST_PREDICT, json.dumps(one).encode()) for one in asked]
        order = [[at for at, _ in some] for some in odd.answers(requests)]
        assert order == [[], *([at] for at in range(len(inputs)))]


def test_metadata(served):
    as_json, as_message = served.answer(
        [(FrameKind.REST_METADATA, b""), (FrameKind.GRPC_METADATA, b"")]
    )
    document = json.loads(as_json)
    assert document["model_spec"]["version"] == "1"
    signatures = document["metadata"]["signature_def"]["signature_def"]
    assert signatures["serving_default"]["inputs"]["features"]["dtype"] == "DT_FLOAT"
    response = get_model_metadata_pb2.GetModelMetadataResponse.FromString(as_message)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert "serving_default" in signatures.signature_def


def test_messages_of_the_front_equal_the_stubs():
    metadata_request = get_model_metadata_pb2.GetModelMetadataRequest()
    for request in (grpc_request(x=np.ones(1000)), metadata_request):
        request.model_spec.name, request.model_spec.version.value = "m", 3
        found = protocol.parse_model_spec(request.SerializeToString())
        assert found == Target(name="m", version=3)
        request.model_spec.version_label = "best"
        with pytest.raises(RequestError, match="Unrecognized servable version label: best"):
            protocol.parse_model_spec(request.SerializeToString())
    broken = VersionState(version=2, state="END", message="broken")
    known = [VersionState(version=1, state="AVAILABLE"), broken]
    states = protocol.states_of(Target(name="m"), ModelStatus(states=known))
    assert [one.version for one in states] == [2, 1]
    response = get_model_status_pb2.GetModelStatusResponse()
    json_format.Parse(protocol.status_json(states), response)
    codes = [one.status.error_code for one in response.model_version_status]
    assert codes == [Code.UNKNOWN, Code.OK]


def test_mutated_requests_are_answered_or_refused(served, odd):
    random = Random(0)
    document = json.dumps({"instances": X[:2].tolist(), "signature_name": "serving_default"})
    text = b'{"signature_name": "text", "inputs": ["ab", {"b64": "/w=="}]}'
    in_fields = grpc_request(features=X[:2])
    in_fields.inputs["features"].ClearField("tensor_content")
    in_fields.inputs["features"].float_val.extend(X[:2].ravel().tolist())
    seeds = [
        (served, FrameKind.REST_PREDICT, document.encode()),
        (odd, FrameKind.REST_PREDICT, text),
        (served, FrameKind.GRPC_PREDICT, grpc_request(features=X[:2]).SerializeToString()),
        (served, FrameKind.GRPC_PREDICT, in_fields.SerializeToString()),
        (served, FrameKind.GRPC_METADATA, b"\x0a\x07\x0a\x05small\x12\x0dsignature_def"),
    ]
    inserts = (b"[", b"]", b"{", b"-", b"NaN", b"1e999", b'"b64"', b"null", b"\x80\xff\xff\x7f")
    for _ in range(300):
        for model, kind, valid in seeds:
            first, second = model.answer([(kind, mutated(valid, random, inserts)), (kind, valid)])
            assert isinstance(second, bytes), f"{kind.name}: a neighbour was refused: {second}"
            if isinstance(first, RequestError):
                assert first.code is not Code.OK
                assert str(first)
