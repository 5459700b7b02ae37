"""Jobs on two hosts, which are two addresses of this machine, without TensorFlow."""

import json
import os
import re
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.multiprocess.jobs import DEADLINE_S, PAUSE, ROOT, STARTS, children, report
from tests.multiprocess.test_live import SOURCE as PHASES
from tests.multiprocess.test_live import metrics_with
from tfdist.cluster import hold_ports
from tfdist.errors import EXIT_PEER_MISSING, EXIT_USAGE
from tfdist.report.run_records import read_run

HOSTS = ("127.0.0.1", "127.0.0.2")
TELL = """
import json, os, sys
told = json.loads(os.environ["TF_CONFIG"])
os.write(1, b"told %s\\n" % json.dumps(told).encode())
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
def job(launch):
    """Starts a job on two hosts, of which the second one has an agent."""

    def start(source, *flags, slots=1, rsh=None, **more):
        hosts = ",".join(f"{name}:{slots}" for name in HOSTS)
        usual = {"--hosts": hosts, "--on": "local"}
        if rsh is not None:
            usual |= {"--on": "ssh", "--rsh": rsh}
        words = [word for flag in usual if flag not in flags for word in (flag, usual[flag])]
        return launch(source, *words, "--run_dir", "run", *flags, **more)

    return start


def agent_of(job):
    """Returns the process id of the agent, once it runs."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        for pid, line in children(job.process.pid).items():
            if "bootstrap.py\0agent" in line and line.startswith(sys.executable):
                return pid
    raise AssertionError("no agent")


@STARTS
def test_an_agent_starts_its_hosts_tasks_of_one_cluster(job, command, tmp_path):
    (tmp_path / "site").mkdir()  # with a disk that is busy
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, time; os.fsync = lambda fd: time.sleep(9)"
    )
    env = {"OWN": "x", "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"}
    env |= {"KERAS_THIS": "k", "NOT_PASSED": "no"}
    running = job(TELL, "--env", "OWN", slots=2, env=env, command=command)
    assert running.end() == 0
    told = [json.loads(line) for line in re.findall("told (.*)", running.text)]
    assert sorted(config["task"]["index"] for config in told) == [0, 1, 2, 3]
    assert len({json.dumps(config["cluster"]) for config in told}) == 1
    addresses = told[0]["cluster"]["worker"]
    assert [address.partition(":")[0] for address in addresses] == [*HOSTS[:1] * 2, *HOSTS[1:] * 2]
    assert "2 hosts, all with tfdist " in running.text
    assert re.search(r"keras \S+: 127\.0\.0\.1 at \S+, 127\.0\.0\.2 at", running.text)
    tasks = report("run")["attempts"][0]["tasks"]
    assert [task["host"] for task in tasks] == [*HOSTS[:1] * 2, *HOSTS[1:] * 2]
    assert all(task["exit_code"] == 0 for task in tasks)
    logs = {path.name for path in (tmp_path / "run/logs/attempt-1").glob("worker-*.log")}
    assert len(logs) == 4


def test_remote_shells_get_named_variables_and_may_print(job, tmp_path):
    """It prints a banner, and starts with another environment, as sshd does."""
    shell = tmp_path / "shell"
    shell.write_text(
        "#!/bin/sh\necho Welcome to $1; echo '{}'; echo motd >&2; "
        'exec env -i PATH=$PATH HOME=$HOME sh -c "$2"\n'
    )
    shell.chmod(0o755)
    names = ("OWN", "ALSO", "KERAS_THIS", "NOT_PASSED")
    seen = f"print('seen', *map(os.environ.get, {names}))"
    env = {"OWN": "x", "ALSO": "y", "KERAS_THIS": "k", "NOT_PASSED": "no"}
    running = job(
        INDEX + "import os\nif index: " + seen, "--env", "OWN", "--env=ALSO",
        rsh=f"{shell} {{host}}", env=env,
    )  # fmt: skip
    assert running.end() == 0
    assert "seen x y k None" in running.text
    assert "Welcome" not in running.text


def test_files_of_the_program_replace_no_module_of_an_agent(job, tmp_path):
    (tmp_path / "secrets.py").write_text("KEY = 'mine'")
    running = job(INDEX + "import secrets; print(secrets.KEY, index)")
    assert running.end() == 0
    assert all(f"mine {index}" in running.text for index in (0, 1))


def test_a_second_launcher_leaves_the_agents_of_a_job_alone(job):
    running = job(PAUSE, "--grace_s", "1")
    running.ready(2)
    other = job(PAUSE, "--grace_s", "1")
    assert other.end() == EXIT_USAGE
    assert "another job is running in" in other.text
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    assert "lost host" not in running.text


