"""`tfdist check`: each kind of mistake is a line with its fix, and a good job has none."""

import dataclasses
import json
import os
import shlex
import socket
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest

from tests.processes import script
from tests.refusals import refused
from tfdist import check
from tfdist.check import Finding, check_command, check_environment, check_file, compare
from tfdist.launch.machine import this_machine

CLUSTER = {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}
TASK = {"type": "worker", "index": 0}
GOOD = json.dumps({"cluster": CLUSTER, "task": TASK})
MIXED = json.dumps({"cluster": {"worker": ["localhost:2222", "b.example:2222"]}, "task": TASK})
FEW = json.dumps({"cluster": CLUSTER, "task": TASK, "tfdist": {"min_workers": 3}})


def texts(findings):
    return [str(finding) for finding in findings]


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, None),
        ({"TF_CONFIG": GOOD}, None),
        ({"TF_CONFIG": "{"}, "TF_CONFIG"),
        ({"TF_CONFIG": MIXED}, "localhost is a loopback address"),
        ({"TF_CONFIG": FEW}, "min_workers is 3"),
        ({"TFDIST_STRATEGIE": "ps"}, "TFDIST_STRATEGIE"),
        ({"TFDIST_HOSTS": "a,b", "TFDIST_NODE_RANK": "2"}, "TFDIST_NODE_RANK"),
        ({"TF_CONFIG": GOOD, "http_proxy": "http://p:1"}, "http_proxy is set, so gRPC"),
        ({"TF_CONFIG": GOOD, "http_proxy": "http://p:1", "no_proxy": "127.0.0.1"}, None),
    ],
)
def test_an_environment_is_read_as_a_task_reads_it(environ, says):
    found = texts(check_environment(environ))
    assert len(found) == (says is not None)
    assert says is None or says in found[0]
    assert all(". Fix: " in line for line in found)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", GOOD, None),
        ("a.json", GOOD.replace("index", "indx"), "lacks some of the keys"),
        ("a.toml", "[cluster]", "the kind of this file is unknown"),
        ("a.py", "from tfdist.configs import base\ndef get_config():\n    return base()\n", None),
        ("a.py", "def get_config():\n    return 3\n", "get_config"),
        ("a.py", "def get_config(:\n", "a.py"),
    ],
)
def test_a_file_is_read_by_its_own_parser(name, text, says, tmp_path):
    (tmp_path / name).write_text(text)
    found = texts(check_file(str(tmp_path / name)))
    assert len(found) == (says is not None), found
    assert says is None or says in found[0]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python -m tfdist.launch --strategy ps --workers 2 --ps 1", None),
        ("tfdist launch --workers 2", None),
        ("tfdist --workers 2 --strategy mirrored", "--workers"),
        ("tfdist train --config.global_batch_size=0", "config.global_batch_size"),
        ("tfdist launch --workers 2 -- --config.learning_rte=1", "learning_rte"),
        ("python train.py", "is no command of tfdist.launch"),
    ],
)
def test_a_command_is_read_by_its_program(command, says):
    found = texts(check_command(shlex.split(command)))
    assert len(found) == (says is not None), found
    assert says is None or says in found[0]


def test_taken_ports_and_unresolved_names_are_found():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        workers = [f"127.0.0.1:{port}", "no-such-host.invalid:2222"]
        config = json.dumps({"cluster": {"worker": workers}, "task": TASK})
        found = texts(check.check_host({"TF_CONFIG": config}))
    assert any("names: no-such-host.invalid does not resolve" in line for line in found)
    assert any(f"ports: port {port} of 127.0.0.1 is taken" in line for line in found)


def test_packages_that_are_missing_or_untested_are_found():
    has = {"tensorflow": "2.10.0", "numpy": "2.0", "tfdist": "0"}
    found = texts(check.check_packages(has, ["tensorflow<2.22,>=2.21", "keras>=3; extra == 'x'"]))
    assert found[0].startswith("error    packages: keras is missing")
    assert found[1].startswith("warning  packages: tensorflow 2.10.0 is not tested")
    assert texts(check.check_packages(check.versions(), ["tensorflow>=2"])) == []


