"""Which variables, flags and arguments hold a secret, by their names."""

from __future__ import annotations

import re

_NAME = re.compile(
    r"((^|[_.-])(token|secret|credentials?|(api|access|private|secret)[_-]?key)"
    r"|password|passwd|passphrase)$",
    re.IGNORECASE,
)


def names_a_secret(name: str) -> bool:
    """Returns whether a name is that of a secret, as HF_TOKEN, ``--api_key`` and PGPASSWORD are."""
    return bool(_NAME.search(name))
