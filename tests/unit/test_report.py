"""The report of a run, from directories that jobs have left: what is shown, and what is refused."""

import base64
import dataclasses
import hashlib
import json
import os
import re
import shutil
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal, refused
from tfdist.files import FileLock
from tfdist.loopback import listen, make_server
from tfdist.outputs.sweep_journal import LOCK
from tfdist.phases import PHASES, SUM
from tfdist.report import __main__ as program
from tfdist.report.page import PARTS, STYLE, render
from tfdist.report.pieces import Series, chart
from tfdist.report.run_records import TaskHistory, names_of, read_run
from tfdist.report.sweep_section import read_sweep

RUNS = Path(__file__).parent / "data" / "report"


class Page(HTMLParser):
    """Text and tags of a page; fails where a tag is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tips: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.tips += [values["title"]] if "title" in values else []
        self.links += [values[name] for name in ("href", "src") if name in values]
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["title"]:
            self.tips.append(data)
        elif self.open[-1:] not in (["style"], ["script"]):
            self.text += data


@pytest.fixture
def run_dir(tmp_path):
    return Path(shutil.copytree(RUNS / "multiworker", tmp_path / "run"))


def page_of(path):
    return Page(render([read_run(path)]))


def change(file, **changes):
    """Change fields of a JSON file, and return all of them."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps(content))
    return content


def change_attempt(run_dir, **changes):
    """Change fields of the first attempt in a report."""
    attempts = json.loads((run_dir / "report.json").read_text())["attempts"]
    attempts[0] |= changes
    change(run_dir / "report.json", attempts=attempts)


