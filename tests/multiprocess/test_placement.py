"""Where the variables of a ps job are, in jobs of several parameter servers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.multiprocess.test_training import PROGRAMS, launch
from tfdist.outputs.costs import COLUMNS


def job(out: Path, *parts: str, ps: int, workers=2, flags=(), python=(sys.executable,)):
    """What the chief saw, and what the job printed."""
    out.mkdir(exist_ok=True)
    said = launch(
        out / "run", "--strategy", "ps", "--workers", str(workers), "--ps", str(ps), *flags,
        str(PROGRAMS / "placement.py"), str(out), *parts, timeout_s=200, python=python,
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


# A network of the job's own, so that nothing else crosses its loopback.
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"', sys.executable)


def test_a_profile_counts_the_bytes_that_cross_the_network(tmp_path):
    seen, said = job(tmp_path, "profile", ps=2, flags=("--profile_ps",), python=ALONE)
    summary = seen["profile"]["summary"]
    links, size = summary["links"], (1000 * 250 + 250) * 4
    read = sum(link["size_bytes"] for ends, link in links.items() if ends.endswith("to worker"))
    written = sum(link["size_bytes"] for ends, link in links.items() if ends.startswith("worker"))
    assert size <= read <= size + 64  # the weights once each, and some numbers
    assert size <= written <= size + 64
    assert read + written <= seen["profile"]["crossed"] <= 1.1 * (read + written)

    assert set(summary["workers"]) == {"worker-0", "worker-1"}
    for costs in summary["workers"].values():
        parts = [costs[f"{name}_ms"] for name in COLUMNS[:-1]]
        assert min(parts) >= 0
        assert costs["step_ms"] == pytest.approx(sum(parts))
        assert costs["read_ms"] > 0
        assert costs["compute_ms"] > 0
        assert costs["write_ms"] > 0
    assert "what a step costs, in ms" in said
    for link in links.values():
        assert f"{link['size_bytes']:,} bytes in {link['tensors']} tensors" in said
