"""A page on loopback that is made anew for each request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tfdist.errors import TfdistError, UsageError

_NAMES = ("127.0.0.1", "localhost")


def make_server(make_page: Callable[[], str], *, port: int) -> ThreadingHTTPServer:
    """Return a server that listens on `port`, 0 for any; UsageError where it cannot.

    It makes one page at a time. A thread for each connection, as browsers open some that say
    nothing for long.
    """
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
                self._answer(403, "not this machine's name")  # a page that has renamed itself
            elif self.path.partition("?")[0] != "/":
                self._answer(404, "the report is at /")
            else:
                with turn:
                    status, text = _made(make_page)
                self._answer(status, text)

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            kind = "html" if status == 200 else "plain"
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the page asks every few seconds."""

    try:
        return ThreadingHTTPServer((_NAMES[0], port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(
            "--port",
            received=f"{port} ({getattr(error, 'strerror', None) or error})",
            expected="a port of this machine that is free",
            fix="give another one, or 0 for any",
            code="port-taken",
        ) from None


def _made(make_page: Callable[[], str]) -> tuple[int, str]:
    try:
        return 200, make_page()
    except TfdistError as error:
        return 500, str(error)