def write_lines(file, lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_restarted_run_shows_its_failure_attempts_and_curves():
    page = page_of(RUNS / "multiworker")
    for text in (
        *("worker-1 at step 225, attempt 1", "killed by SIGKILL, not by the launcher"),
        *("Attempt 1", "exit code 137", "Attempt 2", "exit code 0", "Loss", "Accuracy"),
        *("Steps per second, by task", "Memory in MiB, by task", "Time by phase"),
        *("tensorflow 2.21.0", "--max_restarts 2", "total_examples", "tasks, multiworker"),
    ):
        assert text in page.text
    assert any(tip.startswith("worker-1 failed: killed by SIGKILL") for tip in page.tips)
    assert page.tags.count("svg") == 5


def test_an_elastic_run_shows_its_members_from_each_step(run_dir):
    views = [(["worker-0", "worker-1"], None), (["worker-1"], 1225)]
    views = [{"members": members, "step": step, "at": None} for members, step in views]
    change_attempt(run_dir, views=views)
    text = page_of(run_dir).text
    assert "from step 0worker-0, worker-1from step 1,225worker-1" in text


def test_a_ps_run_shows_its_staleness_and_worker_steps():
    page = page_of(RUNS / "ps")
    assert "Steps by worker" in page.text
    counts = json.loads((RUNS / "ps" / "summary.json").read_text())["staleness"]
    share = 100 * counts["0"] / sum(counts.values())
    assert f"0: {counts['0']:,} steps, {share:.1f} %" in page.tips
    assert any(re.fullmatch(r"worker-1: .* examples/s on average", tip) for tip in page.tips)


def test_a_ps_run_resumed_after_its_end_is_shown(tmp_path):
    run_dir = Path(shutil.copytree(RUNS / "ps", tmp_path / "run"))
    change(run_dir / "summary.json", worker_steps={"worker-0": 0}, staleness={})
    assert "worker-0: 0 steps, 0.0 %" in "\n".join(page_of(run_dir).tips)


def test_the_last_metric_comes_from_the_last_line(run_dir):
    lines = [
        {"step": 1, "loss": 2.5, "val_loss": 3.5, "accuracy": 0.5, "hits": None},
        {"step": 2, "loss": 1.25, "val_loss": None, "accuracy": 0.0, "hits": None},
    ]
    write_lines(run_dir / "metrics.jsonl", lines)
    text = page_of(run_dir).text
    for shown in ("1.25last loss", "not finitelast validation loss", "0last accuracy"):
        assert shown in text
    assert "validation, last \N{EN DASH}" in text
    assert "hits" not in text


@pytest.mark.parametrize(
    ("ended_at", "status"),
    [
        ("2026-11-23T03:49:05.000Z", "failed (exit code 1)"),
        ("2026-11-24T00:00:00.000Z", "done"),
        (None, "failed (exit code 1)"),
    ],
)
def test_a_run_finished_without_the_launcher_is_done(run_dir, ended_at, status):
    change(run_dir / "report.json", exit_code=1)
    change(run_dir / "summary.json", ended_at=ended_at)
    assert read_run(run_dir).status == status


def test_compared_runs_show_differences_and_common_curves():
    page = Page(render([read_run(RUNS / "multiworker"), read_run(RUNS / "ps")]))
    for text in ("Side by side", "Fields that differ", "checkpoints2012"):
        assert text in page.text.replace("s 2", "s2")
    assert {"#run-0", "#run-1"} <= {*page.links}


def test_a_sweep_shows_trials_and_its_trials_show_runs(tmp_path):
    sweep = Path(shutil.copytree(RUNS / "sweep", tmp_path / "sweep"))
    shutil.copytree(RUNS / "multiworker", sweep / "trials" / "5")
    assert program.main([str(sweep)]) == 0
    assert "5 ★" in Page((sweep / "report.html").read_text()).text
    assert program.main([str(sweep / "trials")]) == 0
    assert "worker-1 at step 225, attempt 1" in (sweep / "trials" / "report.html").read_text()


def test_a_sweep_runs_while_its_chief_holds_the_lock(tmp_path):
    lines = (RUNS / "sweep" / "journal.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "journal.jsonl").write_text("".join(lines[:-1]))
    with FileLock(tmp_path / LOCK).acquire():
        assert read_sweep(tmp_path).status == "running"
    assert read_sweep(tmp_path).status == "unfinished: its chief was stopped or killed"
    (tmp_path / "journal.jsonl").write_text(lines[0])
    assert "0trials completed" in Page(render([], [read_sweep(tmp_path)])).text


def test_the_page_loads_no_other_files():
    html = render([read_run(RUNS / "multiworker")], [read_sweep(RUNS / "sweep")])
    assert [link for link in Page(html).links if not link.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in html
    assert [text for text in ("@import", "url(", "<script ") if text in html] == []
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(script) <= 3000
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html


def test_output_of_a_task_stays_plain_text(run_dir):
    failure = {"task": "worker-1", "cause": "<script>alert(1)</script>", "last_lines": []}
    change_attempt(run_dir, first_failure=failure)
    change(run_dir / "report.json", job={"command": '"><img src=x>'})
    page = page_of(run_dir)
    assert (page.tags.count("script"), page.tags.count("img")) == (1, 0)  # its own script
    assert "<script>alert(1)</script>" in page.text


def test_markup_in_place_of_a_number_is_refused(run_dir):
    change_attempt(run_dir, exit_code="<img src=x>")
    assert program.main([str(run_dir)]) == 2


def test_a_command_that_is_not_utf8_is_shown(run_dir):
    change(run_dir / "report.json", job={"command": "train.py /data/caf\udce9"})
    assert program.main([str(run_dir)]) == 0
    assert "caf\\udce9" in (run_dir / "report.html").read_text()


def test_a_path_that_cannot_be_read_is_one_line(capsys):
    assert program.main(["x" * 300]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_of_a_killed_launcher_is_shown(run_dir):
    report = change(run_dir / "report.json", exit_code=None)
    change(run_dir / "report.json", attempts=report["attempts"][:1])
    change(run_dir / "live.json", state="running")
    run = read_run(run_dir)
    assert run.status == "unfinished: its launcher was killed"
    assert [attempt.number for attempt in run.attempts] == [1, 2]
    assert sum(run.attempts[1].history["worker-0"].phases["trace"]) > 0
    assert "no end seen" in str(Page(render([run])).tips)


def test_a_locked_run_is_shown_as_running(run_dir):
    with FileLock(run_dir / "logs" / ".lock").acquire():
        assert 'data-state="going"' in render([read_run(run_dir)], is_followed=True)
    assert read_run(run_dir).status == "done"


@pytest.mark.parametrize(
    "kept", [["metrics.jsonl", "config.json"], ["report.json"], ["metrics.jsonl"]]
)
def test_an_incomplete_run_is_shown(run_dir, kept):
    for path in run_dir.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert page_of(run_dir).text


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("report.json", '{"exit_code": 0, "attem', "not-json"),
        ("report.json", "[1, 2]", "not-json"),
        ("report.json", '{"attempts": [{"number": 1}]}', "not-a-run"),
        ("summary.json", "PK\3\4", "not-json"),
        ("logs/attempt-1/history.json", "{}", "not-a-run"),
    ],
)
def test_half_written_files_are_refused(run_dir, file, text, code):
    (run_dir / file).write_text(text)
    assert refusal(lambda: read_run(run_dir)).code == code


def test_directories_of_other_programs_are_refused(tmp_path):
    for file in ("config.json", "summary.json", "report.json", "live.json"):
        (tmp_path / file).write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
        for path in (tmp_path, tmp_path / file, tmp_path / "none"):
            assert refusal(lambda path=path: read_run(path)).code == "not-a-run"


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document: one item of a list stands for all."""
    yield path
    items = content.items() if isinstance(content, dict) else ()
    items = list(enumerate(content))[:1] if isinstance(content, list) else items
    for key, value in items:
        yield from places(value, (*path, key))


def spoilt(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A document with another value at a place; without it for `...`."""
    if not path:
        return value
    copy = content.copy()
    if value is ... and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = spoilt(content[path[0]], path[1:], value)
    return copy


@pytest.mark.parametrize(
    ("name", "file"),
    [
        *((run, file) for run in ("multiworker", "ps") for file in ("report.json", "summary.json")),
        *(("multiworker", file) for file in ("config.json", "live.json")),
        *(("ps", "logs/attempt-1/history.json"), ("sweep", "journal.jsonl")),
    ],
)
def test_any_file_content_gives_a_page_or_one_line(name, file, tmp_path, capsys):
    run_dir = Path(shutil.copytree(RUNS / name, tmp_path / "run"))
    is_lines = file.endswith(".jsonl")
    text = (run_dir / file).read_text()
    lines = text.splitlines()[:4] if is_lines else [text]  # a sweep that has begun, and one trial
    content = list(map(json.loads, lines))
    if file == "live.json":
        (run_dir / "report.json").write_text('{"attempts": [], "exit_code": null}')
    seen = set()
    for line, path in ((line, path) for line, one in enumerate(content) for path in places(one)):
        for value in (..., None, -1, "x", [None], {"x": "x"}):
            bad = [spoilt(one, path, value) if i == line else one for i, one in enumerate(content)]
            write_lines(run_dir / file, [one for one in bad if one is not ...])
            code = program.main([str(run_dir)])
            assert capsys.readouterr().err.count("\n") == (code == 2), (path, value)
            seen.add(code)
    assert seen == {0, 2}


def test_the_file_is_written_into_the_run_directory(run_dir, capsys):
    assert program.main([str(run_dir)]) == 0
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")
    assert stat.S_IMODE((run_dir / "report.html").stat().st_mode) == 0o600
    assert str(run_dir / "report.html") in capsys.readouterr().out
    assert program.main([str(run_dir), f"--out={run_dir}"]) == 1
    assert capsys.readouterr().err == f"tfdist.report: {run_dir}: Is a directory\n"


@pytest.fixture
def several(tmp_path, monkeypatch):
    """A working directory with runs/a/job, runs/b/job, runs/c (a run), and no/run."""
    monkeypatch.chdir(tmp_path)
    for name in ("a/job", "b/job", "c"):
        shutil.copytree(RUNS / "multiworker", tmp_path / "runs" / name)
        job = {"program": ["/x/train.py", "--lr", name], "flags": {"workers": 2}}
        change(tmp_path / "runs" / name / "report.json", job=job)
    (tmp_path / "no" / "run").mkdir(parents=True)
    return tmp_path / "runs"


def test_without_an_argument_the_newest_run_is_shown(several, capsys):
    newest = Path(shutil.copytree(RUNS / "ps", several / "newest"))
    for at, run in enumerate((several / "c", newest), 1):
        for file in run.iterdir():
            os.utime(file, (at, at))
    assert program.main([]) == 0
    assert capsys.readouterr().out == (
        "newest run in runs/: runs/newest\n"
        "written: runs/newest/report.html (open it in a browser, or use --serve)\n"
    )
    shutil.rmtree(several)
    assert program.main([]) == 2
    assert capsys.readouterr().err.startswith("tfdist.report: RUN_DIR: runs/ has no run. Fix: ")


def test_a_directory_of_runs_shows_its_runs(several, capsys):
    assert program.main(["runs/a", "runs/b/job"]) == 0
    page = Page(Path("report.html").read_text())
    assert "2 runs" in page.text
    assert "fieldruns/a/jobruns/b/job" in page.text  # the heads of the table of differences
    assert "program/x/train.py --lr a/job/x/train.py --lr b/job" in page.text
    shutil.rmtree(several / "a")
    shutil.rmtree(several / "b")
    assert program.main(["runs"]) == 0
    assert "written: runs/report.html (" in capsys.readouterr().out
    assert program.main(["no"]) == 2


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/r/a", "/r/b"], ["a", "b"]),
        (["/r/a/job", "/r/b/job"], ["/r/a/job", "/r/b/job"]),
        (["/r/a"], ["a"]),
        (["/"], ["/"]),
    ],
)
def test_runs_with_equal_last_parts_are_named_by_their_paths(paths, names):
    assert names_of([Path(path) for path in paths]) == names


