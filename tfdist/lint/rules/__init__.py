"""Every rule by its code; a code keeps its meaning for good, and is not given again."""

from __future__ import annotations

from tfdist.lint.findings import Rule
from tfdist.lint.rules import config, environment, general, kubernetes, launcher, slurm, tf_config

_ALL = (
    *general.RULES,
    *tf_config.RULES,
    *environment.RULES,
    *config.RULES,
    *launcher.RULES,
    *kubernetes.RULES,
    *slurm.RULES,
)

RULES: dict[str, Rule] = {rule.code: rule for rule in _ALL}
