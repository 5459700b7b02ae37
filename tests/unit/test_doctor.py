"""The doctor's checks: facts with one thing broken are caught by its rule and no other."""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tfdist.cluster import hold_ports
from tfdist.doctor import main
from tfdist.errors import EXIT_OK, EXIT_USAGE, UsageError
from tfdist.launch.messages import decode, encode
from tfdist.ops.doctor import barrier, examine, machine
from tfdist.ops.doctor.barrier import PortListener
from tfdist.ops.doctor.examine import RULES, TOPICS, PreflightResult, check
from tfdist.ops.doctor.facts import (
    Absence,
    Directory,
    Exchange,
    Host,
    HostFacts,
    JobFacts,
    MachineProbe,
    NameFacts,
    PortFacts,
    Proxy,
    Reach,
    Wire,
    job_of,
)
from tfdist.ops.doctor.machine import Storage
from tfdist.ops.doctor.network_checks import excepted
from tfdist.ops.doctor.servers import ServerProcess
from tfdist.ops.lint import RULES as LINT_RULES
from tfdist.ops.lint import Severity

DOCS = Path(__file__).parents[2] / "docs" / "checks.md"
GIB = 1 << 30
NAMES = ("a", "b", "c")
VERSIONS = {"python": "3.11.7", "tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6"}
VERSIONS |= {"nccl": "2.27", "tfdist": "0.1"}


def host(index: int) -> HostFacts:
    """A host with which nothing is wrong."""
    others = [other for other in range(len(NAMES)) if other != index]
    return HostFacts(
        index=index,
        machine=MachineProbe(
            host_name=NAMES[index],
            versions=tuple(VERSIONS.items()),
            cpus=8,
            cpu_features=("avx2", "fma"),
            memory_available=16 * GIB,
            shared_memory=8 * GIB,
            open_files=4096,
            own_addresses=("127.0.0.1", f"10.0.0.{index + 1}"),
        ),
        names=tuple(
            NameFacts(name=name, addresses=(f"10.0.0.{place + 1}",))
            for place, name in enumerate(NAMES)
        ),
        ports=(PortFacts(port=2222),),
        reaches=tuple(Reach(host=other, port=2222, answered=other) for other in others),
        wires=(Wire(host=others[0], latency_s=1e-4, bytes_per_s=1e9),),
        clock_ahead_s=0.001 if index else None,
        work_s=0.1,
        directory=Directory(free=100 * GIB, reads=100),
    )


GOOD = JobFacts(
    hosts=tuple(Host(name=name, ports=(2222,)) for name in NAMES),
    present=tuple(host(index) for index in range(len(NAMES))),
    shared_dir="/shared",
    exchange=Exchange(size_bytes=4 << 20, reduce_s=0.02, push_s=0.01, pull_s=0.01),
)


def with_b(**changes: Any) -> JobFacts:
    """The good job with other facts of its second host."""
    a, b, c = GOOD.present
    return replace(GOOD, present=(a, replace(b, **changes), c))


def with_machine(**changes: Any) -> JobFacts:
    return with_b(machine=replace(host(1).machine, **changes))


def with_versions(**changes: str) -> JobFacts:
    return with_machine(versions=tuple((VERSIONS | changes).items()))


def with_name(place: int, **changes: Any) -> JobFacts:
    names = list(host(1).names)
    names[place] = replace(names[place], **changes)
    return with_b(names=tuple(names))


def unreached(facts: JobFacts) -> JobFacts:
    """The same before anybody has tried to reach another."""
    return replace(facts, present=tuple(replace(h, reaches=()) for h in facts.present))


def with_wire(**changes: Any) -> JobFacts:
    return with_b(wires=(replace(host(1).wires[0], **changes),))


def with_directory(**changes: Any) -> JobFacts:
    found = host(1).directory
    assert found is not None
    return with_b(directory=replace(found, **changes))


def with_exchange(**changes: Any) -> JobFacts:
    assert GOOD.exchange is not None
    return replace(GOOD, exchange=replace(GOOD.exchange, **changes))


def without_b(**why: Any) -> JobFacts:
    """The good job of which the second host is not there."""
    a, _, c = GOOD.present
    left = (replace(a, reaches=a.reaches[1:]), replace(c, reaches=c.reaches[:1]))
    return replace(GOOD, present=left, absent=(Absence(index=1, **why),))


def alone() -> JobFacts:
    """What the second host knows when it does not find the first."""
    seen = replace(host(1), reaches=(), wires=(), directory=None, clock_ahead_s=None)
    away = (Absence(index=0, why="port 2222: timed out, for 60 s"),)
    return JobFacts(hosts=GOOD.hosts, present=(seen,), absent=away)


