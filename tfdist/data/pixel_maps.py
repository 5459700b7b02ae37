"""Pixel maps: the source row and column of each pixel of a transformed image.

A map of rows is int32[b, height], of columns int32[b, width]; -1 stands for none.
"""

from __future__ import annotations

import tensorflow as tf


def pick(images: tf.Tensor, *, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Return the pixels [b, h, w, c] that `rows` [b, h] and `columns` [b, w] name."""
    # One line of zeros above and to the left is what -1 points at.
    padded = tf.pad(images, [[0, 0], [1, 0], [1, 0], [0, 0]])
    size = tf.shape(padded)
    row_starts = (tf.range(size[0])[:, None] * size[1] + rows + 1) * size[2]
    indices = row_starts[:, :, None] + (columns + 1)[:, None, :]
    # One gather of single pixels; two gathers (rows, then columns) and the projective transform
    # measured no faster, mostly slower.
    pixels = tf.gather(tf.reshape(padded, [-1, size[3]]), indices)
    shape = [images.shape[0], rows.shape[1], columns.shape[1], images.shape[3]]
    return tf.ensure_shape(pixels, shape)


def identity(length: int | tf.Tensor, *, count: tf.Tensor) -> tf.Tensor:
    """Return the map of `count` images as they are, int32[count, length]."""
    line = tf.range(length)
    lines = tf.broadcast_to(line, [count, length])
    return tf.ensure_shape(lines, [None, length if isinstance(length, int) else None])


def length_of(line: tf.Tensor) -> int | tf.Tensor:
    """Return the pixels that a map has for each image; an int where the shape tells."""
    return line.shape[1] if line.shape[1] is not None else tf.shape(line)[1]


def flipped(line: tf.Tensor, flips: tf.Tensor) -> tf.Tensor:
    """Return the maps, those reversed for which `flips` (int32[b]) is 1."""
    return tf.where(flips[:, None] == 1, tf.reverse(line, [1]), line)
