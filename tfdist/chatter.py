"""Lines that TensorFlow's C++ code logs while it loads, before its log level applies.

These are a banner, the processor's features, and an error on a machine without a GPU or its driver.
Other errors of a GPU's driver are shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from tfdist.options import LAUNCHED

CHATTER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog|I0000 .*\.cc:\d+\] "
    rb"|To enable the following instructions: "
    rb"|E0000 .*\] failed call to cuInit: .*(UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE)"
)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hide these lines in the block. Show all other lines of standard error at its end.

    In a task of the launcher this has no effect: the launcher hides the lines and logs them.
    """
    if LAUNCHED in os.environ or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as lines, os.fdopen(os.dup(2), "wb") as shown:
        os.dup2(lines.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown.fileno(), 2)
            lines.seek(0)
            shown.writelines(line for line in lines if not CHATTER.match(line))
