"""A peer that never comes is named, and the tasks that wait for it give up in time."""

import contextlib
import os
import socket

from tests import forked_python
from tests.multiprocess.jobs import side_by_side
from tfdist.cluster import ClusterSpec, JobOptions, Task, TaskConfig, encode, hold_ports
from tfdist.errors import EXIT_OK, EXIT_PEER_MISSING, EXIT_USAGE

DEADLINE_S = 180
CASES = {
    "chief of a ps job": (Task("chief", 0), Task("worker", 1)),
    "worker of a ps job": (Task("worker", 0), Task("chief", 0)),
    "worker": (Task("worker", 0), Task("worker", 1)),  # tensorflow/tensorflow#98217
    "chief": (Task("worker", 1), Task("worker", 0)),
}


class Waiting:
    """A program that makes its strategy as a task of a cluster, without the launcher."""

    def __init__(self, cluster, task, *, startup_timeout_s, said, before="pass"):
        options = JobOptions(startup_timeout_s=startup_timeout_s)
        told = encode(TaskConfig(cluster=cluster, task=task, options=options))
        self.said = said
        with said.open("w") as file:
            program = f"import tfdist; {before}; tfdist.make_strategy()"
            env = {**os.environ, "TF_CONFIG": told}
            self.program = forked_python.Program("-c", program, env=env, stderr=file)

    def end(self):
        """Returns its exit code and what it has said; fails when it does not end."""
        try:
            return self.program.wait(DEADLINE_S), self.said.read_text()
        finally:
            self.program.kill()


def line_of(said):
    (line,) = [text for text in said.splitlines() if text.startswith("tfdist: ")]
    return line


@contextlib.contextmanager
def held(count):
    """The addresses of ports that nobody else gets."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(port).address for port in hold_ports(count)]


def who_waits_names_whom_and_gives_up(tmp_path, case):
    task, missing = CASES[case]
    with held(4) as (a, b, chief, ps):
        cluster = ClusterSpec(chief=(chief,), worker=(a, b), ps=(ps,))
        if "ps" not in case:
            cluster = ClusterSpec(worker=(a, b))
        waiting = Waiting(cluster, task, startup_timeout_s=3.0, said=tmp_path / case)
        yield
        code, said = waiting.end()
    assert code == EXIT_PEER_MISSING, (case, said)
    assert f"{missing} ({cluster.address(missing)}" in line_of(said), case
    assert "raise --startup_timeout_s" in line_of(said), case


def a_peer_that_dies_between_the_meeting_and_tensorflows_start_is_given_up_on(tmp_path):
    with held(1) as (own,):
        with socket.create_server(("127.0.0.1", 0)) as dying:
            cluster = ClusterSpec(worker=(own, f"127.0.0.1:{dying.getsockname()[1]}"))
            said = tmp_path / "said"
            task = Waiting(cluster, Task("worker", 0), startup_timeout_s=5.0, said=said)
            dying.settimeout(DEADLINE_S)
            dying.accept()[0].close()  # worker 0 has seen its peer
        yield
        code, told = task.end()
    assert code == 1, told
    assert "Timeout" in told
    assert "in make_strategy" in told


def test_a_missing_or_dying_peer_times_out(tmp_path):
    dying = a_peer_that_dies_between_the_meeting_and_tensorflows_start_is_given_up_on(tmp_path)
    side_by_side(*(who_waits_names_whom_and_gives_up(tmp_path, case) for case in CASES), dying)


def ends_with_two_versions(cluster, tmp_path):
    """How the tasks of a cluster end, of which worker 1 has another version of TensorFlow."""
    other = "import tensorflow; tensorflow.__version__ = '2.0.7'"
    tasks = {
        str(task): Waiting(
            cluster, task, startup_timeout_s=float(DEADLINE_S), said=tmp_path / str(task),
            before=other if str(task) == "worker-1" else "pass",
        )
        for task in cluster.tasks()
    }  # fmt: skip
    return {name: program.end() for name, program in tasks.items()}


def test_a_ps_job_names_the_worker_with_another_version(tmp_path):
    with held(4) as (chief, ps, *workers):
        cluster = ClusterSpec(chief=(chief,), ps=(ps,), worker=tuple(workers))
        ended = ends_with_two_versions(cluster, tmp_path)
    code, said = ended.pop("chief-0")
    assert code == EXIT_USAGE, said
    begin = f"tfdist: worker-1 ({workers[1]}): TensorFlow 2.0.7 differs from TensorFlow "
    assert line_of(said).startswith(begin)
    assert [code for code, _ in ended.values()] == [EXIT_OK] * 3, ended


def test_workers_of_two_tensorflow_versions_are_both_named(tmp_path):
    with held(2) as workers:
        ended = ends_with_two_versions(ClusterSpec(worker=tuple(workers)), tmp_path)
    assert [code for code, _ in ended.values()] == [EXIT_USAGE] * 2, ended
    line = line_of(ended["worker-0"][1])
    assert line.startswith(f"tfdist: worker-1 ({workers[1]}): TensorFlow 2.0.7 differs from T")
    assert f" in worker-0 ({workers[0]}). Fix: " in line


def test_a_peer_lost_during_a_native_wait_times_out():
    program = (
        "import ctypes; from tfdist.strategy.rendezvous import last_resort\n"
        "with last_resort(timeout_s=2.0):\n"
        "    ctypes.PyDLL(None).sleep(600)  # holds Python's lock, as TensorFlow does\n"
    )
    done = forked_python.run("-c", program, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert 'File "<string>", line 3' in done.stderr
