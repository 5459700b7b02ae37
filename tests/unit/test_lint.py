"""The linter: each broken file is caught by its rule and no other, and good ones by none."""

import functools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refusals import refusal
from tests.unit.lint_cases import BROKEN, HERE
from tfdist.cluster import decode
from tfdist.configs.command_line import parse
from tfdist.lint import main
from tfdist.ops.lint import KINDS, RULES, Finding, LintSource, Severity, kind_of, lint

ROOT = Path(__file__).parents[2]
GOOD = sorted(HERE.glob("good_*.*"))
OURS = sorted(
    path
    for pattern in ("configs/*.py", "launch/**/*.yaml", "tests/golden/*.yaml")
    for path in ROOT.glob(pattern)
)
TEXTS = {**BROKEN, **{path.name: path.read_bytes() for path in GOOD}}
PLAIN = [n for n, text in TEXTS.items() if b"tfdist.train" not in text and not n.endswith(".py")]
MANIFEST = (HERE / "good_indexed_job.yaml").read_text()


@pytest.fixture(autouse=True, scope="module")
def in_the_checkout():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.chdir(ROOT)
        yield


def name_of(path: Path) -> str:
    return path.name


@functools.cache
def of_broken(name: str) -> list[Finding]:
    return lint([LintSource(name=name, data=BROKEN[name])])


def findings(text: str, name: str = "-") -> list[Finding]:
    return lint([LintSource(name=name, data=text.encode())])


def codes(text: str, name: str = "-") -> set[str]:
    return {finding.code for finding in findings(text, name)}


@pytest.mark.parametrize("path", [*GOOD, *OURS], ids=name_of)
def test_a_good_file_has_no_finding(path):
    assert lint([LintSource(name=str(path), data=path.read_bytes())]) == []


OF_WHOLE_FILES = ("LNT", "CFG007", "CFG008", "CFG002", "CFG02")
OF_WHOLE_FILES += ("TFC001", "TFC002", "TFC003", "TFC004")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_caught_by_its_rule_alone_in_one_line_that_names_the_place(name):
    assert {finding.code for finding in of_broken(name)} == {name.partition("_")[0]}
    for finding in of_broken(name):
        assert re.match(rf"{re.escape(name)}(:[1-9]\d*)?( \S|: )", str(finding))
        assert (
            finding.location.line
            or finding.location.path
            or finding.code.startswith(OF_WHOLE_FILES)
        )
        assert "\n" not in str(finding)
        assert "not-a-real" not in str(finding), "a secret is shown"
        assert finding.fix


def test_there_is_a_broken_file_for_each_rule():
    assert {name.partition("_")[0] for name in BROKEN} == set(RULES)


def test_addresses_are_named_by_their_path():
    text = json.dumps({"cluster": {"worker": ["a:1", "b"]}, "task": {"type": "x", "index": 0}})
    for each, code, path in (
        (text, "TFC010", "$.cluster.worker[1]"),
        (text.replace('"b"', '"b:1"'), "TFC015", "$.task.type"),
    ):
        (finding,) = findings(each)
        assert (finding.code, finding.location.path) == (code, path)


def test_a_value_of_several_lines_is_read_to_its_end():
    cluster = json.dumps({"cluster": {"worker": ["a:2222", "b:2222"]}}, indent=1)[1:-2]
    task = '"task": {"type": "worker", "index": 0}'
    text = (
        f"# TF_CONFIG\nTF_CONFIG={{{cluster},\n{task}\n}}\n# more\n\nBASH_FUNC_x%%=() {{  y\n}}\n"
    )
    assert findings(text, "job.env") == []
    (finding,) = findings(text.replace('"index": 0', '"index": 2'), "job.env")
    assert (finding.code, finding.location.line) == ("TFC017", 2)


def test_variables_that_are_right_together_have_no_finding():
    hosts = "TFDIST_HOSTS=a,b\nTFDIST_NODE_RANK=0\n"
    stages = "TFDIST_STAGES=2\nTFDIST_STRATEGY=pipeline\n"
    # In capitals it is no proxy to gRPC.
    assert findings(f"{hosts}{stages}HTTP_PROXY=http://p:1\n", "job.env") == []


@pytest.mark.parametrize("name", [n for n in BROKEN if n.startswith("TFC") and n.endswith("json")])
def test_the_rule_is_that_of_the_error_that_a_task_would_get(name):
    code = name.partition("_")[0]
    if RULES[code].severity is Severity.WARNING or code == "TFC025":
        decode(BROKEN[name])
        return
    assert refusal(lambda: decode(BROKEN[name])).code == code


