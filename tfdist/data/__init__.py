"""Data as a function of the step: sources, the order of examples, and augmentation.

resolve         conversion of the user's data to a source
source          interface of sources: examples by index, or a stream of batches
arrays          arrays in memory or mapped from files
tfrecord, tfds  TFRecord files by record number, and splits of TFDS datasets
python_indexed  examples or batches by index, read by Python code
stream          `tf.data.Dataset` of batches, read from a copy of its graph
draws           order of the examples and their random numbers, as functions of integers
augment         transforms of a batch of images
cache           files that all processes of a machine share
digits          scikit-learn's digits as a TFDS dataset
"""

from __future__ import annotations

from typing import Any

from tfdist.data.arrays import ArraySource
from tfdist.data.augment import (
    Compose,
    Normalization,
    RandomCrop,
    RandomFlip,
    Rescaling,
    for_evaluation,
)
from tfdist.data.draws import draws_for, example_at, example_at_numpy
from tfdist.data.python_indexed import PyDatasetSource, PythonSource
from tfdist.data.resolve import as_source, check_supported
from tfdist.data.source import GraphSource, Source, Transform, lean_options
from tfdist.data.stream import InputFunctionSource, StreamSource
from tfdist.data.tfds import from_tfds
from tfdist.data.tfrecord import TFRecordSource
from tfdist.renamed import refuse_renamed

__all__ = [
    "ArraySource",
    "Compose",
    "GraphSource",
    "InputFunctionSource",
    "Normalization",
    "PyDatasetSource",
    "PythonSource",
    "RandomCrop",
    "RandomFlip",
    "Rescaling",
    "Source",
    "StreamSource",
    "TFRecordSource",
    "Transform",
    "as_source",
    "check_supported",
    "draws_for",
    "example_at",
    "example_at_numpy",
    "for_evaluation",
    "from_tfds",
    "lean_options",
]


def __getattr__(name: str) -> Any:
    refuse_renamed(f"data.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
