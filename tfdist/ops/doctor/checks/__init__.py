"""Every rule by its code; a code keeps its meaning for good, and is not given again."""

from __future__ import annotations

from tfdist.ops.doctor.checks import machines, network
from tfdist.ops.doctor.facts import HostFinding, JobFacts, Topic
from tfdist.ops.rules import Rule

TOPICS: tuple[Topic, ...] = (
    machines.HOSTS,
    network.NAMES,
    network.PORTS,
    network.NETWORK,
    machines.CLOCKS,
    machines.SOFTWARE,
    machines.MACHINES,
    network.PROXIES,
    machines.DIRECTORY,
    network.EXCHANGE,
)

RULES: dict[str, Rule] = {rule.code: rule for topic in TOPICS for rule in topic.rules}


def check(facts: JobFacts) -> list[HostFinding]:
    """Return all that is wrong, topic after topic."""
    return [finding for topic in TOPICS for finding in topic.check(facts)]
