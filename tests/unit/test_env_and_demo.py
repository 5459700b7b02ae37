"""`tfdist env` tells what an issue needs and no secret; `tfdist demo` starts a job."""

import pytest

import tfdist
from tfdist import demo, env
from tfdist.launch import options


def test_the_report_has_versions_the_machine_and_the_variables_that_matter():
    told = dict(env.report({"TF_CONFIG": '{"task": {}}', "TFDIST_PS": "", "HOME": "/home/me"}))
    assert told["tfdist"] == tfdist.__version__
    assert {"python", "tensorflow", "keras", "numpy", "protobuf", "system"} <= set(told)
    assert told["CPUs"].split()[0].isdecimal()
    assert (told["TF_CONFIG"], told["TFDIST_PS"]) == ('{"task": {}}', "(empty)")
    assert "HOME" not in told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TFDIST_RENDEZVOUS_TOKEN", "hunter2"),
        ("https_proxy", "http://me:hunter2@proxy:80"),
        ("KERAS_API_KEY", "hunter2"),
        ("XLA_AUTH", "hunter2"),
        ("TF_NOTE", "hf_hunter2hunter2hunter2"),
    ],
)
def test_the_report_shows_the_name_of_a_secret_alone(name, value):
    told = dict(env.report({name: value, "AWS_SECRET_ACCESS_KEY": "hunter2"}))
    assert told[name] == "set, not shown"
    assert "hunter2" not in str(told)


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ([], ("ps", 4, 1)),
        (["--workers", "2"], ("ps", 2, 1)),
        (["--strategy", "multiworker", "--workers=3"], ("multiworker", 3, None)),
        (["--config.batch_size=8", "--config.ps=3"], ("ps", 4, 1)),
    ],
)
def test_the_shape_of_the_demo_may_be_given(flags, shape):
    job = options.parse(demo.command(flags))
    assert job is not None
    assert (job.strategy, job.workers, job.ps) == shape
    assert job.program.target == "tfdist.train"


def test_the_demo_without_its_data_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert demo.main([]) == 2
    assert "pip install 'tfdist[digits]'" in capsys.readouterr().err
