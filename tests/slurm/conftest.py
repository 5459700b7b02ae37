"""The cluster that `make test-slurm` has started, and jobs on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Slurm, launched


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    folder = os.environ.get("TFDIST_TEST_SLURM")
    if not folder:
        pytest.fail("there is no cluster; run make test-slurm, which starts one", pytrace=False)
    return Cluster(Path(folder))


@pytest.fixture
def slurm(cluster: Cluster, tmp_path: Path) -> Iterator[Slurm]:
    """Jobs in a folder of their own; shows all logs on failure, and leaves both nodes idle."""
    made = Slurm(cluster, tmp_path)
    yield made
    print(made.logs(), cluster.logs(), sep="\n")
    cluster.mend()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What two workers, started by the local launcher, come to."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    return launched(run_dir, "--strategy", "multiworker", "--workers", "2")
