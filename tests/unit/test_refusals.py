"""Command lines and values that are refused: the place and the code of each one's error.

A line of `data/refusals.txt` has a program's words, the place of the error, its code and maybe a
part of its text, such as the name that was meant.
"""

import contextlib
import itertools
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfdist
from tests.refusals import refusal
from tests.unit.submit import PODS, SLURM
from tests.unit.test_cluster_environment import recorded
from tests.unit.test_cluster_environment import tf_config as tf_config_of
from tests.unit.test_launch_plan import planned
from tfdist import check, errors, serve
from tfdist.checkpoint.backup import Best
from tfdist.cluster import decode, read_environment
from tfdist.cluster.address import expand_counts, expand_hosts, parse_hosts
from tfdist.cluster.ports import parse_ports
from tfdist.configs import FIELDS
from tfdist.configs import command_line as train
from tfdist.errors import UsageError
from tfdist.launch import options as launch
from tfdist.launch.multihost.hosts import decided_group
from tfdist.options import LaunchFlags, names_of
from tfdist.pipeline.cuts import balanced
from tfdist.submit import __main__ as submit
from tfdist.submit import command_line
from tfdist.training.epochs import VirtualEpochs
from tfdist.tuning import options as tune
from tfdist.tuning.sweep import runner_of
from tfdist.tuning.trial_job import TrialProgram


def launched(words):
    decided_group(launch.parse(words), {})


def planned_with_2_gpus(words):
    planned(shlex.join(words), gpus="01")


def tf_config(words):
    decode(*words)


def environment(words):
    """Read the variables of the first task of a recorded job, with some changes."""
    name, *changes = words
    read_environment(recorded(name, **dict(one.split("=", 1) for one in changes))[0])


def tuned(words):
    runner_of(tune.parse(["--config", "c.py", *words]), TrialProgram(command=()), {})


PROGRAMS = {
    "launch": launched,
    "train": train.parse,
    "tune": tuned,
    "serve": serve._serve,
    "submit": submit._run,
    "plan": planned_with_2_gpus,
    "environment": environment,
    "tf_config": tf_config,
}
TWO_WORKERS = tf_config_of(["a:1", "b:1"])["TF_CONFIG"]
REPLACED = {
    **{"{slurm}": SLURM, "{pods}": PODS, "{long}": "x" * 300, "{file}": shlex.quote(__file__)},
    "{w0}": '"task": {"type": "worker", "index": 0}',
    "{two_workers}": shlex.quote(TWO_WORKERS),
    "{multiworker}": shlex.quote(f'{TWO_WORKERS[:-1]}, "tfdist": {{"strategy": "multiworker"}}}}'),
}
TABLE = Path(__file__).parent / "data" / "refusals.txt"


def refused_lines():
    """Yield the rows of each program: the words, the place of the error, its code and a part."""
    for text in TABLE.read_text().splitlines():
        if text.startswith("["):
            program = PROGRAMS[text.strip("[]")]
        elif text:
            line, where, code, *says = (part.strip() for part in text.split("|"))
            for name, value in REPLACED.items():
                line = line.replace(name, value)
            yield program, shlex.split(line), where, code, *says


def whole(value):
    errors.require_int("epochs", value, least=1)


def above_0(value):
    errors.require_number("--grace_s", value, above=0)


def virtual_epochs(options):
    VirtualEpochs(**options)


def best(name_and_mode):
    Best(*name_and_mode)


def three_stages(trainable):
    balanced([1.0] * len(trainable), [1, 1], stages=3, trainable=trainable)


def in_slurm(text):
    expand_hosts(text, where="SLURM_STEP_NODELIST")


def counts(text):
    expand_counts(text, where="X")


def range_of_ports(text):
    parse_ports(text, where="--ports")


def script(path):
    launch.check_program(launch.Program(target=path, is_module=False))


def spawned(options):
    tfdist.spawn(len, "abc", **options)


