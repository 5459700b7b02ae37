"""Agents on the nodes of a Ray cluster: the remote shell of ``--on ray``.

`reserve` starts a process that holds a placement group with one bundle for each agent's node. A
relay process replaces ``ssh HOST``. Its actor runs the agent in a bundle, and the relay copies the
pipes' data. The launcher itself does not import Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from tfdist.errors import StartupTimeout, UsageError
from tfdist.launch.guardian import bootstrap_command

MODULE = "tfdist.launch.multihost.on_ray"

_READ_BYTES = 1 << 16
_TURN_S, _CONNECT_S = 0.5, 10.0
_EXIT_LOST = 75
_HOLDERS: list[subprocess.Popen[str]] = []  # they exit with this process


def reserve(num_tasks: int, *, within_s: float) -> tuple[str, tuple[int, ...]]:
    """Reserve CPUs for tasks (0: one per node). Return the group's name and the tasks of each node.

    Raises:
        UsageError: Ray is not installed, or there is no cluster.
        StartupTimeout: The cluster has no room in time.
    """
    name = f"tfdist-{secrets.token_hex(8)}"  # a process id is not unique in a cluster
    words = bootstrap_command(MODULE, "hold", name, str(num_tasks), str(within_s))
    holder = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    _HOLDERS.append(holder)
    assert holder.stdout is not None
    answer = json.loads(holder.stdout.readline() or '{"error": "the process exited"}')
    if "waited" in answer:
        raise StartupTimeout(
            f"--on ray: the cluster had no room for {num_tasks} tasks in {within_s:g} s. Fix: use "
            "fewer --workers, add nodes, or raise --startup_timeout_s"
        )
    if "error" in answer:
        raise UsageError(
            "--on ray",
            f"cannot connect to a Ray cluster: {answer['error']}",
            fix="run pip install 'tfdist[ray]' and ray start, or set RAY_ADDRESS to a cluster",
            code="no-cluster",
        )
    return name, tuple(answer["slots"])


def shell(name: str) -> list[str]:
    """Return the command of a relay, which replaces the remote shell's command."""
    return [*bootstrap_command(MODULE, "relay", name), "{host}"]


def main(argv: Sequence[str]) -> None:
    """Hold the placement group, or relay an agent's pipes. `bootstrap.py` calls it."""
    kind, name, *rest = argv
    if kind == "hold":
        _hold(name, int(rest[0]), float(rest[1]))
    else:
        sys.exit(_relay(name, int(rest[0].rpartition("-")[2]), rest[1]))


def _ray() -> Any:
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:  # Ray itself retries for minutes
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    ray.init(address=address, namespace="tfdist", log_to_driver=False, logging_level="ERROR")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes may lack this module
    return ray


def _hold(name: str, num_tasks: int, within_s: float) -> None:
    try:
        ray = _ray()
        from ray.util import placement_group
    except Exception as error:  # Ray raises many types
        print(json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]}), flush=True)
        return
    able = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    num_tasks = num_tasks or len(able)
    nodes = min(num_tasks, len(able) or num_tasks)  # Ray may start nodes for a request
    each, more = divmod(num_tasks, max(1, nodes))
    slots = [each + (rank < more) for rank in range(nodes)]
    options = {"strategy": "STRICT_SPREAD", "name": name}
    if slots and placement_group([{"CPU": n} for n in slots], **options).wait(within_s):
        print(json.dumps({"slots": slots}), flush=True)
    else:  # no room, or no node has CPUs
        print(json.dumps({"waited": within_s}), flush=True)
    sys.stdin.read()  # until the launcher exits


class Runner:
    """Ray actor that runs an agent and reads and writes its pipes."""

    def __init__(self, command: str, address: str) -> None:
        # Ray hides the node's GPUs from actors that request none.
        env = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES" or v}
        self._child = subprocess.Popen(
            ["sh", "-c", f"{command} {address}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            bufsize=0,
            start_new_session=True,
        )

    def write(self, data: bytes) -> None:
        """Write the launcher's data to the agent. Empty data closes the agent's input."""
        assert self._child.stdin is not None
        if data:
            self._child.stdin.write(data)
        else:
            self._child.stdin.close()

    def read(self, within_s: float) -> tuple[bytes, bytes, int | None]:
        """Return the agent's new output and error output, and its exit code after its exit."""
        out, err = self._child.stdout, self._child.stderr
        assert out is not None
        assert err is not None
        ready = select.select([out, err], [], [], within_s)[0]
        data = [os.read(f.fileno(), _READ_BYTES) if f in ready else b"" for f in (out, err)]
        is_over = len(ready) == 2 and not any(data)
        return data[0], data[1], self._child.wait() if is_over else None


def _relay(name: str, number: int, command: str) -> int:
    ray = _ray()
    from ray.util import get_node_ip_address, get_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(
        placement_group=get_placement_group(name), placement_group_bundle_index=number - 1
    )

    def address() -> str:
        return str(get_node_ip_address())

    here = ray.remote(address).options(num_cpus=0, scheduling_strategy=place)
    at = ray.get(here.remote())
    actor_class = ray.remote(max_restarts=0, max_concurrency=2)(Runner)
    actor = actor_class.options(num_cpus=1, scheduling_strategy=place).remote(command, at)

    def send() -> None:
        while data := os.read(0, _READ_BYTES):
            ray.get(actor.write.remote(data))
        ray.get(actor.write.remote(b""))

    threading.Thread(target=send, daemon=True).start()
    try:
        while True:
            out, err, code = ray.get(actor.read.remote(_TURN_S))
            for fd, data in ((1, out), (2, err)):
                while data:
                    data = data[os.write(fd, data) :]
            if code is not None:
                return int(code)
    except ray.exceptions.RayError as error:
        os.write(2, f"Ray lost the node: {type(error).__name__}\n".encode())
        return _EXIT_LOST
