"""Frames, addresses and the messages of TensorFlow Serving that the front reads and writes."""

import contextlib
import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import forked_python
from tfdist.serving import protocol
from tfdist.serving.protocol import (
    Code,
    Frame,
    Kind,
    ModelStatus,
    RequestError,
    Target,
    VersionState,
)

FRAMES = st.lists(
    st.builds(Frame, st.integers(0, 2**64 - 1), st.sampled_from(Kind), st.binary(max_size=50))
)


@given(FRAMES, st.integers(1, 40))
def test_frames_come_whole_out_of_a_stream_cut_anywhere(frames, cut):
    stream = b"".join(map(protocol.encode_frame, frames))
    buffer, found = protocol.FrameBuffer(), list[Frame]()
    for start in range(0, len(stream), cut):
        found += buffer.feed(stream[start : start + cut])
    assert found == frames


def test_an_error_passes_through_a_frame():
    sent = protocol.encode_error(7, RequestError(Code.NOT_FOUND, "no such signature"))
    (frame,) = protocol.FrameBuffer().feed(sent)
    error = protocol.decode_error(frame.payload)
    assert (frame.id, frame.kind, error.code, str(error)) == (
        *(7, Kind.ERROR),
        *(Code.NOT_FOUND, "no such signature"),
    )


@pytest.mark.parametrize(
    ("method", "path", "target", "kind"),
    [
        ("POST", "/v1/models/m:predict", Target(name="m"), Kind.REST_PREDICT),
        ("POST", "/V1/Models/m:predict", Target(name="m"), Kind.REST_PREDICT),
        ("POST", "/v1/models/m/versions/3:classify", Target(name="m", version=3), 2),
        ("POST", "/v1/models/m/labels/best:regress", Target(name="m", label="best"), 3),
        ("GET", "/v1/models/m", Target(name="m"), None),
        ("GET", "/v1/models/m/versions/3", Target(name="m", version=3), None),
        ("GET", "/v1/models/m/versions/3/metadata", Target(name="m", version=3), 4),
    ],
)
def test_an_address_names_model_version_and_method(method, path, target, kind):
    assert protocol.parse_path(method, path) == (target, kind)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/models/m"),
        ("GET", "/v1/models/m:predict"),
        ("PUT", "/v1/models/m:predict"),
        ("POST", "/v1/models/m/versions/x:predict"),
        ("GET", "/v1/models/"),
        ("POST", "/v1/models/m/versions/99999999999999999999:predict"),
    ],
)
def test_other_addresses_are_refused(method, path):
    with pytest.raises(RequestError) as error:
        protocol.parse_path(method, path)
    assert error.value.code is Code.INVALID_ARGUMENT


def test_a_reason_is_the_line_that_says_why():
    text = "Graph execution error:\n\nChecksum does not match\n\t [[{{node RestoreV2}}]]"
    assert protocol.reason_of(ValueError(text)) == "Checksum does not match"
    assert protocol.reason_of(ValueError()) == "ValueError"


def test_a_body_in_gzip_is_unpacked():
    assert protocol.unzipped(gzip.compress(b"12345"), most=5) == b"12345"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (gzip.compress(bytes(6)), "The request has more than 5 bytes"),
        (gzip.compress(b"1")[:-1], "The body is not gzip as a whole"),
        (gzip.compress(b"1") + b"2", "The body is not gzip as a whole"),
        (b"", "The body is not gzip as a whole"),
        (b"{}", "The body is not gzip: "),
    ],
    ids=range(5),
)
def test_a_body_that_is_not_gzip_is_refused(body, text):
    with pytest.raises(RequestError, match=text):
        protocol.unzipped(body, most=5)


WITH_STUBS = """
from tensorflow_serving.apis import classification_pb2, get_model_status_pb2, predict_pb2
from tfdist.serving import protocol
for message in (predict_pb2.PredictRequest(), classification_pb2.ClassificationRequest()):
    message.model_spec.name, message.model_spec.version.value = "m", 3
    message.model_spec.signature_name = "s"
    assert protocol.parse_model_spec(message.SerializeToString()) == protocol.Target(
        name="m", version=3
    )
labelled = predict_pb2.PredictRequest()
labelled.model_spec.name, labelled.model_spec.version_label = "m", "best"
labelled.inputs["x"].float_val.extend([1.0] * 1000)
found = protocol.parse_model_spec(labelled.SerializeToString())
assert found == protocol.Target(name="m", label="best")
states = [
    protocol.VersionState(version=2, state="END", message="no such file"),
    protocol.VersionState(version=1, state="AVAILABLE"),
]
response = get_model_status_pb2.GetModelStatusResponse.FromString(protocol.status_message(states))
first, second = response.model_version_status
assert (first.version, first.State.Name(first.state)) == (2, "END")
assert (first.status.error_code, first.status.error_message) == (2, "no such file")
assert (second.version, second.State.Name(second.state)) == (1, "AVAILABLE")
"""


def test_messages_are_those_of_the_stubs():
    # In a process of its own, as the stubs load TensorFlow.
    done = forked_python.run("-c", WITH_STUBS, timeout=300)
    assert done.returncode == 0, done.stderr


@given(st.binary(max_size=60))
def test_bytes_that_are_no_request_are_refused(payload):
    with contextlib.suppress(RequestError):
        assert protocol.parse_model_spec(payload).name


def test_states_in_json_are_newest_first():
    known = [
        VersionState(version=1, state="AVAILABLE"),
        VersionState(version=2, state="END", message="broken"),
    ]
    states = protocol.states_of(Target(name="m"), ModelStatus(states=known))
    first, second = protocol.status_json(states)["model_version_status"]
    assert first == {
        "version": "2",
        "state": "END",
        "status": {"error_code": "UNKNOWN", "error_message": "broken"},
    }
    assert second["status"] == {"error_code": "OK", "error_message": ""}
