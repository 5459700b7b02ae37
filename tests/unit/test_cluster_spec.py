"""Task, ClusterSpec and the cluster of a whole job."""

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
    *("999.0.0.1:80", "1.2.3:80", "a..b:80", "a/b:80", "x" * 64 + ":80", "-x:1", "x-:1", "a\0b:1"),
    *("x." * 127 + "x:80", "ipv4:1.2.3.4:80", "user@host:80", "host:1:2", 80, None, ["host:80"]),
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


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_an_address_of_any_usual_form_is_accepted(address):
    assert ClusterSpec(worker=(address,)).address(Task("worker", 0)) == address


@pytest.mark.parametrize("address", [*BAD_ADDRESSES, *BAD_PORTS])
def test_a_bad_address_is_refused_with_its_task_and_the_fix(address):
    error = refusal(lambda: ClusterSpec(worker=("good:1", address)))  # type: ignore[arg-type]
    assert error.where == "cluster worker-1"
    assert error.code == ("TFC011" if address in BAD_PORTS else "TFC010")
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
