"""What a server of a ps job does with the memory of tensors that it has freed: it keeps it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

# Of <malloc.h>. The values are those to which glibc goes by itself in a process that has freed a
# block of 32 MiB: larger ones are of their own, less than twice as much free memory is kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 2**25


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Lets freed blocks of up to 32 MiB serve the next ones; False where that is not for us to say.

    Where a server has freed nothing so large yet, glibc gives the memory of a step's tensors back
    to the kernel and gets it again at the next one, page by page, filled with zeros. A user's own
    settings of glibc's malloc go before these; another C library has none.
    """
    told = environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if told or set_option is None:
        return False
    large = set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    return bool(large and set_option(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES))
