"""scikit-learn's handwritten digits as a TFDS dataset, `tfdist_digits`; importing registers it."""

from tfdist.data.digits.builder import TfdistDigits

__all__ = ["TfdistDigits"]
