"""Every public name resolves, TensorFlow and all."""

import pytest

import tfdist


@pytest.mark.parametrize("name", tfdist.__all__)
def test_every_public_name_is_found(name):
    assert getattr(tfdist, name) is getattr(tfdist, name)
