"""Failures of searches in several processes, replayed: a trial is killed in one search of two."""

import pathlib

import pytest

from tests import forked_python
from tfdist.outputs.sweep_journal import fold, read

pytestmark = pytest.mark.slow

PROGRAM = pathlib.Path(__file__).parent / "programs" / "search.py"
DEADLINE_S = 250


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """The program's result, with the journal of its search."""
    out = tmp_path_factory.mktemp("search")
    done = forked_python.run(str(PROGRAM), str(out), timeout=DEADLINE_S)
    print(done.stdout, done.stderr)
    for path in sorted(out.rglob("*.log")):
        print(f"--- {path.relative_to(out)}\n{path.read_text(errors='replace')}")
    assert (out / "killed").exists()
    return done, read(out / "sweep" / "journal.jsonl")


def test_keras_tuner_915_a_worker_that_is_gone_loses_no_trial(search):
    """An error of a worker held up the chief and lost its trial; the trial is started again.

    https://github.com/keras-team/keras-tuner/issues/915
    """
    trials = fold(search[1]).trials
    assert {number: trial.status for number, trial in trials.items()} == {
        "0": "completed",
        "1": "completed",
    }
    assert [trials[number].starts for number in ("0", "1")] == [2, 1]


def test_keras_tuner_344_the_chief_ends_when_its_trials_have(search):
    """The chief ran on when all was searched; the call returns, and the program goes on.

    https://github.com/keras-team/keras-tuner/issues/344
    """
    done, journal = search
    assert done.returncode == 0, done.stderr
    assert journal[-1]["event"] == "finished"
    assert "all trials have ended" in done.stdout
    assert done.stdout.endswith("the chief goes on with 2 trials\n")
