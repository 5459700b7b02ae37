"""The ledger's files and what they prove, without a run."""

import contextlib
import dataclasses
import itertools
import json
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processes import python
from tests.refusals import refusal
from tfdist import ledger as program
from tfdist.audit.ledger import (
    Header,
    LedgerWriter,
    Record,
    first_examples,
    next_attempt,
    pair_hash,
    prove,
    read_directory,
    read_file,
    to_bytes,
)
from tfdist.errors import TfdistError

N, BATCH = 20, 6
EARLIER = Path(__file__).parent / "data" / "run" / "ledger"
MODES = st.sampled_from(["full", "hash"])
OF_WORKER_1 = "attempt-1-worker-1.bin"


def order(header, positions):
    """A permutation of each pass, without TensorFlow."""
    passes, offsets = np.divmod(positions, header.num_examples)
    orders = {p: np.random.RandomState(p).permutation(header.num_examples) for p in set(passes)}
    return np.array([orders[p][o] for p, o in zip(passes, offsets, strict=True)], np.int64)


def header(**changes):
    values = {
        "mode": "full", "attempt": 1, "task": "worker-0", "num_tasks": 1, "strategy": "single",
        "num_replicas": 1, "threads": 0, "num_examples": N, "shuffle": True, "seed": 7,
        "global_batch_size": BATCH, "example_starts": (0, 25, 50),
    }  # fmt: skip
    return Header(**{**values, **changes})


