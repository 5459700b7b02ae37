"""TF_CONFIG: tasks, their addresses and the options of a job, and every mistake in them."""

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refusals import refusal, refused
from tfdist.cluster import (
    STRATEGIES,
    ClusterSpec,
    JobOptions,
    Task,
    TaskConfig,
    decode,
    encode,
    from_environ,
    job_configs,
    read_environment,
    resolved_kind,
)
from tfdist.errors import UsageError

WORKERS = {"worker": ["a:1", "b:2"]}
PS = {"chief": ["c:1"], "worker": ["a:1"], "ps": ["p:1"]}
EVALUATED = {**PS, "evaluator": ["e:1"]}
WORKER_0 = {"type": "worker", "index": 0}
GOOD = json.dumps({"cluster": WORKERS, "task": WORKER_0})
ADDRESSES = [
    *("localhost:1", "10.0.0.1:65535", "[::1]:1234", "[fe80::1%eth0]:2222", "my_service:80"),
    *("worker-0.job.ns.svc.cluster.local:2222", "fully.qualified.:2222", "127.example.com:2222"),
    "9gag:2222",
]
BAD_ADDRESSES = [
    *("host", "[::1]", ":2222", "http://host:80", " host:80", "ho\nst:80", "", " ", ":"),
    *("a:1,b:1", "::1:1234", "::1", "1:2:3:4:5:6:7:8:80", "[zz]:80", "[fe80::1%]:80", "[::1"),
    *("a..b:80", "a/b:80", "x" * 64 + ":80", "-x:1", "x-:1", "a\0b:1"),
    *("ipv4:1.2.3.4:80", "user@host:80", "host:1:2", 80, None, ["host:80"]),
]
BAD_PORTS = [
    *("host:", "http://", "host:http", "host:0", "host:65536", "host:-1", "host:9999999"),
    "host:\uff18",
]


def config_text(cluster: object = None, task: object = None, **more: object) -> str:
    return json.dumps({"cluster": cluster or WORKERS, "task": task or WORKER_0, **more})


# The cluster


@pytest.mark.parametrize(
    ("lists", "kind", "chief", "replica_tasks"),
    [
        ({}, "single", "worker-0", 1),
        ({"evaluator": []}, "single", "worker-0", 1),
        ({"evaluator": ["e:1"]}, "single", "worker-0", 1),
        ({"worker": ["a:1"], "ps": [], "chief": []}, "multiworker", "worker-0", 1),
        ({"chief": ["a:1"], "worker": []}, "multiworker", "chief-0", 1),
        ({"worker": ["a:1", "b:1"]}, "multiworker", "worker-0", 2),
        ({"chief": ["c:1"], "worker": ["a:1", "b:1"]}, "multiworker", "chief-0", 3),
        ({**EVALUATED, "worker": ["a:1", "b:1"]}, "ps", "chief-0", 2),
    ],
)
def test_addresses_determine_kind_chief_and_replicas(lists, kind, chief, replica_tasks):
    cluster = ClusterSpec.from_dict(lists)
    assert (cluster.kind.name, str(cluster.chief_task)) == (kind, chief)
    assert cluster.num_replica_tasks == replica_tasks


def test_usual_address_forms_and_shared_ports_are_accepted():
    assert ClusterSpec(worker=tuple(ADDRESSES)).address(Task("worker", 8)) == ADDRESSES[8]
    hosts = ["a", "b", "10.0.0.1", "10.0.0.2", "[fd00::1]", "[fd00::2]", "localhost"]
    hosts += ["[fe80::1%eth0]", "[fe80::1%eth1]"]  # zones tell links, and machines, apart
    assert ClusterSpec(worker=tuple(f"{host}:2222" for host in hosts)).num_replica_tasks == 9


@pytest.mark.parametrize("address", [*BAD_ADDRESSES, *BAD_PORTS])
def test_a_bad_address_is_refused_with_its_fix(address):
    error = refusal(lambda: ClusterSpec(worker=("good:1", address)))  # type: ignore[arg-type]
    wanted = "a port from 1" if address in BAD_PORTS else "a valid host name"
    assert (error.where, error.code) == ("cluster worker-1", "bad-value")
    assert wanted in error.problem
    assert ClusterSpec(worker=tuple(re.findall(r'"([^"]*)"', error.fix))).kind.name == "multiworker"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a:1", "a:1"),
        ("a:1", "A.:01"),
        ("[fd00::1]:1", "[FD00::1]:1"),
    ],
)
def test_two_tasks_at_one_address_are_both_named(first, second):
    error = refusal(lambda: ClusterSpec(chief=(first,), worker=("other:1", second)))
    assert "chief-0 and worker-1" in error.problem


# Round trips


@st.composite
def configs(draw):
    lists = ({}, {"evaluator": ["e:1"]}, WORKERS, {"worker": ADDRESSES}, PS, EVALUATED)
    cluster = ClusterSpec.from_dict(draw(st.sampled_from(lists)))
    counts = ("devices_per_worker", "threads_per_task", "split_bytes", "min_workers")
    options = JobOptions(
        strategy=draw(st.sampled_from(["auto", cluster.kind.name])),
        startup_timeout_s=draw(st.floats(0, 1e9, exclude_min=True)),
        run_dir=draw(st.none() | st.text(min_size=1).filter(lambda s: s.strip() and "\0" not in s)),
        attempt=draw(st.integers(1, 2**31 - 1)),
        **{name: draw(st.none() | st.integers(1, 2**31 - 1)) for name in counts},
    )
    return draw(st.sampled_from(list(job_configs(cluster, options=options))))