def test_a_service_in_another_file_counts():
    service, _, rest = MANIFEST.partition("---\n")
    together = [
        LintSource(name="job.yaml", data=rest.encode()),
        LintSource(name="service.yaml", data=service.encode()),
    ]
    assert {f.code for f in lint(together[:1])} == {"K8S018"}
    assert lint(together) == []


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ("backoffLimit: 0", set()),
        ("backoffLimitPerIndex: 0", set()),
        ("backoffLimitPerIndex: 3", {"K8S024"}),
    ],
)
def test_a_job_without_restarts_needs_no_rule_for_mistakes(limit, found):
    policy = re.compile("  podFailurePolicy:.*(?=  template:)", re.DOTALL)
    text = policy.sub(f"  {limit}\n", MANIFEST)
    assert text != MANIFEST
    assert codes(text, "x.yaml") == found


def test_replicas_are_held_against_the_global_batch():
    path = ROOT / "configs" / "digits_single.py"
    source = LintSource(name=path.name, data=path.read_bytes())
    assert lint([source], replicas=64) == []
    (finding,) = lint([source], replicas=65)
    assert finding.code == "CFG014"
    assert "65 replicas" in finding.received


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        (("c.modle = 'cnn'",), "CFG003", 4),
        (("c.seed = 'x'",), "CFG004", 4),
        (("raise ValueError('no')",), "CFG024", 4),
        (("import os", "os.kill(os.getpid(), 9)"), "CFG024", None),
    ],
)
def test_a_config_file_is_run_and_its_mistakes_are_found_where_they_are(
    lines, code, line, tmp_path
):
    path = tmp_path / "c.py"
    body = "".join(f"    {line}\n" for line in ("c = base()", *lines, "return c"))
    path.write_text(f"from tfdist.configs import base\ndef get_config():\n{body}")
    assert [(f.code, f.location.line) for f in findings(path.read_text(), str(path))] == [
        (code, line)
    ]


def test_a_value_is_refused_by_the_same_rule_when_a_program_starts():
    rules = {
        "CFG003": ["augmentation.random_flips=1"],
        "CFG004": ["checkpoints=2.5"],
        "CFG005": ["optimizer=Adam"],
        "CFG006": ["global_batch_size=-1", "learning_rate=inf", "seed=4294967296"],
        "CFG011": ["augmentation.std=-1", "augmentation.mean=()"],
    }
    for code, flags in rules.items():
        for flag in flags:
            assert refusal(lambda flag=flag: parse([f"--config.{flag}"])).code == code


def test_a_config_file_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr("tfdist.ops.lint.tasks._TIMEOUT_S", 0.1)
    loop = "from tfdist.configs import base\ndef get_config():\n    while True: pass\n"
    (finding,) = findings(loop)  # from standard input
    assert (finding.code, finding.received) == ("CFG024", "no end within 0 s")


# Command lines


LAUNCH, TRAIN = "python -m tfdist.launch ", "python -m tfdist.train "


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (LAUNCH + "--workers 4 --split_bytes 4000000 train.py", {"LCH001"}),
        (LAUNCH + "--strategy=multiworker --profile-ps -m tfdist.train", {"LCH001"}),
        (LAUNCH + "--ps 1 --split_bytes 4000000 train.py --split_bytes x", set()),
        (LAUNCH + "--workers two train.py", {"LCH002"}),
        (LAUNCH + "--nproc 2 train.py", {"LCH002"}),
        ("tfdist launch --workers two train.py", {"LCH002"}),
        ("/opt/bin/tfdist --workers two train.py", {"LCH002"}),
        ("uv run tfdist launch --workers two train.py", {"LCH002"}),
        ("python -m tfdist --workers two train.py", {"LCH002"}),
        ("tfdist doctor --workers two", {"LNT002"}),
        ("torchrun --nproc 2 train.py", {"LNT002"}),
        (LAUNCH + "--workers 8 --config.global_batch_size=4", {"CFG014"}),
        (LAUNCH + "--workers 8 --ps 1 --config.global_batch_size=4", set()),
        (LAUNCH + "--strategy pipeline --workers 8 --config.global_batch_size=4", set()),
        (LAUNCH + "--stages 2 --workers 8 --config.global_batch_size=3", {"CFG014"}),
        (LAUNCH + "--ps 1 --config.sharded_optimizer=true", {"CFG025"}),
        (LAUNCH + "--workers 2 --config.sharded_optimizer=true", set()),
        (LAUNCH + "--ps 1 --config.max_staleness=4 --config.model=resnet20", {"CFG015"}),
        (TRAIN + "--config.modle=cnn", {"CFG003"}),
        (TRAIN + "--config.dropout=x", {"CFG004"}),
        (TRAIN + "--overwrit", {"LCH002"}),
        (TRAIN + "--config configs/mnist.py --config.checkpoints=100000", set()),
        (TRAIN + "--config configs/mnist.py --config.checkpoints=10000000", {"CFG009"}),
        (TRAIN + "--config /image/c.py --config.checkpoints=10000000", set()),
        (TRAIN + "--config.dropout=$RATE", set()),
    ],
)
def test_a_command_is_checked_as_the_program_would_read_it(command, expected):
    found = lint([], command=command.split())
    assert {finding.code for finding in found} == expected, found


