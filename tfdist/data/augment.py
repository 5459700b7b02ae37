"""Augmentation of a batch of images with random draws per example.

The changes of an example depend only on (seed, epoch, example id). They do not depend on its batch,
the number of workers, or earlier draws. Each transform changes the whole batch
`[b, height, width, channels]` in one call. Consecutive crops and flips share a gather.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.draws import Draws, draws_for, mix
from tfdist.data.source import Nest, Transform, unpack
from tfdist.errors import UsageError, require, require_int, require_one_of
from tfdist.renamed import refuse_renamed

_Numbers = np.float64 | np.ndarray[Any, Any]


class _Own:
    """Base class of this module's transforms. A call applies a `Compose` of this transform."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        refuse_renamed(*(f"data.{cls.__name__}({name}=)" for name in kwargs))
        return super().__new__(cls)

    def __call__(
        self, batch: Nest, *, example_ids: tf.Tensor, epoch: tf.Tensor | int, seed: int
    ) -> Nest:
        return Compose([self])(batch, example_ids=example_ids, epoch=epoch, seed=seed)


# RandomCrop and RandomFlip move pixels, described by a map of rows, int32[b, height], and a map of
# columns, int32[b, width]. A map contains the source row or column of each pixel. -1 means zeros.
# Rescaling and Normalization compute ``images * scale + offset``, with scalars or numbers per
# channel.


