"""HTTP server on loopback for one document that is generated for each request."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tfdist.errors import TfdistError, opening_port

_ADDRESS = "127.0.0.1"


def listen(port: int, *, flag: str) -> socket.socket:
    """Return a socket that listens on `port` (0: any free port), or raise UsageError for `flag`."""
    with opening_port(flag, port):
        return socket.create_server((_ADDRESS, port))


def make_server(
    listener: socket.socket, make_text: Callable[[], str], *, path: str, content_type: str
) -> ThreadingHTTPServer:
    """Return a server of one document, which owns the listener and generates one text at a time.

    It answers only requests with this machine's name in Host, so that other sites cannot read the
    document. Each connection has a thread, because browsers open connections and leave them idle.
    """
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in (_ADDRESS, "localhost"):
                self._answer(403, "the Host header is not a name of this machine")
            elif self.path.partition("?")[0] != path:
                self._answer(404, f"not found, use {path}")
            else:
                try:
                    with turn:
                        text = make_text()
                except TfdistError as error:
                    self._answer(500, str(error))
                else:
                    with contextlib.suppress(ConnectionError):  # the client disconnected
                        self._answer(200, text)

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            kind = content_type if status == 200 else "text/plain"
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: clients poll every few seconds."""

    server = ThreadingHTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    return server
