"""The report in a headless Chromium: two widths, light and dark, nothing on its console."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.test_report import RUNS
from tfdist.report.page import render
from tfdist.report.run import read_run
from tfdist.report.sweep import read_sweep

pytestmark = [
    pytest.mark.skipif(shutil.which("chromium") is None, reason="tests/browser/setup.sh"),
    pytest.mark.timeout(180),
]

# What the page looks like when it has been laid out, told on the console.
_PROBE = """
<script>
const style = getComputedStyle(document.body);
const cut = [...document.querySelectorAll("h1, h2, h3, .figure, .legend li, dd")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.textContent.slice(0, 40));
const hit = document.querySelector("[data-tip]");
hit.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 20, clientY: 20}));
const seen = {
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  width: document.documentElement.clientWidth,
  background: style.backgroundColor,
  cut: cut,
  tip: document.getElementById("tip").textContent === hit.dataset.tip,
};
console.log("SEEN" + JSON.stringify(seen));
</script></body>"""


# A window of Chromium is never narrower than 500 pixels.
_FRAME = """<!doctype html><html style="color-scheme: light dark"><body>
<iframe src="page.html" style="border: 0; width: {width}px; height: 900px"></iframe>
</body></html>"""


def opened(html: str, tmp_path: Path, *, width: int, is_dark: bool = False) -> list[str]:
    """Open a page in a frame of a width, which a window can fall short of; return its console."""
    (tmp_path / "page.html").write_text(html)
    frame = tmp_path / "frame.html"
    frame.write_text(_FRAME.format(width=width))
    command = [
        *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--window-size=1400,1000", f"--blink-settings=preferredColorScheme={1 - is_dark}"),
        *("--dump-dom", frame.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


PAGES = {
    "run": lambda: render([read_run(RUNS / "multiworker")]),
    "runs": lambda: render([read_run(RUNS / "multiworker"), read_run(RUNS / "ps")]),
    "sweep": lambda: render([], [read_sweep(RUNS / "sweep")]),
}


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_fits_and_says_nothing_on_the_console(name, width, is_dark, tmp_path):
    html = PAGES[name]().replace("</body>", _PROBE)
    (line,) = opened(html, tmp_path, width=width, is_dark=is_dark)
    match = re.search(r"SEEN(\{.*\})", line)
    assert match, line
    found = json.loads(match[1])
    background = "rgb(18, 21, 26)" if is_dark else "rgb(246, 247, 249)"
    assert found == {
        "overflow": 0,
        "width": width,
        "background": background,
        "cut": [],
        "tip": True,
    }


def test_an_error_on_the_console_would_be_seen(tmp_path):
    html = PAGES["run"]().replace("</body>", "<img src='https://localhost/x.png'></body>")
    lines = opened(html, tmp_path, width=1280)
    assert any("Content Security Policy" in line for line in lines)
