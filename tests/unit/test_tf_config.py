"""TF_CONFIG and the job options in it: encode, decode, and every mistake."""

import dataclasses
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import refusals
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
    resolved_strategy,
)
from tfdist.errors import UsageError

WORKERS = {"worker": ["a:1", "b:2"]}
PS = {"chief": ["c:1"], "worker": ["a:1"], "ps": ["p:1"]}
WORKER_0 = {"type": "worker", "index": 0}
GOOD = json.dumps({"cluster": WORKERS, "task": WORKER_0})


def config_text(cluster: object = None, task: object = None, **more: object) -> str:
    return json.dumps({"cluster": cluster or WORKERS, "task": task or WORKER_0, **more})


def refusal(text: str | bytes, *, code: str = "") -> str:
    error = refusals.refusal(lambda: decode(text))
    said = str(error)
    assert said.isprintable()
    assert said.startswith("TF_CONFIG")
    assert code in ("", error.code)
    return said


# Round trips


def hosts() -> st.SearchStrategy[str]:
    label = st.from_regex(r"[a-z0-9_]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
    name = st.lists(label, min_size=1, max_size=3).map(".".join)
    named = name.filter(lambda host: not host.replace(".", "").isdigit())
    ipv4, ipv6 = st.ip_addresses(v=4), st.ip_addresses(v=6)
    return st.one_of(named, ipv4.map(str), ipv6.map(lambda address: f"[{address}]"))


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    kind = draw(st.sampled_from(["single", "multiworker", "ps"]))
    workers = draw(st.integers(1, 4)) if kind != "single" else 0
    servers = draw(st.integers(1, 3)) if kind == "ps" else 0
    chiefs = {"single": 0, "multiworker": draw(st.integers(0, 1)), "ps": 1}[kind]
    count = chiefs + workers + servers + 1
    ports = draw(st.lists(st.integers(1, 65535), min_size=count, max_size=count, unique=True))
    addresses = tuple(f"{draw(hosts())}:{port}" for port in ports)
    return ClusterSpec(
        chief=addresses[:chiefs],
        worker=addresses[chiefs : chiefs + workers],
        ps=addresses[chiefs + workers : count - 1],
        evaluator=addresses[count - 1 :] if draw(st.booleans()) else (),
    )


@st.composite
def configs(draw: st.DrawFn) -> TaskConfig:
    cluster = draw(clusters())
    tasks = [*cluster.tasks(), Task("evaluator", 0)]
    if cluster.kind == "single":
        tasks.append(Task("worker", 0))
    options = JobOptions(
        strategy=draw(st.sampled_from(["auto", cluster.kind])),
        devices_per_worker=draw(st.none() | st.integers(1, 64)),
        startup_timeout_s=draw(st.floats(0, 1e9, exclude_min=True)),
        run_dir=draw(st.none() | st.text(min_size=1).filter(lambda s: s.strip() and "\0" not in s)),
        attempt=draw(st.integers(1, 2**31 - 1)),
        threads_per_task=draw(st.none() | st.integers(1, 1024)),
        profile_ps=draw(st.booleans()),
        split_bytes=draw(st.none() | st.integers(1, 2**31 - 1)),
        min_workers=draw(st.none() | st.integers(1, 1024)),
        terminal=draw(st.booleans()),
    )
    return TaskConfig(cluster=cluster, task=draw(st.sampled_from(tasks)), options=options)


@given(configs())
def test_what_is_encoded_is_decoded_again(config):
    text = encode(config)
    assert text.isascii()
    assert text.isprintable()
    assert decode(text) == config
    assert decode(text.encode()) == config


def test_a_run_dir_that_is_not_utf8_survives():
    options = JobOptions(run_dir=b"run\xff".decode("utf-8", "surrogateescape"))
    config = TaskConfig(cluster=ClusterSpec(), task=Task("worker", 0), options=options)
    assert decode(encode(config)) == config


def test_keys_that_schedulers_add_are_left_alone():
    task = {**WORKER_0, "trial": "1", "cloud": "x"}
    text = config_text(task=task, environment="cloud", rpc_layer="grpc", job={"a": 1})
    assert decode(text) == decode(GOOD)


def test_ten_thousand_tasks_take_less_than_a_tenth_of_a_second():
    cluster = {"worker": [f"worker-{i}.job.svc.cluster.local:2222" for i in range(10_000)]}
    text = config_text(cluster=cluster, task={"type": "worker", "index": 9_999})
    durations_s = []
    for _ in range(5):
        start = time.process_time()
        encode(decode(text))
        durations_s.append(time.process_time() - start)
    assert min(durations_s) < 0.1


# The environment


@pytest.mark.parametrize("read", [from_environ, read_environment])
def test_no_tf_config_means_no_job(read):
    assert read({}) is None
    assert read({"TF_CONFIG": ""}) is None
    assert read({"TF_CONFIG": " \n"}) is None
    assert read({"TF_CONFIG": GOOD}) == decode(GOOD)


# The evaluator


def test_a_training_task_never_sees_the_evaluator():
    with_evaluator = {**PS, "evaluator": ["e:1"]}
    chief = decode(config_text(cluster=with_evaluator, task={"type": "chief", "index": 0}))
    assert chief.cluster == ClusterSpec.from_dict(PS)
    assert "evaluator" not in chief.cluster.as_dict()
    assert chief.options.evaluator  # but knows that there is one
    assert decode(encode(chief)) == chief


@pytest.mark.parametrize("cluster", [PS, {**PS, "evaluator": ["e:1"]}, WORKERS])
def test_an_evaluator_may_stand_in_its_cluster_or_not(cluster):
    config = decode(config_text(cluster=cluster, task={"type": "evaluator", "index": 0}))
    assert config.cluster == ClusterSpec.from_dict(cluster)
    assert resolved_strategy(config) == "auto"


# A whole job


def test_each_task_of_a_job_gets_its_config_in_order():
    cluster = ClusterSpec(**{k: tuple(v) for k, v in PS.items()}, evaluator=("e:1",))
    options = JobOptions(strategy="ps", attempt=3)
    made = list(job_configs(cluster, options=options))
    assert [config.task for config in made] == list(cluster.tasks())
    assert ["evaluator" in config.cluster.as_dict() for config in made] == [False] * 3 + [True]
    with_evaluator = dataclasses.replace(options, evaluator=True)
    assert all(config.options == with_evaluator for config in made)


def test_a_job_of_one_process_is_worker_0_without_a_cluster():
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
        ({"worker": ["a:1"]}, "mirrored", "mirrored"),
        ({"worker": ["a:1"]}, "single", "single"),
        ({}, "auto", "auto"),
        ({}, "single", "single"),
        ({}, "mirrored", "mirrored"),
    ],
)
def test_auto_is_resolved_by_the_cluster(cluster, asked, resolved):
    spec, options = ClusterSpec.from_dict(cluster), JobOptions(strategy=asked)
    config = TaskConfig(cluster=spec, task=Task("worker", 0), options=options)
    assert resolved_strategy(config) == resolved