def test_the_served_page_is_fresh_and_local():
    pages = iter(["page 1", "page 2"])
    listener = listen(0, flag="--port")
    server = make_server(listener, lambda: next(pages), path="/", content_type="text/html")
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        for expected in (b"page 1", b"page 2"):
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.read() == expected
        foreign = urllib.request.Request(url, headers={"Host": "example.org"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(foreign, timeout=10)
        taken = refused(lambda: listen(server.server_address[1], flag="--port"))
        assert taken == ("--port", "port-taken")
        server.shutdown()
        thread.join()


def test_rates_compare_stretches_after_the_resumed_step():
    history = TaskHistory(
        begin=0.0,
        width_s=2.0,
        phases={},
        steps=(0, 10, None, 30, 40, 2, 12),  # the program trains twice
        memory_bytes=(None,) * 7,
    )
    assert history.rates() == [(6.0, 5.0), (9.0, 5.0), (13.0, 5.0)]


def test_a_night_between_two_attempts_is_left_out():
    run = read_run(RUNS / "multiworker")
    first, night = run.attempts[0], 8 * 3600.0
    active = first.end - first.begin
    later = dataclasses.replace(
        first, begin=first.end + night, end=first.end + night + active, tasks=(), history={}
    )
    run = dataclasses.replace(run, attempts=(first, later))
    assert run.active_s(later.begin) == pytest.approx(run.active_s(first.end))
    assert run.active_s(later.end) == pytest.approx(2 * active)
    assert "Gaps between attempts are left out: 8 h 00 min." in Page(render([run])).text


def test_lines_break_at_gaps_and_empty_ones_are_omitted():
    gap = Series(name="a", points=[(0, 1), (1, 2), (1, float("nan")), (2, 3), (3, 4)])
    assert chart("x", [gap], x_label="s").count("<polyline") == 2
    assert chart("x", [Series(name="a", points=[])], x_label="s") == ""


def test_labels_of_small_values_fit_beside_a_chart():
    svg = chart("Rate", [Series(name="a", points=[(1, 1e-3), (2, 1e-3)])], x_label="step")
    labels = re.findall(r'tick end"[^>]*>([^<]*)<', svg)
    assert labels == ["0", "2.5e-4", "5.0e-4", "7.5e-4", "0.001"]


def test_every_phase_has_a_part_and_a_colour():
    assert {*PHASES, SUM} <= {phase for _, phases in PARTS.values() for phase in phases}
    assert all(f"--{part}: #" in STYLE for part in PARTS)


def luminance(colour: str) -> float:
    """Relative luminance of a colour, as WCAG 2.2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_have_the_contrast_of_wcag_aa(scheme):
    block = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w]+): (#\w{6})", block))
    behind = {name: colours.pop(name) for name in ("bg", "card")}
    del colours["rule"]  # lines that say nothing
    text = {"ink", "soft", "good", "bad", "warn", "live"}
    for name, colour in colours.items():
        for other in behind.values():
            low, high = sorted((luminance(colour), luminance(other)))
            assert (high + 0.05) / (low + 0.05) >= (4.5 if name in text else 3), name
