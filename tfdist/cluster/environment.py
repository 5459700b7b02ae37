"""Finding out from the environment which task of which job this process is.

Whoever starts the tasks leaves variables for them, each in its own way. A reader knows one
way: it returns None when its variables are not there, and raises `UsageError` when they are
and say something wrong. A scheduler that sets no TF_CONFIG gets a reader of its own here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tfdist.cluster import tf_config
from tfdist.cluster.tf_config import TaskConfig

Reader = Callable[[Mapping[str, str]], TaskConfig | None]

READERS: tuple[Reader, ...] = (tf_config.from_environ,)
"""In order of precedence: what says the most about the job comes first."""


def read_environment(
    environ: Mapping[str, str], *, readers: Sequence[Reader] = READERS
) -> TaskConfig | None:
    """Returns what the first reader that knows `environ` says, or None: a process by itself."""
    for reader in readers:
        config = reader(environ)
        if config is not None:
            return config
    return None