def taken_and_unreached() -> JobFacts:
    """The good job with a port of the second host taken, which the first does not reach."""
    a, b, c = with_b(ports=(PortFacts(port=2222, error="address already in use"),)).present
    a = replace(a, reaches=(Reach(host=1, port=2222, error="connection refused"), a.reaches[1]))
    return replace(GOOD, present=(a, b, c))


LOOPBACK = tuple(NameFacts(name=name, addresses=("127.0.0.1",)) for name in NAMES)
PROXY = Proxy(name="http_proxy", value="http://proxy:3128")
BROKEN: Mapping[str, list[JobFacts]] = {
    "D001": [without_b(why="did not come within 60 s")],
    "D002": [alone()],
    "D003": [without_b(why="was told of another job: a:2222,d:2222", is_other_job=True)],
    "D004": [without_b(why="timed out", during="wire")],
    "D101": [with_name(2, addresses=(), error="Name or service not known")],
    "D102": [
        unreached(with_name(0, addresses=("10.0.0.3",))),  # another host's
        unreached(with_name(0, addresses=("127.0.0.1",))),  # one's own
    ],
    "D201": [
        with_b(ports=(PortFacts(port=2222, error="address already in use", holder="x (7)"),)),
        taken_and_unreached(),  # which is not said again
    ],
    "D202": [
        with_b(reaches=(Reach(host=0, port=2222, error="timed out"), host(1).reaches[1])),
        with_b(reaches=(Reach(host=0, port=2222, error="connection refused"),)),
    ],
    "D203": [
        with_b(reaches=(Reach(host=0, port=2222, answered=-1),)),
        with_b(reaches=(Reach(host=0, port=2222, answered=2),)),
    ],
    "D205": [with_machine(public_addresses=("203.0.113.9",))],
    "D301": [with_wire(error="64 KiB do not come through: timed out")],
    "D302": [with_wire(bytes_per_s=4e8)],
    "D303": [with_wire(latency_s=0.02)],
    "D401": [with_b(clock_ahead_s=3.0), with_b(clock_ahead_s=-3.0, clock_error_s=0.1)],
    "D501": [
        with_machine(versions=tuple(p for p in VERSIONS.items() if p[0] != "keras")),
    ],
    "D502": [with_versions(python="3.12.1")],
    "D503": [with_versions(tensorflow="2.20.0")],
    "D504": [with_versions(keras="3.14.0")],
    "D505": [with_versions(numpy="2.3.0")],
    "D506": [with_versions(tfdist="0.2")],
    "D507": [
        with_versions(nccl="2.21"),
        with_machine(versions=tuple(p for p in VERSIONS.items() if p[0] != "nccl")),
    ],
    "D508": [with_machine(cpu_features=("avx2", "avx512f", "fma"))],
    "D601": [
        replace(GOOD, present=tuple(less_memory(h) for h in GOOD.present))
        for less_memory in (
            lambda h: replace(h, machine=replace(h.machine, memory_available=GIB // 2)),
            lambda h: replace(h, machine=replace(h.machine, memory_limit=GIB, memory_used=GIB)),
        )
    ],
    "D603": [with_machine(gpus=2, shared_memory=64 << 20), with_machine(gpus=1, shared_memory=0)],
    "D604": [with_machine(open_files=256)],
    "D605": [with_b(work_s=0.2)],
    "D701": [
        with_machine(proxy=PROXY),
        with_machine(proxy=replace(PROXY, excepted_by="no_proxy", exceptions=("localhost", "a"))),
    ],
    "D801": [with_directory(error="not there")],
    "D802": [with_directory(error="read-only file system", is_read_only=True)],
    "D803": [with_directory(unseen=(0,))],
    "D804": [with_directory(torn=3)],
    "D805": [with_directory(sync_error="invalid argument")],
    "D807": [with_directory(free=1 << 20)],
    "D901": [with_exchange(error="no result after 40 s")],
    "D902": [with_exchange(is_right=False)],
    "D903": [with_exchange(reduce_s=1.0)],
    "D904": [with_exchange(push_s=1.0)],
    "D905": [with_exchange(pull_s=1.0)],
}
CASES = [(code, facts) for code, several in BROKEN.items() for facts in several]
IDS = [f"{code}-{n}" for code, several in BROKEN.items() for n in range(len(several))]


def examined(facts: JobFacts) -> PreflightResult:
    return PreflightResult(facts=facts, findings=tuple(check(facts)), took_s=1.5)


@pytest.mark.parametrize(("code", "facts"), CASES, ids=IDS)
def test_what_is_broken_is_caught_by_its_rule_alone_and_told_with_hosts_and_fix(code, facts):
    result = examined(facts)
    assert {finding.code for finding in result.findings} == {code}
    for finding in result.findings:
        assert finding.hosts
        assert set(finding.hosts) <= set(NAMES)
        assert all((finding.received, finding.expected, finding.fix))
    severity = RULES[code].severity
    assert examine.exit_code(result.findings) == (2 if severity is Severity.ERROR else 1)
    lines = examine.as_text(result).splitlines()
    assert all(any(line.startswith(topic.name) for line in lines) for topic in TOPICS)
    at = next(i for i, line in enumerate(lines) if code in line)
    assert severity.value in lines[at]
    assert "Fix: " in lines[at + 1]


def test_every_rule_has_broken_facts_and_every_topic_a_number_of_its_own():
    assert set(BROKEN) == set(RULES)
    assert len(RULES) == sum(len(topic.rules) for topic in TOPICS)
    for number, topic in enumerate(TOPICS):
        assert {rule.code[:2] for rule in topic.rules} == {f"D{number}"}, topic.name
    assert not set(RULES) & set(LINT_RULES)


def test_every_topic_is_in_the_docs():
    topics = re.findall(r"(?m)^\| D(\d) \|", DOCS.read_text())
    assert topics == [str(number) for number in range(len(TOPICS))]


# What is no finding


NOT_BROKEN = {
    "nothing": GOOD,
    "repairs": with_versions(python="3.11.9"),
    "its own name is loopback, as under Debian": with_name(1, addresses=("127.0.1.1",)),
    "excepted": with_machine(proxy=replace(PROXY, excepted_by="no_proxy", exceptions=NAMES)),
    "no GPU": with_machine(shared_memory=64 << 20),
    "cannot be told that closely": with_b(clock_ahead_s=1.2, clock_error_s=0.5),
    # An address that the host itself does not have, as behind a translation: it answers there.
    "translated": unreached(with_name(0, addresses=("203.0.113.9",))),
    # Hosts that are one machine: each answers under its own name.
    "answers": with_name(0, addresses=("127.0.0.1",)),
    "one machine": replace(GOOD, present=tuple(replace(h, names=LOOPBACK) for h in GOOD.present)),
}


@pytest.mark.parametrize("name", NOT_BROKEN)
def test_what_a_job_can_have_is_no_finding(name):
    result = examined(NOT_BROKEN[name])
    assert (result.findings, examine.exit_code(result.findings)) == ((), 0)


def test_speed_is_compared_with_the_connection():
    slow = [replace(h, wires=(replace(h.wires[0], bytes_per_s=1e7),)) for h in GOOD.present]
    took = Exchange(size_bytes=4 << 20, reduce_s=0.8, push_s=0.8, pull_s=0.8)
    assert check(replace(GOOD, present=tuple(slow), exchange=took)) == []
    assert len(check(replace(GOOD, exchange=took))) == 3


@pytest.mark.parametrize(
    ("host", "exceptions", "is_excepted"),
    [
        ("node1", ["node1"], True),
        ("node1.cluster", [".cluster"], True),
        ("node1", ["node10"], False),
        ("10.1.2.3", ["10.0.0.0/8"], True),
        ("10.1.2.3", ["11.0.0.0/8"], False),
        ("node1", ["", "10.0.0.0/8"], False),
        ("NODE1", ["node1"], True),
    ],
)
def test_exceptions_are_read_as_grpc_reads_them(host, exceptions, is_excepted):
    assert excepted(host, exceptions) == is_excepted


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"HTTP_PROXY": "http://p"}, None),
        ({"http_proxy": "http://p", "grpc_proxy": "http://g"}, ("grpc_proxy", "http://g", "", ())),
        (
            {"https_proxy": "http://me:secret@p:1", "no_proxy": "a, b", "no_grpc_proxy": "c"},
            ("https_proxy", "http://p:1", "no_grpc_proxy", ("c",)),
        ),
    ],
)
def test_the_proxy_is_the_one_that_grpc_takes(environ, expected):
    found = machine.proxy_of(environ)
    seen = found and (found.name, found.value, found.excepted_by, found.exceptions)
    assert seen == expected


