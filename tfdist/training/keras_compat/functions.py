"""`tf.function` without its warning of tracing often.

TensorFlow warns where functions are traced again and again, by the name of the Python function
(https://github.com/tensorflow/tensorflow/issues/34025); it has no public switch for one function.
Ended by: no release, TensorFlow 2.21 included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def compiled(function: Callable[..., Any]) -> Any:
    """`tf.function` for what is traced once for each program, and so often in a process.

    TensorFlow takes that for a mistake and warns; what is traced here is traced on purpose.
    """
    made = tf.function(function, autograph=False)
    made._omit_frequent_tracing_warning = True
    return made
