"""Jobs are started as in the tests of one machine; here each launcher is on a host of its own."""

import pytest

from tests.multiprocess import jobs
from tests.multiprocess.conftest import launch
from tests.multiprocess.namespaces import TwoHosts

__all__ = ["launch"]


@pytest.fixture
def network(tmp_path_factory):
    hosts = TwoHosts(tmp_path_factory.mktemp("network"), ("alpha", "beta"))
    yield hosts
    hosts.close()


@pytest.fixture
def on(launch, network):
    """Starts the launcher of a host."""

    def start(host, source, *flags, **more):
        rank = ["alpha", "beta"].index(host)
        return launch(
            source,
            *("--hosts", "alpha,beta", "--node_rank", str(rank), "--run_dir", "run", *flags),
            command=(*network.inside(host), *jobs.LAUNCH),
            env={"TFDIST_RENDEZVOUS_TOKEN": "known to both hosts"},
            **more,
        )

    return start
