"""Every public name resolves, TensorFlow and all."""

from __future__ import annotations

import pytest

import tfdist


@pytest.mark.parametrize("name", tfdist.__all__)
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(tfdist, name) is getattr(tfdist, name)
