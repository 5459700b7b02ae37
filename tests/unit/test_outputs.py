"""Hashes of a model's weights and state."""

import hashlib
import struct
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from tfdist.checkpoint.model_state import state_sha256, weights_sha256


def test_the_hash_covers_weights_in_order_then_the_optimizer():
    kernel = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    halves = np.ones(2, ml_dtypes.bfloat16)
    weights = [kernel.T, np.array(7, ">i4"), halves]
    model = SimpleNamespace(weights=weights, optimizer=None)
    found = struct.pack("<4fi", 1, 3, 2, 4, 7) + halves.tobytes()
    assert weights_sha256(model) == state_sha256(model) == hashlib.sha256(found).hexdigest()
    model.optimizer = SimpleNamespace(variables=[np.array(5, np.int64)])
    assert weights_sha256(model) == hashlib.sha256(found).hexdigest()
    assert state_sha256(model) == hashlib.sha256(found + struct.pack("<q", 5)).hexdigest()
