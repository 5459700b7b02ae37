"""The cluster that `make test-slurm` has started, and jobs on it."""

import os
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Slurm, launched


@pytest.fixture(scope="session")
def cluster():
    folder = os.environ.get("TFDIST_TEST_SLURM")
    if not folder:
        pytest.fail("there is no cluster; run make test-slurm, which starts one", pytrace=False)
    return Cluster(Path(folder))


@pytest.fixture
def slurm(cluster, tmp_path):
    """Jobs in a folder of their own; shows all logs on failure, and leaves both nodes idle."""
    made = Slurm(cluster, tmp_path)
    yield made
    print(made.logs(), cluster.logs(), sep="\n")
    cluster.mend()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """What two workers, started by the local launcher, come to."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    return launched(run_dir, "--strategy", "multiworker", "--workers", "2")
