"""Loaded version of a model that answers batches of requests. This module imports TensorFlow.

As in TensorFlow Serving, a model has one Session, and callables are made once. A call takes 18 us
of CPU time. A call of a signature from `tf.saved_model.load` takes 380 us.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.protobuf import config_pb2
from tensorflow_serving.apis import get_model_metadata_pb2, predict_pb2, prediction_log_pb2

from tfdist.serving import rest
from tfdist.serving.protocol import Code, FrameKind, RequestError, invalid, reason_of
from tfdist.serving.rest import DEFAULT_SIGNATURE, TensorSpec

_MOST_BYTES = 64 << 20  # size limit of an array from a smaller request: a tensor may repeat a value
_MOST_OF_A_BYTE = 8  # array bytes per byte of a request: protobuf packs a small int64 into one
_FIELDS = {  # the field of a TensorProto for the values of each type
    "float32": "float_val",
    "float64": "double_val",
    "int64": "int64_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
    "bool": "bool_val",
    "object": "string_val",
    **dict.fromkeys(("int32", "int16", "int8", "uint16", "uint8"), "int_val"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """Signature of a model, called with arrays in the order of `inputs`."""

    inputs: Mapping[str, TensorSpec]
    outputs: tuple[str, ...]
    call: Callable[..., Sequence[Any]]
    batches: bool  # requests can share a call: each answer depends only on its own example

    def run(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs by name, as arrays. TensorFlow returns a scalar string as bytes."""
        values = zip(self.outputs, self.call(*arrays), strict=True)
        return {
            name: np.array(value, object) if isinstance(value, bytes) else np.asarray(value)
            for name, value in values
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Decoded predict request: the input arrays, and the function that encodes the answer."""

    signature: str
    arrays: tuple[np.ndarray, ...]
    encode: Callable[[Mapping[str, np.ndarray]], bytes]

    @property
    def rows(self) -> int:
        return len(self.arrays[0]) if self.arrays and self.arrays[0].ndim else 1


class ServedModel:
    """Version of a model, with a callable for each signature."""

    def __init__(self, directory: Path, name: str, *, batch_sizes: Sequence[int]) -> None:
        self.name = name
        self.version = int(directory.name)
        self._sizes = tuple(sorted(batch_sizes))
        self._by_example = True  # the manifest can say that requests must not share a batch
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((directory / "manifest.json").read_text())
            self._by_example = bool(manifest["by_example"])
        graph = tf.Graph()
        options = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1)
        options.intra_op_parallelism_threads = len(os.sched_getaffinity(0))
        options.gpu_options.allow_growth = True  # other replicas and versions share the GPU
        with graph.as_default():
            self._session = tf.compat.v1.Session(graph=graph, config=options)
            meta = tf.compat.v1.saved_model.load(self._session, ["serve"], str(directory))
        self._definitions = meta.signature_def
        self.signatures = {
            key: self._signature(definition)
            for key, definition in meta.signature_def.items()
            if definition.outputs and not key.startswith("__")
        }
        self._specs = {key: one.inputs for key, one in self.signatures.items()}

    def _signature(self, definition: Any) -> Signature:
        inputs = dict(sorted(definition.inputs.items()))
        outputs = dict(sorted(definition.outputs.items()))
        specs = {name: _spec(info) for name, info in inputs.items()}
        found = map(_spec, outputs.values())
        options = config_pb2.CallableOptions(
            feed=[info.name for info in inputs.values()],
            fetch=[info.name for info in outputs.values()],
        )
        options.run_options.inter_op_thread_pool = -1  # run in the caller's thread
        return Signature(
            inputs=specs,
            outputs=tuple(outputs),
            call=self._session._make_callable_from_options(options),
            batches=self._by_example
            and all(spec.shape and spec.shape[0] == -1 for spec in specs.values())
            and all(spec.shape is None or spec.shape[:1] == (-1,) for spec in found),
        )

    def warm_up(self, directory: Path) -> None:
        """Run the warm-up requests in ``assets.extra``, and a batch of each batch size."""
        file = directory / "assets.extra" / "tf_serving_warmup_requests"
        if not file.is_file():
            return
        for record in tf.compat.v1.io.tf_record_iterator(str(file)):
            log = prediction_log_pb2.PredictionLog.FromString(record)
            if log.HasField("predict_log"):
                payload = log.predict_log.request.SerializeToString()
                (answer,) = self.answer([(FrameKind.GRPC_PREDICT, payload)])
                if isinstance(answer, RequestError):
                    raise answer
                call = self._decode_grpc(payload)
                signature = self.signatures[call.signature]
                for size in self._sizes if signature.batches and call.rows else ():
                    signature.call(*[np.repeat(array[:1], size, axis=0) for array in call.arrays])

    def answer(self, requests: Sequence[tuple[FrameKind, bytes]]) -> list[bytes | RequestError]:
        """Return the answers in the order of the requests."""
        return [one for _, one in sorted(itertools.chain(*self.answers(requests)))]

    def answers(
        self, requests: Sequence[tuple[FrameKind, bytes]]
    ) -> Iterator[list[tuple[int, bytes | RequestError]]]:
        """Yield each call's answers by number of request. Compatible requests share a call."""
        calls = [self._decoded(kind, payload) for kind, payload in requests]
        groups: dict[object, list[tuple[int, Call]]] = {}
        for at, call in enumerate(calls):
            if isinstance(call, Call):
                shares = self.signatures[call.signature].batches
                shapes = tuple(array.shape[1:] for array in call.arrays)
                key = (call.signature, shapes) if shares else at
                groups.setdefault(key, []).append((at, call))
        yield [(at, call) for at, call in enumerate(calls) if not isinstance(call, Call)]
        for members in groups.values():
            for batch in self._batches(members):
                numbers = iter([at for at, _ in batch])
                for found in self._run([call for _, call in batch]):
                    yield [(next(numbers), answer) for answer in found]

    def _batches(self, members: Sequence[tuple[int, Call]]) -> Iterator[list[tuple[int, Call]]]:
        """Yield batches of calls. A call with more rows than the limit is a batch of one call."""
        batch, rows = list[tuple[int, Call]](), 0
        for at, call in members:
            rows += call.rows
            if batch and rows > self._sizes[-1]:
                yield batch
                batch, rows = [], call.rows
            batch.append((at, call))
        yield batch

    def _decoded(self, kind: FrameKind, payload: bytes) -> Call | bytes | RequestError:
        try:
            if kind is FrameKind.REST_PREDICT:
                name, inputs, row = rest.decode_predict(payload, self._specs)
                return self._call(name, inputs, functools.partial(rest.encode_predict, row=row))
            if kind is FrameKind.GRPC_PREDICT:
                return self._decode_grpc(payload)
            metadata = self._metadata()
            if kind is FrameKind.GRPC_METADATA:
                return bytes(metadata.SerializeToString())
            names = {"preserving_proto_field_name": True}
            names["always_print_fields_with_no_presence"] = True
            document = json_format.MessageToDict(metadata, **names)
            document["metadata"]["signature_def"].pop("@type")
            return json.dumps(document, indent=1).encode()
        except RequestError as error:
            return error
        except Exception as error:
            return RequestError(Code.INVALID_ARGUMENT, f"{type(error).__name__}: {error}")

    def _decode_grpc(self, payload: bytes) -> Call:
        request = predict_pb2.PredictRequest.FromString(payload)
        name = request.model_spec.signature_name or DEFAULT_SIGNATURE
        signature = self.signatures.get(name)
        if signature is None:
            invalid(f'Serving signature name: "{name}" not found in signature def')
        sent, wanted = set(request.inputs), set(signature.inputs)
        if sent != wanted:
            extra, missing = ",".join(sorted(sent - wanted)), ",".join(sorted(wanted - sent))
            invalid(
                f"input size does not match signature: {len(sent)}!={len(wanted)}. "
                f"Sent extra: {{{extra}}}. Missing but required: {{{missing}}}."
            )
        arrays = {
            key: _array(request.inputs[key], spec, key) for key, spec in signature.inputs.items()
        }
        outputs = tuple(dict.fromkeys(request.output_filter)) or signature.outputs
        for key in outputs:
            if key not in signature.outputs:
                invalid(f"output tensor alias not found in signature: {key}")
        return self._call(name, arrays, functools.partial(self._encode_grpc, name, outputs))

    def _call(self, name: str, inputs: Mapping[str, np.ndarray], encode: Any) -> Call:
        signature = self.signatures[name]
        arrays = tuple(inputs[key] for key in signature.inputs)
        if signature.batches and len({len(array) for array in arrays}) > 1:
            sizes = ", ".join(f"{key}: {len(inputs[key])}" for key in signature.inputs)
            invalid(f"inputs differ in their first dimension ({sizes})")
        return Call(signature=name, arrays=arrays, encode=encode)

    def _encode_grpc(
        self, signature: str, wanted: Sequence[str], outputs: Mapping[str, np.ndarray]
    ) -> bytes:
        response = predict_pb2.PredictResponse()
        response.model_spec.name, response.model_spec.signature_name = self.name, signature
        response.model_spec.version.value = self.version
        for name in wanted:
            array, tensor = outputs[name], response.outputs[name]
            if field := _FIELDS.get(array.dtype.name):
                tensor.dtype = tf.as_dtype(array.dtype).as_datatype_enum
                for size in array.shape:
                    tensor.tensor_shape.dim.add().size = size
                getattr(tensor, field).extend(array.ravel().tolist())
            else:
                tensor.CopyFrom(tf.make_tensor_proto(array))
        return bytes(response.SerializeToString())

    def _run(self, calls: Sequence[Call]) -> Iterator[Sequence[bytes | RequestError]]:
        """Yield the answers of each run. After an error, each call of the signature is a run."""
        signature, left = self.signatures[calls[0].signature], list(calls)
        try:
            for answers in self._run_batch(signature, calls):
                yield answers
                del left[: len(answers)]
        except Exception as error:
            if len(left) > 1:
                for call in left:
                    yield from self._run([call])
            elif isinstance(error, RequestError):
                yield [error]
            else:
                code = error.error_code if isinstance(error, tf.errors.OpError) else Code.INTERNAL
                yield [RequestError(Code(code), reason_of(error))]

    def _run_batch(
        self, signature: Signature, calls: Sequence[Call]
    ) -> Iterator[Sequence[bytes | RequestError]]:
        separate = ([call.encode(signature.run(call.arrays))] for call in calls)
        if not signature.batches:
            yield from separate  # a single call
            return
        rows = [call.rows for call in calls]
        size = next((one for one in self._sizes if one >= sum(rows)), sum(rows))
        columns = zip(*(call.arrays for call in calls), strict=True)
        outputs = signature.run([_padded(column, size) for column in columns])
        if any(array.ndim == 0 or len(array) != size for array in outputs.values()):
            yield from separate  # outputs lack rows
            return
        answers: list[bytes | RequestError] = []
        start = 0
        for call, count in zip(calls, rows, strict=True):
            end = start + count
            answers.append(call.encode({name: array[start:end] for name, array in outputs.items()}))
            start = end
        yield answers

    def _metadata(self) -> Any:
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        response.model_spec.name = self.name
        response.model_spec.version.value = self.version
        definitions = get_model_metadata_pb2.SignatureDefMap()
        for key, definition in self._definitions.items():
            definitions.signature_def[key].CopyFrom(definition)
        response.metadata["signature_def"].Pack(definitions)
        return response


def _spec(info: Any) -> TensorSpec:
    dtype = np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype)
    shape = info.tensor_shape
    sizes = None if shape.unknown_rank else tuple(dim.size for dim in shape.dim)
    return TensorSpec(dtype=dtype, shape=sizes)