def test_the_launcher_shows_the_tasks_of_all_hosts(job):
    (held,) = hold_ports(1)
    running = job(PHASES, f"--metrics_port={held.port}")
    running.ready(2)
    metrics_with(held.port, f'tfdist_step{{host="{HOSTS[1]}",task="worker-1"}} 8.0')
    task, at = 'task="worker-0"', f'host="{HOSTS[0]}"'
    text = metrics_with(held.port, f'tfdist_task_phase{{{at},phase="step",{task}}} 1.0')
    assert f"tfdist_memory_bytes{{{at},{task}}}" in text
    assert f'tfdist_memory_bytes{{host="{HOSTS[1]}",task="worker-1"}}' not in text
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    (attempt,) = read_run(Path("run")).attempts
    assert {span.task: span.host for span in attempt.tasks} == {
        **{"worker-0": HOSTS[0], "worker-1": HOSTS[1]}
    }
    assert set(attempt.history) == {"worker-0", "worker-1"}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_host_ends_the_whole_job(job, failing):
    source = INDEX + f"if index == {failing}: print('about to'); raise ValueError('boom')\n" + PAUSE
    running = job(source)
    assert running.end() == 1
    said = f"worker-{failing} on {HOSTS[failing]} failed first: ValueError: boom"
    assert running.text.count(said) == 1
    failure = report("run")["attempts"][0]["first_failure"]
    assert (failure["task"], failure["host"]) == (f"worker-{failing}", HOSTS[failing])
    assert "about to" in failure["last_lines"]


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)], ids=["launcher", "agent", "both"])
def test_a_signal_to_any_host_stops_the_whole_job(job, asked):
    running = job(SAVE)
    running.ready(2)
    agent = agent_of(running)
    for rank in asked:  # as a scheduler does it, to all at once
        os.kill((running.process.pid, agent)[rank], signal.SIGTERM)
    assert running.end() == 143
    assert running.text.count("saved") == 2
    assert report("run")["exit_code"] == 143
    running.assert_gone()


STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
HOLDS = "import ctypes; [ctypes.PyDLL(None).sleep(600) for _ in range(9)]"  # with Python's lock


@pytest.mark.parametrize(
    ("what", "cause"), [(STOPS, "is stopped"), (HOLDS, "no heartbeat")], ids=["stopped", "silent"]
)
def test_a_task_that_hangs_on_another_host_is_found(job, what, cause):
    source = INDEX + f"import signal, time\ntime.sleep(5)\nif index: {what}\nelse: {PAUSE}"
    running = job(source, "--hang_timeout_s", "3", "--startup_timeout_s", "10", "--grace_s", "1")
    assert running.end() == 1
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
    [
        (signal.SIGKILL, "the agent or its remote shell was killed by signal 9"),
        (signal.SIGSTOP, "no message for 8 s"),
    ],
    ids=["killed", "silent"],
)
def test_a_lost_agent_is_a_failure_of_its_host(job, signum, why):
    running = job(PAUSE)
    running.ready(2)
    began_s = time.monotonic()
    agent = agent_of(running)
    os.kill(agent, signum)
    running.read_until("lost host")
    assert time.monotonic() - began_s < 10  # long before its task would be missed
    assert running.end() == EXIT_PEER_MISSING
    assert f"worker-1 on 127.0.0.2 failed first: lost host 127.0.0.2: {why}" in running.text
    assert report("run")["attempts"][0]["first_failure"]["host"] == HOSTS[1]
    running.assert_gone()


@pytest.mark.parametrize("flags", [(), ("--max_restarts", "3")], ids=["once", "restarts"])
def test_orphaned_tasks_have_the_whole_grace_to_save(job, flags):
    slow = SAVE.replace("    print('saved'", "    import time; time.sleep(3)\n    print('saved'")
    running = job(slow, *flags)
    running.ready(2)
    agent = agent_of(running)  # which writes the log, and ends after its task
    running.pidfds[agent] = os.pidfd_open(agent)
    running.process.kill()
    running.end()
    running.assert_gone()
    assert Path("run/logs/attempt-1/worker-1.log").read_text().endswith("saved\n")


RESUMES = ATTEMPT + "if attempt == 1: " + PAUSE + "\nprint('attempt', attempt, index)\n"


def test_the_host_of_a_killed_agent_rejoins(job):
    running = job(RESUMES, "--max_restarts", "1")
    running.ready(2)
    os.kill(agent_of(running), signal.SIGKILL)
    assert running.end() == 0
    assert "attempt 2 1" in running.text
    attempts = report("run")["attempts"]
    assert [attempt["exit_code"] for attempt in attempts] == [75, 0]
    assert len(attempts[1]["tasks"]) == 2
    running.assert_gone()


def test_a_new_agent_waits_for_old_tasks_then_kills(job):
    """So no two tasks write to one run directory."""
    writes = (
        ATTEMPT + "import os, pathlib, time\nsteps = pathlib.Path(f'steps-{index}')\n"
        "os.write(1, b'ready %d\\n' % os.getpid())\n"
        "deadline = time.monotonic() + (600 if attempt == 1 else 1)\n"
        "while time.monotonic() < deadline:\n"
        "    with steps.open('a') as file: file.write(f'{attempt}\\n')\n"
        "    time.sleep(0.01)\n"
    )
    running = job(writes, "--max_restarts", "1", "--grace_s", "2")
    running.ready(2)
    os.kill(agent_of(running), signal.SIGSTOP)
    assert running.end() == 0
    written = Path("steps-1").read_text().split()
    assert written == sorted(written)
    assert {*written} == {"1", "2"}


