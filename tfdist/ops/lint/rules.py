"""Rules of the lint, by their codes, and findings: which is broken, where, how to put it right."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.errors import UsageError
from tfdist.ops.rules import Rule, error, warning


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
    """One mistake in one place; the last three parts are those of a `UsageError`."""

    code: str
    place: Location
    received: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.place}: {self.code} received {self.received}; "
            f"expected {self.expected}. Fix: {self.fix}"
        )


def of_error(code: str, place: Location, error: UsageError) -> Finding:
    """Return the finding that says in `place` what `error` says."""
    return Finding(code, place, str(error.received), error.expected, error.fix)


_ALL = (
    # Files
    error("LNT001", "a file cannot be read as text"),
    error("LNT002", "neither name nor text of a file says what to check; --kind does"),
    # TF_CONFIG
    error("TFC001", "TF_CONFIG is not JSON"),
    error("TFC002", "JSON in the wrong quotes, as of a printed Python dict"),
    error("TFC003", "a key is twice in one object: JSON keeps the last"),
    error("TFC004", "JSON, but not an object of a few levels"),
    error("TFC005", "no cluster: each task would train by itself"),
    error("TFC006", "no task, or a task without type or index"),
    error("TFC007", "a section (cluster, task, tfdist) is not an object"),
    error("TFC008", "an unknown task type in the cluster"),
    error("TFC009", "the addresses of a task type are not a list, or no list has any"),
    error("TFC010", "an address is not host:port"),
    error("TFC011", "a port is not from 1 to 65535"),
    error("TFC012", "two tasks have one address, at which one of them cannot listen"),
    error("TFC013", "more than one chief or evaluator"),
    error("TFC014", "ps without a chief or a worker"),
    error("TFC015", "an unknown type of this task"),
    error("TFC016", "an index is not a whole number"),
    error("TFC017", "a task is not in the cluster"),
    error("TFC018", "an unknown option under tfdist"),
    error("TFC019", "an option under tfdist has the wrong type or is out of its range"),
    error("TFC020", "the cluster is not one for the strategy"),
    error("TFC021", "a key was meant to be tfdist: its options would be lost"),
    warning("TFC022", "localhost among other hosts, which would connect to themselves"),
    warning("TFC023", "a port that Linux gives to outgoing connections (32768 to 60999)"),
    warning("TFC024", "a port below 1024, at which an ordinary user cannot listen"),
    error("TFC025", "min_workers that the cluster does not have"),
    warning("TFC026", "an option of ps jobs in a cluster without ps"),
    # Variables
    error("ENV001", "a TFDIST_ variable has a value that it cannot have"),
    error("ENV002", "a variable has a name close to one of ours"),
    error("ENV003", "TFDIST_HOSTS is not a list of hosts"),
    error("ENV004", "too few or too many tasks for the strategy, the ps or the evaluator"),
    warning("ENV005", "a secret in plain text"),
    error("ENV006", "two sources disagree, as TF_CONFIG and the scheduler"),
    error("ENV007", "the variables of a scheduler contradict each other"),
    warning("ENV008", "gRPC would go through a proxy to the other tasks"),
    warning("ENV009", "a variable of ps jobs in a job without ps"),
    warning("ENV010", "TF_USE_LEGACY_KERAS beside a job of tfdist: tf.keras is Keras 2 then"),
    # Configurations, in files and as flags
    error("CFG001", "a config file is not Python"),
    error("CFG002", "a config file without get_config()"),
    error("CFG003", "an unknown field"),
    error("CFG004", "a value of the wrong type"),
    error("CFG005", "a value is not one of the field's choices"),
    error("CFG006", "a value is out of the field's range"),
    error("CFG007", "a configuration that does not begin with base(), which has every field"),
    error("CFG008", "get_config() returns no configuration"),
    error("CFG009", "more checkpoints than examples"),
    error("CFG010", "a warm-up as long as the run"),
    error("CFG011", "a mean or deviation that pixels cannot be normalised by"),
    error("CFG012", "profile_steps are not (first, last)"),
    error("CFG013", "early stopping without validation"),
    error("CFG014", "a global batch smaller than the number of replicas"),
    warning("CFG015", "BatchNormalization under ps, where workers overwrite its statistics"),
    warning("CFG016", "momentum has no effect with this optimizer"),
    warning("CFG017", "a run shorter than one step"),
    warning("CFG018", "a virtual epoch ends before a backup is due"),
    warning("CFG020", "validation on the training examples"),
    error("CFG021", "several devices under the strategy single"),
    warning("CFG022", "a config file imports TensorFlow, and so does every check of it"),
    warning("CFG023", "max_staleness in a job without ps"),
    error("CFG024", "a config file fails, or does not end in time"),
    error("CFG025", "sharded_optimizer under mirrored or ps"),
    warning("CFG026", "sharded_optimizer has no effect under single"),
    # Command lines
    error("LCH001", "a flag for ps jobs in a job without ps"),
    error("LCH002", "flags that tfdist.launch or tfdist.train refuses"),
    # Manifests
    error("K8S001", "a manifest is not YAML"),
    error("K8S010", "a Job of several pods is not Indexed: its pods do not know their index"),
    error("K8S011", "fewer pods at a time than tasks, which wait for each other"),
    error("K8S012", "pods without a subdomain have no names in DNS"),
    error("K8S013", "TFDIST_HOSTS is below another subdomain than the pods"),
    error("K8S014", "TFDIST_HOSTS has another number of pods than the workload"),
    error("K8S015", "TFDIST_HOSTS has names that the pods do not have"),
    error("K8S016", "several pods without TFDIST_HOSTS: each would train by itself"),
    warning("K8S018", "no Service for the names of the pods"),
    error("K8S019", "the Service of the pods is not headless"),
    warning("K8S024", "exit code 2, a mistake of the user's, is tried again"),
    warning("K8S025", "the job is given up for exit code 75, 130 or 143, which mean: again"),
    warning("K8S026", "the pod's grace period is shorter than a save or the launcher's grace"),
    error("K8S034", "a TFJob sets a variable that its operator sets"),
    error("K8S035", "all pods have the TF_CONFIG or the rank of one"),
    warning("K8S045", "the container names ports, and none is the task's"),
)

RULES: dict[str, Rule] = {rule.code: rule for rule in _ALL}
