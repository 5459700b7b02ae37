"""TensorFlow Serving's JSON, read and written."""

import itertools
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.serving import rest
from tfdist.serving.protocol import Code, RequestError
from tfdist.serving.rest import TensorSpec


def spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(dtype=np.dtype(dtype), shape=shape)


SIGNATURES = {
    "serving_default": {"x": spec("float32", -1, 2)},
    "text": {"t": spec("object", -1)},
    "pair": {"a": spec("int64", -1), "b": spec("float32", -1, 2)},
    "flag": {"f": spec("bool", -1)},
    "mark": {"m": spec("uint64", -1)},
    "half": {"h": spec("bfloat16", -1)},
}


def decode(document: Any) -> tuple[str, dict[str, np.ndarray], bool]:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return rest.decode_predict(body, SIGNATURES)


NAMES = ("text", "pair", "flag", "mark", "half")
TEXT, PAIR, FLAG, MARK, HALF = ({"signature_name": name} for name in NAMES)
ROWS = [{"a": 1, "b": [1, 2]}, {"b": [3, 4], "a": 2}]


@pytest.mark.parametrize(
    ("document", "inputs"),
    [
        ({"instances": [[1, 2.5], [3, 4]]}, {"x": [[1, 2.5], [3, 4]]}),
        ({**PAIR, "instances": ROWS}, {"a": [1, 2], "b": [[1, 2], [3, 4]]}),
        ({"inputs": [[1, 2]]}, {"x": [[1, 2]]}),
        ({**PAIR, "inputs": {"a": [1], "b": [[3, 4]]}}, {"a": [1], "b": [[3, 4]]}),
        (
            {**TEXT, "instances": ["a", {"b64": "/wA="}, "ü", {"b64": "_w"}]},
            {"t": [b"a", b"\xff\x00", "ü".encode(), b"\xff"]},
        ),
        (b'{"instances": [[NaN, -Infinity]]}', {"x": [[np.nan, -np.inf]]}),
        ({**MARK, "instances": [2**63, 1]}, {"m": [2**63, 1]}),
        ({**HALF, "instances": [1, 2]}, {"h": [1, 2]}),
    ],
)
def test_inputs_are_rows_or_columns_of_signature_types(document, inputs):
    signature, found, by_row = decode(document)
    assert (by_row, set(found)) == ("inputs" not in str(document), set(inputs))
    for name, values in inputs.items():
        dtype = SIGNATURES[signature][name].dtype
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], np.array(values, dtype))


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (b"", "JSON Parse error: "),
        (b"{", "JSON Parse error: "),
        (b"[1]", "JSON Value: [1] Is not object"),
        ({}, "Missing 'inputs' or 'instances' key"),
        ({"instances": 1}, "Expecting 'instances' to be a list/array with values"),
        ({"instances": []}, "Expecting 'instances' to be a list/array with values"),
        ({"instances": [[1, 2]], "inputs": [[1, 2]]}, "or both are present"),
        ({"signature_name": 3, "inputs": 1}, "'signature_name' key must be a string value."),
        ({"signature_name": "no", "inputs": 1}, '"no" not found in signature def'),
        ({"instances": [["a", 1]]}, "input x: the values are not equally nested lists of type"),
        ({"instances": [[0, 1], [0.5, True]]}, "of type float"),
        ({**PAIR, "inputs": {"a": [1, False], "b": []}}, "input a: "),
        ({"instances": [[None, 1]]}, "of type float"),
        ({"instances": [[1, 2], [3]]}, "input x: "),
        ({"instances": [[1, [2]]]}, "input x: "),
        ({**TEXT, "inputs": [["a"], []]}, "input t: "),
        ({"instances": [[1, 2, 3]]}, "input x: shape [1,3] does not match signature: [?,2]"),
        ({"instances": [[1, 16777217]]}, "of type float, or a number loses precision"),
        ({"instances": [[1, 1e39]]}, "a number loses precision"),
        ({"instances": [{"y": 1}]}, "element: 0 of 'instances' list. JSON object: {"),
        ({**PAIR, "instances": [ROWS[0], {"a": 1}]}, "equal to: a,b"),
        ({**PAIR, "instances": [ROWS[0], 1]}, "element: 1 of 'instances' list"),
        ({**PAIR, "instances": [1]}, "instances is a plain value/list"),
        ({**PAIR, "inputs": [1]}, "inputs is a plain value/list"),
        ({**PAIR, "inputs": {"a": [1]}}, "Missing named input: b"),
        ({**PAIR, "instances": [{"a": 1.5, "b": [1, 2]}]}, "input a: "),
        ({**TEXT, "inputs": [{"b64": "!"}]}, "Unable to base64 decode"),
        ({**TEXT, "inputs": [{"b32": "a"}]}, "of type string"),
        ({**TEXT, "inputs": [3]}, "of type string"),
        ({**FLAG, "inputs": [1]}, "of type bool"),
        ({**MARK, "inputs": [2**63, -1]}, "of type uint64"),
        ({**MARK, "inputs": [2**63, 1.5]}, "of type uint64"),
        ({**HALF, "inputs": [257]}, "of type bfloat16"),
        *((b'{"instances": ' + b"[" * n + b"1" + b"]" * n + b"}", "") for n in (70, 1000, 100_000)),
        *((b'{"inputs": ' + b"[" * n + b"NaN" + b"]" * n + b"}", "") for n in (70, 1000, 100_000)),
    ],
    ids=itertools.count(),
)
def test_bad_requests_get_one_line(document, text):
    with pytest.raises(RequestError) as error:
        decode(document)
    assert error.value.code is Code.INVALID_ARGUMENT
    assert text in str(error.value)