def test_a_command_is_given_after_two_dashes(capsys):
    assert main(["--", *(LAUNCH + "--workers 2 --profile_ps train.py").split()]) == 2
    out = capsys.readouterr().out
    assert out.startswith("command line --profile_ps: LCH001 error: received True with --strategy")
    assert out.endswith("1 file: 1 error, 0 warnings\n")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"cluster": {}}', "tf_config"),
        ("{'cluster': {}}", "tf_config"),
        ('{"apiVersion": "v1", "kind": "Service"}', "manifest"),
        ("# a comment\napiVersion: v1\n", "manifest"),
        ("#!/bin/sh\n", None),
        ("from x import y\ndef get_config():\n", "config"),
        ("PATH=/bin\nTF_CONFIG={}\n", "environ"),
        ("hello", None),
    ],
)
def test_standard_input_is_known_by_its_text(text, kind):
    assert kind_of("-", text) == kind


def test_anchors_that_multiply_cost_nothing():
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert codes("\n".join(lines), "a.yaml") == set()


# The program


def test_the_exit_code_is_the_worst_finding(tmp_path, capsys):
    doubtful, wrong = tmp_path / "TFC024_low.json", tmp_path / "TFC010_no_port.json"
    for path in doubtful, wrong:
        path.write_bytes(BROKEN[path.name])
    assert main([str(path) for path in GOOD]) == 0
    assert capsys.readouterr().out == f"{len(GOOD)} files: no findings\n"
    assert main([str(doubtful)]) == 1
    assert main([str(doubtful), str(wrong)]) == 2
    out = capsys.readouterr().out
    assert "TFC010_no_port.json $.cluster.worker[0]: TFC010 error: received 'a.example'" in out
    assert out.endswith("2 files: 1 error, 1 warning\n")


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ([], "command line"),
        (["nowhere.yaml"], "command line"),
        (["--kind=manifests", "x"], "--kind"),
        (["--replicas", "0", "x"], "--replicas"),
        (["."], "command line"),
        (["a\0b"], "command line"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments, where, capsys):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tfdist.lint: {where}: received ")


def test_json_has_all_parts(tmp_path, capsys):
    path = tmp_path / "K8S011_two_at_a_time.yaml"
    path.write_bytes(BROKEN[path.name])
    assert main(["--json", str(path)]) == 2
    value = json.loads(capsys.readouterr().out)
    (finding,) = value["findings"]
    found = value["exit_code"], finding["code"], finding["severity"]
    assert found == (2, "K8S011", "error")
    assert path.read_text().splitlines()[finding["line"] - 1] == "  parallelism: 2"
    assert set(finding) >= {"title", "file", "path", "received", "expected", "fix"}


def test_the_list_has_every_rule_and_its_meaning(capsys):
    assert main(["--list"]) == 0
    text = capsys.readouterr().out
    for code, rule in RULES.items():
        assert f"{code} {rule.severity.value}" in text
        assert rule.title in text
    assert main(["--list", "--json"]) == 0
    assert [rule["code"] for rule in json.loads(capsys.readouterr().out)] == list(RULES)


def test_the_environment_is_checked(monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", "{'cluster': {}}")
    assert main(["--environ"]) == 2
    assert "environment TF_CONFIG: TFC002 error" in capsys.readouterr().out


# Config files are left out: they are run, and nobody wants to run what chance wrote.


@given(st.binary(max_size=200), st.sampled_from([kind for kind in KINDS if kind != "config"]))
@settings(max_examples=200)
def test_random_bytes_end_nothing(data, kind):
    for finding in lint([LintSource(name="x", data=data, kind=kind)]):
        assert finding.code in RULES


@given(st.sampled_from(PLAIN), st.floats(0, 1), st.text(max_size=4), st.integers(0, 12))
@settings(max_examples=400)
def test_a_damaged_file_ends_nothing(name, where, put, cut):
    data = TEXTS[name][:8000]
    at = int(where * len(data))
    damaged = data[:at] + put.encode("utf-8", "surrogatepass") + data[at + cut :]
    for finding in lint([LintSource(name=name, data=damaged)]):
        assert finding.code in RULES
        assert finding.location.file == name