@pytest.mark.parametrize(
    ("cluster", "asked"),
    [({}, "ps"), ({}, "multiworker"), (WORKERS, "single"), (PS, "mirrored")],
)
def test_a_strategy_that_the_cluster_is_not_for_is_refused(cluster, asked):
    value = {"cluster": cluster, "task": WORKER_0, "tfdist": {"strategy": asked}}
    refusal(json.dumps(value), code="TFC020")


# Mistakes in the text


@pytest.mark.parametrize(
    "text",
    [
        *(str(json.loads(GOOD)), f"'{GOOD}'", f'"{GOOD}"', json.dumps(GOOD)),
        *(GOOD.replace('"', '\\"'), str({**json.loads(GOOD), "x": None})),
    ],
)
def test_usual_mistakes_of_quoting_are_shown_repaired(text):
    said = refusal(text)
    assert "received an object in the wrong quotes" in said
    assert f"Fix: TF_CONFIG='{GOOD[:-1]}" in said


# Mistakes that a file can show are in lint_cases.py.
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("nonsense", "TFC001"),
        ("3", "TFC004"),
        ("null", "TFC004"),
        ("[null, true, NaN, 0.5]", "TFC004"),
        (b"\xff\xfe", "TFC001"),
        ('{"a":' * 100_000, "TFC004"),
        ('{"a": ' + "9" * 5000 + "}", "TFC001"),
        ("{}", "TFC005"),
        ('{"cluster": null, "task": {}}', "TFC007"),
        ('{"cluster": {"worker": null}, "task": {}}', "TFC009"),
        ('{"cluster": {"worker": {"0": "a:1"}}, "task": {}}', "TFC009"),
        ('{"cluster": {"ps": [], "chief": []}, "task": {}}', "TFC009"),
        ('{"cluster": {"worker": [], "evaluator": ["e:1"]}, "task": {}}', "TFC009"),
        ('{"cluster": {"worker": [null]}, "task": {}}', "TFC010"),
        ('{"cluster": {"evaluator": ["a:1", "b:1"]}, "task": {}}', "TFC013"),
        ('{"cluster": {}, "task": []}', "TFC007"),
        ('{"cluster": {}, "task": {"typ": "ps", "index": 0}}', "TFC006"),
        ('{"cluster": {}, "task": {"type": "worker", "index": true}}', "TFC016"),
        ('{"cluster": {}, "task": {"type": "worker", "index": 1.0}}', "TFC016"),
        ('{"cluster": {}, "task": {"type": "worker", "index": 1}}', "TFC017"),
        ('{"cluster": {}, "task": {"type": "evaluator", "index": 1}}', "TFC017"),
        ('{"cluster": {}, "task": {"type": "worker", "index": 1' + "0" * 300 + "}}", "TFC017"),
    ],
)
def test_what_is_no_task_of_a_job_is_refused(text, code):
    refusal(text, code=code)


