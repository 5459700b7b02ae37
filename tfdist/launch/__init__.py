"""Launcher, which starts, supervises and stops the processes of a job."""

import os

if not hasattr(os, "memfd_create"):
    raise ImportError(
        "this system cannot start tfdist's processes, which need Linux. Fix: train in one process"
        " with tfdist.make_strategy() and model.fit",
        name=__name__,
    )
