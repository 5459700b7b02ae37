"""Settings from ``TFDIST_*`` variables, for a job that another launcher starts.

A scheduler sets the number and the hosts of the tasks. These variables set the strategy, the
number of ps and other options. They must have the same values in all tasks of the job.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.cluster.address import shown
from tfdist.cluster.ports import parse_ports
from tfdist.cluster.tf_config import STRATEGIES, JobOptions
from tfdist.errors import UsageError, require_one_of

LAUNCHED = "TFDIST_JOB"
"""Variable that tfdist's launcher sets in its tasks. Such a task reads only TF_CONFIG."""

CLUSTER, STRATEGY, PS = "TFDIST_CLUSTER", "TFDIST_STRATEGY", "TFDIST_PS"
PORTS = "TFDIST_PORTS"
HOSTS, NODE_RANK, LOCAL_RANK = "TFDIST_HOSTS", "TFDIST_NODE_RANK", "TFDIST_LOCAL_RANK"

LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
"""Variable that makes tf.keras Keras 2 (package tf_keras). `import keras` remains Keras 3."""

RUN_DIR, STARTUP_TIMEOUT_S = "TFDIST_RUN_DIR", "TFDIST_STARTUP_TIMEOUT_S"
DEVICES_PER_WORKER, MIN_WORKERS = "TFDIST_DEVICES_PER_WORKER", "TFDIST_MIN_WORKERS"
SPLIT_BYTES, EVALUATOR = "TFDIST_SPLIT_BYTES", "TFDIST_EVALUATOR"
STAGES = "TFDIST_STAGES"

RESTARTS, UNCOUNTED_RESTARTS = "TFDIST_RESTARTS", "TFDIST_RESTARTS_UNCOUNTED"
"""Variables with a task's earlier starts. An indexed Job of Kubernetes has two such counts."""

FLAGS = {
    "run_dir": RUN_DIR,
    "startup_timeout_s": STARTUP_TIMEOUT_S,
    "devices_per_worker": DEVICES_PER_WORKER,
    "min_workers": MIN_WORKERS,
    "evaluator": EVALUATOR,
    "ports": PORTS,
    "split_bytes": SPLIT_BYTES,
    "stages": STAGES,
}
"""The variable of each flag of the launcher that ``tfdist.submit`` sets in tasks."""

_OF_CLUSTERS = (CLUSTER, STRATEGY, PS, HOSTS, NODE_RANK, LOCAL_RANK)
NAMES = (*_OF_CLUSTERS, *FLAGS.values(), RESTARTS, UNCOUNTED_RESTARTS)

_MAX = 2**31 - 1
_COUNTS_OF_RESTARTS = (RESTARTS, UNCOUNTED_RESTARTS, "SLURM_RESTART_COUNT")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings(JobOptions):
    """Settings of a job from its ``TFDIST_*`` variables: options, number of ps, and ports.

    Attributes:
      ps: Number of ps, which are the last tasks (default: 1 under ps, else 0).
      ports: Ports that tasks may use (default: any).
    """

    ps: int | None = None
    ports: range | None = None

    def options(self) -> JobOptions:
        """Return only the options of TF_CONFIG."""
        names = (field.name for field in dataclasses.fields(JobOptions))
        return JobOptions(**{name: getattr(self, name) for name in names})


def restarts(environ: Mapping[str, str]) -> int:
    """Return the number of earlier starts of this task, counted by a launcher or a scheduler."""
    return sum(integer(environ, name) or 0 for name in _COUNTS_OF_RESTARTS)


def from_environ(environ: Mapping[str, str]) -> JobSettings:
    """Return the settings in `environ`. Raise `UsageError` with the name of a wrong variable."""
    _refuse_misspelt(environ)
    strategy = text(environ, STRATEGY) or "auto"
    require_one_of(STRATEGY, strategy, STRATEGIES, code="ENV001")
    ports = text(environ, PORTS)
    stages = integer(environ, STAGES, least=1)
    if stages is not None and strategy != "pipeline":
        raise _wrong(STAGES, f"{stages}", "none without stages", f"set {STRATEGY}=pipeline")
    return JobSettings(
        strategy=strategy,
        ps=integer(environ, PS, least=0),
        evaluator=bool(integer(environ, EVALUATOR, most=1)),
        ports=parse_ports(ports, where=PORTS) if ports else None,
        attempt=1 + restarts(environ),
        run_dir=text(environ, RUN_DIR) or None,
        startup_timeout_s=_seconds(environ, STARTUP_TIMEOUT_S),
        devices_per_worker=integer(environ, DEVICES_PER_WORKER, least=1),
        min_workers=integer(environ, MIN_WORKERS, least=1),
        split_bytes=integer(environ, SPLIT_BYTES, least=1),
        stages=stages,
    )


def legacy_keras(environ: Mapping[str, str]) -> str:
    """Return a warning if tf.keras is Keras 2, which tfdist does not support, else ""."""
    value = environ.get(LEGACY_KERAS, "")
    if value not in ("1", "true", "True"):  # as TensorFlow reads it
        return ""
    return (
        f"{LEGACY_KERAS}={value}: tf.keras is Keras 2, whose models tfdist refuses. "
        "Fix: unset it, or make models by `import keras` alone"
    )


