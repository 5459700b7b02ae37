"""Task, ClusterSpec and the cluster of a whole job."""

import dataclasses
import json
import pickle
import re

import pytest

from tests.refusals import refusal
from tfdist.cluster import ClusterSpec, Task
from tfdist.cluster.address import check_address

PS_JOB = ClusterSpec(chief=("c:1",), worker=("w:1", "w:2"), ps=("p:1",), evaluator=("e:1",))
GOOD_ADDRESSES = [
    "localhost:1",
    "10.0.0.1:65535",
    "[::1]:1234",
    "[fe80::1%eth0]:2222",
    "worker-0.job.ns.svc.cluster.local:2222",
    "fully.qualified.:2222",
    "my_service:80",
    "127.example.com:2222",
    "9gag:2222",
]
BAD_ADDRESSES = [
    *("host", "[::1]", ":2222", "http://host:80", " host:80", "ho\nst:80", "", " ", ":"),
    *("a:1,b:1", "::1:1234", "::1", "1:2:3:4:5:6:7:8:80", "[zz]:80", "[fe80::1%]:80", "[::1"),
    *("999.0.0.1:80", "1.2.3:80", "a..b:80", "a/b:80", "x" * 254 + ":80", "-x:1", "x-:1", "a\0b:1"),
    *("ipv4:1.2.3.4:80", "user@host:80", "host:1:2", 80, None, ["host:80"]),
]
BAD_PORTS = [
    "host:",
    "http://",
    "host:http",
    "host:0",
    "host:65536",
    "host:-1",
    "host:9999999",
    "host:\uff18",
]


def test_tasks_sort_in_the_order_in_which_they_start():
    expected = [Task("chief", 0), Task("worker", 2), Task("worker", 10), Task("ps", 0)]
    expected.append(Task("evaluator", 0))
    assert sorted(reversed(expected)) == expected
    assert max(expected) >= min(expected)


@pytest.mark.parametrize(
    ("type_", "meant"),
    [("wroker", "worker"), ("Worker", "worker"), ("master", "chief"), ("parameter-server", "ps")],
)
def test_an_unknown_type_is_refused_with_the_near_name(type_, meant):
    error = refusal(lambda: Task(type_, 0))
    assert f"received {type_!r}" in str(error)
    assert f"did you mean {meant!r}?" in str(error)


@pytest.mark.parametrize("index", ["0", 1.0, "one", -1, True, None])
def test_an_index_that_is_no_integer_is_refused_with_the_fix(index):
    error = refusal(lambda: Task("worker", index))  # type: ignore[arg-type]
    shown = repr(index) if isinstance(index, str) else json.dumps(index)
    assert f"received {shown}; expected an integer" in str(error)
    assert 'without quotes, as in "index": 0' in str(error)


def test_specs_and_tasks_are_frozen_hashable_and_survive_pickling():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PS_JOB.chief = ()  # type: ignore[misc]
    assert len({PS_JOB, pickle.loads(pickle.dumps(PS_JOB))}) == 1
    assert len({Task("ps", 0), pickle.loads(pickle.dumps(Task("ps", 0)))}) == 1


def test_a_dict_holds_only_the_types_that_have_tasks():
    cluster = ClusterSpec(worker=("a:1", "b:1"))
    assert cluster.as_dict() == {"worker": ["a:1", "b:1"]}
    assert ClusterSpec().as_dict() == {}
    assert ClusterSpec.from_dict(PS_JOB.as_dict()) == PS_JOB


def test_tasks_and_addresses_of_a_job():
    names = [str(task) for task in PS_JOB.tasks()]
    assert names == ["chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0"]
    assert [str(task) for task in PS_JOB.training_tasks()] == names[:-1]
    assert PS_JOB.address(Task("worker", 1)) == "w:2"
    assert PS_JOB.without_evaluator().as_dict().keys() == {"chief", "worker", "ps"}


@pytest.mark.parametrize(
    ("cluster", "kind", "chief", "replica_tasks"),
    [
        (ClusterSpec(), "single", "worker-0", 1),
        (ClusterSpec(evaluator=("e:1",)), "single", "worker-0", 1),
        (ClusterSpec(worker=("a:1",)), "multiworker", "worker-0", 1),
        (ClusterSpec(chief=("a:1",)), "multiworker", "chief-0", 1),
        (ClusterSpec(worker=("a:1", "b:1")), "multiworker", "worker-0", 2),
        (ClusterSpec(chief=("c:1",), worker=("a:1", "b:1")), "multiworker", "chief-0", 3),
        (PS_JOB, "ps", "chief-0", 2),
    ],
)
def test_the_kind_the_chief_and_the_replicas_follow_from_the_addresses(
    cluster, kind, chief, replica_tasks
):
    assert cluster.kind == kind
    assert str(cluster.chief_task) == chief
    assert cluster.num_replica_tasks == replica_tasks