def record_of(head, first, last, *, task=0, change=None, **about):
    """What a task records of a range; `change` is a step, and what it does to its rows."""
    firsts, width = first_examples(head.plan), -(-head.global_batch_size // head.num_tasks)
    indices = np.full((last - first, 1, width), -1, np.int64)
    passes = indices.copy()
    for row, step in enumerate(range(first, last)):
        size = firsts[step + 1] - firsts[step]
        low, high = (part * size // head.num_tasks for part in (task, task + 1))
        positions = firsts[step] + np.arange(low, high)
        indices[row, 0, : high - low] = order(head, positions)
        passes[row, 0, : high - low] = positions // head.num_examples
        if change and step == change[0] and task == 0:
            change[1](indices[row, 0], passes[row, 0])
    if head.mode == "hash":
        arrays = sums(indices, passes)
    else:
        arrays = indices, passes, np.arange(first, last).astype(np.uint64)
    return Record(first=first, last=last, payload=to_bytes(arrays), **about)


def sums(indices, passes):
    there = indices >= 0
    lowest = np.where(there, passes, 2**62).min(axis=(1, 2))
    mine = [there & (passes == (lowest + more)[:, None, None]) for more in (0, 1)]
    hashes = pair_hash(indices, passes)
    totals = [np.where(one, hashes, np.uint64(0)).sum((1, 2), np.uint64) for one in mine]
    return lowest, np.stack([one.sum((1, 2)) for one in mine], 1), np.stack(totals, 1)


def write(directory, ranges=((0, 10),), *, tasks=1, change=None, begun=1, **head):
    for task in range(tasks):
        of_task = {"task": f"worker-{task}", "num_tasks": tasks, "num_replicas": tasks}
        mine = header(**{**of_task, **head})
        writer = LedgerWriter(directory, mine)
        for span in ranges:
            writer.append(record_of(mine, *span, task=task, change=change, begun=begun, worker=3))
        writer.close()


def cut(path):
    """Cut the end off, as a kill does."""
    path.write_bytes(path.read_bytes()[:-3])


def proof_of(directory):
    return prove(read_directory(directory), order=order)


@settings(max_examples=60)
@given(data=st.data())
def test_however_it_is_cut_and_resumed_a_right_run_is_proved(tmp_path_factory, data):
    """Attempts of any number of tasks, resumed anywhere before where the last one stopped."""
    directory = tmp_path_factory.mktemp("ledger")
    start = 0
    for attempt in range(1, data.draw(st.integers(1, 5)) + 1):
        last = data.draw(st.integers(start + 1, 10))
        cuts = sorted({start, last, *data.draw(st.sets(st.integers(start, last), max_size=3))})
        tasks, mode = data.draw(st.integers(1, 4)), data.draw(MODES)
        write(directory, list(itertools.pairwise(cuts)), tasks=tasks, mode=mode, attempt=attempt)
        start = data.draw(st.integers(0, min(last, 9)))
    proof = proof_of(directory)
    assert proof.proved, proof
    attempts = proof.ledger.attempts
    assert proof.ledger.end == attempts[-1].last
    # What a later attempt did again is void: each step counts once.
    assert sum(a.last - a.first - a.void_steps for a in attempts) == proof.ledger.end


@settings(max_examples=60)
@given(mode=MODES, step=st.integers(0, 9), tasks=st.integers(1, 3), other=st.integers(0, N - 1))
def test_one_example_for_another_is_found(tmp_path_factory, mode, step, tasks, other):
    directory = tmp_path_factory.mktemp("ledger")
    was = []

    def swap(indices, passes):
        if indices[0] >= 0:
            was.append((int(indices[0]), int(passes[0])))
            indices[0] = other

    write(directory, [(0, 10)], tasks=tasks, mode=mode, change=(step, swap))
    proof = proof_of(directory)
    if not was or was[0][0] == other:
        assert proof.proved
        return
    (wrong,) = [part for part in proof.passes if not part.proved]
    assert wrong.number == was[0][1]
    if mode == "full":
        assert (wrong.first_missed, wrong.first_repeated) == ((was[0][0],), (other,))
    else:
        assert step in wrong.steps


@settings(max_examples=80)
@given(at=st.integers(0, 3000), mode=MODES)
def test_a_file_cut_anywhere_keeps_its_whole_records(tmp_path_factory, at, mode):
    directory = tmp_path_factory.mktemp("ledger")
    write(directory, [(0, 3), (3, 4), (4, 10)], mode=mode)
    (path,) = directory.iterdir()
    whole = path.read_bytes()
    records = read_file(path).records
    ends = [whole.index(record.payload) + len(record.payload) for record in records]
    at = min(at, len(whole))
    path.write_bytes(whole[:at])
    file = read_file(path)
    if at <= whole.index(b"\n"):
        assert file is None
        return
    assert file.records == records[: sum(end <= at for end in ends)]
    assert not file.damaged
    write(directory, [(3 if at >= ends[0] else 0, 10)], mode=mode, attempt=2)
    assert proof_of(directory).proved


@settings(max_examples=300)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), mode=MODES)
def test_whatever_bit_is_changed_nothing_is_proved(tmp_path_factory, at, bit, mode):
    directory = tmp_path_factory.mktemp("ledger")
    write(directory, [(0, 3), (3, 10)], mode=mode)
    (path,) = directory.iterdir()
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with contextlib.suppress(TfdistError):
        assert not proof_of(directory).proved


@settings(max_examples=50)
@given(low=st.integers(-1, 2**40), steps=st.integers(0, 5))
def test_a_record_reads_back_as_it_was_written(tmp_path_factory, low, steps):
    directory = tmp_path_factory.mktemp("ledger")
    most = np.full(steps, 2**64 - 1, np.uint64)
    arrays = (np.full((steps, 2, 3), low), np.arange(steps), most)
    record = Record(first=3, last=3 + steps, worker=2, begun=4, payload=to_bytes(arrays))
    writer = LedgerWriter(directory, header())
    writer.append(record)
    writer.close()
    (file,) = read_directory(directory)
    assert file.records == (record,)
    assert [a.tolist() for a in file.records[0].arrays] == [a.tolist() for a in arrays]


