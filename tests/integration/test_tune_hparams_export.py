"""What a sweep writes for TensorBoard's HParams, read as TensorBoard reads it."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from tfdist.outputs.sweep_journal import fold
from tfdist.tuning.exports import export_hparams

SPACE = [{"class_name": "Float", "config": {"name": name}} for name in ("lr", "opt")]


def trial(name: str, *scores: float) -> list[dict[str, Any]]:
    history = [{"virtual_epoch": n, "val_accuracy": score} for n, score in enumerate(scores, 1)]
    values = {"lr": 0.5, "opt": "adam", "flip": True, "tuner/epochs": 3}
    return [
        {"event": "asked", "trial": name, "values": values, "run": name, "until": None},
        {"event": "started", "trial": name, "at": 1.0},
        {
            "event": "ended",
            "at": 2.0,
            "trial": name,
            "status": "COMPLETED" if scores else "FAILED",
            "score": max(scores, default=None),
            "best_virtual_epoch": 1,
            "history": history,
            "reason": "",
            "last_lines": [],
        },
    ]


@pytest.fixture
def state():
    begun = {"event": "begun", "objective": "val_accuracy", "direction": "max", "space": SPACE}
    return fold([begun, *trial("0", 0.5, 0.75), *trial("1"), *trial("2", 0.1)[:2]])


def read(path: Path) -> tuple[EventAccumulator, dict[str, bytes]]:
    events = EventAccumulator(str(path))
    events.Reload()
    return events, events.summary_metadata and events.PluginTagToContent("hparams")


def test_values_scores_and_ends_are_what_tensorboard_reads(state, tmp_path):
    export_hparams(state, tmp_path)
    events, content = read(tmp_path / "tensorboard" / "0")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    values = {name: value.WhichOneof("kind") for name, value in start.hparams.items()}
    assert values == {"lr": "number_value", "opt": "string_value", "flip": "bool_value"}
    assert start.hparams["lr"].number_value == 0.5
    assert start.group_name == "0"
    scores = [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors("val_accuracy")]
    assert scores == [(1, 0.5), (2, 0.75)]
    for name, status in (("0", api_pb2.STATUS_SUCCESS), ("1", api_pb2.STATUS_FAILURE)):
        _, content = read(tmp_path / "tensorboard" / name)
        end = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
        assert end.status == status
    assert not (tmp_path / "tensorboard" / "2").exists(), "it is running"


def test_a_sweep_that_goes_on_writes_only_what_is_missing(state, tmp_path):
    export_hparams(state, tmp_path)
    board = tmp_path / "tensorboard"
    (board / ".0.unfinished").mkdir()  # of a chief that was killed
    (board / "0").rename(board / ".0.unfinished" / "0")
    kept = list((board / "1").iterdir())
    export_hparams(state, tmp_path)
    assert len(list((board / "0").iterdir())) == 1
    assert list((board / "1").iterdir()) == kept
    assert not (board / ".0.unfinished").exists()
