"""Jobs of two launchers, on two addresses of this machine as two hosts, without TensorFlow."""

import json
import os
import re
import signal
import socket
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.multiprocess.jobs import DEADLINE_S, PAUSE, ROOT, STARTS, report
from tests.multiprocess.test_live import SOURCE as PHASES
from tests.multiprocess.test_live import metrics_with
from tests.ports import in_a_row
from tfdist.cluster import hold_ports
from tfdist.errors import EXIT_PEER_MISSING, EXIT_USAGE
from tfdist.launch.events import SAME_REQUEST_S
from tfdist.report.run import read_run

HOSTS = ("127.0.0.1", "127.0.0.2")
TOKEN = "a secret that nobody must see"
TELL = """
import json, os, sys
told = json.loads(os.environ["TF_CONFIG"])
os.write(1, b"told %s\\n" % json.dumps(told).encode())
assert "TFDIST_RENDEZVOUS_TOKEN" not in os.environ
"""
INDEX = 'import json, os\nindex = json.loads(os.environ["TF_CONFIG"])["task"]["index"]\n'
ATTEMPT = INDEX + 'attempt = json.loads(os.environ["TF_CONFIG"])["tfdist"]["attempt"]\n'
SAVE = INDEX + (
    "import signal, sys\n"
    "def save(signum, frame):\n"
    "    print('saved', flush=True)\n"
    "    sys.exit(143)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "os.write(1, b'ready %d\\n' % os.getpid())\n"
    "while True: signal.pause()\n"
)


