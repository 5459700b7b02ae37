"""The linter: each broken file is caught by its rule and no other, and good ones by none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.cluster import decode
from tfdist.configs import check
from tfdist.errors import UsageError
from tfdist.lint import RULES, Finding, Severity, Source, lint
from tfdist.lint.__main__ import main
from tfdist.lint.config_values import code_of as code_of_config
from tfdist.lint.config_values import configuration
from tfdist.lint.files import KINDS, kind_of
from tfdist.lint.tf_config import code_of

ROOT = Path(__file__).parents[2]
FILES = sorted(p for p in (Path(__file__).parent / "lint").glob("[A-Zg]*_*.*") if p.is_file())
BROKEN = [path for path in FILES if not path.name.startswith("good_")]
GOOD = [path for path in FILES if path.name.startswith("good_")]
OURS = sorted(
    path
    for pattern in ("configs/*.py", "launch/**/*.sh", "launch/**/*.sbatch", "launch/**/*.yaml")
    for path in ROOT.glob(pattern)
)
MANIFEST = (Path(__file__).parent / "lint" / "good_indexed_job.yaml").read_text()


def name_of(path: Path) -> str:
    return path.name


def findings(text: str, name: str = "-", kind: str | None = None) -> list[Finding]:
    return lint([Source(name=name, data=text.encode(), kind=kind)])


def codes(text: str, name: str = "-", kind: str | None = None) -> set[str]:
    return {finding.code for finding in findings(text, name, kind)}


# The files


@pytest.mark.parametrize("path", BROKEN, ids=name_of)
def test_a_broken_file_is_caught_by_its_rule_and_no_other(path: Path) -> None:
    found = lint([Source(name=path.name, data=path.read_bytes())])
    assert {finding.code for finding in found} == {path.name.split("_")[0]}, found


@pytest.mark.parametrize("path", [*GOOD, *OURS], ids=name_of)
def test_a_good_file_has_no_finding(path: Path) -> None:
    found = lint([Source(name=path.name, data=path.read_bytes())])
    # Examples name an image that everybody makes for themselves.
    assert [f for f in found if path in GOOD or f.code != "K8S029"] == []


@pytest.mark.parametrize("path", BROKEN, ids=name_of)
def test_every_finding_is_one_line_that_names_the_place(path: Path) -> None:
    for finding in lint([Source(name=path.name, data=path.read_bytes())]):
        assert re.match(rf"{re.escape(path.name)}(:[1-9]\d*)?( \S|: )", str(finding))
        whole_file = finding.code.startswith("LNT") or finding.code in ("TFC001", "TFC002")
        whole_file |= finding.code in ("TFC003", "TFC004")
        assert finding.place.line or finding.place.path or whole_file, finding
        assert "\n" not in str(finding)
        assert finding.fix


@pytest.mark.parametrize("code", RULES)
def test_every_rule_has_a_broken_file(code: str) -> None:
    assert [path for path in BROKEN if path.name.startswith(f"{code}_")]


def test_there_are_many_broken_files_and_a_rule_for_each() -> None:
    assert len(BROKEN) >= 60
    assert {path.name.split("_")[0] for path in BROKEN} == set(RULES)


# Places


def test_the_place_is_the_line_of_the_mistake() -> None:
    for path in BROKEN:
        text = path.read_bytes().decode("utf-8", "replace").splitlines()
        for finding in lint([Source(name=path.name, data=path.read_bytes())]):
            if finding.code in ("CFG003", "CFG006", "SLM004", "SLM011") and finding.place.line:
                field = finding.place.path.rpartition(".")[2].lstrip("-")
                lines = text[finding.place.line - 1 : finding.place.line + 1]
                assert any(field in line for line in lines), finding


def test_addresses_are_named_by_their_path() -> None:
    text = json.dumps({"cluster": {"worker": ["a:1", "b"]}, "task": {"type": "x", "index": 0}})
    assert [(f.code, f.place.path) for f in findings(text)] == [
        ("TFC010", "$.cluster.worker[1]"),
        ("TFC015", "$.task.type"),
    ]


def test_one_mistake_does_not_hide_another() -> None:
    config = "from tfdist.configs import base\ndef get_config():\n    c = base()\n"
    config += "    c.modle = 'cnn'\n    c.dropout = 2.0\n    c.seed = 'x'\n    return c\n"
    found = [(f.code, f.place.line) for f in findings(config, "c.py")]
    assert found == [("CFG003", 4), ("CFG006", 5), ("CFG004", 6)]


# What the checks of tfdist.cluster and tfdist.configs refuse has a rule


@pytest.mark.parametrize("path", [p for p in BROKEN if p.name.startswith("TFC")], ids=name_of)
def test_the_rule_is_that_of_the_error_that_a_task_would_get(path: Path) -> None:
    code = path.name.split("_")[0]
    if path.suffix != ".json":
        return
    if RULES[code].severity is Severity.WARNING or code == "TFC025":
        decode(path.read_text())
        return
    with pytest.raises(UsageError) as refused:
        decode(path.read_text())
    assert code_of(refused.value) == code


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"model": "vgg"}, "CFG005"),
        ({"learning_rate": float("nan")}, "CFG006"),
        ({"warmup_examples": 10**9}, "CFG010"),
        ({"augmentation.std": (0.0,)}, "CFG011"),
        ({"early_stopping_patience": 1, "validation_split": ""}, "CFG013"),
    ],
)
def test_what_configs_refuse_has_a_rule(values: dict[str, object], code: str) -> None:
    with pytest.raises(UsageError) as refused:
        check(configuration(values))
    assert code_of_config(refused.value) == code


# Several files, replicas, kinds


def test_a_service_in_another_file_counts() -> None:
    service, _, rest = MANIFEST.partition("---\n")
    together = [
        Source(name="job.yaml", data=rest.encode()),
        Source(name="service.yaml", data=service.encode()),
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
def test_a_job_without_restarts_needs_no_rule_for_mistakes(limit: str, found: set[str]) -> None:
    policy = re.compile("  podFailurePolicy:.*(?=  template:)", re.DOTALL)
    text = policy.sub(f"  {limit}\n", MANIFEST)
    assert text != MANIFEST
    assert codes(text, "x.yaml") == found


OWN = "podSelector: {matchLabels: {app: mnist}}"
DNS = "{to: [{namespaceSelector: {}}], ports: [{protocol: UDP, port: 53}]}"


def with_policy(spec: str) -> str:
    """The good manifest with another NetworkPolicy for its pods."""
    written = spec.replace("OWN", OWN).replace("DNS", DNS)
    return MANIFEST.partition("  policyTypes: [Ingress]")[0] + f"  {written}\n"


@pytest.mark.parametrize(
    "spec",
    [
        "ingress: [{from: [{podSelector: {}}]}]",
        "ingress: [{from: [{OWN, namespaceSelector: {matchLabels: {team: ml}}}]}]",
        "ingress: [{from: [{podSelector: {matchLabels: {app: other}}}]}, {from: [{OWN}]}]",
        "ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8}}], ports: [{port: 2222}]}]",
        "ingress: [{from: [{OWN}], ports: [{port: 2000, endPort: 3000}]}]",
        "ingress: [{from: [{OWN}], ports: [{protocol: TCP}]}]",
        "ingress: [{from: [{OWN}], ports: [{port: '{{ .Values.port }}'}]}]",
        "ingress: [{from: [{OWN}]}]\n  egress: [{to: [{OWN}]}, DNS]",
        "ingress: [{from: [{OWN}]}]\n  egress: [{}]",
        "ingress: [{from: [{OWN}]}]\n  policyTypes: [Ingress]\n  egress: []",
    ],
)
def test_a_policy_that_has_the_jobs_pods_beside_others_is_good(spec: str) -> None:
    assert findings(with_policy(spec), "x.yaml") == []


def test_ports_of_a_policy_are_held_against_where_tasks_listen() -> None:
    at = "ingress: [{from: [{OWN}], ports: [{port: WHERE}]}]"
    hosts = '            - {name: TFDIST_HOSTS, value: "mnist-[0-3].train"}\n'
    port = '            - {name: TFDIST_PORT, value: "7000"}\n'
    ports = '            - {name: TFDIST_PORTS, value: "7000-7100"}\n'
    named = "          ports: [{name: tasks, containerPort: 2222}]\n          env:\n"
    for right, old, new in (
        ("2222", hosts, hosts),
        ("7000", hosts, hosts + port),
        ("7000", hosts, hosts + ports),
        ("tasks", "          env:\n", named),
    ):
        for where, expected in ((right, set()), ("8080", {"K8S040"})):
            changed = with_policy(at.replace("WHERE", where)).replace(old, new)
            assert codes(changed, "x.yaml") == expected, (right, where)


def test_several_policies_add_up_and_those_of_other_namespaces_do_not() -> None:
    shut = with_policy("ingress: []")
    open_ = "---\n" + MANIFEST.rpartition("---\n")[2]
    assert codes(shut, "x.yaml") == {"K8S040"}
    assert codes(shut + open_, "x.yaml") == set()
    policy = "{name: train}\nspec:\n  podSelector"
    elsewhere = shut.replace(policy, policy.replace("}", ", namespace: other}"))
    assert codes(elsewhere, "x.yaml") == {"K8S040"}  # the job may be meant for there
    in_ml = elsewhere.replace("  name: mnist\n", "  name: mnist\n  namespace: ml\n")
    assert codes(in_ml, "x.yaml") == {"K8S028"}


def test_programs_by_themselves_may_be_kept_from_each_other() -> None:
    text = with_policy("ingress: []").replace(
        '{name: TFDIST_HOSTS, value: "mnist-[0-3].train"}', "{name: TFDIST_CLUSTER, value: none}"
    )
    assert codes(text, "x.yaml") == set()


def test_replicas_are_held_against_the_global_batch() -> None:
    path = ROOT / "configs" / "digits_single.py"
    source = Source(name=path.name, data=path.read_bytes())
    assert lint([source], replicas=64) == []
    (finding,) = lint([source], replicas=65)
    assert finding.code == "CFG014"
    assert "65 replicas" in finding.received


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("export TFDIST_STRATEGY=multiworker", "export TFDIST_CLUSTER=none"),
        ("srun python", "srun -n2 python"),
        ("export TFDIST_STRATEGY=multiworker", "export TFDIST_STRATEGY=ps"),
        ("size=256", 'size="$BATCH"'),
    ],
)
def test_a_small_batch_is_not_held_against_tasks_that_do_not_share_it(old: str, new: str) -> None:
    text = (Path(__file__).parent / "lint" / "good_sbatch.sh").read_text()
    changed = text.replace(old, new)
    assert changed != text
    assert codes(changed.replace("size=256", "size=2"), "x.sh") == set()


def test_an_evaluator_has_no_part_of_the_batch() -> None:
    folder = Path(__file__).parent / "lint"
    manifest = (folder / "CFG014_in_a_manifest.yaml").read_text().replace("size=2", "size=3")
    script = (folder / "CFG014_in_a_script.sh").read_text().replace("size=2", "size=3")
    hosts = '            - {name: TFDIST_HOSTS, value: "mnist-[0-3].train"}\n'
    export = "export TFDIST_STRATEGY=multiworker\n"
    for text, name, line, evaluator in (
        (manifest, "x.yaml", hosts, '            - {name: TFDIST_EVALUATOR, value: "1"}\n'),
        (script, "x.sh", export, "export TFDIST_EVALUATOR=1\n"),
    ):
        beside = text.replace(line, line + evaluator)
        assert beside != text
        assert codes(text, name) == {"CFG014"}
        assert codes(beside, name) == set()
        assert codes(beside.replace("size=3", "size=2"), name) == {"CFG014"}


def test_a_config_file_is_read_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w')\nfrom tfdist.configs import base\n"
    text += "def get_config():\n    c = base()\n    c.model = 'x'\n    return c\n"
    assert codes(text, "c.py") == {"CFG005"}
    assert not mark.exists()


def test_what_only_running_would_tell_is_not_judged() -> None:
    text = "from tfdist.configs import base\nfrom x import n, tune\ndef get_config():\n"
    text += "    c = base()\n    c.total_examples = n\n    c.checkpoints = 10**6\n    {}\n"
    text += "    return c\n"
    assert codes(text.format("pass"), "c.py") == set()
    known = text.replace("= n\n", "= 100\n").replace("10**6", "500")
    assert codes(known.format("pass"), "c.py") == {"CFG009"}
    assert codes(known.format("tune(c)"), "c.py") == set()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"cluster": {}}', "tf_config"),
        ("{'cluster': {}}", "tf_config"),
        ('{"apiVersion": "v1", "kind": "Service"}', "manifest"),
        ("# a comment\napiVersion: v1\n", "manifest"),
        ("#!/bin/sh\n", "script"),
        ("#SBATCH -n 4\n", "script"),
        ("from x import y\ndef get_config():\n", "config"),
        ("PATH=/bin\nTF_CONFIG={}\n", "environ"),
        ("hello", None),
    ],
)
def test_standard_input_is_known_by_its_text(text: str, kind: str | None) -> None:
    assert kind_of("-", text) == kind


def test_a_secret_is_not_shown() -> None:
    for path in BROKEN:
        if path.name.startswith("ENV005"):
            (finding,) = lint([Source(name=path.name, data=path.read_bytes())])
            assert "not-a-real" not in str(finding)


def test_anchors_that_multiply_cost_nothing() -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert codes("\n".join(lines), "a.yaml") == set()


# The program


def test_the_exit_code_is_the_worst_finding(capsys: pytest.CaptureFixture[str]) -> None:
    here = Path(__file__).parent / "lint"
    assert main([str(path) for path in GOOD]) == 0
    assert capsys.readouterr().out == f"{len(GOOD)} files: no findings\n"
    assert main([str(here / "TFC024_low.json")]) == 1
    assert main([str(here / "TFC024_low.json"), str(here / "TFC010_no_port.json")]) == 2
    out = capsys.readouterr().out
    assert "TFC010_no_port.json $.cluster.worker[0]: TFC010 error: received 'a.example'" in out
    assert out.endswith("2 files: 1 error, 1 warning\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no file"),
        (["nowhere.yaml"], "No such file"),
        (["--jsn", "x"], "did you mean '--json'?"),
        (["--kind=manifests", "x"], "did you mean 'manifest'?"),
        (["--replicas", "0", "x"], "a number from 1 on"),
        (["--kind"], "no value"),
        (["."], "Is a directory"),
        (["a\0b"], "null"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_json_has_all_parts(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parent / "lint" / "K8S011_two_at_a_time.yaml"
    assert main(["--json", str(path)]) == 2
    value = json.loads(capsys.readouterr().out)
    assert value["exit_code"] == 2
    (finding,) = value["findings"]
    assert finding["code"] == "K8S011"
    assert finding["severity"] == "error"
    assert path.read_text().splitlines()[finding["line"] - 1] == "  parallelism: 2"
    assert set(finding) >= {"title", "file", "path", "received", "expected", "fix"}


def test_the_list_has_every_rule_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    text = capsys.readouterr().out
    for code, rule in RULES.items():
        assert f"{code} {rule.severity.value}" in text
        assert rule.reason in text
    assert main(["--list", "--json"]) == 0
    assert [rule["code"] for rule in json.loads(capsys.readouterr().out)] == list(RULES)


def test_the_environment_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", "{'cluster': {}}")
    assert main(["--environ"]) == 2
    assert "environment TF_CONFIG: TFC002 error" in capsys.readouterr().out


def test_nothing_heavy_is_loaded() -> None:
    program = (
        "import sys; from tfdist.lint.__main__ import main; code = main(sys.argv[1:]);"
        "heavy = {'tensorflow', 'keras', 'numpy'} & set(sys.modules); assert not heavy, heavy;"
        "assert 'yaml' not in sys.modules or len(sys.argv) > 2; sys.exit(code)"
    )
    here = Path(__file__).parent / "lint"
    for names in (["good_multiworker.json"], ["good_indexed_job.yaml", "good_sbatch.sh"]):
        files = [str(here / name) for name in names]
        done = subprocess.run(
            [sys.executable, "-c", program, *files], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (
            0,
            f"{len(files)} file{'s' * (len(files) > 1)}: no findings\n",
        ), done.stderr


# Anything at all


@given(st.binary(max_size=200), st.sampled_from(KINDS))
@settings(deadline=None, max_examples=200)
def test_random_bytes_end_nothing(data: bytes, kind: str) -> None:
    for finding in lint([Source(name="x", data=data, kind=kind)]):
        assert finding.code in RULES


@given(st.sampled_from(FILES), st.floats(0, 1), st.text(max_size=4), st.integers(0, 12))
@settings(deadline=None, max_examples=400)
def test_a_damaged_file_ends_nothing(path: Path, where: float, put: str, cut: int) -> None:
    data = path.read_bytes()[:8000]
    at = int(where * len(data))
    damaged = data[:at] + put.encode("utf-8", "surrogatepass") + data[at + cut :]
    for finding in lint([Source(name=path.name, data=damaged)]):
        assert finding.code in RULES
        assert finding.place.file == path.name
