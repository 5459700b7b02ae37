"""Rules for variables, wherever they are set: environments, manifests, scripts."""

from __future__ import annotations

from tfdist.lint.rules.table import error, warning

RULES = (
    error(
        "ENV001",
        "a TFDIST_ variable with a value that it cannot have",
        reason="Every task of the job would refuse it when it starts.",
    ),
    error(
        "ENV002",
        "a variable with a name close to one of ours",
        reason="Left alone, what it says would be lost; tasks refuse it.",
    ),
    error(
        "ENV003",
        "TFDIST_HOSTS that is no list of hosts",
        reason="It is host:slots,... or a node list; ports and spaces are not part of it.",
    ),
    error(
        "ENV004",
        "a strategy or ps that the number of tasks is not enough for",
        reason="A ps job has a chief and a worker besides its ps; single is one task.",
    ),
    warning(
        "ENV005",
        "a secret in plain text",
        reason="Files are copied, committed and shown; a reference to a secret says nothing.",
    ),
    error(
        "ENV006",
        "two sources that disagree",
        reason="TF_CONFIG and the scheduler describe different jobs, and one of them is wrong.",
    ),
    error(
        "ENV007",
        "a scheduler's variables that contradict themselves",
        reason="A task cannot tell which one it is, and does not guess.",
    ),
    warning(
        "ENV008",
        "a proxy between the tasks",
        reason="gRPC takes http_proxy and the like for all hosts that no_proxy does not name.",
    ),
    warning(
        "ENV009",
        "a variable for ps jobs in a job without ps",
        reason="TFDIST_SPLIT_BYTES and TFDIST_PROFILE_PS are read by nobody there.",
    ),
)
