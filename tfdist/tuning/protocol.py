"""Meeting of a sweep's chief and its runners: address, token, and their messages as JSON objects.

A runner comes with ``runner``: its name, its slots and the leases it holds. It is told to ``run``
a trial, ``stop`` one with the save, or ``drop`` one whose lease it has lost; it says what has
``ended`` until it hears that this was ``taken``.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist import files
from tfdist.cluster import tf_config
from tfdist.cluster.address import is_loopback, split_address
from tfdist.errors import TfdistError, UsageError, opening_port
from tfdist.files import one_line_errors
from tfdist.launch.multihost import agreement
from tfdist.launch.multihost.agreement import without_secrets
from tfdist.launch.multihost.rendezvous import listen, resolve
from tfdist.outputs.sweep_journal import TRIALS, Slot
from tfdist.tuning import trial_job
from tfdist.tuning.options import RunOptions, SweepOptions
from tfdist.tuning.trial_job import (
    Completed,
    Failed,
    Goal,
    Killed,
    Outcome,
    TrialJob,
    TrialProgram,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepAddress:
    """Address, token and fingerprint by which runners join their chief."""

    address: str
    token: bytes = field(repr=False)
    terms: Mapping[str, str]
    """What must be the same on all hosts."""


def sweep_address_of(
    options: RunOptions, program: TrialProgram, environ: Mapping[str, str]
) -> SweepAddress | None:
    """Return where this sweep meets its runners, None where it has none elsewhere.

    A token is needed on one machine too: a runner runs programs for who comes with it.

    Raises UsageError where there is no token.
    """
    address = options.serve or options.join
    if address is None:
        return None
    token = agreement.read_token(environ, path=options.rendezvous_token_file, hosts=[""])
    alike_flags = ("strategy", "workers", "ps", "devices_per_worker", "trial_timeout_s")
    shown = without_secrets(program.args, key=token)
    terms = {
        **agreement.versions(),
        "sweep directory": str(options.sweep_dir.absolute()),
        **{f"--{name}": str(getattr(options, name)) for name in alike_flags},
        "program": program.name,
        "its text": agreement.digest(program.file),
        **{f"argument {number}": arg for number, arg in enumerate(shown, 1)},
        **agreement.variables(environ),
    }
    return SweepAddress(address=address, token=token, terms=terms)


def listener_of(address: str) -> socket.socket:
    """Return a socket that listens at the address of ``--serve``, and at no other.

    Raises UsageError where this machine does not have it, or something else listens there.
    """
    host, port = split_address(address)
    with opening_port("--serve", address):
        _, (number, _) = resolve(host, port)
        _require_reachable(address, host, number)
        return listen(number, port)


def _require_reachable(address: str, host: str, number: str) -> None:
    found = ipaddress.ip_address(number)
    if found.is_unspecified or (found.is_loopback and not is_loopback(host)):
        raise UsageError(
            "--serve",
            received=f"{address}, which is {number} on this machine",
            expected="an address at which the runners reach it",
            fix="give the number of that address",
            code="unreachable",
        )


def apply_tf_config(
    options: SweepOptions, environ: Mapping[str, str]
) -> tuple[SweepOptions, dict[str, str]]:
    """Return the options with what TF_CONFIG says of several hosts, and the environment without.

    The chief of its cluster serves at its own address, the workers join; flags say more.

    Raises UsageError for a ps or an evaluator.
    """
    config = tf_config.from_environ(environ)
    if config is None or len(config.cluster.tasks()) < 2:
        return options, dict(environ)
    rest = {name: value for name, value in environ.items() if name != tf_config.VARIABLE}
    if options.serve or options.join:
        return options, rest
    address = config.cluster.address(config.cluster.chief_task)
    if config.task == config.cluster.chief_task:
        return dataclasses.replace(options, serve=address), rest
    if config.task.type == "worker":
        return dataclasses.replace(options, join=address), rest
    raise UsageError(
        "TF_CONFIG",
        received=f"task {config.task}",
        expected="chief or worker: a sweep's chief, and its runners",
        fix="give --serve or --join",
        code="no-part-in-a-sweep",
    )


# Ownership file of a served sweep: which chief has it, and where that is.
#
# A runner that sees another one than its chief has told it, or none, has another directory: one
# that is not shared, or that was copied before this chief was started.

OWNERSHIP = "served.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ownership:
    """Contents of the file."""

    sweep: str
    """Drawn by each chief: a copy made before does not have it."""
    address: str
    """Of the chief: where runners find it again if it was started anew elsewhere."""


def read_ownership(sweep_dir: Path) -> Ownership | None:
    """Return it, None where there is none that can be read."""
    try:
        content = json.loads((sweep_dir / OWNERSHIP).read_text(encoding="utf-8"))
        return Ownership(sweep=str(content["sweep"]), address=str(content["address"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_ownership(sweep_dir: Path, *, address: str) -> Ownership:
    """Write where the chief is, before it listens there; return what is written.

    Raises TfdistError where the file cannot be written.
    """
    ownership = Ownership(sweep=secrets.token_hex(16), address=address)
    path = sweep_dir / OWNERSHIP
    with one_line_errors(path):
        files.write_json(path, dataclasses.asdict(ownership), durable=False)
    return ownership


# Messages.

Message = dict[str, Any]
Lease = tuple[str, int]
"""A trial and the number of its start."""

ALIVE = "alive"
"""What a runner says each second with the time of its own clock, and hears back at once: so it
knows by when it has been heard."""

LEASE_S = 10.0
"""From the last word of a runner; a trial is given to another within 15 s."""

ANY_RANK = 1 << 48
"""A runner draws its rank from so many, so that hardly two of them draw the same."""

OF_TRACKERS = frozenset({"WANDB_RUN_GROUP", "MLFLOW_RUN_CONTEXT"})
"""The variables that trials may have beside their assignment."""

_KINDS = {"completed": Completed, "failed": Failed, "killed": Killed}


def encode_job(job: TrialJob) -> Message:
    """Return a trial as a message; the paths in it are as on the chief's host."""
    return {
        "trial": job.trial,
        "lease": job.lease,
        "slot": job.slot.number,
        "run": job.run_dir.name,
        "flags": list(job.flags),
        "variables": dict(job.variables),
        "goal": dataclasses.asdict(job.goal),
    }


