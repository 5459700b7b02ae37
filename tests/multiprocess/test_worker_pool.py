"""Workers of a ps job come late, die, stay away and return; the others go on."""

import json
import os
import re
import threading

import pytest

from tests import forked_python
from tests.multiprocess.trainings import PROGRAMS, launch
from tests.processes import until
from tests.tools.ledger import prove
from tfdist.cluster import ClusterSpec, JobOptions, Task, TaskConfig, encode, hold_ports

pytestmark = pytest.mark.slow

PROGRAM = PROGRAMS / "worker_pool.py"
DEADLINE_S = 500


class Job:
    """A ps job of three workers without a launcher, so that any task can be absent."""

    def __init__(self, logs, **options):
        self.ports = hold_ports(5)
        chief, ps, *workers = (port.address for port in self.ports)
        self.cluster = ClusterSpec(chief=(chief,), ps=(ps,), worker=tuple(workers))
        self.options = JobOptions(threads_per_task=1, **options)
        self.logs = logs
        self.tasks = {}
        reads, to_chief = os.pipe()
        from_chief, writes = os.pipe()
        self.stdio_of_chief = {"stdin": reads, "stdout": writes}
        self.to_chief, self.from_chief = os.fdopen(to_chief, "w"), os.fdopen(from_chief)

    def start(self, *tasks):
        for task in tasks:
            config = TaskConfig(cluster=self.cluster, task=task, options=self.options)
            env = {**os.environ, "TF_CONFIG": encode(config), "CUDA_VISIBLE_DEVICES": "-1"}
            env |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "6"}
            files = self.stdio_of_chief if task == CHIEF else {}
            with (self.logs / f"{task}.log").open("ab") as log:
                program = forked_python.Program(str(PROGRAM), env=env, stderr=log, **files)
            for fd in files.values():
                os.close(fd)
            self.tasks[task] = program

    def kill(self, *tasks):
        for task in tasks:
            self.tasks[task].kill()
            self.tasks[task].wait()

    def ask(self, seconds):
        """Has the chief hand out work for so long."""
        print(seconds, file=self.to_chief, flush=True)

    def work(self, seconds):
        """Returns asked, applied, losses, and the pieces of each worker."""
        self.ask(seconds)
        for line in self.from_chief:
            if line.startswith("did "):
                asked, applied, losses, *pieces = map(int, line.split()[1:])
                return asked, applied, losses, pieces
        raise AssertionError(f"the chief ended with {self.tasks[CHIEF].wait()}")

    def end(self):
        self.kill(*self.tasks)

    def close(self):
        self.to_chief.close()
        self.from_chief.close()


CHIEF, PS = Task("chief", 0), Task("ps", 0)
ZERO, ONE, TWO = (Task("worker", i) for i in range(3))


@pytest.fixture
def job(tmp_path):
    jobs = []

    def make(**options):
        jobs.append(Job(tmp_path, **options))
        return jobs[-1]

    late = threading.Timer(DEADLINE_S, lambda: [made.end() for made in jobs])
    late.start()
    yield make
    timely = late.is_alive()
    late.cancel()
    for made in jobs:
        made.end()
        made.close()
    logs = "\n".join(f"{log.name}:\n{log.read_text()}" for log in tmp_path.glob("*.log"))
    print(logs)
    assert timely, f"not done in {DEADLINE_S} s"


@pytest.mark.timeout(DEADLINE_S + 60)
def test_work_goes_on_while_one_worker_lives_and_ends_with_a_line_without_any(job, tmp_path):
    job = job(startup_timeout_s=30.0, min_workers=2)
    job.start(PS, ZERO, TWO, CHIEF)  # worker 1 is late
    asked, applied, losses, (zero, one, two) = job.work(1)
    assert (applied, losses, one) == (asked, 0, 0)
    assert min(zero, two) > 0

    job.start(ONE)
    until(lambda: job.work(1)[3][1] > 0, within_s=DEADLINE_S)  # the late worker gets work

    killing = threading.Timer(0.5, job.kill, [ZERO, ONE])
    killing.start()
    asked, applied, losses, (_, _, two) = job.work(2)
    killing.join()
    assert losses <= 2
    assert asked <= applied <= asked + 10 * losses
    assert two
    asked, applied, _, pieces = job.work(1)  # worker 0 is gone for good
    assert applied == asked
    assert pieces[:2] == [0, 0]

    job.start(ONE)
    until(lambda: job.work(1)[3][1] > 0, within_s=DEADLINE_S)  # and the one that returned
    job.kill(TWO)
    asked, _, losses, pieces = job.work(1)
    assert pieces[0] == pieces[2] == 0
    assert pieces[1] * 10 == asked

    job.kill(ONE)
    job.ask(5)
    assert job.tasks[CHIEF].wait(DEADLINE_S) == 75
    assert "no worker answered for 8 s" in (tmp_path / "chief-0.log").read_text()


def test_a_worker_that_does_not_do_its_piece_is_named_and_its_piece_done_by_another(tmp_path):
    run_dir = tmp_path / "run"
    command = ("--strategy=ps", "--workers=2", "--ps=1", "--hang_timeout_s=6")
    said = launch(run_dir, *command, str(PROGRAMS / "owing.py"), timeout_s=DEADLINE_S)
    (failure,) = json.loads((run_dir / "report.json").read_text())["attempts"][-1]["lost"]
    assert failure["task"] == "worker-1"
    assert re.match(r"hangs: its work unit is unfinished after \d+ s", failure["cause"])
    assert "units done: 100" in said


@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_end_of_a_ps_ends_the_chief_with_its_name(job, tmp_path):
    job = job(startup_timeout_s=150.0)
    job.start(PS, ZERO, ONE, TWO, CHIEF)
    job.work(1)
    threading.Timer(1.0, lambda: job.kill(PS)).start()
    job.ask(20)
    assert job.tasks[CHIEF].wait(DEADLINE_S) == 75
    assert "lost ps-0: it does not answer" in (tmp_path / "chief-0.log").read_text()


def test_a_step_that_two_workers_began_is_counted(tmp_path):
    words = ["--strategy=ps", "--workers=2", "--ps=1", str(PROGRAMS / "twice.py")]
    launch(tmp_path / "run", *words, str(tmp_path / "ledger"), timeout_s=DEADLINE_S)
    problems = prove(tmp_path / "ledger")
    assert "step 0: begun 2 times" in problems
    assert {problem.partition(":")[2] for problem in problems} == {" begun 2 times"}
