"""The doctor: what is broken is caught by its rule and no other; how the hosts meet for it."""

import contextlib
import json
import os
import re
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.refusals import refused
from tfdist.cluster import hold_ports
from tfdist.doctor import main
from tfdist.errors import EXIT_OK, EXIT_USAGE, PeerLost, StartupTimeout
from tfdist.launch.events import decode, encode
from tfdist.ops.doctor import examine, probes
from tfdist.ops.doctor.checks import RULES, TOPICS, check
from tfdist.ops.doctor.examine import HostBarrier, PreflightResult, join_barrier, run_steps
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
    PreflightJob,
    Proxy,
    Reach,
    Wire,
    job_of,
)
from tfdist.ops.doctor.probes import PortListener, Storage
from tfdist.ops.doctor.servers import ServerProcess
from tfdist.ops.lint import RULES as LINT_RULES
from tfdist.ops.lint import Severity

SOON_S, LONG_S = 0.3, 60.0
DOCS = Path(__file__).parents[2] / "docs" / "checks.md"
GIB = 1 << 30
NAMES = ("a", "b", "c")
VERSIONS = {"python": "3.11.7", "tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6"}
VERSIONS |= {"nccl": "2.27", "tfdist": "0.1"}


def host(index):
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


A, B, C = GOOD.present


def with_b(**changes):
    """The good job with other facts of its second host."""
    return replace(GOOD, present=(A, replace(B, **changes), C))


def with_machine(**changes):
    return with_b(machine=replace(B.machine, **changes))


def with_versions(**changes):
    """With other versions, or without those that are None."""
    versions = {name: v for name, v in (VERSIONS | changes).items() if v is not None}
    return with_machine(versions=tuple(versions.items()))


def with_name(place, *, reaches=B.reaches, **changes):
    names = list(B.names)
    names[place] = replace(names[place], **changes)
    return with_b(names=tuple(names), reaches=reaches)


def with_wire(**changes):
    return with_b(wires=(replace(B.wires[0], **changes),))


def with_directory(**changes):
    return with_b(directory=replace(B.directory, **changes))


def with_exchange(**changes):
    return replace(GOOD, exchange=replace(GOOD.exchange, **changes))


def without_b(**why):
    """The good job of which the second host is not there."""
    left = (replace(A, reaches=A.reaches[1:]), replace(C, reaches=C.reaches[:1]))
    return replace(GOOD, present=left, absent=(Absence(index=1, **why),))


def alone():
    """What the second host knows when it does not find the first."""
    seen = replace(B, reaches=(), wires=(), directory=None, clock_ahead_s=None)
    away = (Absence(index=0, why="port 2222: timed out, for 60 s"),)
    return JobFacts(hosts=GOOD.hosts, present=(seen,), absent=away)


