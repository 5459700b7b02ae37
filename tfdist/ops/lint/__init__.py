"""Checks of a job's files before anything is started; without TensorFlow.

rules         every rule: code, severity, meaning; and what a check found, and where
environment   TF_CONFIG, and our variables beside it
programs      command lines of `tfdist.launch` and `tfdist.train`, and config files
manifests     the Kubernetes manifests of a job
files         which file is of which kind, and the checks of each
"""

from __future__ import annotations

from tfdist.ops.lint.files import LintSource, lint
from tfdist.ops.lint.rules import RULES, Finding, Location
from tfdist.ops.rules import Rule, Severity

__all__ = ["RULES", "Finding", "LintSource", "Location", "Rule", "Severity", "lint"]