def test_a_task_that_the_cluster_does_not_have_is_refused():
    error = refusal(lambda: PS_JOB.address(Task("worker", 2)))
    assert "received worker-2; expected an index from 0 to 1" in str(error)
    error = refusal(lambda: ClusterSpec(worker=("a:1",)).address(Task("chief", 0)))
    assert "received chief-0; expected a task of the cluster, which has worker" in str(error)


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_an_address_of_any_usual_form_is_accepted(address):
    assert ClusterSpec(worker=(address,)).address(Task("worker", 0)) == address


@pytest.mark.parametrize("address", [*BAD_ADDRESSES, *BAD_PORTS])
def test_a_bad_address_is_refused_with_its_task_and_the_fix(address):
    error = refusal(lambda: ClusterSpec(worker=("good:1", address)))  # type: ignore[arg-type]
    assert error.where == "cluster worker-1"
    is_port = address in BAD_PORTS
    assert error.code == ("TFC011" if is_port else "TFC010")
    assert ("a port from 1 to 65535" if is_port else "in brackets") in error.expected
    for right in re.findall(r'"([^"]*)"', error.fix):
        check_address(right, where="address")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a:1", "a:1"),
        ("a:1", "A.:01"),
        ("localhost:1", "127.0.0.1:1"),
        ("127.0.0.1:1", "127.0.0.2:1"),
        ("[::1]:1", "localhost:1"),
        ("0.0.0.0:1", "[::]:1"),
        ("[::ffff:10.0.0.1]:1", "10.0.0.1:1"),
        ("[fd00::1]:1", "[FD00:0::0001]:1"),
        ("[fe80::1%eth0]:1", "[FE80::0:1%eth0]:1"),
        ("[::1%lo]:1", "[::1]:1"),
    ],
)
def test_two_tasks_at_one_address_are_both_named(first, second):
    error = refusal(lambda: ClusterSpec(chief=(first,), worker=("other:1", second)))
    assert error.code == "TFC012"
    assert "for both chief-0 and worker-1" in str(error.received)
    assert error.fix == "give worker-1 another port"


def test_the_same_port_on_different_hosts_is_accepted():
    hosts = ["a", "b", "10.0.0.1", "10.0.0.2", "[fd00::1]", "[fd00::2]", "localhost"]
    hosts += ["[fe80::1%eth0]", "[fe80::1%eth1]"]  # zones tell links, and machines, apart
    cluster = ClusterSpec(worker=tuple(f"{host}:2222" for host in hosts))
    assert cluster.num_replica_tasks == len(hosts)


@pytest.mark.parametrize(
    ("addresses", "received", "fix"),
    [
        ({"ps": ["p:1"], "worker": ["w:1"]}, "ps without chief", 'add "chief"'),
        ({"ps": ["p:1"], "chief": ["c:1"]}, "chief and ps without worker", 'add "worker"'),
        ({"chief": ["a:1", "b:1"]}, "2 addresses for chief", "make the others workers"),
        ({"evaluator": ["a:1", "b:1"]}, "2 addresses for evaluator", "keep one evaluator"),
        ({"wokrer": ["a:1"]}, "'wokrer'", "did you mean 'worker'?"),
        ({"worker": "a:1"}, "'a:1'", '"worker": ["host:port", ...]'),
        ({"worker": {"0": "a:1"}}, "{'0': 'a:1'}", '"worker": ["host:port", ...]'),
        ({"worker": None}, "null", "leave worker out"),
        ({"worker": []}, "[], and no address", "or unset TF_CONFIG"),
        ({"ps": [], "chief": []}, "[], and no address", "or unset TF_CONFIG"),
        ({"worker": [], "evaluator": ["e:1"]}, "[], and no address", "or unset TF_CONFIG"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused_with_the_fix(addresses, received, fix):
    error = refusal(lambda: ClusterSpec.from_dict(addresses))
    assert f"received {received}" in str(error)
    assert fix in str(error).partition("Fix:")[2]


@pytest.mark.parametrize(
    ("addresses", "kind"),
    [
        ({}, "single"),
        ({"evaluator": []}, "single"),
        ({"worker": ["w:1"], "ps": [], "chief": []}, "multiworker"),
        ({"chief": ["c:1"], "worker": []}, "multiworker"),
    ],
)
def test_an_empty_list_beside_others_is_a_type_without_tasks(addresses, kind):
    assert ClusterSpec.from_dict(addresses).kind == kind
