"""Rules for command lines of the launcher, in scripts and manifests."""

from __future__ import annotations

from tfdist.lint.rules.table import error

RULES = (
    error(
        "LCH001",
        "a flag for ps jobs in a job without ps",
        reason="The launcher refuses --split_bytes and --profile_ps there, and starts nothing.",
    ),
)