CALLS = {
    (in_slurm, "SLURM_STEP_NODELIST", "bad-value"): [
        *("", ",", "n1,", ",n1", "n1,,n2", "n[1-3", "n1-3]", "n[]", "n[7]]", "n[7],,m[8]"),
        *("n[1,,2]", "n[1-]", "n[-1]", "n[3-1]", "n[a-b]", "n[1-2-3]", "n[1-2]]", "n[[1-2]]"),
        *("n[1[2][3]],m[4-5]", "n[[1][2]],m[4],m[5]", "n[1 -2]", "n1 n2", "(n1,n2)", "n1\nn2"),
        *("n[1-2],,n3", "n[1-2]n3]", "n[1-2],m],o[3]", "m,n[1-2],,o[3]", "m[1-2],n[1,3-2]"),
        *("n[٣]", f"n[{'7' * 19}]", f"n[1-{10**17}]", f"n[1-{10**30}]"),
    ],
    (counts, "X", "bad-value"): ["", "2(3)", "2(x0)", "x", "-1", "2,,1", "2(x99999999)"],
    (range_of_ports, "--ports", "bad-value"): [
        *("", "20000", "20000-", "20-10", "0-9", "1-65536", "a-b", "-1-2"),
    ],
    (decode, "TF_CONFIG", "bad-tf-config"): [
        *(b"\xff\xfe", '{"a": ' + "9" * 5000 + "}", '{"a":' * 100_000),
    ],
    (decode, "TF_CONFIG task", "bad-tf-config"): [
        '{"cluster": {}, "task": {"type": "worker", "index": 1' + "0" * 300 + "}}",
    ],
    (script, "program", "no-file"): ["trian.py", ".", "/dev/stdin", "x" * 300, "", " "],
    (spawned, "--workers", "bad-value"): [{"workers": 0}, {"workers": "two"}],
    (spawned, "--ps", "exclusive"): [{"ps": 1}],
    (whole, "epochs", "not-an-int"): [0, 1.0, "3", None, True, np.float32(2)],
    (above_0, "--grace_s", "not-a-number"): [
        *(0, -1.0, "3", None, True, float("nan"), float("inf"), 10**400),
    ],
    (parse_hosts, "--hosts", "bad-value"): [
        *("", "a,", "a b", "n[1-", "a/b", "a:0", "a:x", "a:", ":2", "a:2222", "fd00::1"),
        "fd00::1:2",
    ],
    (virtual_epochs, "VirtualEpochs: total_examples", "not-an-int"): [
        {"total_examples": n} for n in (0, 10.0, True)
    ],
    (virtual_epochs, "VirtualEpochs: checkpoints", "not-an-int"): [
        {"total_examples": 10, "checkpoints": 0},
    ],
    (virtual_epochs, "VirtualEpochs", "out-of-range"): [
        {"total_examples": 10, "checkpoints": 11},
    ],
    (best, "BackupAndRestore: mode", "unknown-value"): [
        *(("reward", "auto"), ("loss_accuracy", "least")),
    ],
    (three_stages, "stages", "no-cut"): [[True, True], [True, False, True]],
}
ROWS = [
    *refused_lines(),
    *((call, value, *error) for (call, *error), values in CALLS.items() for value in values),
]


@pytest.fixture
def _on_host_a(tmp_path, monkeypatch):
    """An empty directory with a secret, on a host of a known name and without Ray."""
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text("x")
    Path("secret").chmod(0o600)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("socket.gethostname", lambda: "a.example.org")
    unknown = Mock(side_effect=OSError("unknown"))
    monkeypatch.setattr("tfdist.launch.multihost.hosts.resolve", unknown)


@pytest.mark.usefixtures("_on_host_a")
@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0].__name__} {row[1]}"[:80] for row in ROWS])
def test_it_is_refused(row):
    call, given, where, code, *says = row
    error = refusal(lambda: call(given))
    assert (error.where, error.code) == (where, code)
    assert all(text in str(error) for text in says)
    assert "hunter2" not in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 900


def names_in(parser):
    return [flag[2:] for flag in parser._option_string_actions if flag not in ("-h", "--help")]


PARSERS = {
    "launch": (launch.parse, names_of(LaunchFlags)),
    "train": (train.parse, ["overwrite", *(f"config.{name}" for name in FIELDS)]),
    "tune": (tune.parse, names_of(tune.SweepOptions)),
    "serve": (serve._parser().parse_args, names_in(serve._parser())),
    "submit": (command_line.parse, names_in(command_line._parser())),
    "check": (check._parser().parse_args, names_in(check._parser())),
}
TEXTS = (
    *("0", "-1", "2", "1.5", "nan", "inf", "1e999", "9" * 5000),
    *("", "--", "/", "true", "ps", "a,b", "a:1"),
)
VALUES = st.sampled_from(TEXTS) | st.text(max_size=8)


@pytest.mark.usefixtures("_on_host_a")
@pytest.mark.parametrize("program", PARSERS)
def test_each_flag_reads_or_refuses_each_text(program):
    parse, names = PARSERS[program]
    for name, text in itertools.product(names, TEXTS):
        with contextlib.suppress(UsageError):
            parse([f"--{name}={text}"])


@pytest.mark.usefixtures("_on_host_a")
@pytest.mark.parametrize("program", PARSERS)
@given(data=st.data())
@settings(
    max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_any_command_line_is_parsed_or_a_usage_error(program, data):
    parse, names = PARSERS[program]
    flags = st.sampled_from([f"--{name}" for name in names])
    given_flags = st.lists(flags | st.builds("{}={}".format, flags, VALUES), max_size=6)
    words = data.draw(given_flags) + data.draw(st.lists(VALUES, max_size=2))
    with contextlib.suppress(UsageError, SystemExit):  # -h exits
        parse(words)
