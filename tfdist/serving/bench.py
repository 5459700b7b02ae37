"""``python -m tfdist.bench serve URL``: load on a model server, and the latencies its clients see.

URL is that of a model, http://127.0.0.1:8501/v1/models/NAME, of any server that has TensorFlow
Serving's REST interface; with --grpc the requests go to its gRPC interface. Without --rate each
connection sends when it has its answer (closed loop).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tfdist.argument_parser import Parser, reading_file, run_program
from tfdist.errors import (
    EXIT_OK,
    TfdistError,
    require,
    require_int,
    require_number,
    require_packages,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code: 1 where a request failed."""
    words = sys.argv[1:] if argv is None else argv
    return run_program("tfdist.bench", lambda: _bench(words))


def _parser() -> Parser:
    parser = Parser(prog="python -m tfdist.bench serve", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("url", metavar="URL", help="http://HOST:PORT/v1/models/NAME")
    add("--grpc", default="", metavar="HOST:PORT", help="send by gRPC, to this address")
    add("--connections", type=int, default=8, help="requests at a time; default 8")
    add("--seconds", type=float, default=10.0, help="to measure; default 10")
    add("--warm_up_s", type=float, default=1.0, help="before that; default 1")
    add("--rate", type=float, metavar="N", help="requests a second, for an open loop")
    add("--tries", type=int, default=1, help="of a request whose connection breaks; default 1")
    add("--examples", type=int, default=1, help="in a request made from the signature; default 1")
    add("--body", type=Path, metavar="FILE", help="the request: JSON, of gRPC a PredictRequest")
    add("--token", type=Path, metavar="FILE", help="has the server's secret")
    add("--json", action="store_true", help="one line of JSON")
    return parser


def _bench(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    _check(options)
    with reading_file("--token", options.token, expected="a file of one line of text"):
        token = options.token.read_text().strip() if options.token else ""
    with reading_file("--body", options.body, expected="a file"):
        body = options.body.read_bytes() if options.body else b""
    from tfdist.serving.load import Load, example_body, example_message, run

    url = options.url.rstrip("/")
    if not options.body:
        make = example_message if options.grpc else example_body
        body = make(url, examples=options.examples, token=token)
    load = Load(
        url=url,
        body=body,
        grpc=options.grpc,
        connections=options.connections,
        seconds=options.seconds,
        warm_up_s=options.warm_up_s,
        rate=options.rate,
        tries=options.tries,
        token=token,
    )
    try:
        found = asyncio.run(run(load)).summary()
    except OSError as error:
        raise TfdistError(f"{options.grpc or url}: {error.strerror or error}") from error
    print(json.dumps(found) if options.json else _text(found, options))
    return EXIT_OK if not found["failed"] else 1


def _check(options: Any) -> None:
    require_packages("tfdist.bench", "httptools", "grpc", extra="serving")
    require(
        _is_of_a_model(options.url),
        "URL",
        received=repr(options.url),
        expected="the address of a model",
        fix="write http://127.0.0.1:8501/v1/models/NAME",
        code="bad-value",
    )
    require_int("--connections", options.connections, least=1)
    require_int("--tries", options.tries, least=1)
    require_int("--examples", options.examples, least=1)
    require_number("--seconds", options.seconds, above=0, unit="seconds")
    require_number("--warm_up_s", options.warm_up_s, least=0, unit="seconds")
    if options.rate is not None:
        require_number("--rate", options.rate, above=0, unit="requests a second")


def _is_of_a_model(url: str) -> bool:
    try:
        parts = urlsplit(url)
        at_host = parts.port != 0 and parts.hostname
    except ValueError:  # a port that is none
        return False
    return bool(at_host) and parts.scheme in ("http", "https") and "/models/" in parts.path


def _text(found: dict[str, Any], options: Any) -> str:
    loop = f"open loop at {options.rate:g}/s" if options.rate else "closed loop"
    failed = ", ".join(f"{count}x {what}" for what, count in found["failed"].items()) or "none"
    lines = [
        f"{loop}, {options.connections} connections, {options.seconds:g} s",
        f"answered: {found['requests']} ({found['per_s']:g}/s); failed: {failed}",
    ]
    if "ms" in found:
        lines.append("ms: " + ", ".join(f"{name} {ms:g}" for name, ms in found["ms"].items()))
    return "\n".join(lines)
