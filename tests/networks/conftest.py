"""Jobs are started as in the tests of one machine; here each host has a network and an sshd."""

import subprocess
import sys

import pytest

from tests.multiprocess import jobs
from tests.multiprocess.conftest import launch
from tests.multiprocess.namespaces import TwoHosts

__all__ = ["launch"]

ADDRESSES = {"alpha": "10.77.0.1", "beta": "10.77.0.2"}


@pytest.fixture
def network(tmp_path_factory):
    hosts = TwoHosts(tmp_path_factory.mktemp("network"), ("alpha", "beta"))
    yield hosts
    hosts.close()


class Sshd:
    """An sshd on one host, which lets one key in, and how to reach it."""

    def __init__(self, network, folder, host):
        self.folder = folder
        for name in ("key", "host_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(make, check=True)
        (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
        self.know(self.host_key)
        config = {
            "HostKey": folder / "host_key",
            "AuthorizedKeysFile": folder / "authorized_keys",
            "PidFile": folder / "sshd.pid",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
        }
        (folder / "sshd_config").write_text("".join(f"{k} {v}\n" for k, v in config.items()))
        command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")]
        # Its directory for the separation of privileges is the system's.
        network.on(host, "mount", "-t", "tmpfs", "none", "/run")
        network.on(host, "mkdir", "-p", "/run/sshd")
        with open(folder / "sshd.log", "ab") as log:
            # Not in the user namespace: there sshd has no other users to become.
            inside = [word for word in network.inside(host) if word != "--user"]
            self.process = subprocess.Popen([*inside, *command], stdout=log, stderr=log)
        reach = f"import socket; socket.create_connection(('{ADDRESSES[host]}', 22), 1)"
        for _ in range(100):
            done = subprocess.run(
                [*network.inside("alpha"), sys.executable, "-S", "-c", reach], capture_output=True
            )
            if not done.returncode:
                return
        raise AssertionError((folder / "sshd.log").read_text())

    @property
    def host_key(self):
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def know(self, key):
        lines = [f"{name} {key}\n" for name in (*ADDRESSES, *ADDRESSES.values(), "fd77::2")]
        (self.folder / "known_hosts").write_text("".join(lines))

    @property
    def command(self):
        """What ~/.ssh/config of a user says, in words; the rest is the command of --on ssh."""
        known = f"UserKnownHostsFile={self.folder / 'known_hosts'}"
        key = ("-o", "IdentitiesOnly=yes", "-i", str(self.folder / "key"))
        usual = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
        return " ".join(["ssh", "-F", "none", *usual, *key, "-o", known])

    def close(self):
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def sshd(network, tmp_path_factory):
    server = Sshd(network, tmp_path_factory.mktemp("sshd"), "beta")
    yield server
    server.close()


@pytest.fixture
def job(launch, network, sshd):
    """Starts a job on alpha and beta from alpha, by ssh."""

    def start(source, *flags, hosts="alpha,beta", **more):
        return launch(
            source,
            *("--hosts", hosts, "--rsh", sshd.command, "--run_dir", "run", *flags),
            command=(*network.inside("alpha"), *jobs.LAUNCH),
            **more,
        )

    return start
