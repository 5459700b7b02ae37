"""A Slurm of two nodes on this machine, in a folder of its own, that leaves nothing behind.

Every process of it, and of its jobs, carries the path of its ``slurm.conf`` in the environment:
by that they are found when they are to end. The nodes are named by their addresses, which every
machine has, so that nothing is written outside the folder.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("127.0.0.2", "127.0.0.3")

_CPUS = 4  # of each node, however many there are
_GPUS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")  # no task opens them
DEADLINE_S = 90.0
_PAUSE_S = 0.05
_NODE = "TFDIST_TEST_NODE"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")

# A credential that is valid for a shorter time lets a job that is queued again start sooner:
# Slurm waits until the old one has expired.
_CONF = """\
ClusterName=tfdist
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,bf_interval=1,sched_interval=1
JobRequeue=0
KillWait=60
MessageTimeout=60
ReturnToService=0
SlurmdTimeout=300
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
NodeName={nodes[0]} Port={ports[1]} {same}
NodeName={nodes[1]} Port={ports[2]} {same}
PartitionName=tests Nodes=ALL Default=YES
"""


class ClusterError(Exception):
    """The cluster did not do in time what was asked of it."""


class Cluster:
    """The cluster in a folder, wherever it was started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts the daemons and waits until both nodes are idle."""
        missing = [name for name in _PROGRAMS if not shutil.which(name)]
        if missing:
            raise ClusterError(f"no {', '.join(missing)}: install slurm-wlm and munge")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self.conf.write_text(
            _CONF.format(
                folder=self.folder,
                user=getpass.getuser(),
                nodes=NODES,
                same=f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 CPUs={_CPUS} "
                f"RealMemory=65536 Gres=gpu:{len(_GPUS)}",
                ports=_free_ports(3),
            )
        )
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={gpu}\n" for gpu in _GPUS))
        self._start_munge(key)
        self._spawn("slurmctld", "-D", name="slurmctld")
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def _start_munge(self, key: Path) -> None:
        names = {"socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        files = [f"--{flag}={self.folder / name}" for flag, name in names.items()]
        log = f"--log-file={self.folder / 'munged.log'}"
        # By force: whoever owns the folders above, the folder itself is this user's.
        arguments = ["--foreground", "--force", f"--key-file={key}", *files, log]
        self._spawn("munged", *arguments, name="munged")
        socket_ = self.folder / "munge.socket"
        self.until(socket_.exists, "munged has a socket")

    def start_node(self, node: str) -> None:
        """Starts the daemon of a node."""
        self._spawn("slurmd", "-D", "-N", node, name=f"slurmd-{node}")

    def kill_node(self, node: str) -> None:
        """Kills all processes of a node at once, as the end of its power would."""
        self._kill(lambda environ: self._is_of(node, environ))

    def mend(self) -> None:
        """Ends all jobs and brings lost nodes back; waits until both are idle."""
        self.ask("scancel", "--state=PENDING", "--user", getpass.getuser())
        self.ask("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
        for node in NODES:
            if not self._found(lambda environ, node=node: self._is_of(node, environ)):
                self.start_node(node)
            self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Waits until both nodes are idle."""
        self.until(lambda: self.states() == ["idle"] * len(NODES), "both nodes are idle")

    def states(self) -> list[str]:
        """Returns the state of each node."""
        argv = ["sinfo", "--noheader", "--Node", "--format=%T"]
        return self.ask(*argv).stdout.split()

    def ask(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Runs one of Slurm's commands."""
        return subprocess.run(
            argv, env=self.environ(), capture_output=True, text=True, timeout=DEADLINE_S
        )

    def environ(self, **more: str) -> dict[str, str]:
        """Returns the environment in which Slurm's commands speak to this cluster."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TFDIST"))}
        return {**inherited, "SLURM_CONF": str(self.conf), **more}

    def until(self, true: Callable[[], bool], what: str, *, within_s: float = DEADLINE_S) -> None:
        """Waits for something that Slurm tells nobody of by itself."""
        deadline_s = time.monotonic() + within_s
        while not true():
            if time.monotonic() > deadline_s:
                raise ClusterError(f"within {within_s:.0f} s not so: {what}\n{self.logs()}")
            time.sleep(_PAUSE_S)

    def end(self) -> None:
        """Ends every process of the cluster and of its jobs."""
        self._kill(lambda environ: True)

    def processes(self) -> list[int]:
        """Returns the processes of the cluster and of its jobs, this one excepted."""
        return self._found(lambda environ: True)

    def logs(self) -> str:
        """Returns what the daemons have said."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in files)

    @staticmethod
    def _is_of(node: str, environ: list[str]) -> bool:
        marks = {f"SLURMD_NODENAME={node}", f"{_NODE}={node}"}  # of its tasks, and of its daemon
        return not marks.isdisjoint(environ)

    def _spawn(self, *argv: str, name: str) -> None:
        node = {_NODE: name.partition("-")[2]} if "-" in name else {}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._children.append(
                subprocess.Popen(
                    argv,
                    env=self.environ(**node),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the tests, which end it themselves
                )
            )

    def _kill(self, which: Callable[[list[str]], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while found := self._found(which):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline_s:
                raise ClusterError(f"processes that do not end: {found}")
            time.sleep(_PAUSE_S)

    def _found(self, which: Callable[[list[str]], bool]) -> list[int]:
        for child in self._children:
            child.poll()  # so that it is no zombie
        mark = f"SLURM_CONF={self.conf}"
        own, found = os.getpid(), []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != own:
                with contextlib.suppress(OSError):
                    environ = Path(entry.path, "environ").read_text(errors="replace").split("\0")
                    if mark in environ and which(environ):
                        found.append(int(entry.name))
        return found


def _free_ports(count: int) -> list[int]:
    """Returns ports that nobody has now; they are below those of outgoing connections."""
    found: list[int] = []
    for port in range(17_800, 20_000):
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("", port))
            found.append(port)
            if len(found) == count:
                return found
    raise ClusterError("no free ports")
