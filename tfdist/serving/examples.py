"""Classify and regress: serialized `tf.train.Example`s in; classes with scores, or values, out.

Forms and texts follow ``json_tensor.cc``, ``classifier.cc`` and ``regressor.cc`` of TensorFlow
Serving. For signatures that name one of the two methods, which exports of tfdist do not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import classification_pb2, regression_pb2

from tfdist.serving import rest
from tfdist.serving.protocol import Kind, invalid


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """Classify or regress: its name in signatures, their outputs, and its messages."""

    title: str
    name: str
    outputs: tuple[str, ...]
    request: Any
    response: Any


CLASSIFY = Method(
    title="classification",
    name="tensorflow/serving/classify",
    outputs=("classes", "scores"),
    request=classification_pb2.ClassificationRequest,
    response=classification_pb2.ClassificationResponse,
)
REGRESS = Method(
    title="regression",
    name="tensorflow/serving/regress",
    outputs=("outputs",),
    request=regression_pb2.RegressionRequest,
    response=regression_pb2.RegressionResponse,
)
METHODS = {
    Kind.REST_CLASSIFY: CLASSIFY,
    Kind.GRPC_CLASSIFY: CLASSIFY,
    Kind.REST_REGRESS: REGRESS,
    Kind.GRPC_REGRESS: REGRESS,
}


def decode_json(body: bytes) -> tuple[str, np.ndarray]:
    """Return the signature's name and the examples ``[n]`` in a JSON body; raise RequestError."""
    document = rest.parse(body)
    name = rest.signature_of(document)
    listed = document.get("examples")
    if not isinstance(listed, list) or not listed:
        invalid("Expecting key 'examples' with a list/array of values")
    context = _example(document["context"]) if "context" in document else b""
    return name, np.array([context + _example(one) for one in listed], object)


def decode_message(method: Method, payload: bytes) -> tuple[str, np.ndarray]:
    """Return the signature's name and the examples ``[n]`` in a request; raise RequestError."""
    request = method.request.FromString(payload)
    in_context = request.input.example_list_with_context
    context = in_context.context.SerializeToString()  # of no bytes where there is none
    listed = [*request.input.example_list.examples, *in_context.examples]
    if not listed:
        invalid("Input is empty.")
    name = request.model_spec.signature_name or rest.DEFAULT_SIGNATURE
    return name, np.array([context + one.SerializeToString() for one in listed], object)


def require_method(method: Method, name: str, definition: Any) -> None:
    """Raise RequestError unless a signature (None where there is none) is one of a method."""
    if definition is None:
        invalid(f"No signature was found with the name: {name}")
    if definition.method_name != method.name:
        invalid(
            f"Expected {method.title} signature method_name to be {method.name}. "
            f"Was: {definition.method_name}"
        )
    if len(definition.inputs) != 1 or not set(definition.outputs) & set(method.outputs):
        wanted = " or ".join(f'"{key}"' for key in method.outputs)
        invalid(f"Expected {method.title} signature of one input, with outputs {wanted}")


def encode_json(method: Method, outputs: Mapping[str, np.ndarray]) -> bytes:
    """Return the JSON answer: pairs of label and score for each example, or its value."""
    if method is REGRESS:
        values = _values(outputs)
        return rest.dumps({"results": values}, {"outputs": values})
    labels, scores = _classes(outputs)
    rows = [
        [[label.decode("utf-8", "replace"), score] for label, score in zip(*row, strict=True)]
        for row in zip(labels, scores, strict=True)
    ]
    return rest.dumps({"results": rows}, {"scores": scores})


def encode_message(method: Method, spec: Any, outputs: Mapping[str, np.ndarray]) -> bytes:
    """Return the answer of gRPC; `spec` is the ``ModelSpec`` of what answers."""
    response = method.response()
    response.model_spec.CopyFrom(spec)
    if method is REGRESS:
        for value in _values(outputs):
            response.result.regressions.add(value=value)
    else:
        for labels, scores in zip(*_classes(outputs), strict=True):
            row = response.result.classifications.add()
            for label, score in zip(labels, scores, strict=True):
                row.classes.add(label=label.decode("utf-8", "replace"), score=score)
    return bytes(response.SerializeToString())


def _classes(outputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and scores ``[n, classes]``; what the signature leaves out is empty or 0."""
    shape = next(outputs[key].shape for key in CLASSIFY.outputs if key in outputs)
    labels = outputs.get("classes", np.full(shape, b"", object))
    scores = outputs.get("scores", np.zeros(shape, np.float32))
    if labels.ndim != 2 or labels.shape != scores.shape:
        found = f"{labels.shape} and {scores.shape}"
        invalid(f"Expected classes and scores of shape [batch_size num_classes] but got {found}")
    return labels, scores


def _values(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the value of each example ``[n]``."""
    array = outputs["outputs"]
    if array.shape[1:] not in ((), (1,)):
        invalid(f"Expected output shape [batch_size] or [batch_size, 1] but got {array.shape}")
    return array.reshape(-1)


def _example(value: Any) -> bytes:
    """Return the serialized Example that a JSON object is."""
    if not isinstance(value, dict):
        invalid(f"Example must be JSON object but got JSON {rest.json_type(value)}")
    made = tf.train.Example()
    for name, content in value.items():
        feature = made.features.feature[name]
        for one in content if isinstance(content, list) else [content]:
            kind, converted = _element(name, one)
            if feature.WhichOneof("kind") not in (None, kind):
                invalid(f"Feature: {name} has elements of different types")
            getattr(feature, kind).value.append(converted)
    return bytes(made.SerializeToString())


def _element(name: str, value: Any) -> tuple[str, Any]:
    """Return the kind of list that a JSON value of a feature is in, and the value there."""
    if isinstance(value, int):  # a bool is one
        return "int64_list", int(value)
    if isinstance(value, float):
        return "float_list", value
    if isinstance(value, str):
        return "bytes_list", value.encode("utf-8", "surrogatepass")
    if rest.is_base64(value):
        return "bytes_list", rest.from_base64(value)
    invalid(f"Feature: {name} has element with unexpected JSON type: {rest.json_type(value)}")