def text(environ: Mapping[str, str], name: str) -> str:
    """Return the stripped value of a variable, "" if it is not set."""
    return environ.get(name, "").strip()


def integer(
    environ: Mapping[str, str], name: str, *, least: int = 0, most: int = _MAX
) -> int | None:
    """Return the value of an integer variable, None if it is not set or empty."""
    value = text(environ, name)
    if not value:
        return None
    if len(value) <= 10 and value.isascii() and value.isdecimal() and least <= int(value) <= most:
        return int(value)
    expected = f"an integer from {least} " + ("on" if most == _MAX else f"to {most}")
    if name in NAMES:
        raise _wrong(name, value, expected, "correct it, or unset it")
    raise contradiction(name, shown(value), expected, f"see who sets {name} in this job")


def _seconds(environ: Mapping[str, str], name: str) -> float:
    """Return a positive number of seconds (default: the startup timeout of `JobOptions`)."""
    value = text(environ, name)
    try:
        seconds = float(value) if value else JobOptions().startup_timeout_s
    except ValueError:
        seconds = 0.0
    if 0 < seconds <= 1e9:
        return seconds
    expected = "a positive number of seconds, at most 1e9"
    raise _wrong(name, value, expected, "correct it, or unset it")


def needed(environ: Mapping[str, str], name: str, *, least: int = 0, most: int = _MAX) -> int:
    """Return the value of an integer variable. Raise `UsageError` if it is not set."""
    value = integer(environ, name, least=least, most=most)
    if value is None:
        raise missing(name, "a number, as whoever set the variables beside it sets it too")
    return value


def missing(name: str, expected: str) -> UsageError:
    """Return the error for a variable that is not set."""
    fix = f"pass it on to the task, or set {CLUSTER}=none for a process by itself"
    return contradiction(name, "nothing: it is not set", expected, fix)


def contradiction(where: str, received: str, expected: str, fix: str) -> UsageError:
    """Return the error for a scheduler's variables that contradict each other."""
    return UsageError(where, received=received, expected=expected, fix=fix, code="ENV007")


def _wrong(name: str, value: str, expected: str, fix: str) -> UsageError:
    return UsageError(name, received=shown(value), expected=expected, fix=fix, code="ENV001")


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Raise UsageError for a misspelt ``TFDIST_*`` variable, which would be ignored."""
    for name in environ:
        if not name.startswith("TFDIST_") or name in NAMES or name == LAUNCHED:
            continue
        endings = [ours.removeprefix("TFDIST_") for ours in NAMES]
        close = difflib.get_close_matches(name.removeprefix("TFDIST_"), endings, n=1, cutoff=0.8)
        if close:
            ours = f"TFDIST_{close[0]}"
            fix = f"write {ours}, or unset {name}"
            raise UsageError(
                name, received="a value", expected=f"the name {ours}", fix=fix, code="ENV002"
            )


_SECRET = re.compile(
    r"((^|[_.-])(token|secret|credentials?|(api|access|private|secret)[_-]?key)"
    r"|password|passwd|passphrase)$",
    re.IGNORECASE,
)
_MAY_BE_SECRET = re.compile(
    r"(^|[_.-])(key|auth|authorization|pwd|pw|pass|bearer|jwt|pat|cookie|dsn|sig|signature|sas)$"
    r"|^-p$",
    re.IGNORECASE,
)
_HOLDS_SECRET = re.compile(
    r"\b(ghp_|github_pat_|glpat-|hf_|sk-|xox[abp]-|AKIA|ASIA|AIza|ya29\.|npm_|pypi-)[\w-]{12,}"
    r"|\beyJ[\w-]{5,}\.eyJ[\w-]{5,}\."  # JSON Web Token: two JSON objects in base64
    r"|\b[Bb]earer +[\w.~+/-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|[a-z][a-z0-9+.-]{0,30}://[^/\s:@]*:[^/\s@]+@"  # bounded, or long texts are slow
)
_ASSIGNMENT = re.compile(
    r"""(?<![\w.-])(?:([\w.-]++)["']?\s*[=:]|(-[\w.-]++)\s)\s*["']?(?=[^\s"'&,;])"""
)
"""A name and its value in a text, such as ``?sig=X``, ``{"key": "X"}`` or ``--token X``."""
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def names_a_secret(name: str) -> bool:
    """Return whether a name denotes a secret, such as HF_TOKEN, ``--api_key`` or PGPASSWORD."""
    return bool(_SECRET.search(name))


def may_name_a_secret(name: str) -> bool:
    """Return whether to hide the value of this name, such as ``--wandb_key`` or ``--auth``.

    It is also True for harmless names such as ``--sort_key``, so never raise an error for it.
    """
    words = _WORD_BOUNDARY.sub("_", name)  # AccountKey
    return names_a_secret(words) or bool(_MAY_BE_SECRET.search(words))


def holds_a_secret(text: str) -> bool:
    """Return whether a text contains a token of a known format, or a password in a URL."""
    return bool(_HOLDS_SECRET.search(text))


def may_hold_a_secret(text: str) -> bool:
    """Return whether to hide a text, because it contains a secret or a value named as a secret."""
    return holds_a_secret(text) or any(
        may_name_a_secret(found[1] or found[2]) for found in _ASSIGNMENT.finditer(text)
    )