def test_missing_shared_memory_and_disk_space_are_found(monkeypatch):
    machine = dataclasses.replace(this_machine({}), gpus=("GPU-0",))
    state = os.statvfs("/")
    full = os.statvfs_result([*state[:4], 0, *state[5:]])
    monkeypatch.setattr(check.os, "statvfs", lambda path: full)
    found = texts(check.check_host({}, machine=machine))
    assert any("shared memory" in line for line in found)
    assert any("run directory" in line and "0 MiB are free" in line for line in found)


def test_a_check_leaves_the_run_directory_unchanged(tmp_path):
    assert list(check.check_directory(str(tmp_path / "runs" / "a b"))) == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (only,) = texts(check.check_directory(str(tmp_path / "file" / "x")))
    assert "Not a directory" in only


def test_a_run_directory_in_a_closed_directory_is_a_finding(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    user = os.geteuid()
    os.seteuid(user or 65_534)  # root may open any directory
    try:
        (only,) = texts(check.check_directory(str(tmp_path / "closed" / "runs")))
    finally:
        os.seteuid(user)
    assert "Permission denied" in only


def test_a_checkout_that_is_not_installed_is_checked(monkeypatch):
    monkeypatch.setattr(check, "versions", lambda: {"python": "3.11.7"})
    monkeypatch.setattr(check.metadata, "requires", Mock(side_effect=PackageNotFoundError))
    found = texts(check.check_host({}))
    assert "error    packages: tfdist is missing. Fix: install tfdist." in found


RSH = """
host=$1; shift
case $host in
  a) exec sh -c "$*";;
  b) echo 'b: Permission denied' >&2; exit 255;;
  c) exec env PYTHONPATH={site} CUDA_VISIBLE_DEVICES= sh -c "$*";;
  d) cd /; exec unshare -rm sh -c "mount -t tmpfs none {root}; $*";;
esac
"""


def test_agents_check_the_hosts_and_their_packages_are_compared(tmp_path, capsys, monkeypatch):
    (tmp_path / "keras-9.9.9.dist-info").mkdir()
    (tmp_path / "keras-9.9.9.dist-info" / "METADATA").write_text("Name: keras\nVersion: 9.9.9\n")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    shell = script(tmp_path / "rsh", RSH.format(site=tmp_path, root=tmp_path))
    monkeypatch.setenv("OWN", "x")
    monkeypatch.setenv("TFDIST_STRATEGY", "multi-worker")  # which a job's agents get
    flags = ["--hosts", "a,b,c,d", "--rsh", str(shell), "--env", "OWN", "--run_dir", str(tmp_path)]
    assert check.main(flags) == 2
    lines = capsys.readouterr().out.splitlines()
    assert not any(": a: host" in line or ": c: host" in line for line in lines), lines
    assert any("error    b: host: b: Permission denied. Fix: make this" in one for one in lines)
    assert any("packages: keras" in line and "9.9.9 on c" in line for line in lines), lines
    assert any(line.startswith("error    a: environment TFDIST_STRATEGY") for line in lines), lines
    assert any(line.startswith("error    d: host: FileNotFoundError: ") for line in lines), lines


def test_versions_are_compared_and_repairs_of_python_are_not():
    same = {"python": "3.11.7", "numpy": "2"}
    assert list(compare({"a": same, "b": {**same, "python": "3.11.9"}})) == []
    (found,) = compare({"a": same, "b": {**same, "numpy": "3"}})
    assert found.problem == "numpy 2 on a; 3 on b"


def test_the_exit_code_tells_errors_from_warnings(monkeypatch, capsys):
    warning = Finding(subject="x", problem="y", fix="z", is_error=False)
    for findings, code in (
        ([], 0),
        ([warning], 1),
        ([warning, dataclasses.replace(warning, is_error=True)], 2),
    ):
        monkeypatch.setattr(check, "check_environment", lambda environ, found=findings: found)
        monkeypatch.setattr(check, "check_host", lambda environ, run_dir: [])
        assert check.main([]) == code
    assert capsys.readouterr().out.splitlines()[0] == "no findings"


def test_files_are_checked_beside_hosts_and_ssh_needs_hosts(tmp_path, capsys):
    assert check.main([str(tmp_path / "a.toml"), "--hosts", "a", "--rsh", "no-such-shell"]) == 2
    out = capsys.readouterr().out
    assert "a: host: no-such-shell: No such file" in out
    assert out.endswith("\n2 errors, 0 warnings\n")
    assert refused(lambda: check._run(["--on", "ssh"]))[1] == "no-value"
