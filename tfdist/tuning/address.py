"""Where a sweep's chief and its runners meet: address, token, and what both must have alike."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tfdist.cluster import tf_config
from tfdist.cluster.address import split_address
from tfdist.errors import UsageError
from tfdist.launch.multihost import agreement
from tfdist.launch.multihost.agreement import without_secrets
from tfdist.launch.multihost.connection import resolve
from tfdist.launch.multihost.rendezvous import listen
from tfdist.tuning.options import RunOptions
from tfdist.tuning.runner import TrialProgram

_Options = TypeVar("_Options", bound=RunOptions)
_MOST_AT_ONCE = 1024


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
    """Return what listens at the address of ``--serve``, and at no other.

    Raises UsageError where this machine does not have it, or something else listens there.
    """
    host, port = split_address(address)
    try:
        _, (number, _) = resolve(host, port)
        _require_reachable(address, host, number)
        return listen(number, port, num_hosts=_MOST_AT_ONCE)
    except OSError as error:
        raise UsageError(
            "--serve",
            received=f"{address} ({error.strerror or error})",
            expected="an address and a free port of this machine",
            fix="end what listens there, or correct it",
            code="cannot-listen",
        ) from None


def _require_reachable(address: str, host: str, number: str) -> None:
    found = ipaddress.ip_address(number)
    if found.is_unspecified or (found.is_loopback and not agreement.is_loopback(host)):
        raise UsageError(
            "--serve",
            received=f"{address}, which is {number} on this machine",
            expected="an address at which the runners reach it",
            fix="give the number of that address",
            code="unreachable",
        )


def placed(options: _Options, environ: Mapping[str, str]) -> tuple[_Options, dict[str, str]]:
    """Return the options with what TF_CONFIG says of several hosts, and the environment without.

    The chief of its cluster serves at its own address, the workers join; flags say more.

    Raises UsageError for a ps or an evaluator.
    """
    told = tf_config.from_environ(environ)
    if told is None or len(told.cluster.tasks()) < 2:
        return options, dict(environ)
    rest = {name: value for name, value in environ.items() if name != tf_config.VARIABLE}
    if options.serve or options.join:
        return options, rest
    address = told.cluster.address(told.cluster.chief_task)
    if told.task == told.cluster.chief_task:
        return dataclasses.replace(options, serve=address), rest
    if told.task.type == "worker":
        return dataclasses.replace(options, join=address), rest
    raise UsageError(
        "TF_CONFIG",
        received=f"task {told.task}",
        expected="chief or worker: a sweep's chief, and its runners",
        fix="give --serve or --join",
        code="no-part-in-a-sweep",
    )
