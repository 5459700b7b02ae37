"""A network of the job's own whose one wire, loopback, is no faster than it is told to be."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess

_LOG = logging.getLogger(__name__)
_DEADLINE_S = 20
# Packets as of Ethernet, and not of 64 kB, which the limit would never let through. The queue
# holds what 300 ms take: senders wait then, as nothing is lost on the way.
_LIMIT = (
    "ip link set lo mtu 1500 up && "
    'tc qdisc add dev lo root tbf rate "$1mbit" burst 64kb latency 300ms && shift && exec "$@"'
)


def behind(rate_mbit: float) -> list[str]:
    """What to write before a command that is to run there; Linux, with `tc`."""
    maps = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--net", *maps, "sh", "-c", _LIMIT, "sh", f"{rate_mbit:g}"]


def possible(rate_mbit: float) -> bool:
    """Whether this machine lets this user have one; where not, says why in one line."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        why = f"{', '.join(missing)} not found"
    else:
        done = subprocess.run(
            [*behind(rate_mbit), "true"], capture_output=True, text=True, timeout=_DEADLINE_S
        )
        if done.returncode == 0:
            return True
        why = (done.stderr.strip().splitlines() or ["refused"])[-1]
    _LOG.warning("nothing is measured behind a wire: %s", why)
    return False