LOOPBACK = tuple(NameFacts(name=name, addresses=("127.0.0.1",)) for name in NAMES)
TAKEN = replace(B, ports=(PortFacts(port=2222, error="in use", holder="x (7)"),))
REFUSED = Reach(host=1, port=2222, error="connection refused")
PROXY = Proxy(name="http_proxy", value="http://proxy:3128")
BROKEN = {
    "D001": [without_b(why="did not come within 60 s")],
    "D002": [alone()],
    "D003": [without_b(why="was told of another job: a:2222,d:2222", is_other_job=True)],
    "D004": [without_b(why="timed out", during="wire")],
    "D101": [with_name(2, addresses=(), error="Name or service not known")],
    "D102": [
        with_name(0, addresses=("10.0.0.3",), reaches=()),  # another host's
        with_name(0, addresses=("127.0.0.1",), reaches=()),  # one's own
    ],
    "D201": [
        replace(GOOD, present=(A, TAKEN, C)),
        # That it is not reached is not said again.
        replace(GOOD, present=(replace(A, reaches=(REFUSED, A.reaches[1])), TAKEN, C)),
    ],
    "D202": [
        with_b(reaches=(Reach(host=0, port=2222, error="timed out"), B.reaches[1])),
        with_b(reaches=(replace(REFUSED, host=0),)),
    ],
    "D203": [with_b(reaches=(Reach(host=0, port=2222, answered=who),)) for who in (-1, 2)],
    "D205": [with_machine(public_addresses=("203.0.113.9",))],
    "D301": [with_wire(error="64 KiB do not come through: timed out")],
    "D302": [with_wire(bytes_per_s=4e8)],
    "D303": [with_wire(latency_s=0.02)],
    "D401": [with_b(clock_ahead_s=3.0), with_b(clock_ahead_s=-3.0, clock_error_s=0.1)],
    "D501": [with_versions(keras=None)],
    "D502": [with_versions(python="3.12.1")],
    "D503": [with_versions(tensorflow="2.20.0")],
    "D504": [with_versions(keras="3.14.0")],
    "D505": [with_versions(numpy="2.3.0")],
    "D506": [with_versions(tfdist="0.2")],
    "D507": [with_versions(nccl="2.21"), with_versions(nccl=None)],
    "D508": [with_machine(cpu_features=("avx2", "avx512f", "fma"))],
    "D601": [
        with_machine(memory_available=GIB // 2),
        with_machine(memory_limit=GIB, memory_used=GIB),
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


def examined(facts):
    return PreflightResult(facts=facts, findings=tuple(check(facts)), took_s=1.5)


@pytest.mark.parametrize(("code", "facts"), CASES)
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


def test_every_rule_has_broken_facts_and_every_topic_a_number_in_the_docs():
    assert set(BROKEN) == set(RULES)
    assert len(RULES) == sum(len(topic.rules) for topic in TOPICS)
    for number, topic in enumerate(TOPICS):
        assert {rule.code[:2] for rule in topic.rules} == {f"D{number}"}, topic.name
    assert not set(RULES) & set(LINT_RULES)
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
    "translated": with_name(0, addresses=("203.0.113.9",), reaches=()),
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
    ("exceptions", "are_excepted"),
    [
        ((".CLUSTER", "10.0.0.0/8"), True),
        (("node1.cluster", "10.1.2.3"), True),
        (("node10.cluster", "10.0.0.0/8"), False),
        (("", ".cluster", "11.0.0.0/8"), False),
    ],
)
def test_exceptions_are_read_as_grpc_reads_them(exceptions, are_excepted):
    facts = with_machine(proxy=replace(PROXY, excepted_by="no_proxy", exceptions=exceptions))
    named = tuple(Host(name=name, ports=(2222,)) for name in ("node1.cluster", "10.1.2.3"))
    facts = replace(facts, hosts=named, present=(replace(facts.present[1], index=0, names=()),))
    assert [f.code for f in check(facts) if f.code == "D701"] == ["D701"] * (not are_excepted)


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
    found = probes.proxy_of(environ)
    seen = found and (found.name, found.value, found.excepted_by, found.exceptions)
    assert seen == expected


def test_facts_come_through_as_they_were_and_nothing_else_does():
    for facts in (GOOD, *(facts for _, facts in CASES)):
        assert decode(JobFacts, json.loads(json.dumps(encode(facts)))) == facts
    good = json.loads(json.dumps(encode(B)))
    for changes in (
        *({"index": "1"}, {"index": True}, {"machine": []}, {"machine": {}}, {"unknown": 1}),
        *({"ports": {"port": 1}}, {"ports": [{"port": "22"}]}, {"work_s": "fast"}),
    ):
        with pytest.raises(ValueError, match=r"."):
            decode(HostFacts, {**good, **changes})


# Probes


def test_a_port_that_is_taken_has_a_holder():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with contextlib.closing(PortListener("x", [port])) as opened:
            (found,) = opened.ports
    assert found.error == "address already in use"
    assert re.fullmatch(rf".+ \({os.getpid()}\)", found.holder)


def test_the_other_end_says_who_it_is(monkeypatch):
    with hold_ports(1)[0] as held, hold_ports(1)[0] as silent:
        hosts = (Host(name="x", ports=(1,)), Host(name="127.0.0.1", ports=(held.port, silent.port)))
        for line, answered in [
            (probes.greeting(1, "abc"), 1),
            (probes.greeting(1, "another"), -1),
            ("SSH-2.0-OpenSSH", -1),
        ]:
            with contextlib.closing(PortListener(line, [held.port])):
                first, second = probes.reach(hosts, present=[0, 1], index=0, fingerprint="abc")
            assert (first.error, first.answered) == ("", answered)
            assert second.error == "connection refused"
        monkeypatch.setattr(probes, "_REACH_S", 0.0)
        found = probes.reach(hosts, present=[0, 1], index=0, fingerprint="abc")
    assert {reach.error for reach in found} == {"not tried within 0 s"}


def test_a_plain_connection_is_measured_and_what_a_listener_takes_is_bounded():
    with hold_ports(1)[0] as held, contextlib.closing(PortListener("x", [held.port])):
        found = probes.measure("127.0.0.1", held.port, host=0)
        with probes.connected("127.0.0.1", held.port) as (sock, reader, _):
            sock.sendall((probes.MAX_PIECE_BYTES + 1).to_bytes(8, "big"))
            assert reader.read(1) == b""
    assert found.error == ""
    assert 0 < found.latency_s < 1
    assert found.bytes_per_s > 1e6


def read_by_two(path):
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
    def in_place(path, *, durable):
        path.write_bytes(b"")
        time.sleep(0.01)  # in which the other reads, also where threads take long turns
        yield path

    monkeypatch.setattr(probes, "replacing", in_place)
    assert read_by_two(tmp_path)[1].torn > 0


def test_files_of_a_host_that_has_another_directory_are_not_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "_SEEN_WITHIN_S", 0.2)
    storage = Storage(str(tmp_path), mark="m", index=1)
    start_s = time.monotonic()
    assert storage.read(storage.write(), present=range(30)).unseen == (0, *range(2, 30))
    assert time.monotonic() - start_s < 5.0
    found = Storage(str(tmp_path / "none"), mark="m", index=1).write()
    assert found.error == "no such file or directory"


# The job


def job_in(cluster, task="worker", index=0):
    task = {"type": task, "index": index}
    return job_of({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})


def test_hosts_and_ports_come_from_tf_config():
    cluster = {"chief": ["a:1"], "worker": ["a:2", "b:2"], "ps": ["c:9"]}
    for task, is_first in [("chief", True), ("worker", False), ("ps", True)]:
        job = job_in(cluster, task)
        assert [(h.name, h.ports) for h in job.hosts] == [("a", (1, 2)), ("b", (2,)), ("c", (9,))]
        assert (job.task == job.probe_task) == is_first
    assert job.index == 2
    evaluated = {"worker": ["a:1"], "evaluator": ["b:1"]}
    assert refused(lambda: job_in(evaluated, "evaluator")) == ("TF_CONFIG", "wrong-task")


def test_hosts_come_from_flags_and_a_process_by_itself_is_a_job(monkeypatch):
    job = job_of({"TFDIST_PS": "1"}, hosts="a:2,b", node_rank=1)
    assert [(h.name, h.ports) for h in job.hosts] == [("a", (2222, 2223)), ("b", (2222,))]
    assert (job.index, str(job.task), str(job.probe_task)) == (1, "ps-0", "ps-0")
    alone = job_of({"TFDIST_EVALUATOR": "1"}, hosts="a,b", node_rank=1)
    assert ([h.name for h in alone.hosts], str(alone.task)) == (["a", "b"], "worker-1")
    assert job_of({}).host.ports == ()
    # The ports of a range are those that the tasks take without a launcher.
    job = job_of({"TFDIST_PORTS": "2000-2007"}, hosts="a:2,b", node_rank=1)
    assert [h.ports for h in job.hosts] == [(2000, 2001), (2000,)]
    assert job.meeting_port == 2002
    monkeypatch.setattr("socket.gethostname", lambda: "b.example.org")
    assert job_of({}, hosts="a:2,b").index == 1


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


# The answer


def test_what_nobody_measured_is_not_well_and_what_others_send_does_not_write_over_the_terminal():
    lines = examine.as_text(examined(alone())).splitlines()
    for topic in ("network", "clocks"):
        (line,) = (line for line in lines if line.startswith(topic))
        assert line.endswith("not looked at: no other host was met")
    assert "\x1b" not in examine.as_text(examined(with_name(2, error="\x1b[2Jgone\n")))


def test_json_has_the_findings_the_topics_that_are_well_the_facts_and_the_rules(capsys):
    printed = json.loads(examine.as_json(examined(with_versions(keras="3.0"))))
    assert printed["exit_code"] == EXIT_USAGE
    (finding,) = printed["findings"]
    assert (finding["code"], finding["severity"], finding["hosts"]) == ("D504", "error", ["b"])
    assert set(printed["topics"]) == {topic.name for topic in TOPICS} - {"software"}
    assert printed["facts"]["present"][1]["machine"]["host_name"] == "b"
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
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")  # as in a pod that can be read only
    environ = {"PYTHONPATH": str(tmp_path)}
    with contextlib.closing(ServerProcess(0, ["a:1", "b:1"], environ=environ)) as server:
        if not deadline_s:
            is_hanging.read_text()
        found = server.result()
    assert found.error == error
    assert {f.code for f in check(replace(GOOD, exchange=found))} == {"D901"}


# The meeting of the hosts


@pytest.fixture
def port():
    """The port at which the hosts meet."""
    with hold_ports(1)[0] as held:
        yield held.port


def job(port, index, *, hosts=2, token=b"secret"):
    names = ("127.0.0.1", "127.0.0.2", "127.0.0.3")[:hosts]
    listed = tuple(Host(name=name, ports=(port - 1,)) for name in names)
    return PreflightJob(hosts=listed, index=index, token=token)


@contextlib.contextmanager
def opened(port, **more):
    barrier = HostBarrier(job(port, 0, **more))
    yield barrier
    barrier.end(0)


@contextlib.contextmanager
def met(port, second):
    """The first host's barrier, to which a member has come, and what comes of its `second`."""

    def come():
        with contextlib.closing(join_barrier(job(port, 1), within_s=LONG_S)) as member:
            return second(member)

    with ThreadPoolExecutor() as pool, opened(port) as barrier:
        end = pool.submit(come)
        barrier.gather(within_s=LONG_S)
        yield barrier, end


def nothing(present):
    """A step of the first host itself."""


def test_hosts_come_together_answer_and_are_let_go(port):
    steps = {"look": lambda present: {"saw": list(present)}}
    with met(port, lambda member: run_steps(member, steps, hosts=2)) as (barrier, end):
        assert (barrier.present, barrier.absent) == ([0, 1], [])
        answers = barrier.ask("look", lambda present: {"saw": "own"})
        assert answers == {0: {"saw": "own"}, 1: {"saw": [0, 1]}}
        barrier.end(2)
    assert end.result() == 2


def test_who_does_not_come_is_named_and_who_finds_nobody_says_where_it_looked(port):
    with pytest.raises(StartupTimeout, match=rf"127\.0\.0\.1:{port}: .* refused"):
        join_barrier(job(port, 1), within_s=SOON_S)
    with opened(port, hosts=3) as barrier:
        barrier.gather(within_s=SOON_S)
        assert [(a.index, a.is_other_job) for a in barrier.absent] == [(1, False), (2, False)]
        assert "did not come" in barrier.absent[0].why
    with socket.create_server(("", port)):
        where, _ = refused(lambda: HostBarrier(job(port, 0)))
    assert where == "the port at which the hosts meet"


@pytest.mark.parametrize(
    ("other", "code", "why"),
    [
        ({"hosts": 3}, "hosts-differ", "127.0.0.3"),
        ({"token": b"guessed"}, "wrong-token", "127.0.0.1: a wrong token)"),
    ],
    ids=["job", "token"],
)
def test_who_is_of_another_job_or_has_another_token_is_told_and_named(other, code, why, port):
    def come():
        return refused(lambda: join_barrier(job(port, 1, **other), within_s=LONG_S))

    with ThreadPoolExecutor() as pool, opened(port) as barrier:
        end = pool.submit(come)
        barrier.gather(within_s=1.0 if "token" in other else LONG_S)
    (absence,) = barrier.absent
    assert absence.is_other_job == ("hosts" in other)
    assert why in absence.why
    assert end.result()[1] == code


@pytest.mark.parametrize("answered", [["look"], []])
def test_a_host_that_goes_is_named_with_the_step_that_it_did_not_do(answered, port):
    def second(member):
        while not (member.lost or member.take_messages()):
            select.select([member], [], [], LONG_S)
            member.turn()
        if answered:
            member.send({"saw": 1})

    with met(port, second) as (barrier, _):
        for step in answered:
            assert set(barrier.ask(step, nothing)) == {0, 1}
        assert set(barrier.ask("wire", nothing)) == {0}
        assert [(a.index, a.during) for a in barrier.absent] == [(1, "wire")]


def test_a_host_that_never_answers_is_given_up_on(port, monkeypatch):
    monkeypatch.setattr(examine, "_STEP_S", SOON_S)
    done = threading.Event()
    with met(port, lambda member: done.wait(LONG_S)) as (barrier, _):
        barrier.ask("look", nothing)
        done.set()
    assert [(a.index, a.why) for a in barrier.absent] == [(1, "no answer in time")]


@pytest.mark.parametrize(
    ("does", "refusal"),
    [
        (lambda barrier: barrier.ask("remove", nothing), "it asks for .*'remove'"),
        (lambda barrier: barrier.lose(1, "as if it had ended"), "closed the connection"),
    ],
    ids=["asks for another", "goes"],
)
def test_a_host_takes_no_steps_but_its_own_and_notices_that_the_first_has_gone(does, refusal, port):
    with met(port, lambda member: run_steps(member, {}, hosts=2)) as (barrier, end):
        does(barrier)
        assert barrier.present == [0]
    with pytest.raises(PeerLost, match=refusal):
        end.result()
