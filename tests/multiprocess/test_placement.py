"""Where the variables of a ps job are, in jobs of several parameter servers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.multiprocess.test_training import PROGRAMS, launch


def job(out: Path, *parts: str, ps: int, flags: tuple[str, ...] = ()):
    """What the chief saw, and what the job printed."""
    said = launch(
        out / "run", "--strategy", "ps", "--workers", "2", "--ps", str(ps), *flags,
        str(PROGRAMS / "placement.py"), str(out), *parts, timeout_s=200,
    )  # fmt: skip
    return json.loads((out / "seen.json").read_text()), said


@pytest.fixture(scope="module")
def two_ps(tmp_path_factory):
    return job(tmp_path_factory.mktemp("two"), "placement", ps=2)


def test_variables_are_balanced_by_bytes_and_slots_are_beside_them(two_ps):
    seen, said = two_ps[0]["placement"], two_ps[1]
    assert seen["iterations"] == 45
    assert seen["losses"][-1] < seen["losses"][0]
    servers, sizes = seen["servers"], seen["sizes"]
    kernels = [path for path in servers if path.startswith("sequential/") and "kernel" in path]
    # In turn, as TensorFlow has it, all three would be on ps-0.
    assert [servers[path] for path in kernels] == [0, 1, 0]
    for path in servers:
        if path.startswith("sequential/"):
            slot = "adam/" + path.replace("/", "_")
            beside = {servers[f"{slot}_{kind}"] for kind in ("momentum", "velocity")}
            assert beside == {servers[path]}
    told = re.search(r"parameter server: ps-0 ([\d,]+) bytes, ps-1 ([\d,]+) bytes", said)
    for ps in (0, 1):  # and the loss' total and count, of 4 bytes each
        held = sum(sizes[path] for path in servers if servers[path] == ps)
        assert held <= int(told[ps + 1].replace(",", "")) <= held + 16


def test_more_servers_than_variables_is_said_and_not_refused(tmp_path):
    seen, said = job(tmp_path, "waste", ps=4)
    assert seen["waste"]["losses"]
    assert "ps: received 4 for a model whose weights are on 1 of them; ps-1, ps-2, ps-3" in said
