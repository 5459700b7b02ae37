"""Sweeps: KerasTuner searches, tfdist runs every trial as a job of its own, and nothing is lost.

The journal of a sweep is its only truth. The chief of a sweep that was killed reads it, brings a
new oracle to the same state by asking and telling it the same, and goes on.

`options`, `events`, `journal`, `lock` and `results` load no KerasTuner; `space` and `search` do,
and with it Keras and TensorFlow.
"""

from __future__ import annotations