@dataclasses.dataclass(frozen=True, slots=True)
class RandomCrop(_Own):
    """Random crop of each image, with the arguments of `keras.layers.RandomCrop`.

    He et al., "Deep residual learning" (2015), use ``RandomCrop(32, 32, padding=4)`` for CIFAR-10.

    Args:
      height: Height of the window in pixels (default: height of the image).
      width: Width of the window in pixels (default: width of the image).
      seed: Seed of the draws (default: the run's seed).
      data_format: "channels_last" or `None`.
      name: Ignored.
      padding: Pixels of zeros added on each side before the crop (default: 0).
    """

    height: int | None = None
    width: int | None = None
    seed: int | None = None
    data_format: str | None = None
    name: str | None = None
    _: dataclasses.KW_ONLY
    padding: int = 0

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            if getattr(self, name) is not None:
                require_int(f"RandomCrop: {name}", getattr(self, name), least=1)
        require_int("RandomCrop: padding", self.padding, least=0)
        _check_draws(self)

    def move(
        self, rows: tf.Tensor, columns: tf.Tensor, *, draws: Draws
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the maps of rows and columns for the window."""
        return (
            self._window(rows, length=self.height, draws=draws, index=0),
            self._window(columns, length=self.width, draws=draws, index=1),
        )

    def _window(
        self, line: tf.Tensor, *, length: int | None, draws: Draws, index: int
    ) -> tf.Tensor:
        available = line.shape[1] or tf.shape(line)[1]
        length = available if length is None else length
        places = available + 2 * self.padding - length + 1
        # Raises at trace time if the size of the images is known.
        enough = tf.debugging.assert_positive(
            places, message=f"RandomCrop: images smaller than a window of {length}"
        )
        with tf.control_dependencies([] if enough is None else [enough]):
            places = tf.identity(places)
        first = draws.below(places, index=index) - self.padding
        wanted = first[:, None] + tf.range(length)
        inside = (wanted >= 0) & (wanted < available)
        source = tf.gather(line, tf.clip_by_value(wanted, 0, available - 1), batch_dims=1)
        return tf.where(inside, source, -1)


@dataclasses.dataclass(frozen=True, slots=True)
class RandomFlip(_Own):
    """Random flip of each image, with the arguments of `keras.layers.RandomFlip`.

    Each direction has the probability 0.5.

    Args:
      mode: "horizontal" (left to right), "vertical" or "horizontal_and_vertical" (default).
      seed: Seed of the draws (default: the run's seed).
      data_format: "channels_last" or `None`.
    """

    mode: str = "horizontal_and_vertical"
    seed: int | None = None
    data_format: str | None = None

    def __post_init__(self) -> None:
        modes = ("horizontal", "vertical", "horizontal_and_vertical")
        require_one_of("RandomFlip: mode", self.mode, modes)
        _check_draws(self)

    def move(
        self, rows: tf.Tensor, columns: tf.Tensor, *, draws: Draws
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the maps of rows and columns, reversed for the examples to flip."""
        if "vertical" in self.mode:
            rows = _flipped(rows, draws.below(2, index=0))
        if "horizontal" in self.mode:
            columns = _flipped(columns, draws.below(2, index=1))
        return rows, columns


def _check_draws(transform: RandomCrop | RandomFlip) -> None:
    """Raise UsageError for a seed or a data format that this module does not support."""
    where = type(transform).__name__
    if transform.seed is not None:
        require_int(f"{where}: seed", transform.seed, least=0)
    if transform.data_format is not None:
        fix = "move the channels to the last axis"
        require_one_of(f"{where}: data_format", transform.data_format, ["channels_last"], fix=fix)


@dataclasses.dataclass(frozen=True, slots=True)
class Rescaling(_Own):
    """Scaling to ``images * scale + offset`` in floating point, as `keras.layers.Rescaling`."""

    scale: float
    offset: float = 0.0

    def coefficients(self) -> tuple[_Numbers, _Numbers]:
        """Return (scale, offset)."""
        return np.float64(self.scale), np.float64(self.offset)


@dataclasses.dataclass(frozen=True, slots=True)
class Normalization(_Own):
    """Scaling to ``(images - mean) / sqrt(variance)``, as `keras.layers.Normalization`.

    Args:
      axis: -1 (default): `mean` may be a number per channel. `None`: `mean` is a single number.
      mean: Mean of the stored pixels: a number, or a list with a number for each channel.
      variance: Variance, with the shape of `mean`.
      invert: True to undo the scaling: ``images * sqrt(variance) + mean`` (default: False).
    """

    axis: Literal[-1] | None = -1
    mean: float | Sequence[float] | None = None
    variance: float | Sequence[float] | None = None
    invert: bool = False

    def __post_init__(self) -> None:
        mean, variance = self._statistics()  # NaN for None
        has_shape = mean.shape == variance.shape and mean.ndim <= (self.axis == -1)
        require(
            has_shape
            and self.axis in (-1, None)
            and np.isfinite(mean).all()
            and (variance > 0).all(),
            "Normalization",
            f"axis={self.axis}, mean={self.mean} and variance={self.variance} do not fit together",
            fix="pass a mean and a positive variance: with axis=-1 a list for the channels, else "
            "a number",
            code="out-of-range",
        )

    def coefficients(self) -> tuple[_Numbers, _Numbers]:
        """Return the scale and the offset."""
        mean, variance = self._statistics()
        std = np.sqrt(variance)
        return (std, mean) if self.invert else (1.0 / std, -mean / std)

    def _statistics(self) -> tuple[_Numbers, _Numbers]:
        """Return mean and variance, also if they have the shape [1, 1, 1, channels] of a layer."""
        mean, variance = (np.asarray(value, np.float64) for value in (self.mean, self.variance))
        return np.squeeze(mean), np.squeeze(variance)


_MOVES = (RandomCrop, RandomFlip)
_SCALES = (Rescaling, Normalization)


class Compose:
    """Sequence of transforms. Two transforms of the same class draw different random numbers.

    `x` must be a tensor of images, or a dict or tuple with the images at `key`. `y` and
    `sample_weight` are unchanged.
    """

    def __init__(self, transforms: Sequence[Transform], *, key: str | int | None = None) -> None:
        flat: list[Transform] = []
        for each in transforms:
            flat += each.transforms if isinstance(each, Compose) and each.key is None else [each]
        self.transforms: tuple[Transform, ...] = tuple(flat)
        self.key: str | int | None = key

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self, batch: Nest, *, example_ids: tf.Tensor, epoch: tf.Tensor | int, seed: int
    ) -> Nest:
        """Return the transformed batch. `example_ids` is int64[b], `epoch` is int64[] or [b]."""
        by = {"example_ids": example_ids, "epoch": epoch, "seed": seed}
        for kind, group in itertools.groupby(enumerate(self.transforms), key=_kind_of):
            members: list[tuple[int, Any]] = list(group)
            if kind is _MOVES:
                batch = self._moved(batch, members, by)
            elif kind is _SCALES:
                images = _scaled(self._images(batch), [member for _, member in members])
                batch = self._with_images(batch, images)
            else:
                for position, transform in members:
                    batch = transform(batch, **{**by, "seed": mix(seed + position)})
        return batch

    def _images(self, batch: Nest) -> tf.Tensor:
        x = unpack(batch)[0]
        images = x if self.key is None else x[self.key]
        nested = tf.nest.is_nested(images)
        images = images if nested else tf.convert_to_tensor(images)
        if nested or images.shape.rank != 4:
            raise UsageError(
                "augmentation",
                f"the inputs {tf.nest.map_structure(lambda leaf: leaf.shape, images)} are not one "
                "tensor [batch, height, width, channels]",
                fix="name the images with key= if the model has several inputs, or add a channel "
                "axis",
                code="unsupported-data",
            )
        return images

    def _with_images(self, batch: Nest, images: tf.Tensor) -> Nest:
        x: Any = unpack(batch)[0]
        if self.key is None:
            x = images
        elif isinstance(x, dict):
            x = {**x, self.key: images}
        else:
            at = int(self.key)
            x = (*x[:at], images, *x[at:][1:])
        return (x, *batch[1:]) if isinstance(batch, tuple) else x

    def _moved(self, batch: Nest, members: list[tuple[int, Any]], by: Mapping[str, Any]) -> Nest:
        """Return the batch after crops and flips. `by` contains example ids, epoch and seed."""
        images = self._images(batch)
        size = tf.shape(images)
        rows = _identity(images.shape[1] or size[1], count=size[0])
        columns = _identity(images.shape[2] or size[2], count=size[0])
        for position, move in members:
            own = by if move.seed is None else {**by, "seed": move.seed}
            draws = draws_for(type(move).__name__, position=position, **own)
            rows, columns = move.move(rows, columns, draws=draws)
        return self._with_images(batch, _pick(images, rows=rows, columns=columns))


def for_evaluation(transform: Transform | None) -> Transform | None:
    """Return `transform` without crops and flips, for validation and prediction."""
    if isinstance(transform, _MOVES):
        return None
    if isinstance(transform, Compose):
        kept = [each for each in map(for_evaluation, transform.transforms) if each is not None]
        return Compose(kept, key=transform.key)
    return transform


def _kind_of(numbered: tuple[int, Transform]) -> tuple[type, ...] | None:
    return next((kind for kind in (_MOVES, _SCALES) if isinstance(numbered[1], kind)), None)


def _scaled(images: tf.Tensor, steps: Sequence[Any]) -> tf.Tensor:
    """Apply all steps as a product and a sum, in `keras.config.floatx()`.

    The steps are merged in double precision. If the graph optimizer merged them, the values would
    depend on the rest of the graph.
    """
    scale: _Numbers = np.float64(1.0)
    offset: _Numbers = np.float64(0.0)
    for step in steps:
        factor, shift = step.coefficients()
        scale, offset = scale * factor, offset * factor + shift
    images = tf.cast(images, keras.config.floatx())
    return images * tf.constant(scale, images.dtype) + tf.constant(offset, images.dtype)


def _pick(images: tf.Tensor, *, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Return the pixels [b, h, w, c] at `rows` [b, h] and `columns` [b, w]."""
    # Index -1 points to a line of zeros above and to the left.
    padded = tf.pad(images, [[0, 0], [1, 0], [1, 0], [0, 0]])
    size = tf.shape(padded)
    row_starts = (tf.range(size[0])[:, None] * size[1] + rows + 1) * size[2]
    indices = row_starts[:, :, None] + (columns + 1)[:, None, :]
    # A single gather of pixels: two gathers (rows, then columns) and the projective transform
    # were mostly slower and never faster in measurements.
    pixels = tf.gather(tf.reshape(padded, [-1, size[3]]), indices)
    shape = [images.shape[0], rows.shape[1], columns.shape[1], images.shape[3]]
    return tf.ensure_shape(pixels, shape)


def _identity(length: int | tf.Tensor, *, count: tf.Tensor) -> tf.Tensor:
    """Return the map of `count` unchanged images, int32[count, length]."""
    line = tf.range(length)
    lines = tf.broadcast_to(line, [count, length])
    return tf.ensure_shape(lines, [None, length if isinstance(length, int) else None])


def _flipped(line: tf.Tensor, flips: tf.Tensor) -> tf.Tensor:
    """Return the maps, reversed for examples with `flips` (int32[b]) equal to 1."""
    return tf.where(flips[:, None] == 1, tf.reverse(line, [1]), line)