@pytest.mark.parametrize(
    ("options", "place", "said"),
    [
        ({"startup_timeout_s": 0}, "tfdist.startup_timeout_s", "received 0"),
        ({"startup_timeout_s": -1.5}, "tfdist.startup_timeout_s", "received -1.5"),
        ({"startup_timeout_s": True}, "tfdist.startup_timeout_s", "received True"),
        ({"startup_timeout_s": float("nan")}, "tfdist.startup_timeout_s", "received nan"),
        ({"startup_timeout_s": 10**400}, "tfdist.startup_timeout_s", "at most 1e9"),
        ({"attempt": None}, "tfdist.attempt", "received None"),
        ({"attempt": 1.0}, "tfdist.attempt", "received 1.0"),
        ({"devices_per_worker": 0}, "tfdist.devices_per_worker", "at least 1"),
        ({"devices_per_worker": "2"}, "tfdist.devices_per_worker", "without quotes"),
        ({"threads_per_task": True}, "tfdist.threads_per_task", "received True"),
        ({"terminal": 1}, "tfdist.terminal", "true or false"),
        ({"run_dir": ""}, "tfdist.run_dir", "received ''"),
        ({"run_dir": "a\0b"}, "tfdist.run_dir", "the path of a directory"),
        ({"strategy": "Mirrored"}, "tfdist.strategy", "did you mean 'mirrored'?"),
        ({"strategy": None}, "tfdist.strategy", "received None"),
        ({"strategy": ["ps"]}, "tfdist.strategy", "received ['ps']"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name(options, place, said):
    text = refusal(config_text(tfdist=options))
    assert text.startswith(f"TF_CONFIG {place}: ")
    assert said in text
    with pytest.raises(UsageError, match=f"^{place}: "):
        JobOptions.from_dict(options)


# Anything at all


def only_usage_errors(text: str | bytes) -> None:
    try:
        config = decode(text)
    except UsageError as error:
        said = str(error)
    else:
        said = encode(config)
        assert decode(said) == config
    assert said.isprintable()


WORDS = ["cluster", "task", "tfdist", "type", "index", *STRATEGIES, "worker", "chief", "evaluator"]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from([*WORDS, "a:1", "b:2", "[::1]:3", "::1:4", "0"]),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)
ALMOST = st.fixed_dictionaries(
    {},
    optional={
        "cluster": JSON | st.dictionaries(st.sampled_from(WORDS), st.lists(LEAVES, max_size=3)),
        "task": JSON | st.fixed_dictionaries({"type": LEAVES, "index": LEAVES}),
        "tfdist": JSON | st.dictionaries(st.sampled_from([*WORDS, "attempt", "run_dir"]), LEAVES),
    },
)


@given(JSON | ALMOST)
@settings(max_examples=300)
def test_random_json_raises_nothing_but_usage_errors(value):
    only_usage_errors(json.dumps(value))
    only_usage_errors(str(value))