# Facts on their way


def test_facts_come_through_as_they_were():
    for facts in (GOOD, *(facts for _, facts in CASES)):
        assert decode(JobFacts, json.loads(json.dumps(encode(facts)))) == facts


@pytest.mark.parametrize(
    "changes",
    [
        {"index": "1"},
        {"index": True},
        {"machine": []},
        {"machine": {}},
        {"ports": {"port": 1}},
        {"ports": [{"port": "22"}]},
        {"work_s": "fast"},
        {"machine": {"host_name": "b", "versions": [["a", "b", "c"]]}},
        {"unknown": 1},
    ],
)
def test_what_is_no_fact_is_refused(changes):
    good: Any = json.loads(json.dumps(encode(host(1))))
    with pytest.raises(ValueError, match=r"."):
        decode(HostFacts, {**good, **changes})


# Gathering


def test_a_port_that_is_taken_has_a_holder():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with contextlib.closing(PortListener("x", [port])) as opened:
            (found,) = opened.ports
    assert found.error == "address already in use"
    assert re.fullmatch(rf".+ \({os.getpid()}\)", found.holder)


def test_the_other_end_says_who_it_is():
    with hold_ports(1)[0] as held, hold_ports(1)[0] as silent:
        hosts = (Host(name="x", ports=(1,)), Host(name="127.0.0.1", ports=(held.port, silent.port)))
        for line, answered in [
            (barrier.greeting(1, "abc"), 1),
            (barrier.greeting(1, "another"), -1),
            ("SSH-2.0-OpenSSH", -1),
        ]:
            with contextlib.closing(PortListener(line, [held.port])):
                first, second = barrier.reach(hosts, present=[0, 1], index=0, fingerprint="abc")
            assert (first.error, first.answered) == ("", answered)
            assert second.error == "connection refused"


