"""Frames, addresses and bodies that the front reads without a model."""

import contextlib
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.serving import protocol, replica
from tfdist.serving.protocol import Code, Frame, FrameKind, RequestError, Target

FRAMES = st.lists(
    st.builds(Frame, st.integers(0, 2**64 - 1), st.sampled_from(FrameKind), st.binary(max_size=50))
)


@given(FRAMES, st.integers(1, 40))
def test_frames_are_read_from_a_stream_in_any_pieces(frames, cut):
    stream = b"".join(map(protocol.encode_frame, frames))
    buffer, found = protocol.FrameBuffer(), list[Frame]()
    for start in range(0, len(stream), cut):
        found += buffer.feed(stream[start : start + cut])
    assert found == frames


def test_a_replica_sends_each_answer_before_the_next_call():
    ours, theirs = socket.socketpair()
    ours.settimeout(1)
    buffer, sent = protocol.FrameBuffer(), list[list[int]]()

    class Model:
        def answers(self, requests: Any) -> Any:
            for at in range(len(requests)):
                yield [(at, b"{}")]
                sent.append([frame.id for frame in buffer.feed(ours.recv(1000))])

    frames = [Frame(id, FrameKind.REST_PREDICT, b"{}") for id in (7, 8)]
    ours.sendall(b"".join(map(protocol.encode_frame, frames)))
    ours.shutdown(socket.SHUT_WR)
    model: Any = Model()
    replica._serve(model, theirs, max_batch=8)
    assert sent == [[7], [8]]


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("POST", "/V1/Models/m:predict", (Target(name="m"), FrameKind.REST_PREDICT)),
        ("POST", "/v1/models/m/versions/3:predict", (Target(name="m", version=3), 1)),
        ("GET", "/v1/models/m", (Target(name="m"), None)),
        ("GET", "/v1/models/m/versions/3", (Target(name="m", version=3), None)),
        ("GET", "/v1/models/m/versions/3/metadata", (Target(name="m", version=3), 2)),
        ("POST", "/v1/models/m:classify", None),
        ("POST", "/v1/models/m/labels/best:predict", None),
        ("GET", f"/v1/models/m/versions/{2**63 - 1}", (Target(name="m", version=2**63 - 1), None)),
        ("GET", f"/v1/models/m/versions/{2**63}", None),
        ("GET", f"/v1/models/m/versions/{'9' * 5000}", None),
        ("POST", "/v1/models/m", None),
        ("GET", "/v1/models/m:predict", None),
        ("PUT", "/v1/models/m:predict", None),
        ("POST", "/v1/models/m/versions/x:predict", None),
        ("GET", "/v1/models/", None),
        ("POST", "/v1/models/m/versions/99999999999999999999:predict", None),
    ],
)
def test_an_address_is_parsed_or_refused(method, path, found):
    if found:
        assert protocol.parse_path(method, path) == found
        return
    with pytest.raises(RequestError) as error:
        protocol.parse_path(method, path)
    assert error.value.code is Code.INVALID_ARGUMENT


def test_the_reason_is_the_informative_line():
    text = "Graph execution error:\n\nChecksum does not match\n\t [[{{node RestoreV2}}]]"
    assert protocol.reason_of(ValueError(text)) == "Checksum does not match"
    assert protocol.reason_of(ValueError()) == "ValueError"


@given(st.binary(max_size=60))
def test_bytes_that_are_no_request_are_refused(payload):
    with contextlib.suppress(RequestError):
        assert protocol.parse_model_spec(payload).name
