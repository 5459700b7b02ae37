"""``python -m tfdist.serve DIR``: serve the models that `tfdist.export` has written.

DIR has versions, or models that have versions. Clients of TensorFlow Serving work unchanged: REST
at /v1/models/NAME:predict, and gRPC by PredictionService (Predict, GetModelMetadata).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.argument_parser import Parser, reading_file, run_program
from tfdist.cluster.address import is_loopback
from tfdist.errors import (
    EXIT_OK,
    UsageError,
    require,
    require_int,
    require_number,
    require_packages,
)
from tfdist.files import require_private

if TYPE_CHECKING:
    from tfdist.serving.supervisor import ServeOptions

_LOCAL_ALONE = ("token", "tls_cert", "tls_key")  # not for Ray's proxies
_SHORTEST_HANG_S = 5.0  # lower bound of the default: a busy machine may be silent for seconds
_NEEDED = ("uvicorn", "httptools", "orjson", "grpc", "grpc_health", "prometheus_client")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program("tfdist.serve", lambda: _serve(argv))


def _parser() -> Parser:
    parser = Parser(prog="python -m tfdist.serve", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="VERSION or NAME/VERSION directories")
    add("--name", help="model name (default: the directory's name, or all models in it)")
    add("--replicas", type=int, default=1, help="processes per model (default: 1)")
    add("--on", choices=["local", "ray"], default="local", help="ray: use the nodes of Ray")
    add("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    add("--insecure", action="store_true", help="accept requests from other machines with no token")
    add("--rest_port", type=int, default=8501, help="0 for any free port (default: 8501)")
    add("--grpc_port", type=int, default=8500, help="0 for any free port (default: 8500)")
    add("--max_batch", type=int, default=32, help="examples per batch (default: 32)")
    add("--max_queue", type=int, default=1000, help="waiting requests (default: 1000)")
    add("--max_body_mib", type=int, default=64, help="size of a request (default: 64)")
    add("--timeout_s", type=float, default=30.0, help="longest wait for an answer (default: 30)")
    add("--hang_s", type=float, help="replace a replica silent so long (default: timeout_s / 2)")
    add("--drain_s", type=float, default=30.0, help="finish requests after SIGTERM (default: 30)")
    add("--token", type=Path, metavar="FILE", help="secret that clients must send")
    add("--tls_cert", type=Path, metavar="FILE.pem", help="TLS certificate")
    add("--tls_key", type=Path, metavar="FILE.pem", help="private key of the certificate")
    return parser


def _serve(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    _check(options)
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    if options.on == "ray":
        _serve_on_ray(options)
    else:
        asyncio.run(_serve_here(options))
    return EXIT_OK


def _check(options: Any) -> None:
    require_packages("tfdist.serve", *_NEEDED, "tensorflow_serving", extra="serving")
    for flag in ("replicas", "max_batch", "max_queue", "max_body_mib"):
        require_int(f"--{flag}", getattr(options, flag), least=1)
    require(
        is_loopback(options.host) or options.token or options.insecure,
        "--host",
        f"other machines can send requests to {options.host!r} without a token",
        fix="pass --token FILE, or --insecure if every machine may send requests",
        code="no-token",
    )
    if options.hang_s is None:  # leaves the same time for a retry on another replica
        options.hang_s = max(_SHORTEST_HANG_S, options.timeout_s / 2)
    for flag in ("timeout_s", "hang_s"):
        require_number(f"--{flag}", getattr(options, flag), above=0, unit="seconds")
    require_number("--drain_s", options.drain_s, least=0, unit="seconds")
    _check_files(options)


def _check_files(options: Any) -> None:
    """Reject files that would make each start of a front fail."""
    require(
        bool(options.tls_cert) == bool(options.tls_key),
        "--tls_cert",
        "TLS needs both --tls_cert and --tls_key",
        fix="pass both files",
        code="no-value",
    )
    for flag in ("token", "tls_cert", "tls_key"):
        path = getattr(options, flag)
        with reading_file(f"--{flag}", path, expected="a file that is not empty"):
            if path and not path.read_bytes().strip():
                raise ValueError("empty")
    if options.tls_cert:
        expected = "a certificate and its key, in PEM"
        with reading_file("--tls_cert", options.tls_cert, expected=expected):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.tls_cert, options.tls_key, password="")


async def _serve_here(options: Any) -> None:
    from tfdist.serving.supervisor import ServiceSupervisor

    if options.token:
        with options.token.open("rb") as file:
            require_private(file, where="--token")
    supervisor = ServiceSupervisor(_settings(options))
    scheme = "https" if options.tls_cert else "http"
    print(
        f"serving {options.directory}: REST {scheme}://{supervisor.rest_address}/v1/models, "
        f"gRPC {supervisor.grpc_address}",
        flush=True,
    )
    await supervisor.run()


def _serve_on_ray(options: Any) -> None:
    for flag in _LOCAL_ALONE:
        require(
            not getattr(options, flag),
            f"--{flag}",
            "--on ray does not support this flag",
            fix="leave it out, and set up tokens and TLS in a proxy in front of Ray Serve",
            code="unused-option",
        )
    require(
        0 <= options.rest_port < 65536,  # Ray's proxies would fail without a message
        "--rest_port",
        f"{options.rest_port} is out of range (0 to 65535)",
        fix="choose a free port below 65536",
        code="port-taken",
    )
    require_packages("--on ray", "ray", extra="ray")
    try:
        from tfdist.serving.on_ray import run
    except ImportError as error:  # Ray is installed without the packages of Ray Serve
        problem, fix = f"cannot import {error.name or error}", "run pip install 'tfdist[ray]'"
        raise UsageError("--on ray", problem, fix=fix, code="missing-package") from None

    run(_settings(options))


def _settings(options: Any) -> ServeOptions:
    """Convert the flags to the settings of a service, or raise UsageError."""
    from tfdist.serving.supervisor import ServeOptions

    most = options.max_batch
    same = ("name", "replicas", "host", "rest_port", "grpc_port", "timeout_s", "hang_s", "drain_s")
    return ServeOptions(
        **{name: getattr(options, name) for name in same},
        directory=options.directory.resolve(),
        batch_sizes=(*(1 << n for n in range(most.bit_length()) if 1 << n < most), most),
        requests=options.max_queue,
        window=2 * most,
        body_bytes=min(options.max_body_mib, 2047) << 20,  # gRPC's limit is an int
        token=_resolved(options.token),
        certificate=_resolved(options.tls_cert),
        key=_resolved(options.tls_key),
    )


def _resolved(path: Path | None) -> str:
    return str(path.resolve()) if path else ""


if __name__ == "__main__":
    sys.exit(main())