def test_a_port_that_is_not_tried_in_time_is_named(monkeypatch):
    monkeypatch.setattr(barrier, "_REACH_S", 0.0)
    hosts = (Host(name="a"), Host(name="127.0.0.1", ports=(1,)))
    found = barrier.reach(hosts, present=[0, 1], index=0, fingerprint="abc")
    assert found == (Reach(host=1, port=1, error="not tried within 0 s"),)


def test_a_plain_connection_is_measured():
    with hold_ports(1)[0] as held, contextlib.closing(PortListener("x", [held.port])):
        found = barrier.measure("127.0.0.1", held.port, host=0)
    assert found.error == ""
    assert 0 < found.latency_s < 1
    assert found.bytes_per_s > 1e6


def test_what_a_listener_takes_is_bounded():
    with (
        hold_ports(1)[0] as held,
        contextlib.closing(PortListener("x", [held.port])),
        barrier.connected("127.0.0.1", held.port) as (sock, reader, _),
    ):
        sock.sendall((barrier.MAX_PIECE_BYTES + 1).to_bytes(8, "big"))
        assert reader.read(1) == b""


def read_by_two(path: Path) -> list[Directory]:
    """What two hosts find that look at a directory at the same time, and leave."""
    hosts = [Storage(str(path), mark="m", index=index) for index in (0, 1)]
    written = [host.write() for host in hosts]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda h, w: h.read(w, present=[0, 1]), hosts, written))


def test_a_directory_is_looked_at_and_left_as_it_was(tmp_path):
    found = read_by_two(tmp_path)
    assert [(each.error, each.unseen, each.torn) for each in found] == [("", (), 0)] * 2
    assert found[1].reads > 0
    assert min(each.free for each in found) > 0
    for index in (1, 0):
        Storage(str(tmp_path), mark="m", index=index).clean()
    assert list(tmp_path.iterdir()) == []


def test_a_file_written_in_place_is_torn(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def in_place(path: Path, *, durable: bool) -> Iterator[Path]:
        path.write_bytes(b"")
        yield path

    monkeypatch.setattr("tfdist.ops.doctor.machine.replacing", in_place)
    assert read_by_two(tmp_path)[1].torn > 0


def test_files_of_a_host_that_has_another_directory_are_not_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.ops.doctor.machine._SEEN_WITHIN_S", 0.2)
    storage = Storage(str(tmp_path), mark="m", index=1)
    start_s = time.monotonic()
    assert storage.read(storage.write(), present=range(30)).unseen == (0, *range(2, 30))
    assert time.monotonic() - start_s < 5.0
    assert (
        Storage(str(tmp_path / "none"), mark="m", index=1).write().error
        == "no such file or directory"
    )


# The job


def test_hosts_and_ports_come_from_tf_config():
    cluster = {"chief": ["a:1"], "worker": ["a:2", "b:2"], "ps": ["c:9"]}
    for task, index, speaks in [("chief", 0, True), ("worker", 0, False), ("ps", 0, True)]:
        config = json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})
        job = job_of({"TF_CONFIG": config})
        assert [(h.name, h.ports) for h in job.hosts] == [("a", (1, 2)), ("b", (2,)), ("c", (9,))]
        assert (job.task == job.probe_task) == speaks
    assert job.index == 2


