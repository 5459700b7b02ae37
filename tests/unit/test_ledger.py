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
from tfdist.errors import TfdistError, UsageError

N, BATCH = 20, 6
EARLIER = Path(__file__).parent / "data" / "run" / "ledger"


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
    """What task number `task` of `head.num_tasks` records of a range."""
    firsts, width = first_examples(head.plan), -(-head.global_batch_size // head.num_tasks)
    indices = np.full((last - first, 1, width), -1, np.int64)
    passes = indices.copy()
    for row, step in enumerate(range(first, last)):
        size = firsts[step + 1] - firsts[step]
        low, high = (part * size // head.num_tasks for part in (task, task + 1))
        positions = firsts[step] + np.arange(low, high)
        indices[row, 0, : high - low] = order(head, positions)
        passes[row, 0, : high - low] = positions // head.num_examples
    if change is not None:
        change(indices, passes)
    if head.mode == "hash":
        arrays = sums(indices, passes)
    else:
        arrays = indices, passes, np.arange(first, last).astype(np.uint64)
    return Record(first=first, last=last, payload=to_bytes(arrays), **about)


def sums(indices, passes):
    there = indices >= 0
    lowest = np.where(there, passes, 2**62).min(axis=(1, 2))
    hashes = pair_hash(indices, passes)
    counts, totals = [], []
    for more in range(2):
        mine = there & (passes == (lowest + more)[:, None, None])
        counts.append(mine.sum(axis=(1, 2)))
        totals.append(np.where(mine, hashes, np.uint64(0)).sum(axis=(1, 2), dtype=np.uint64))
    return lowest, np.stack(counts, 1), np.stack(totals, 1)


def write(directory, ranges_, *, tasks=1, change=None, begun=1, **head):
    for task in range(tasks):
        mine = header(task=f"worker-{task}", num_tasks=tasks, num_replicas=tasks, **head)
        writer = LedgerWriter(directory, mine)
        for first, last in ranges_:
            changed = change if change and first <= change[0] < last and task == 0 else None

            def apply(indices, passes, changed=changed, first=first):
                if changed:
                    changed[1](indices[changed[0] - first], passes[changed[0] - first])

            writer.append(record_of(mine, first, last, task=task, change=apply, begun=begun))
        writer.close()


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
        mode = data.draw(st.sampled_from(["full", "hash"]))
        tasks = data.draw(st.integers(1, 4))
        write(directory, list(itertools.pairwise(cuts)), tasks=tasks, mode=mode,
              attempt=attempt)  # fmt: skip
        start = data.draw(st.integers(0, min(last, 9)))
    proof = proof_of(directory)
    assert proof.proved, proof
    attempts = proof.ledger.attempts
    assert proof.ledger.end == attempts[-1].last
    # What a later attempt did again is void: each step counts once.
    assert sum(a.last - a.first - a.void_steps for a in attempts) == proof.ledger.end


@settings(max_examples=60)
@given(
    mode=st.sampled_from(["full", "hash"]),
    step=st.integers(0, 9),
    tasks=st.integers(1, 3),
    other=st.integers(0, N - 1),
)
def test_one_example_for_another_is_found(tmp_path_factory, mode, step, tasks, other):
    directory = tmp_path_factory.mktemp("ledger")
    was = []

    def swap(indices, passes):
        place = np.flatnonzero(indices[0] >= 0)
        if len(place):
            was.append((int(indices[0, place[0]]), int(passes[0, place[0]])))
            indices[0, place[0]] = other

    write(directory, [(0, 10)], tasks=tasks, mode=mode, change=(step, swap))
    proof = proof_of(directory)
    if not was or was[0][0] == other:
        assert proof.proved
        return
    assert not proof.proved
    (wrong,) = [part for part in proof.passes if not part.proved]
    assert wrong.number == was[0][1]
    if mode == "full":
        assert wrong.first_missed == (was[0][0],)
        assert wrong.first_repeated == (other,)
    else:
        assert step in wrong.steps


def test_repeats_are_listed_ten_and_counted(tmp_path, capsys):
    def all_of_one(indices, passes):
        indices[:] = 3

    write(tmp_path, [(0, 10)], change=(0, all_of_one))
    proof = proof_of(tmp_path)
    first = proof.passes[0]
    assert first.repeated == 1
    assert first.first_repeated == (3,)
    assert first.missed == 6 - (3 in order(header(), np.arange(6)))
    assert not proof.epochs[0].proved
    assert program.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1 repeated: 3" in out
    assert "NOT proved" in out


def test_steps_that_nobody_recorded_are_named(tmp_path):
    write(tmp_path, [(0, 4)], attempt=1)
    write(tmp_path, [(6, 10)], attempt=2)
    proof = proof_of(tmp_path)
    assert not proof.proved
    assert any("steps 4 to 5: in no attempt" in problem for problem in proof.problems)


def test_a_task_without_a_file_is_named(tmp_path):
    write(tmp_path, [(0, 5), (5, 10)], tasks=3)
    (tmp_path / "attempt-1-worker-1.bin").unlink()
    proof = proof_of(tmp_path)
    assert not proof.proved
    assert "2 of 3 tasks have a file: worker-0, worker-2" in proof.problems[0]


def test_a_task_that_recorded_less_than_its_peers_is_named(tmp_path):
    write(tmp_path, [(0, 5), (5, 8)], tasks=2)
    path = tmp_path / "attempt-1-worker-1.bin"
    path.write_bytes(path.read_bytes()[:-3])
    write(tmp_path, [(8, 10)], attempt=2)
    proof = proof_of(tmp_path)
    assert not proof.proved
    assert "steps 5 to 7: not recorded by worker-1 in attempt 1" in proof.problems


def test_a_range_in_flight_when_all_ended_does_not_count(tmp_path, capsys):
    write(tmp_path / "ledger", [(0, 5), (5, 10)], tasks=2)
    path = tmp_path / "ledger" / "attempt-1-worker-1.bin"
    path.write_bytes(path.read_bytes()[:-3])
    proof = proof_of(tmp_path / "ledger")
    assert proof.proved, proof
    assert proof.ledger.end == 5
    (tmp_path / "summary.json").write_text('{"steps": 10}')
    assert program.main([str(tmp_path)]) == 1
    assert "steps 5 to 9: done and not recorded" in capsys.readouterr().out


def test_steps_that_were_dispatched_twice_are_listed(tmp_path):
    write(tmp_path, [(0, 6)])
    again = LedgerWriter(tmp_path, header(attempt=2, strategy="ps"))
    again.append(record_of(header(), 6, 10, begun=2, worker=1))
    again.close()
    proof = proof_of(tmp_path)
    assert not proof.proved
    assert proof.problems == ("steps 6 to 9: handed out 2 times (last by worker-1)",)


def test_files_of_two_runs_are_refused(tmp_path):
    write(tmp_path, [(0, 5)], attempt=1)
    write(tmp_path, [(5, 10)], attempt=2, seed=8)
    with pytest.raises(TfdistError, match=r"attempts 1 and 2 are not of one run.*seed"):
        proof_of(tmp_path)


def test_a_run_that_was_made_longer_is_one_run(tmp_path):
    write(tmp_path, [(0, 10)], attempt=1)
    write(tmp_path, [(10, 15)], attempt=2, example_starts=(0, 25, 50, 75))
    assert proof_of(tmp_path).proved


@settings(max_examples=80)
@given(cut=st.integers(0, 3000), mode=st.sampled_from(["full", "hash"]))
def test_a_file_cut_anywhere_keeps_its_whole_records(tmp_path_factory, cut, mode):
    directory = tmp_path_factory.mktemp("ledger")
    write(directory, [(0, 3), (3, 4), (4, 10)], mode=mode)
    (path,) = directory.iterdir()
    whole = path.read_bytes()
    records = read_file(path).records
    ends = [whole.index(record.payload) + len(record.payload) for record in records]
    cut = min(cut, len(whole))
    path.write_bytes(whole[:cut])
    file = read_file(path)
    if cut <= whole.index(b"\n"):
        assert file is None
        return
    assert file.records == records[: sum(end <= cut for end in ends)]
    assert not file.damaged
    write(directory, [(3 if cut >= ends[0] else 0, 10)], mode=mode, attempt=2)
    assert proof_of(directory).proved


def test_the_format_is_that_of_every_version(tmp_path):
    (file,) = read_directory(EARLIER)
    assert prove([file], order=order).proved
    writer = LedgerWriter(tmp_path, file.header)
    for record in file.records:
        writer.append(dataclasses.replace(record, payload=to_bytes(record.arrays)))
    writer.close()
    assert (tmp_path / file.path.name).read_bytes() == file.path.read_bytes()


@settings(max_examples=50)
@given(low=st.integers(-1, 2**40), steps=st.integers(0, 5))
def test_a_record_reads_back_as_it_was_written(tmp_path_factory, low, steps):
    directory = tmp_path_factory.mktemp("ledger")
    most = np.full(steps, 2**64 - 1, np.uint64)
    arrays = (np.full((steps, 2, 3), low), np.arange(steps), most)
    record = Record(first=3, last=3 + steps, worker=2, begun=4, payload=to_bytes(arrays))
    writer = LedgerWriter(directory, header())
    writer.append(record)
    (file,) = read_directory(directory)
    (back,) = file.records
    assert back == record
    assert [a.tolist() for a in back.arrays] == [a.tolist() for a in arrays]


def test_passes_beyond_the_127th_are_proved_by_their_hashes(tmp_path):
    """A record that ends inside the step in which pass 128 begins: 127 is the most of an int8."""
    longer = {"example_starts": (0, 140 * N)}
    into = int(np.searchsorted(first_examples(header(**longer).plan), 128 * N))
    write(tmp_path, [(0, into), (into, -(-140 * N // BATCH))], mode="hash", **longer)
    proof = proof_of(tmp_path)
    assert proof.proved, proof.problems
    assert len(proof.passes) == 140


@settings(max_examples=300)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), mode=st.sampled_from(["full", "hash"]))
def test_whatever_bit_is_changed_nothing_is_proved(tmp_path_factory, at, bit, mode):
    directory = tmp_path_factory.mktemp("ledger")
    write(directory, [(0, 3), (3, 10)], mode=mode)
    (path,) = directory.iterdir()
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with contextlib.suppress(TfdistError):
        assert not proof_of(directory).proved


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


def test_a_first_range_in_flight_proves_nothing(tmp_path, capsys):
    write(tmp_path, [(0, 1)], tasks=2)
    (tmp_path / "attempt-1-worker-1.bin").unlink()
    assert program.main([str(tmp_path)]) == 1
    assert program.main([str(tmp_path), "--same_as", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == 2 * [
        "tfdist.ledger: ledger: no step is recorded"
    ]


def test_tasks_of_two_runs_in_one_attempt_are_refused(tmp_path):
    write(tmp_path / "a", [(0, 10)], tasks=2)
    write(tmp_path / "b", [(0, 10)], tasks=2, seed=8)
    name = "attempt-1-worker-1.bin"
    (tmp_path / "b" / name).replace(tmp_path / "a" / name)
    with pytest.raises(TfdistError, match=r"worker-0 and worker-1 of attempt 1.*differ in seed"):
        proof_of(tmp_path / "a")


def test_a_damaged_ledger_proves_nothing_and_is_not_the_same_as_another(tmp_path, capsys):
    for run in ("a", "b"):
        write(tmp_path / run, [(0, 5), (5, 10)])
    path = tmp_path / "b" / "attempt-1-worker-0.bin"
    data = bytearray(path.read_bytes())
    data[data.index(read_file(path).records[1].payload) + 5] ^= 1
    path.write_bytes(data)
    for arguments in ([tmp_path / "a", "--same_as", tmp_path / "b"], [tmp_path / "b"]):
        assert program.main(list(map(str, arguments))) == 1
        assert "attempt-1-worker-0.bin: damaged from byte" in capsys.readouterr().out


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    write(tmp_path, [(0, 10)])
    (tmp_path / "attempt-1-worker-1.bin").mkdir()
    assert program.main([str(tmp_path)]) == 1
    assert "attempt-1-worker-1.bin: Is a directory" in capsys.readouterr().err


def test_attempts_are_numbered_by_their_files(tmp_path):
    assert next_attempt(tmp_path / "none") == 1
    write(tmp_path, [(0, 1)], attempt=9)
    write(tmp_path, [(0, 1)], attempt=10)
    assert next_attempt(tmp_path) == 11


def test_a_file_is_never_written_over(tmp_path):
    write(tmp_path, [(0, 1)])
    with pytest.raises(TfdistError, match="File exists"):
        write(tmp_path, [(0, 1)])


def test_the_program_says_what_is_proved_without_tensorflow(tmp_path):
    write(tmp_path / "run" / "ledger", [(0, 7)], tasks=4, example_starts=(0, 40))
    write(tmp_path / "run" / "ledger", [(6, 7)], tasks=2, attempt=2, example_starts=(0, 40))
    run = "import sys; from tfdist.ledger import main; code = main(sys.argv[1:])"
    run += "; assert 'tensorflow' not in sys.modules; sys.exit(code)"
    done = python("-c", run, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "attempt 1: single, 4 tasks, 4 replicas, steps 0 to 6; 1 of them void" in done.stdout
    assert "passes: 2 of 2 proved" in done.stdout
    assert done.stdout.endswith("exactly once, as far as the run got\n")


def test_the_program_speaks_json(tmp_path, capsys):
    write(tmp_path, [(0, 10)], num_examples=50)
    assert program.main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["proved"] is True
    assert told["passes"][0]["seen"] == 50
    assert told["attempts"][0]["last_step"] == 9


def test_two_runs_are_compared_step_by_step(tmp_path, capsys):
    def other(indices, passes):
        indices[0, 0] += 1

    write(tmp_path / "a", [(0, 10)], tasks=4)
    write(tmp_path / "b", [(0, 4), (4, 10)], tasks=4)
    write(tmp_path / "c", [(0, 10)], tasks=4, change=(3, other))
    assert program.main([str(tmp_path / "a"), "--same_as", str(tmp_path / "b")]) == 0
    assert program.main([str(tmp_path / "a"), "--same_as", str(tmp_path / "c")]) == 1
    assert "steps with other examples: 3\n" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path, capsys):
    assert program.main([str(tmp_path / "nowhere")]) == 2
    assert "received no ledger" in capsys.readouterr().err
    (tmp_path / "attempt-1-worker-0.bin").write_bytes(b"{}\n")
    with pytest.raises(UsageError, match="does not begin like a ledger"):
        read_directory(tmp_path)
