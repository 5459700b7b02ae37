"""The TFDS dataset `tfdist_digits`: scikit-learn's handwritten digits. The import registers it.

The dataset contains 1,797 real scans of 8 x 8 pixels and needs no download.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from tfdist.errors import require_packages

# Every fifth example of each digit is a test example.
_TEST_STRIDE = 5


class TfdistDigits(tfds.core.GeneratorBasedBuilder):
    """Builder of the splits `train` (about 80 % of each digit) and `test` (about 20 %)."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}  # noqa: RUF012  (TFDS declares it so)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                # Grey values 0 to 16: number of dark pixels in a block of 4 x 4 pixels.
                "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
        )
        return tfds.core.DatasetInfo(
            builder=self,
            description=(
                "Handwritten digits of 43 people, scanned and reduced to 8 x 8 pixels of 0 to 16: "
                "the test part of the UCI data set that scikit-learn installs (E. Alpaydin and C. "
                "Kaynak, Optical Recognition of Handwritten Digits, 1998, doi:10.24432/C50P49)."
            ),
            features=features,
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        images, labels = _load_digits()
        is_test = _every_nth_of_each_label(labels)
        return {
            "train": self._generate_examples(images, labels, chosen=~is_test),
            "test": self._generate_examples(images, labels, chosen=is_test),
        }

    def _generate_examples(
        self,
        images: np.ndarray[Any, Any],
        labels: np.ndarray[Any, Any],
        chosen: np.ndarray[Any, Any],
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in np.flatnonzero(chosen).tolist():
            yield index, {"image": images[index], "label": int(labels[index])}


def _load_digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return images uint8[1797, 8, 8, 1] and labels int64[1797]."""
    require_packages("dataset tfdist_digits", "sklearn", extra="digits")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8)[..., None], digits.target.astype(np.int64)


def _every_nth_of_each_label(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return bool[n] that is true for each label's fifth, tenth, ... example in data order."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[_TEST_STRIDE - 1 :: _TEST_STRIDE]] = True
    return chosen
