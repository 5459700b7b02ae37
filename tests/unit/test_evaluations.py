"""What an evaluator writes, and how a run stands by it."""

from __future__ import annotations

import json
import math

import pytest

from tfdist.errors import TfdistError, UsageError
from tfdist.outputs.evaluations import Evaluations
from tfdist.training.evaluator import best_so_far


def lines(*losses):
    return [{"step": 10 * i, "val_loss": loss} for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "best", "since"),
    [
        ((3.0,), 0, 0),
        ((3.0, 2.0, 2.5, 2.1), 1, 2),
        ((3.0, 3.0), 0, 1),
        ((3.0, 2.95), 0, 1),  # by less than min_delta
        ((None, 2.0), 1, 0),
        ((None, None), None, 2),
        ((2.0, None, None), 0, 2),
        ((math.nan, 2.0), 1, 0),
        ((2.0, math.nan, -math.inf), 0, 2),
        ((math.inf,), None, 1),
    ],
)
def test_the_best_is_the_first_that_was_better_by_enough(losses, best, since):
    stands = best_so_far(lines(*losses), monitor="val_loss", less=True, min_delta=0.1)
    assert stands.since == since
    assert (stands.best and stands.best["step"]) == (None if best is None else 10 * best)


def test_more_may_be_better():
    stands = best_so_far(lines(0.1, 0.3, 0.2), monitor="val_loss", less=False)
    assert (stands.best["step"], stands.since) == (10, 1)


def test_a_figure_that_no_evaluation_has_is_refused_by_a_near_name():
    with pytest.raises(UsageError, match=r"'val_los' .did you mean 'val_loss'"):
        best_so_far(lines(1.0), monitor="val_los", less=True)


def test_a_step_that_is_done_again_takes_back_the_lines_from_it_on(tmp_path):
    files = Evaluations(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert files.lines() == []
    for step in (7, 14, 21, 14):
        files.write(files.with_line({"step": step, "val_loss": math.nan}))
    assert [line["step"] for line in files.lines()] == [7, 14]
    assert files.lines()[0]["val_loss"] is None
    assert len(files.metrics_file.read_text().splitlines()) == 2


def test_a_line_that_a_crash_cut_short_does_not_count(tmp_path):
    files = Evaluations(tmp_path)
    files.metrics_file.write_text(json.dumps({"step": 7}) + '\n{"step": 1')
    assert files.lines() == [{"step": 7}]


def test_all_of_it_goes_where_the_checkpoints_go(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    files = Evaluations(folder)
    assert not files.is_stop_requested
    files.ask_to_stop({"step": 14, "best_step": 7})
    assert files.is_stop_requested
    files.write([{"step": 14}])
    files.best_file.touch()
    folder.rename(tmp_path / "old")
    assert (files.is_stop_requested, files.lines(), files.best_file.exists()) == (False, [], False)


def test_what_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(TfdistError, match="evaluator, in"):
        Evaluations(tmp_path / "missing" / "checkpoints").write([{"step": 1}])