def test_hosts_come_from_flags_and_a_process_by_itself_is_a_job(monkeypatch):
    job = job_of({"TFDIST_PS": "1"}, hosts="a:2,b", node_rank=1)
    assert [(h.name, h.ports) for h in job.hosts] == [("a", (2222, 2223)), ("b", (2222,))]
    assert (job.index, str(job.task), str(job.probe_task)) == (1, "ps-0", "ps-0")
    alone = job_of({"TFDIST_EVALUATOR": "1"}, hosts="a,b", node_rank=1)
    assert ([h.name for h in alone.hosts], str(alone.task)) == (["a", "b"], "worker-1")
    assert job_of({}).host.ports == ()
    monkeypatch.setattr("socket.gethostname", lambda: "b.example.org")
    assert job_of({}, hosts="a:2,b").index == 1


def test_the_ports_of_a_range_are_those_that_the_tasks_take_without_a_launcher():
    job = job_of({"TFDIST_PORTS": "2000-2007"}, hosts="a:2,b", node_rank=1)
    assert [h.ports for h in job.hosts] == [(2000, 2001), (2000,)]
    assert job.meeting_port == 2002


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--hosts", "a,b"], "--node_rank"),
        (["--node_rank", "1"], "--hosts"),
        (["--hosts", "a,b", "--node_rank", "2"], "0 to 1"),
        (["--startup_timeout_s", "-1"], "a number above 0"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv, said, capsys):
    assert main(argv) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tfdist.doctor: ")
    assert said in line


def test_an_evaluator_is_told_to_leave_it():
    cluster = {"worker": ["a:1"], "evaluator": ["b:1"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    with pytest.raises(UsageError, match="an evaluator"):
        job_of({"TF_CONFIG": config})


# The answer


def test_what_nobody_measured_is_not_well():
    lines = examine.as_text(examined(alone())).splitlines()
    for topic in ("network", "clocks"):
        (line,) = (line for line in lines if line.startswith(topic))
        assert line.endswith("not looked at: no other host was met")


def test_json_has_the_findings_the_topics_that_are_well_and_the_facts():
    printed = json.loads(examine.as_json(examined(with_versions(keras="3.0"))))
    assert printed["exit_code"] == EXIT_USAGE
    (finding,) = printed["findings"]
    assert (finding["code"], finding["severity"], finding["hosts"]) == ("D504", "error", ["b"])
    assert set(printed["topics"]) == {topic.name for topic in TOPICS} - {"software"}
    assert printed["facts"]["present"][1]["machine"]["host_name"] == "b"


def test_what_others_send_does_not_write_over_the_terminal():
    text = examine.as_text(examined(with_name(2, error="\x1b[2Jgone\n")))
    assert "\x1b" not in text


def test_a_list_of_rules_is_printed(capsys):
    assert main(["--list", "--json"]) == EXIT_OK
    assert {rule["code"] for rule in json.loads(capsys.readouterr().out)} == set(RULES)


# TensorFlow's servers, or what is in their place


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import sys; sys.exit('no module of that name')", "exit code 1: no module of that name"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        (
            "import sys, time; print('in the push', file=sys.stderr, flush=True)\n"
            "print('E0000 1 cuda.cc:5] failed call to cuInit', file=sys.stderr, flush=True)\n"
            "open('hangs', 'w').close(); time.sleep(600)",
            "no result after 0 s: in the push",
        ),
    ],
    ids=["fails", "is killed", "hangs"],
)
def test_servers_that_come_to_no_result_are_a_finding(program, error, tmp_path, monkeypatch):
    package = tmp_path / "tfdist" / "ops" / "doctor"
    package.mkdir(parents=True)
    for directory in (package.parents[1], package.parent, package):
        (directory / "__init__.py").touch()
    (package / "servers.py").write_text(program)
    is_hanging = tmp_path / "hangs"
    os.mkfifo(is_hanging)
    deadline_s = 0.0 if "no result" in error else 60.0
    monkeypatch.setattr("tfdist.ops.doctor.servers.DEADLINE_S", deadline_s)
    monkeypatch.chdir(tmp_path)
    environ = {"PYTHONPATH": str(tmp_path)}
    with contextlib.closing(ServerProcess(0, ["a:1", "b:1"], environ=environ)) as server:
        if not deadline_s:
            is_hanging.read_text()
        found = server.result()
    assert found.error == error
    assert {f.code for f in check(replace(GOOD, exchange=found))} == {"D901"}
