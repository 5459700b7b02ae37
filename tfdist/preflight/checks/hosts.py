"""Whether all hosts of the job are there, and of the same job."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.lint.rules import error
from tfdist.preflight.facts import JobFacts
from tfdist.preflight.findings import Finding, Topic

_RULES = (
    error(
        "D001",
        "a host that did not come",
        reason="A job waits for all of its tasks, and those of this host would not be there.",
    ),
    error(
        "D002",
        "a host that does not reach the first one",
        reason="Tasks of a job connect to each other, and all of them to the first.",
    ),
    error(
        "D003",
        "a host that was told of another job",
        reason="Tasks that disagree about who is where wait for each other for ever.",
    ),
    error(
        "D004",
        "a host that went away while it was looked at",
        reason="A connection that does not last for a few seconds does not carry a job.",
    ),
)


def _check(facts: JobFacts) -> Iterator[Finding]:
    for absence in facts.absent:
        name = facts.name(absence.index)
        if absence.index == 0:
            yield Finding(
                code="D002",
                hosts=(facts.name(facts.present[0].index),),
                received=f"no way to {name}: {absence.why}",
                expected=f"an answer from {name}",
                fix=f"start the same command on {name}, and open its ports to this host",
            )
        elif absence.is_other_job:
            yield Finding(
                code="D003",
                hosts=(name,),
                received=absence.why,
                expected="the same hosts and ports, and the same version, on all hosts",
                fix=f"give {name} the same --hosts or TF_CONFIG, and the same tfdist",
            )
        elif absence.during:
            yield Finding(
                code="D004",
                hosts=(name,),
                received=f"{absence.why}, asked for {absence.during}",
                expected="a connection that lasts, and a process that lives",
                fix=f"see what the command says on {name}, and what is between the hosts",
            )
        else:
            yield Finding(
                code="D001",
                hosts=(name,),
                received=absence.why,
                expected="every host of the job",
                fix=f"start the same command on {name}, with its own --node_rank",
            )


def _seen(facts: JobFacts) -> str:
    return ", ".join(host.name for host in facts.hosts)


TOPIC = Topic(name="hosts", rules=_RULES, check=_check, seen=_seen)
