"""Rules for TF_CONFIG."""

from __future__ import annotations

from tfdist.lint.rules.table import error, warning

RULES = (
    error(
        "TFC001",
        "TF_CONFIG that is not JSON",
        reason="TensorFlow parses it as JSON, and fails with a bare traceback.",
    ),
    error(
        "TFC002",
        "JSON in the wrong quotes",
        reason="A printed Python dict, or one more pair of quotes, is the usual way it goes wrong.",
    ),
    error(
        "TFC003",
        "a key twice in one object",
        reason="JSON keeps the last without a word; half of the cluster would be lost.",
    ),
    error(
        "TFC004",
        "JSON that is not an object of a few levels",
        reason='TensorFlow expects {"cluster": {...}, "task": {...}}.',
    ),
    error(
        "TFC005",
        "no cluster",
        reason="Without it each task trains by itself, and all write the same files.",
    ),
    error(
        "TFC006",
        "no task, or a task without type or index",
        reason="A task that does not know which one it is cannot join the others.",
    ),
    error(
        "TFC007",
        "a section that is not an object",
        reason="cluster, task and tfdist are objects, with names for what is in them.",
    ),
    error(
        "TFC008",
        "an unknown type of task in the cluster",
        reason="The tasks are chief, worker, ps and evaluator; others take no part.",
    ),
    error(
        "TFC009",
        "addresses that are not a list",
        reason="The index of a task is its position in the list.",
    ),
    error(
        "TFC010",
        "an address that is not host:port",
        reason="gRPC fails late, with a message that does not name the task.",
    ),
    error(
        "TFC011",
        "a port that is none",
        reason="Ports are 1 to 65535; with 0 each task would listen where nobody looks.",
    ),
    error(
        "TFC012",
        "an address for two tasks",
        reason="One of the two cannot listen, and TensorFlow hangs without a word.",
    ),
    error(
        "TFC013",
        "more than one chief or evaluator",
        reason="One task writes and decides, and one evaluates.",
    ),
    error(
        "TFC014",
        "ps without a chief or a worker",
        reason="The chief hands out the steps of a ps job, and the workers do them.",
    ),
    error(
        "TFC015",
        "an unknown type of this task",
        reason="The tasks are chief, worker, ps and evaluator.",
    ),
    error(
        "TFC016",
        "an index that is not a whole number",
        reason='TensorFlow takes "0" in quotes, and compares it with 0 later on.',
    ),
    error(
        "TFC017",
        "a task that is not in the cluster",
        reason="It has no address to listen at, and the others do not wait for it.",
    ),
    error(
        "TFC018",
        "an unknown option under tfdist",
        reason="Options that nobody reads look as if they had been followed.",
    ),
    error(
        "TFC019",
        "an option of the wrong type or out of its range",
        reason="It would be refused in every task, on every machine.",
    ),
    error(
        "TFC020",
        "a strategy that the cluster is not for",
        reason="A ps job in a multiworker cluster hangs in silence.",
    ),
    error(
        "TFC021",
        "a key that was meant to be tfdist",
        reason="TensorFlow leaves keys alone that it does not know: the options would be lost.",
    ),
    warning(
        "TFC022",
        "this machine's own name among other hosts",
        reason="Every machine is its own localhost: tasks on others would connect to themselves.",
    ),
    warning(
        "TFC023",
        "a port that Linux gives to outgoing connections",
        reason="From 32768 to 60999 a connection of anyone's may have it when the task starts.",
    ),
    warning(
        "TFC024",
        "a port for administrators",
        reason="Below 1024 an ordinary user's task cannot listen, as most systems have it.",
    ),
    error(
        "TFC025",
        "min_workers that the cluster does not have",
        reason="It is for a ps job, and says with how many of its workers it may start.",
    ),
    warning(
        "TFC026",
        "an option of ps jobs in a cluster without ps",
        reason="split_bytes divides variables over the ps, and profile_ps measures them.",
    ),
)
