"""A headless Chromium that tests steer over a pipe, by the DevTools protocol."""

import base64
import itertools
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

_PATIENCE_S = 60.0
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


class Browser:
    """One browser with one page; `console` is all that the page has said or been told there."""

    def __init__(self, profile: Path) -> None:
        commands, answers = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{commands[0]} 4>&{answers[1]}', "bash"),
                *("chromium", *_FLAGS, f"--user-data-dir={profile}"),
            ],
            pass_fds=(commands[0], answers[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(answers[1])
        self._to, self._from = commands[1], answers[0]
        self._ids = itertools.count(1)
        self._data = b""
        self._session = ""
        self._loaded = 0
        self.console: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        answer = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._to)  # it ends when nobody steers it
        os.close(self._from)
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(
        self, url: str, *, width: int = 1280, height: int = 900, is_dark: bool = False
    ) -> None:
        """Load a page as a screen of this size shows it; what the console had is forgotten."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.console.clear()
        before = self._loaded
        self._call("Page.navigate", url=url)
        deadline_s = time.monotonic() + _PATIENCE_S
        while self._loaded == before:
            self._next(deadline_s)

    def run(self, script: str) -> Any:
        """Return the value of an expression, of a promise what it comes to."""
        answer = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return when an expression is true, which is asked for with each frame of the page."""
        self.run(
            "new Promise((done) => { const ask = () =>"
            f" ({condition}) ? done() : requestAnimationFrame(ask); ask(); }})"
        )

    def picture(self) -> bytes:
        """Return what the screen shows, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **params: Any) -> Mapping[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _PATIENCE_S
        while (answer := self._next(deadline_s)).get("id") != number:
            pass
        assert "error" not in answer, answer
        result: Mapping[str, Any] = answer["result"]
        return result

    def _next(self, deadline_s: float) -> Mapping[str, Any]:
        """Return the next message; take note of what the console says."""
        while b"\0" not in self._data:
            left_s = max(0.0, deadline_s - time.monotonic())
            assert select.select([self._from], [], [], left_s)[0], "no answer from Chromium"
            data = os.read(self._from, 1 << 16)
            assert data, "Chromium has ended"
            self._data += data
        text, _, self._data = self._data.partition(b"\0")
        message: Mapping[str, Any] = json.loads(text)
        if message.get("method") == "Page.loadEventFired":
            self._loaded += 1
        if message.get("method") in (
            *("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"),
        ):
            self.console.append(json.dumps(message["params"]))
        return message