@pytest.mark.parametrize(
    "values", [["a" * 3_000, *"b" * 3_000], [*[0] * 3_000, "a"], [*[0] * 3_000, 1e39]]
)
def test_a_bad_request_takes_little_memory(values):
    """NumPy gives each text as many bytes as the longest: 40 GB for a body of 500 kB."""
    tracemalloc.start()
    with pytest.raises(RequestError):
        decode({"signature_name": "half", "inputs": values})
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2_000_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "b64", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.sampled_from(["instances", "inputs"]), st.sampled_from([*SIGNATURES]), JSON)
def test_any_json_is_read_or_refused(key, signature, value):
    try:
        _, inputs, _ = decode({"signature_name": signature, key: value})
    except RequestError:
        return
    for name, array in inputs.items():
        rest.require_fit(array.shape, SIGNATURES[signature][name], name)
        assert array.dtype == SIGNATURES[signature][name].dtype


NUMBERS_AND_TEXTS = {"y": np.array([1, 2]), "t": np.array([b"a", b"b"], object)}


@pytest.mark.parametrize(
    ("outputs", "answer"),
    [
        ({"y": np.array([[0.5], [1.0]], "f")}, b'{"predictions":[[0.5],[1.0]]}'),
        (NUMBERS_AND_TEXTS, b'{"predictions":[{"y":1,"t":"a"},{"y":2,"t":"b"}]}'),
        (NUMBERS_AND_TEXTS, b'{"outputs":{"y":[1,2],"t":["a","b"]}}'),
        # A float has the digits of its type, or none.
        ({"y": np.array([0.1, np.nan, np.inf], "f")}, b'{"outputs":[0.1,NaN,Infinity]}'),
        (
            {"y": np.array([0.1], "f"), "z": np.array([0.1])},
            b'{"predictions":[{"y":0.1,"z":0.1}]}',
        ),
        (
            {"y": np.array(0.1, "f"), "z": np.array([[0.1]], "f")},
            b'{"outputs":{"y":0.1,"z":[[0.1]]}}',
        ),
        ({"y": np.array([0.5, np.nan], "bfloat16")}, b'{"outputs":[0.5,NaN]}'),
        ({"raw_bytes": np.array([b"\xff\x00"], object)}, b'{"outputs":[{"b64":"/wA="}]}'),
    ],
)
def test_outputs_are_answered_as_rows_or_columns(outputs, answer):
    assert rest.encode_predict(outputs, row=b"predictions" in answer) == answer
