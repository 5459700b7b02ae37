"""`tfdist.bench batch` without TensorFlow: what is asked for, the table, the lines, the picture."""

import json
from typing import Any

import pytest

from tfdist import bench
from tfdist.find.batch_size import BatchTrial, MemoryLimits


def tried(request: Any, limits: MemoryLimits, *, timeout_s: float) -> BatchTrial:
    """As fast as the model is small; of the large one a batch of 16 does not fit."""
    size, words = request["batch_size"], request["subject"]
    if words == ["a.py:large"] and size > 8:
        return BatchTrial(batch_size=size, fits=False, cause="full")
    measured = {"peak_bytes": size << 20, "examples_per_second": 100.0 * size, "cores": 1.5}
    return BatchTrial(batch_size=size, fits=True, parameters=1234, **measured)


def test_each_subject_is_measured_until_a_size_does_not_fit(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "try_out", tried)
    files = ["--plot", str(tmp_path / "b.png"), "--json", str(tmp_path / "b.jsonl")]
    assert bench.main(["batch", "a.py:small", "a.py:large", "--sizes", "32,8,16", *files]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert table == [
        ["a.py:small", "1,234", "8", "800", "1.50", "8"],
        ["a.py:small", "1,234", "16", "1,600", "1.50", "16"],
        ["a.py:small", "1,234", "32", "3,200", "1.50", "32"],
        ["a.py:large", "1,234", "8", "800", "1.50", "8"],
        ["a.py:large", "16", "full"],
    ]
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [line["fits"] for line in lines] == [True] * 4 + [False]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_subjects_are_functions_or_a_configuration():
    assert bench.parse(["batch"]).subjects == [[]]
    flags = ["--config=configs/mnist.py", "--config.model=dense"]
    assert bench.parse(["batch", "a.py:f", *flags]).subjects == [["a.py:f"], flags]


@pytest.mark.parametrize("flag", ["--sizes=8,0", "--sizes=8,,9", "--steps=0", "--size=8"])
def test_what_cannot_be_is_one_line(flag, capsys):
    assert bench.main(["batch", flag]) == 2
    assert capsys.readouterr().err.count("\n") == 1
