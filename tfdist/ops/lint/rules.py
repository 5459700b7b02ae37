"""Rules of the lint, by their codes, and findings: which is broken, where, how to put it right."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.errors import UsageError
from tfdist.ops.rules import Rule, rules_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Location of a finding: a file, and the line or the path in it, or both."""

    file: str
    line: int | None = None
    path: str = ""

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}" if self.line else self.file
        return f"{at} {self.path}" if self.path else at


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake in one location; the last three parts are those of a `UsageError`."""

    code: str
    location: Location
    received: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.location}: {self.code} {RULES[self.code].severity.value}: "
            f"received {self.received}; expected {self.expected}. Fix: {self.fix}"
        )


def finding_of(error: UsageError, location: Location, *, otherwise: str = "") -> Finding:
    """Return the finding for an error: of its rule, or `otherwise` where its code is none."""
    code = error.code if error.code in RULES else otherwise
    return Finding(code, location, str(error.received), error.expected, error.fix)


_ALL = rules_of("""
LNT001 error: a file cannot be read as text
LNT002 error: neither name nor text of a file says what to check; --kind does
TFC001 error: TF_CONFIG is not JSON
TFC002 error: JSON in the wrong quotes, as of a printed Python dict
TFC003 error: a key is twice in one object: JSON keeps the last
TFC004 error: JSON, but not an object of a few levels
TFC005 error: no cluster: each task would train by itself
TFC006 error: no task, or a task without type or index
TFC007 error: a section (cluster, task, tfdist) is not an object
TFC008 error: an unknown task type in the cluster
TFC009 error: the addresses of a task type are not a list, or no list has any
TFC010 error: an address is not host:port
TFC011 error: a port is not from 1 to 65535
TFC012 error: two tasks have one address, at which one of them cannot listen
TFC013 error: more than one chief or evaluator
TFC014 error: ps without a chief or a worker
TFC015 error: an unknown type of this task
TFC016 error: an index is not a whole number
TFC017 error: a task is not in the cluster
TFC018 error: an unknown option under tfdist
TFC019 error: an option under tfdist has the wrong type or is out of its range
TFC020 error: the cluster is not one for the strategy
TFC021 error: a key was meant to be tfdist: its options would be lost
TFC022 warning: localhost among other hosts, which would connect to themselves
TFC023 warning: a port that Linux gives to outgoing connections (32768 to 60999)
TFC024 warning: a port below 1024, at which an ordinary user cannot listen
TFC025 error: min_workers that the cluster does not have
ENV001 error: a TFDIST_ variable has a value that it cannot have
ENV002 error: a variable has a name close to one of ours
ENV003 error: TFDIST_HOSTS is not a list of hosts
ENV004 error: too few or too many tasks for the strategy, the ps or the evaluator
ENV005 warning: a secret in plain text
ENV006 error: two sources disagree, as TF_CONFIG and the scheduler
ENV007 error: the variables of a scheduler contradict each other
ENV008 warning: gRPC would go through a proxy to the other tasks
ENV010 warning: TF_USE_LEGACY_KERAS beside a job of tfdist: tf.keras is Keras 2 then
CFG001 error: a config file is not Python
CFG002 error: a config file without get_config()
CFG003 error: an unknown field
CFG004 error: a value of the wrong type
CFG005 error: a value is not one of the field's choices
CFG006 error: a value is out of the field's range
CFG007 error: a configuration that does not begin with base(), which has every field
CFG008 error: get_config() returns no configuration
CFG009 error: more checkpoints than examples
CFG010 error: a warm-up as long as the run
CFG011 error: a mean or deviation that pixels cannot be normalised by
CFG012 error: profile_steps are not (first, last)
CFG013 error: early stopping without validation
CFG014 error: a global batch smaller than the number of replicas
CFG015 warning: BatchNormalization under ps, where workers overwrite its statistics
CFG020 warning: validation on the training examples
CFG021 error: several devices under the strategy single
CFG024 error: a config file fails, or does not end in time
CFG025 error: sharded_optimizer under mirrored, ps or pipeline
LCH001 error: a flag for ps jobs in a job without ps
LCH002 error: flags that tfdist.launch or tfdist.train refuses
K8S001 error: a manifest is not YAML
K8S010 error: a Job of several pods is not Indexed: its pods do not know their index
K8S011 error: fewer pods at a time than tasks, which wait for each other
K8S012 error: pods without a subdomain have no names in DNS
K8S013 error: TFDIST_HOSTS is below another subdomain than the pods
K8S014 error: TFDIST_HOSTS has another number of pods than the workload
K8S015 error: TFDIST_HOSTS has names that the pods do not have
K8S016 error: several pods without TFDIST_HOSTS: each would train by itself
K8S018 warning: no Service for the names of the pods
K8S019 error: the Service of the pods is not headless
K8S024 warning: exit code 2, a mistake of the user's, is tried again
K8S025 warning: the job is given up for exit code 75, 130 or 143, which mean: again
K8S026 warning: the pod's grace period may be shorter than a save
K8S034 error: a TFJob sets a variable that its operator sets
K8S035 error: all pods have the TF_CONFIG or the rank of one
""")

RULES: dict[str, Rule] = {rule.code: rule for rule in _ALL}
