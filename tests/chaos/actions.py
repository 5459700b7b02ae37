"""What the runner does to a job from outside: to its processes, its disk, its network."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.processes import Running, send

_FILLER = ".filler"
_CLONE_NEWNET = 0x40000000


def kill(tasks: Mapping[str, Running]) -> None:
    """Kills all of these at once."""
    for task in tasks.values():
        send(task.pid, signal.SIGKILL)


def corrupt_newest(checkpoints: Path) -> str:
    """Turns over a byte in the middle of the newest checkpoint's largest file; returns its name."""
    newest = max(checkpoints.glob("step-*"), key=lambda p: int(p.name.rpartition(".")[2]))
    file = max((f for f in newest.iterdir() if f.is_file()), key=lambda f: f.stat().st_size)
    with open(file, "r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0xFF]))
    return f"{newest.name}/{file.name}"


class SmallDisk:
    """A tmpfs of a few megabytes, which can be filled and emptied; needs the right to mount."""

    def __init__(self, directory: Path, *, size_bytes: int) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PermissionError(done.stderr.strip() or "mount failed")

    def fill(self) -> None:
        """Takes all the room that is left."""
        path = self._directory / _FILLER
        with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def empty(self) -> None:
        """Gives the room back."""
        (self._directory / _FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Keeps what is on it, and unmounts."""
        kept = self._directory.with_name(self._directory.name + "-kept")
        shutil.copytree(self._directory, kept, dirs_exist_ok=True)
        subprocess.run(["umount", "-l", str(self._directory)], check=False)


def own_network() -> None:
    """Puts the calling process into a network of its own, with a loopback interface that is up.

    For `preexec_fn`. Raises PermissionError without the right to.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise PermissionError(os.strerror(ctypes.get_errno()))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def set_network(pid: int, *, up: bool) -> None:
    """Cuts the network of a process that has one of its own, or joins it again."""
    command = ["nsenter", "-t", str(pid), "-n", "ip", "link", "set", "lo", "up" if up else "down"]
    subprocess.run(command, check=False, capture_output=True)