# Shells of hosts that do not come back, or do not come at all.


@pytest.fixture
def shell(tmp_path):
    """Writes a remote shell that does something else at its second start and after."""

    def write(later=None, first='exec sh -c "$1"'):
        later = later or first
        path = tmp_path / "shell"
        path.write_text(f"#!/bin/sh\nif [ -e came ]; then {later}; else touch came; {first}; fi\n")
        path.chmod(0o755)
        return f"env HOST={{host}} {path}"

    return write


UNREACHABLE = "ssh: connect to host b port 22: No route to host"


def test_with_min_workers_the_job_continues_without_a_host(job, shell):
    rsh = shell(f"echo '{UNREACHABLE}' >&2; exit 255")
    flags = ("--min_workers", "1", "--startup_timeout_s", "3", "--max_restarts", "1")
    running = job(RESUMES, *flags, rsh=rsh)
    running.ready(2)
    os.kill(agent_of(running), signal.SIGKILL)
    assert running.end() == 0
    assert "continuing without 127.0.0.2 (rank 1), with 1 worker" in running.text
    assert "attempt 2 0" in running.text
    assert [task["task"] for task in report("run")["attempts"][1]["tasks"]] == ["worker-0"]


def test_a_host_that_does_not_return_ends_the_job(job, shell):
    rsh = shell(f"echo '{UNREACHABLE}' >&2; exit 255")
    running = job(RESUMES, "--max_restarts", "1", "--startup_timeout_s", "3", rsh=rsh)
    running.ready(2)
    os.kill(agent_of(running), signal.SIGKILL)
    assert running.end() == EXIT_PEER_MISSING
    assert "not restarting: 1 of 2 hosts connected within 3 s, without 127.0.0.2" in running.text
    assert f"(127.0.0.2: {UNREACHABLE})" in running.text


def lines(job):
    return job.text.strip().splitlines()


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        ("sleep 60", EXIT_PEER_MISSING, r"1 of 2 hosts connected within 2 s, without 127.0.0.2"),
        (f"echo '{UNREACHABLE}'; exit 255", EXIT_PEER_MISSING, rf"1 of 2 .*: {UNREACHABLE}\)"),
        ("echo Host key verification failed.; exit 255", EXIT_USAGE, r"2: .*Host key .* a pass"),
        ("echo 'a@b: Permission denied (publickey,password).'; exit 255", EXIT_USAGE,
         r"2: .*Permission .* a pass"),
        ("echo ssh: Could not resolve hostname b; exit 255", EXIT_USAGE, r"2: .*hostname b"),
        ("exec sh -c 'exec /no/python x'", EXIT_USAGE, r"127.0.0.2: .*same path"),
        ("exit 3", EXIT_USAGE, r"127.0.0.2: .*exited with code 3"),
    ],
    ids=["silent", "no route", "host key", "password", "name", "python", "other"],
)  # fmt: skip
def test_a_failed_agent_start_is_a_one_line_error(job, shell, does, code, said):
    running = job(PAUSE, "--startup_timeout_s", "2", rsh=shell(first=f"({does}) >&2"))
    assert running.end() == code
    assert re.search(said, lines(running)[-1]), running.text
    assert len(lines(running)) == 1 + (UNREACHABLE in does)
    assert not os.path.exists("run")


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (
            "KERAS_BACKEND=jax",
            "host: KERAS_BACKEND jax there, not set here",
        ),
        ("PYTHONPATH={site}", f"keras 9.9.9 there, {version('keras')} here"),
    ],
    ids=["variable", "version"],
)
def test_a_difference_between_hosts_is_named_before_start(job, shell, does, said, tmp_path):
    metadata = tmp_path / "other" / "keras-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 9.9.9\n")
    does = does.format(site=tmp_path / "other")
    running = job(PAUSE, rsh=shell(first=f'exec env {does} sh -c "$1"'))
    assert running.end() == EXIT_USAGE
    (line,) = lines(running)
    assert said in line
    assert not os.path.exists("run")


def test_an_unshared_run_directory_is_a_one_line_error(job, shell, tmp_path):
    """The other host has another directory at its path."""
    rsh = shell(first=f'exec unshare -rm sh -c "mount -t tmpfs none {tmp_path}/run; $1"')
    (tmp_path / "run").mkdir()
    running = job(PAUSE, "--max_restarts", "1", rsh=rsh)
    assert running.end() == EXIT_USAGE
    said = f"worker-1 on 127.0.0.2 failed first: {tmp_path}/run is not shared"
    assert sum(said in line for line in lines(running)) == 1