@given(configs())
def test_an_encoded_config_decodes_to_itself(config):
    text = encode(config)
    assert text.isascii()
    assert text.isprintable()
    assert decode(text) == decode(text.encode()) == config


def test_non_utf8_run_directories_and_scheduler_keys_survive():
    options = JobOptions(run_dir=b"run\xff".decode("utf-8", "surrogateescape"))
    config = TaskConfig(cluster=ClusterSpec(), task=Task("worker", 0), options=options)
    assert decode(encode(config)) == config
    task = {**WORKER_0, "trial": "1", "cloud": "x"}
    assert decode(config_text(task=task, environment="cloud", job={"a": 1})) == decode(GOOD)


@pytest.mark.parametrize("read", [from_environ, read_environment])
def test_no_tf_config_means_no_job(read):
    assert [read(e) for e in ({}, {"TF_CONFIG": ""}, {"TF_CONFIG": " \n"})] == [None] * 3
    assert read({"TF_CONFIG": GOOD}) == decode(GOOD)


# The tasks of a job


def test_a_training_task_knows_only_that_an_evaluator_exists():
    chief = decode(config_text(cluster=EVALUATED, task={"type": "chief", "index": 0}))
    assert chief.cluster == ClusterSpec.from_dict(PS)
    assert chief.options.evaluator
    assert decode(encode(chief)) == chief


@pytest.mark.parametrize("cluster", [PS, EVALUATED, WORKERS])
def test_an_evaluator_may_stand_in_its_cluster_or_not(cluster):
    config = decode(config_text(cluster=cluster, task={"type": "evaluator", "index": 0}))
    assert config.cluster == ClusterSpec.from_dict(cluster)
    assert resolved_kind(config).name == "auto"


def test_each_task_gets_its_config_in_order():
    cluster, options = ClusterSpec.from_dict(EVALUATED), JobOptions(strategy="ps", attempt=3)
    made = list(job_configs(cluster, options=options))
    assert [config.task for config in made] == list(cluster.tasks())
    assert ["evaluator" in config.cluster.as_dict() for config in made] == [False] * 3 + [True]
    assert {c.options for c in made} == {dataclasses.replace(options, evaluator=True)}
    (config,) = job_configs(ClusterSpec(), options=JobOptions(strategy="mirrored"))
    assert (config.task, config.cluster) == (Task("worker", 0), ClusterSpec())
    with_evaluator = job_configs(ClusterSpec(evaluator=("e:1",)), options=JobOptions())
    assert [str(config.task) for config in with_evaluator] == ["worker-0", "evaluator-0"]


@pytest.mark.parametrize(
    ("cluster", "asked", "resolved"),
    [
        (PS, "auto", "ps"),
        (PS, "ps", "ps"),
        (WORKERS, "auto", "multiworker"),
        ({"worker": ["a:1"]}, "auto", "multiworker"),
        *(({"worker": ["a:1"]}, strategy, strategy) for strategy in ("mirrored", "single")),
        *(({}, strategy, strategy) for strategy in ("auto", "single", "mirrored")),
    ],
)
def test_auto_is_resolved_by_the_cluster(cluster, asked, resolved):
    spec, options = ClusterSpec.from_dict(cluster), JobOptions(strategy=asked)
    config = TaskConfig(cluster=spec, task=Task("worker", 0), options=options)
    assert resolved_kind(config).name == resolved


# Mistakes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("startup_timeout_s", value) for value in (0, -1.5, True, float("nan"), 10**400)),
        *(("attempt", None), ("attempt", 1.0), ("devices_per_worker", 0)),
        *(("devices_per_worker", "2"), ("threads_per_task", True), ("evaluator", 1)),
        *(("run_dir", ""), ("run_dir", 3)),
        *(("strategy", value) for value in ("Mirrored", None, ["ps"])),
    ],
)
def test_a_wrong_option_is_refused_with_its_name(name, value):
    where = f"tfdist.{name}"
    assert refused(lambda: JobOptions(**{name: value})) == (where, "bad-value")
    text = config_text(tfdist={name: value})
    assert refused(lambda: decode(text)) == (f"TF_CONFIG {where}", "bad-value")


WORDS = ["cluster", "task", "tfdist", "type", "index", *STRATEGIES, "worker", "chief", "evaluator"]
LEAF = st.sampled_from([*WORDS, "a:1", "b:2", "[::1]:3", "::1:4", "0"]) | st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text()
)
JSON = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)
ALMOST = st.fixed_dictionaries(
    {},
    optional={
        "cluster": JSON | st.dictionaries(st.sampled_from(WORDS), st.lists(LEAF, max_size=3)),
        "task": JSON | st.fixed_dictionaries({"type": LEAF, "index": LEAF}),
        "tfdist": JSON | st.dictionaries(st.sampled_from([*WORDS, "attempt", "run_dir"]), LEAF),
    },
)


@given(JSON | ALMOST)
@settings(max_examples=300)
def test_random_json_raises_only_usage_errors(value):
    for text in (json.dumps(value), str(value)):
        try:
            config = decode(text)
            said = encode(config)
        except UsageError as error:
            said = str(error)
        else:
            assert decode(said) == config
        assert said.isprintable()