def decode_job(message: Any, *, sweep_dir: Path) -> TrialJob:
    """Return the trial of a message; raise TfdistError for one that would run anything else."""
    flags, variables = tuple(message["flags"]), message["variables"]
    run, goal = message["run"], message["goal"]
    if (
        not all(flag.startswith("--config.") for flag in flags)
        or variables.keys() - {trial_job.VARIABLE, *OF_TRACKERS}
        or (not run or run.startswith(".") or "/" in run)  # a directory among the trials
    ):
        raise TfdistError(f"the chief has given what is no trial of this sweep: {run}")
    return TrialJob(
        run_dir=sweep_dir / TRIALS / run,
        flags=flags,
        variables=variables,
        goal=Goal(**{**goal, "medians": tuple(goal["medians"])}),
        slot=Slot(number=message["slot"]),
        trial=message["trial"],
        lease=message["lease"],
    )


def encode_outcome(outcome: Outcome) -> Message:
    """Return the outcome of a trial as a message."""
    return {"kind": type(outcome).__name__.lower(), **dataclasses.asdict(outcome)}


def decode_outcome(message: Any) -> Outcome:
    """Return the outcome of a message."""
    kind = _KINDS[message["kind"]]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in message.items() if k != "kind"}
    outcome: Outcome = kind(**values)
    return outcome


def decode_lease(message: Any) -> Lease:
    """Return the trial and the number of a lease."""
    trial, number = message
    return trial, number