@pytest.fixture
def port():
    """Returns a port that is free, and stays so unless somebody insists on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOSTS[0], 0))
        yield held.getsockname()[1]


@pytest.fixture
def host(launch, port):
    """Starts the launcher of a host."""

    def start(rank, source, *flags, slots=1, **more):
        listed = ",".join(f"{name}:{slots}" for name in HOSTS)
        usual = {"--hosts": listed, "--rendezvous_port": str(port)}
        words = [word for flag in usual if flag not in flags for word in (flag, usual[flag])]
        return launch(
            source, *words, *("--node_rank", str(rank), "--run_dir", "run"), *flags, **more
        )

    return start


@pytest.fixture
def both(host):
    return lambda source, *flags, **more: [host(rank, source, *flags, **more) for rank in (1, 0)]


def codes(jobs):
    return [job.end() for job in jobs]


@STARTS
def test_each_launcher_starts_its_own_tasks_of_one_cluster(both, command, tmp_path):
    (tmp_path / "site").mkdir()  # with a disk that is busy
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, time; os.fsync = lambda fd: time.sleep(6)"
    )
    env = {"TFDIST_RENDEZVOUS_TOKEN": TOKEN, "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"}
    jobs = both(TELL, slots=2, env=env, command=command)
    assert codes(jobs) == [0, 0]
    told = [[json.loads(line) for line in re.findall("told (.*)", job.text)] for job in jobs]
    here = [sorted(config["task"]["index"] for config in configs) for configs in told]
    assert here == [[2, 3], [0, 1]]
    clusters = {json.dumps(config["cluster"]) for configs in told for config in configs}
    assert len(clusters) == 1
    addresses = json.loads(clusters.pop())["worker"]
    assert [address.partition(":")[0] for address in addresses] == [*HOSTS[:1] * 2, *HOSTS[1:] * 2]
    assert len(jobs[1].text.split("2 hosts, all with tfdist ")) == 2
    assert re.search(r"configuration \w{12}: 127\.0\.0\.1 at \S+, 127\.0\.0\.2 at", jobs[1].text)
    tasks = report("run")["attempts"][0]["tasks"]
    assert [task["host"] for task in tasks] == [*HOSTS[:1] * 2, *HOSTS[1:] * 2]
    assert all(task["exit_code"] == 0 for task in tasks)
    logs = {path.name for path in (tmp_path / "run/logs/attempt-1").glob("worker-*.log")}
    assert len(logs) == 4
    written = [job.text for job in jobs]
    written += [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(TOKEN in text for text in written)


def test_host_0_shows_the_tasks_of_all_hosts(host):
    (held,) = hold_ports(1)
    jobs = [host(1, PHASES), host(0, PHASES, f"--metrics_port={held.port}")]
    for job in jobs:
        job.ready(1)
    metrics_with(held.port, f'tfdist_step{{host="{HOSTS[1]}",task="worker-1"}} 8.0')
    task, at = 'task="worker-0"', f'host="{HOSTS[0]}"'
    text = metrics_with(held.port, f'tfdist_task_phase{{{at},phase="step",{task}}} 1.0')
    assert f"tfdist_memory_bytes{{{at},{task}}}" in text
    assert f'tfdist_memory_bytes{{host="{HOSTS[1]}",task="worker-1"}}' not in text
    jobs[0].signal(signal.SIGTERM)
    assert codes(jobs) == [143, 143]
    (attempt,) = read_run(Path("run")).attempts
    assert {span.task: span.host for span in attempt.tasks} == {
        **{"worker-0": HOSTS[0], "worker-1": HOSTS[1]}
    }
    assert set(attempt.history) == {"worker-0", "worker-1"}


def test_all_ports_are_of_the_range_that_was_given_and_taken_ones_are_skipped(both):
    row = in_a_row(10)
    with row[2] as taken:
        for port in row[:2] + row[3:]:
            port.release()
        first = row[0].port
        # The launchers of both hosts are on this machine: they share the range.
        ports = ("--ports", f"{first}-{first + 9}", "--rendezvous_port", str(first))
        jobs = both(TELL, *ports, slots=2)
        assert codes(jobs) == [0, 0], [job.text for job in jobs]
        (workers,) = {
            tuple(json.loads(line)["cluster"]["worker"])
            for job in jobs
            for line in re.findall("told (.*)", job.text)
        }
        numbers = {int(worker.rpartition(":")[2]) for worker in workers}
        assert len(numbers) == 4
        assert numbers <= {*range(first + 1, first + 10)} - {taken.port}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_host_ends_the_job_on_all_and_is_reported_with_its_host(both, failing):
    source = INDEX + f"if index == {failing}: print('about to'); raise ValueError('boom')\n" + PAUSE
    jobs = both(source)
    assert codes(jobs) == [1, 1]
    for job in jobs:
        assert f"worker-{failing} on {HOSTS[failing]} failed first: ValueError: boom" in job.text
    failure = report("run")["attempts"][0]["first_failure"]
    assert (failure["task"], failure["host"]) == (f"worker-{failing}", HOSTS[failing])
    assert "about to" in failure["last_lines"]


def test_a_job_that_failed_is_started_again_on_all_hosts(both):
    source = ATTEMPT + "if attempt == 1:\n  if index: raise ValueError('boom')\n  else: " + PAUSE
    said = "print('attempt', attempt, 'started again', os.environ['TFDIST_RESTARTS'])"
    jobs = both(f"{source}\n{said}\n", "--max_restarts", "1")
    assert codes(jobs) == [0, 0]
    assert [attempt["exit_code"] for attempt in report("run")["attempts"]] == [1, 0]
    assert all("attempt 2 started again 1\n" in job.text for job in jobs)


def test_a_worker_of_a_ps_job_is_started_again_alone_on_its_host(host, tmp_path):
    source = (
        "import json, os, pathlib, signal, time\n"
        'task = json.loads(os.environ["TF_CONFIG"])["task"]\n'
        "again = pathlib.Path('again')\n"
        "if task['type'] == 'chief':\n"
        "    while not again.exists(): time.sleep(0.05)\n"
        "elif task['type'] == 'worker' and task['index'] == 0:\n"
        "    if not pathlib.Path('failed').exists():\n"
        "        pathlib.Path('failed').touch()\n"
        "        raise ValueError('boom')\n"
        "    again.touch()\n"
        "    signal.pause()\n"
        "else: signal.pause()\n"
    )
    flags = ("--strategy", "ps", "--max_restarts", "1")
    # The chief on host 0, the worker and the ps on host 1.
    other = ("--hosts", "127.0.0.1:1,127.0.0.2:2")
    jobs = [host(rank, source, *flags, *other) for rank in (1, 0)]
    assert codes(jobs) == [0, 0]
    (attempt,) = report("run")["attempts"]
    assert [(past["task"], past["host"]) for past in attempt["restarts"]] == [
        ("worker-0", HOSTS[1])
    ]
    assert (tmp_path / "run/logs/attempt-1/worker-0.restart-1.log").exists()


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)], ids=["first", "second", "both at once"])
def test_a_signal_to_any_launcher_stops_the_job_on_all_with_the_save(both, asked):
    other, first = jobs = both(SAVE)
    for job in jobs:
        job.ready(1)
    for rank in asked:  # as a scheduler does it, to all at once
        (first, other)[rank].signal(signal.SIGTERM)
    assert codes(jobs) == [143, 143]
    assert all("saved" in job.text for job in jobs)
    assert report("run")["exit_code"] == 143
    for job in jobs:
        job.assert_gone()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_output_that_is_closed_stops_the_job_on_all_with_the_save(both, rank):
    prints = "    print('here', flush=True); select.select([], [], [], 0.01)\n"
    source = "import select\n" + SAVE.replace(" signal.pause()\n", "\n" + prints)
    source = source.replace(
        "    print('saved'", "    select.select([], [], [], 0.5)\n    print('saved'"
    )
    other, first = jobs = both(source, "--grace_s", "60")
    for job in jobs:
        job.ready(1)
    os.close((first, other)[rank].fd)
    assert [job.process.wait(DEADLINE_S) for job in jobs] == [141, 141]
    for index in range(2):
        log = Path(f"run/logs/attempt-1/worker-{index}.log")
        assert log.read_text().endswith("saved\n")


def test_a_second_signal_to_the_same_launcher_kills_on_all(both):
    source = "import signal; signal.signal(15, signal.SIG_IGN)\n" + PAUSE
    other, first = jobs = both(source, "--grace_s", "100")
    for job in jobs:
        job.ready(1)
    other.signal(signal.SIGTERM)
    first.read_until("SIGTERM: ending 2 tasks")
    time.sleep(2 * SAME_REQUEST_S)
    other.signal(signal.SIGTERM)
    assert codes(jobs) == [143, 143]
    for job in jobs:
        job.assert_gone()


STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
HOLDS = "import ctypes; [ctypes.PyDLL(None).sleep(600) for _ in range(9)]"  # with Python's lock


@pytest.mark.parametrize(
    ("what", "cause"), [(STOPS, "SIGSTOP"), (HOLDS, "does not answer")], ids=["stopped", "silent"]
)
def test_a_task_that_hangs_on_another_host_is_found(both, what, cause):
    source = INDEX + f"import signal, time\ntime.sleep(5)\nif index: {what}\nelse: {PAUSE}"
    jobs = both(source, "--hang_timeout_s", "3", "--startup_timeout_s", "10", "--grace_s", "1")
    assert codes(jobs) == [1, 1]
    failure = report("run")["attempts"][0]["first_failure"]
    assert (failure["task"], failure["host"]) == ("worker-1", HOSTS[1])
    assert failure["cause"].startswith("hangs: ")
    assert cause in failure["cause"]
    if what == HOLDS:  # one that is stopped cannot print them
        assert any("program.py" in line for line in failure["stacks"]["worker-1"])


# hosts that go


@pytest.mark.alone
@pytest.mark.parametrize(
    ("signum", "why"),
    [(signal.SIGKILL, "it has closed the connection"), (signal.SIGSTOP, "no word for 4 s")],
    ids=["killed", "silent"],
)
def test_a_host_that_vanishes_is_a_failure_that_names_it(both, signum, why):
    other, first = both(PAUSE, "--host_timeout_s", "4")
    other.ready(1)
    first.ready(1)
    began_s = time.monotonic()
    other.signal(signum)
    assert first.end() == EXIT_PEER_MISSING
    assert time.monotonic() - began_s < 30  # long before its task would be missed
    assert f"worker-1 on 127.0.0.2 failed first: host 127.0.0.2 is gone: {why}" in first.text
    assert report("run")["attempts"][0]["first_failure"]["host"] == HOSTS[1]
    other.signal(signal.SIGCONT)
    assert other.end() in (EXIT_PEER_MISSING, -signal.SIGKILL)
    other.assert_gone()
    first.assert_gone()


def test_without_host_0_the_others_end_and_say_so(both):
    other, first = both(PAUSE)
    other.ready(1)
    first.ready(1)
    first.process.kill()
    assert other.end() == EXIT_PEER_MISSING
    assert "the launcher of 127.0.0.1 is gone: it has closed the connection" in other.text
    other.assert_gone()
    first.end()
    first.assert_gone()


RESUMES = ATTEMPT + "if attempt == 1: " + PAUSE + "\nprint('attempt', attempt, index)\n"


@pytest.fixture
def running(both):
    """Starts the launchers of a job that goes on in its second attempt; its tasks are ready."""

    def start(*flags):
        jobs = both(RESUMES, "--max_restarts", "1", *flags)
        for job in jobs:
            job.ready(1)
        return jobs

    return start


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_comes_back_is_in_the_next_attempt(host, running, rank):
    other, first = running()
    gone, left = (other, first) if rank else (first, other)
    gone.process.kill()
    left.read_until("is gone")
    again = host(rank, RESUMES, "--max_restarts", "1")
    assert codes([left, again]) == [0, 0]
    assert "attempt 2 1" in (again if rank else other).text
    if rank:
        attempts = report("run")["attempts"]
        assert [attempt["exit_code"] for attempt in attempts] == [75, 0]
        assert len(attempts[1]["tasks"]) == 2
        gone.assert_gone()


def test_without_a_host_that_does_not_come_back_the_others_go_on_where_that_was_asked_for(running):
    other, first = running("--min_workers", "1", "--startup_timeout_s", "6")
    other.process.kill()
    assert first.end() == 0
    assert "going on without 127.0.0.2 (rank 1), with 1 worker" in first.text
    assert "attempt 2 0" in first.text
    assert [task["task"] for task in report("run")["attempts"][1]["tasks"]] == ["worker-0"]


def test_a_host_that_does_not_come_back_ends_the_job(running):
    other, first = running("--startup_timeout_s", "6")
    other.process.kill()
    assert first.end() == EXIT_PEER_MISSING
    assert "not started again: 1 of 2 hosts are there: waited 6 s for 127.0.0.2" in first.text


# hosts that never meet


def lines(job):
    return job.text.strip().splitlines()


def test_a_host_that_does_not_come_is_named(host, port):
    first = host(0, PAUSE, "--startup_timeout_s", "1")
    assert first.end() == EXIT_PEER_MISSING
    (line,) = lines(first)
    assert line.startswith("1 of 2 hosts are there: waited 1 s for 127.0.0.2 (rank 1)")
    assert f"127.0.0.1:{port}" in line
    assert not os.path.exists("run")


def test_hosts_that_differ_are_told_in_what_and_start_nothing(host, tmp_path):
    metadata = tmp_path / "other" / "keras-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 9.9.9\n")
    path = {"PYTHONPATH": f"{tmp_path / 'other'}:{ROOT}"}
    first = host(0, PAUSE, "--max_restarts", "1", args=("--lr", "1"))
    other = host(1, PAUSE, "--max_restarts", "2", args=("--lr", "2"), env=path)
    assert codes([other, first]) == [EXIT_USAGE, EXIT_USAGE]
    for job in (first, other):
        (line,) = lines(job)
        assert f"keras 9.9.9 there, {version('keras')} here; " in line
        assert "--max_restarts 2 there, 1 here; argument 2 2 there, 1 here" in line
    assert first.text.startswith("hosts: received 127.0.0.2 (rank 1) with ")
    assert not os.path.exists("run")


def test_a_wrong_token_is_told_to_both(host):
    other = host(1, PAUSE, env={"TFDIST_RENDEZVOUS_TOKEN": TOKEN + "!"})
    first = host(0, PAUSE, "--startup_timeout_s", "6", env={"TFDIST_RENDEZVOUS_TOKEN": TOKEN})
    assert codes([other, first]) == [EXIT_USAGE, EXIT_PEER_MISSING]
    assert other.text.startswith("token: received one that 127.0.0.1:")
    assert "(turned away: 127.0.0.2: a wrong token)" in first.text
    assert TOKEN not in first.text + other.text


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_one_line(host, launch):
    with socket.create_server((HOSTS[0], 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        job = host(0, PAUSE, "--rendezvous_port", place.partition(":")[2])
        assert job.end() == EXIT_USAGE
        assert lines(job)[0].startswith(f"--rendezvous_port: received {place} (Address already in")
    job = launch(
        PAUSE, "--hosts", "127.0.0.1,192.0.2.1", "--node_rank", "1",
        env={"TFDIST_RENDEZVOUS_TOKEN": TOKEN},
    )  # fmt: skip
    assert job.end() == EXIT_USAGE
    assert lines(job)[0].startswith("--hosts: received '192.0.2.1' for this machine")


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_while_waiting_for_the_others(host, port, rank):
    job = host(rank, PAUSE, "--startup_timeout_s", "50")
    if not rank:
        job.read_until(r"waiting for 127\.0\.0\.2 \(rank 1\), for 50 s in all")
    else:  # it says nothing while it tries
        with socket.create_server((HOSTS[0], port)) as server:
            server.settimeout(DEADLINE_S)
            server.accept()[0].close()
    job.signal(signal.SIGINT)
    assert job.end() == 130


def test_what_this_host_would_start_can_be_looked_at(host):
    job = host(1, PAUSE, "--dry_run", slots=2, env={"TFDIST_RENDEZVOUS_TOKEN": TOKEN})
    assert job.end() == 0
    assert re.findall("# (worker-.)", job.text) == ["worker-2", "worker-3"]
    assert "host 127.0.0.2 (rank 1 of 2)" in job.text
    assert TOKEN not in job.text