def test_the_format_is_that_of_every_version(tmp_path):
    (file,) = read_directory(EARLIER)
    assert prove([file], order=order).proved
    writer = LedgerWriter(tmp_path, file.header)
    for record in file.records:
        writer.append(dataclasses.replace(record, payload=to_bytes(record.arrays)))
    writer.close()
    assert (tmp_path / file.path.name).read_bytes() == file.path.read_bytes()


def test_passes_beyond_the_127th_are_proved_by_their_hashes(tmp_path):
    """A record that ends inside the step in which pass 128 begins: 127 is the most of an int8."""
    longer = {"example_starts": (0, 140 * N)}
    into = int(np.searchsorted(first_examples(header(**longer).plan), 128 * N))
    write(tmp_path, [(0, into), (into, -(-140 * N // BATCH))], mode="hash", **longer)
    proof = proof_of(tmp_path)
    assert proof.proved, proof.problems
    assert len(proof.passes) == 140


def test_a_run_that_was_made_longer_is_one_run(tmp_path):
    write(tmp_path, [(0, 10)], attempt=1)
    write(tmp_path, [(10, 15)], attempt=2, example_starts=(0, 25, 50, 75))
    assert proof_of(tmp_path).proved


# What does not prove anything, and what is said of it.


def flip(path):
    """Change a bit of the last record."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


HALVES = [(0, 5), (5, 10)]
ALL_OF_ONE = (0, lambda indices, passes: indices.fill(3))
AGAIN = {"ranges": [(5, 10)], "attempt": 2}


@pytest.mark.parametrize(
    ("writes", "then", "says"),
    [
        ([{"change": ALL_OF_ONE}], None, ["; 1 repeated: 3; 6 missed: 1, 8", "virtual epoch 1: "]),
        ([{"ranges": [(0, 4)]}, AGAIN], None, ["steps 4: in no attempt"]),
        ([{"ranges": HALVES, "tasks": 3}], Path.unlink, ["2 of 3 tasks have a file: worker-0, "]),
        (
            [{"ranges": [(0, 3), (3, 8)], "tasks": 2}, {"ranges": [(8, 10)], "attempt": 2}],
            cut,
            ["steps 3 to 7: not recorded by worker-1 in attempt 1"],
        ),
        (
            [{"ranges": [(0, 5)]}, {**AGAIN, "begun": 2}],
            None,
            ["steps 5 to 9: handed out 2 times (last by worker-3)"],
        ),
        ([{"ranges": HALVES, "tasks": 2}], flip, [f"{OF_WORKER_1}: damaged from byte"]),
        ([{"ranges": [(0, 5)]}, {**AGAIN, "seed": 8}], None, ["attempts 1 and 2 are not", "seed"]),
        (
            [{"num_tasks": 2}, {"num_tasks": 2, "task": "worker-1", "seed": 8}],
            None,
            ["worker-0 and worker-1 of attempt 1", "differ in seed"],
        ),
        ([{"ranges": [(0, 1)], "num_tasks": 2}], None, ["no step is recorded"]),
        ([{}], Path.mkdir, [f"{OF_WORKER_1}: Is a directory"]),
    ],
)
def test_what_is_not_proved_is_said(writes, then, says, tmp_path, capsys):
    for one in writes:
        write(tmp_path / "ledger", **one)
    if then:
        then(tmp_path / "ledger" / OF_WORKER_1)
    assert program.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out.endswith("NOT proved: see above\n") or err.count("\n") == 1
    assert [line for line in says if line not in out + err] == []


def test_what_is_no_ledger_is_refused(tmp_path, capsys):
    assert program.main([str(tmp_path)]) == 2
    (tmp_path / OF_WORKER_1).write_bytes(b"{}\n")
    assert refusal(lambda: read_directory(tmp_path)).code == "other-format"
    assert "received no ledger" in capsys.readouterr().err


def test_a_range_in_flight_when_all_ended_does_not_count(tmp_path, capsys):
    write(tmp_path / "ledger", [(0, 5), (5, 10)], tasks=2)
    cut(tmp_path / "ledger" / OF_WORKER_1)
    proof = proof_of(tmp_path / "ledger")
    assert proof.proved, proof
    assert proof.ledger.end == 5
    (tmp_path / "summary.json").write_text('{"steps": 10}')
    assert program.main([str(tmp_path)]) == 1
    assert "steps 5 to 9: done and not recorded" in capsys.readouterr().out


@pytest.mark.parametrize("left", ["no file", "nothing", "a first line"])
def test_a_task_that_could_write_nothing_takes_the_range_of_its_peers_back(tmp_path, left):
    """It was killed, or its disk was full, when the second attempt had begun."""
    write(tmp_path, [(0, 6)], tasks=2)
    write(tmp_path, [(4, 8)], tasks=2, attempt=2)
    path = tmp_path / "attempt-2-worker-1.bin"
    path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\n" if left[0] == "a" else b"")
    if left == "no file":
        path.unlink()
    proof = proof_of(tmp_path)
    assert proof.proved, proof.problems
    assert proof.ledger.end == 4


@contextlib.contextmanager
def room_for(size_bytes):
    """Lets no file grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("before", "room"), [(0, 0), (0, 100), (4, 9)])
def test_a_disk_that_is_full_is_told_once_and_what_was_whole_stays(tmp_path, before, room):
    writer = LedgerWriter(tmp_path, header())
    if before:
        writer.append(record_of(header(), 0, before))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    with room_for(size + room):
        with pytest.raises(TfdistError, match=r"attempt-1-worker-0\.bin: File too large"):
            writer.append(record_of(header(), before, 10))
        writer.close()  # says nothing more
    write(tmp_path, [(before, 10)], attempt=2)
    assert proof_of(tmp_path).proved


def test_attempts_are_numbered_by_their_files_which_are_never_written_over(tmp_path):
    assert next_attempt(tmp_path / "none") == 1
    for attempt in (9, 10):
        write(tmp_path, [(0, 1)], attempt=attempt)
    assert next_attempt(tmp_path) == 11
    with pytest.raises(TfdistError, match="File exists"):
        write(tmp_path, [(0, 1)], attempt=10)


def test_the_program_says_what_is_proved_without_tensorflow(tmp_path, capsys):
    write(tmp_path / "ledger", [(0, 7)], tasks=4, example_starts=(0, 40))
    write(tmp_path / "ledger", [(6, 7)], tasks=2, attempt=2, example_starts=(0, 40))
    run = "import sys; from tfdist.ledger import main; code = main(sys.argv[1:])"
    run += "; assert 'tensorflow' not in sys.modules; sys.exit(code)"
    done = python("-c", run, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "attempt 1: single, 4 tasks, 4 replicas, steps 0 to 6; 1 of them void" in done.stdout
    assert "passes: 2 of 2 proved" in done.stdout
    assert done.stdout.endswith("exactly once, as far as the run got\n")
    assert program.main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["proved"] is True
    assert [one["seen"] for one in told["passes"]] == [20, 20]
    assert [one["last_step"] for one in told["attempts"]] == [6, 6]


def test_two_runs_are_compared_step_by_step(tmp_path, capsys):
    def other(indices, passes):
        indices[0] += 1

    write(tmp_path / "a", [(0, 10)], tasks=4)
    write(tmp_path / "b", [(0, 4), (4, 10)], tasks=4)
    write(tmp_path / "c", [(0, 10)], tasks=4, change=(3, other))
    write(tmp_path / "d", [(0, 5), (5, 10)])
    flip(tmp_path / "d" / "attempt-1-worker-0.bin")
    for run, code, line in (
        *(("b", 0, "examples: none"), ("c", 1, "steps with other examples: 3\n")),
        ("d", 1, "attempt-1-worker-0.bin: damaged from byte"),
    ):
        assert program.main([str(tmp_path / "a"), "--same_as", str(tmp_path / run)]) == code
        assert line in capsys.readouterr().out
