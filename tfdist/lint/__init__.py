"""What is wrong with a job's files before anything is started; without TensorFlow.

`python -m tfdist.lint` reads TF_CONFIG, config files, Kubernetes manifests, sbatch scripts and
recorded environments. Nothing that it reads is run.
"""

from __future__ import annotations

from tfdist.lint.files import Source, lint
from tfdist.lint.findings import Finding, Place, Rule, Severity
from tfdist.lint.rules import RULES

__all__ = ["RULES", "Finding", "Place", "Rule", "Severity", "Source", "lint"]
