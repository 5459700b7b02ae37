"""A replica whose model is not TensorFlow's: it starts at once, and dies or hangs when it is asked.

A file ``saved_model.pb`` that says ``broken`` does not load.
"""

import json
import os
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from tfdist.serving import replica
from tfdist.serving.protocol import Code, FrameKind, RequestError

INPUT = {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": "-1"}, {"size": "2"}]}}
SIGNATURES = {"serving_default": {"inputs": {"x": INPUT}}}


class FakeModel:
    """Answers a request with its version and process, and what it was sent."""

    def __init__(self, directory: Path, name: str, *, batch_sizes: Sequence[int]) -> None:
        self.version = int(directory.name)
        if (directory / "saved_model.pb").read_text() == "broken":
            raise ValueError("broken on purpose")

    def warm_up(self, directory: Path) -> None:
        pass

    def answers(
        self, requests: Sequence[tuple[FrameKind, bytes]]
    ) -> list[list[tuple[int, bytes | RequestError]]]:
        return [[(at, self._one(kind, payload)) for at, (kind, payload) in enumerate(requests)]]

    def _one(self, kind: FrameKind, payload: bytes) -> bytes | RequestError:
        if kind is FrameKind.REST_METADATA:
            return json.dumps(
                {"metadata": {"signature_def": {"signature_def": SIGNATURES}}}
            ).encode()
        if kind is not FrameKind.REST_PREDICT:
            return payload
        try:
            asked = json.loads(payload)["instances"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return RequestError(Code.INVALID_ARGUMENT, "no request of this model")
        if asked == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if asked == "hang":
            signal.pause()
        if asked == "fail":
            return RequestError(Code.INVALID_ARGUMENT, "failed on purpose")
        return json.dumps({"predictions": asked, "by": [self.version, os.getpid()]}).encode()


def main(argv: Sequence[str]) -> int:
    fake = types.ModuleType("tfdist.serving.model")
    fake.ServedModel = FakeModel  # type: ignore[attr-defined]
    sys.modules["tfdist.serving.model"] = fake
    return replica.main(argv)
