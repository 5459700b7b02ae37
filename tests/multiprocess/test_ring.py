"""Gradients by the ring: the bits of TensorFlow's own, and a name for who has gone."""

import json
import os
import re
import signal

from tests import forked_python
from tests.multiprocess.trainings import PROGRAMS, ended, launch
from tfdist.cluster import ClusterSpec, Task, TaskConfig, encode, hold_ports
from tfdist.errors import EXIT_PEER_MISSING, EXIT_USAGE

PROGRAM = PROGRAMS / "ring.py"
DEADLINE_S = 250
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}


def test_two_workers_get_the_bits_that_tensorflows_ring_gives_them(tmp_path):
    seen = {}
    for how in ("ring", "collectives"):
        flags = ("--strategy", "multiworker", "--workers", "2")
        launch(tmp_path / how, *flags, str(PROGRAM), str(tmp_path), how, timeout_s=DEADLINE_S)
        files = [tmp_path / f"{how}-worker-{i}.json" for i in range(2)]
        seen[how] = [json.loads(file.read_text()) for file in files]
    assert [task["by ring"] for task in seen["ring"]] == [True, True]
    assert [task["by ring"] for task in seen["collectives"]] == [False, False]
    assert len({task["sha"] for tasks in seen.values() for task in tasks}) == 1
    assert [task["broadcasts"] for task in seen["ring"]] == [0, 0]
    assert all(task["broadcasts"] for task in seen["collectives"])


def test_workers_that_take_different_branches_end_with_what_each_of_them_sums(tmp_path):
    flags = ("--strategy=multiworker", "--workers=2", "--max_restarts=3")
    words = (*flags, str(PROGRAM), str(tmp_path), "differs")
    code, said = ended(tmp_path / "run", *words, timeout_s=DEADLINE_S)
    assert code == EXIT_USAGE, said
    place = r"sum (\d+) of the run, place (\d) of a step \[\('float32', \(3,\)\)\]"
    told = rf"sums over the workers: worker-\d runs {place}, but worker-\d runs {place}. Fix: "
    found = re.search(told, said)
    assert found, said
    assert found[1] == found[3]
    assert sorted((found[2], found[4])) == ["1", "2"]
    assert "not restarting: exit code 2 is a mistake" in said


def test_a_worker_that_dies_is_named_by_its_neighbour_without_a_launcher_too(tmp_path):
    ports = hold_ports(2)
    cluster = ClusterSpec(worker=tuple(port.address for port in ports))
    tasks, logs = [], [tmp_path / f"{index}.log" for index in range(2)]
    for index, log in enumerate(logs):
        config = encode(TaskConfig(cluster=cluster, task=Task("worker", index)))
        env = {**os.environ, **THREADS, "TF_CONFIG": config}
        with log.open("w") as file:
            task = forked_python.Program(str(PROGRAM), str(tmp_path), "dies", env=env, stderr=file)
        tasks.append(task)
    try:
        codes = [task.wait(DEADLINE_S) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
        said = [log.read_text() for log in logs]
        print(*said)
    assert codes == [EXIT_PEER_MISSING, -signal.SIGKILL]
    (line,) = [text for text in said[0].splitlines() if text.startswith("tfdist: ")]
    assert line.startswith(f"tfdist: worker-0: lost worker-1 ({ports[1].address}): ")
