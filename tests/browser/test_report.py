"""The report in a headless Chromium: two widths, light and dark, nothing on its console."""

from __future__ import annotations

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

# What the page looks like when it has been laid out, put where `--dump-dom` shows it.
_PROBE = """
<script>
const style = getComputedStyle(document.body);
const cut = [...document.querySelectorAll("h1, h2, h3, .figure, .legend li, dd")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display != "inline")
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
document.body.setAttribute("data-seen", JSON.stringify(seen));
</script></body>"""


def opened(html: str, tmp_path: Path, *, width: int, is_dark: bool = False) -> tuple[str, str]:
    """Open a page; return its DOM, and what Chromium has logged of its console."""
    file = tmp_path / "page.html"
    file.write_text(html)
    command = [
        *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
        *(f"--window-size={width},1000", f"--blink-settings=preferredColorScheme={1 - is_dark}"),
        *("--dump-dom", file.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(re.findall(r".*CONSOLE.*", done.stderr))


def seen(dom: str) -> str:
    match = re.search(r'data-seen="([^"]*)"', dom)
    assert match, "the page's script did not run to its end"
    return match[1].replace("&quot;", '"')


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
    dom, console = opened(html, tmp_path, width=width, is_dark=is_dark)
    assert console == ""
    found = seen(dom)
    assert '"overflow":0' in found
    assert f'"width":{width}' in found
    assert '"cut":[]' in found
    assert '"tip":true' in found
    background = "rgb(18, 21, 26)" if is_dark else "rgb(246, 247, 249)"
    assert background in found


def test_an_error_on_the_console_would_be_seen(tmp_path):
    html = PAGES["run"]().replace("</body>", "<img src='https://localhost/x.png'></body>")
    _, console = opened(html, tmp_path, width=1280)
    assert "Content Security Policy" in console
