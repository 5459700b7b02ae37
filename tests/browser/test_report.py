"""The report in a headless Chromium: two widths, light and dark, a run that goes on."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.browser.chromium import Browser
from tests.multiprocess.jobs import DEADLINE_S, ROOT, default_signals
from tests.unit.test_report import RUNS
from tfdist.errors import EXIT_INTERRUPTED
from tfdist.report.page import render
from tfdist.report.run_records import read_run
from tfdist.report.sweep_section import read_sweep

pytestmark = [
    pytest.mark.skipif(shutil.which("chromium") is None, reason="tests/browser/setup.sh"),
    pytest.mark.timeout(300),
]

# What the page looks like when it has been laid out.
_PROBE = """(() => {
  const root = document.documentElement;
  const texts = "h1, h2, h3, .figure, .legend li, dd";
  const labels = [...document.querySelectorAll(".scale")].flatMap((scale) => {
    const boxes = [...scale.children].map((one) => one.getBoundingClientRect());
    return boxes.slice(1).map((box, i) => box.left - boxes[i].right);
  });
  return {
    overflow: root.scrollWidth - root.clientWidth,
    width: root.clientWidth,
    background: getComputedStyle(document.body).backgroundColor,
    cut: [...document.querySelectorAll(texts)].filter((o) => o.scrollWidth > o.clientWidth + 1)
      .map((one) => one.textContent.slice(0, 40)),
    touching: labels.filter((space) => space < 4).length,
  };
})()"""

PAGES = {
    "run": lambda: render([read_run(RUNS / "multiworker")]),
    "runs": lambda: render([read_run(RUNS / "multiworker"), read_run(RUNS / "ps")]),
    "sweep": lambda: render([read_run(RUNS / "multiworker")], [read_sweep(RUNS / "sweep")]),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_fits_without_console_messages(browser, name, width, is_dark, tmp_path):
    (tmp_path / "page.html").write_text(PAGES[name]())
    browser.open((tmp_path / "page.html").as_uri(), width=width, is_dark=is_dark)
    assert browser.run(_PROBE) == {
        "overflow": 0,
        "width": width,
        "background": "rgb(18, 21, 26)" if is_dark else "rgb(246, 247, 249)",
        "cut": [],
        "touching": 0,
    }
    assert browser.console == []


def test_hovering_marks_the_same_step_in_all_step_charts(browser, tmp_path):
    (tmp_path / "page.html").write_text(PAGES["run"]())
    browser.open((tmp_path / "page.html").as_uri(), width=1280)
    shown = browser.run("""(() => {
      const hit = document.querySelectorAll("svg[data-axis=step] .hit")[3];
      hit.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
      return [...document.querySelectorAll("svg:has(.crosshair)")].map((svg) => [
        svg.dataset.axis === "step",
        svg.querySelector(".crosshair.shown") !== null,
        svg.parentElement.querySelector(".readout").textContent,
        hit.textContent.split("\\n")[0],
      ]);
    })()""")
    assert {(is_step, is_shown) for is_step, is_shown, _, _ in shown} == {
        (True, True),
        (False, False),
    }
    for is_step, _, readout, step in shown:
        assert readout.startswith(step) if is_step else readout == ""
    assert browser.console == []


@pytest.mark.parametrize("seconds", [7.3, 4000, 90_000])
def test_timeline_labels_do_not_overlap_on_a_phone(browser, seconds, tmp_path):
    run = read_run(RUNS / "multiworker")
    first = dataclasses.replace(run.attempts[0], end=run.begin + seconds)
    html = render([dataclasses.replace(run, attempts=(first,))])
    (tmp_path / "page.html").write_text(html)
    browser.open((tmp_path / "page.html").as_uri(), width=390)
    assert browser.run(_PROBE)["touching"] == 0


def test_an_error_on_the_console_would_be_seen(browser, tmp_path):
    html = PAGES["run"]().replace("</body>", "<img src='https://localhost/x.png'></body>")
    (tmp_path / "page.html").write_text(html)
    browser.open((tmp_path / "page.html").as_uri())
    assert any("Content Security Policy" in line for line in browser.console)


# Each line that the test writes into the pipe is the step that the task does next.
PROGRAM = """
import sys
from tfdist import phases
phases.enter("step", step=0)
print("ready", flush=True)
for line in open(sys.argv[1]):
    phases.enter("step", step=int(line))
"""


def started(*command, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=default_signals,
    )


def lines_until(process, pattern):
    for line in process.stdout:
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"{pattern} was not printed")


@pytest.fixture
def followed(browser, tmp_path):
    """A page that follows a job of one task: the browser, the pipe, the job, the server."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    os.mkfifo(tmp_path / "steps")
    launch = ("tfdist.launch", "--strategy=single", "--run_dir=run", "program.py", "steps")
    with started(*launch, cwd=tmp_path) as job:
        lines_until(job, "ready")
        (tmp_path / "run" / "config.json").write_text('{"global_batch_size": 8}')
        with (
            (tmp_path / "steps").open("w") as steps,
            started("tfdist.report", "--serve", "--port=0", "run", cwd=tmp_path) as server,
        ):
            try:
                browser.open(lines_until(server, r"http://\S+")[0])
                yield browser, steps, job, server
            finally:
                server.kill()
                job.terminate()


def test_an_open_page_follows_a_run_to_its_end(followed):
    browser, steps, job, server = followed
    assert browser.run("document.querySelector('main').dataset.state") == "going"
    assert browser.run("document.querySelector('.badge').textContent") == "running"
    browser.run("document.querySelector('details').open = true")
    for step in (17, 23):
        steps.write(f"{step}\n")
        steps.flush()
        browser.wait_for(f"document.querySelector('.figure b').textContent === '{step}'")
    assert browser.run("document.querySelector('details').open")
    steps.close()
    assert job.wait(DEADLINE_S) == 0
    browser.wait_for("document.querySelector('main').dataset.state === 'over'")
    assert browser.run("document.querySelector('.badge').textContent") == "done"
    assert browser.console == []
    server.send_signal(signal.SIGINT)
    assert server.wait(DEADLINE_S) == EXIT_INTERRUPTED


def test_a_page_shows_that_its_server_has_ended(followed):
    browser, _, _, server = followed
    server.send_signal(signal.SIGINT)
    assert server.wait(DEADLINE_S) == EXIT_INTERRUPTED
    browser.wait_for("document.body.matches('.lost')")
