"""The doctor as a step of two nodes finds them, and each other, by what Slurm says alone."""

import json
import sys

from tests.slurm.cluster import NODES


def test_a_step_of_two_nodes_is_looked_at(slurm):
    doctor = (sys.executable, "-m", "tfdist.doctor", "--quick", "--json", "--shared_dir=.")
    done = slurm.run("srun", "--nodes=2", "--ntasks=2", *doctor)
    printed = json.loads(done.stdout)
    assert [finding for finding in printed["findings"] if finding["severity"] == "error"] == []
    assert [host["name"] for host in printed["facts"]["hosts"]] == list(NODES)
    assert len(printed["facts"]["present"]) == 2
    assert {"hosts", "names", "ports", "shared directory"} <= set(printed["topics"])
    assert f"the findings for {NODES[1]} are printed on {NODES[0]}" in done.stderr
    assert not list(slurm.folder.glob(".tfdist*"))