def _array(tensor: Any, spec: TensorSpec, name: str) -> np.ndarray:
    """Return the array in a tensor of a request, after a check of its size."""
    has = tf.as_dtype(tensor.dtype)
    if np.dtype(has.as_numpy_dtype) != spec.dtype:
        wanted = tf.as_dtype(spec.dtype).name
        invalid(f"input {name}: type {has.name} does not match signature: {wanted}")
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if any(size < 0 for size in shape) or tensor.tensor_shape.unknown_rank:
        invalid(f"input {name}: shape {shape} has an unknown dimension")
    rest.require_fit(shape, spec, name)
    size_bytes = math.prod(shape) * spec.dtype.itemsize
    if tensor.tensor_content and spec.dtype.kind != "O":
        if len(tensor.tensor_content) != size_bytes:
            found = len(tensor.tensor_content)
            invalid(f"input {name}: shape {shape} needs {size_bytes} bytes, got {found}")
        return np.frombuffer(tensor.tensor_content, spec.dtype).reshape(shape)
    if size_bytes > max(_MOST_BYTES, _MOST_OF_A_BYTE * tensor.ByteSize()):
        invalid(f"input {name}: shape {shape} exceeds the size limit of a request")
    return np.asarray(tf.make_ndarray(tensor))


def _padded(column: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return the rows of requests as one array, padded to `size` rows with the last row."""
    missing = size - sum(map(len, column))
    if len(column) == 1 and not missing:
        return column[0]
    return np.concatenate([*column, np.repeat(column[-1][-1:], missing, axis=0)])
