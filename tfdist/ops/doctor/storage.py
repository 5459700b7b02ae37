"""Probes of the shared directory: visibility, renames, durability, free space."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tfdist.files import fsync
from tfdist.ops.doctor.facts import Directory, reason_of

_PAGE_BYTES = 64 << 10
_SEEN_WITHIN_S = 2.0
_TURNING_S = 0.5
_NOT_TO_BE_WRITTEN = (errno.EROFS, errno.EACCES, errno.EPERM)


class Storage:
    """This host's side of a look at a directory: all write, then all read, then all clean up.

    Args:
      path: the directory; everything is written into one of its own in it.
      mark: names that one, the same on all hosts.
      index: of this host; the first replaces the file that all read.
    """

    def __init__(self, path: str, *, mark: str, index: int) -> None:
        self._home = Path(path)
        self._place = self._home / f".tfdist-doctor-{mark}"
        self._index = index

    @property
    def _page(self) -> Path:
        return self._place / "page"

    def _file(self, index: int) -> Path:
        return self._place / f"host-{index}"

    def write(self) -> Directory:
        """Write this host's file, and the first host's page, through to the disk."""
        if not self._home.is_dir():
            missing = "not a directory" if self._home.exists() else "not there"
            return Directory(error=missing)
        try:
            self._place.mkdir(exist_ok=True)
            self._file(self._index).write_bytes(b"%d" % self._index)
            if self._index == 0:
                _turn(self._page, 0)
            state = os.statvfs(self._home)
        except OSError as error:
            is_read_only = error.errno in _NOT_TO_BE_WRITTEN
            return Directory(error=reason_of(error), is_read_only=is_read_only)
        found = Directory(free=state.f_bavail * state.f_frsize)
        start = time.perf_counter()
        try:
            for path in (self._file(self._index), self._place):
                fsync(path)
        except OSError as error:
            return replace(found, sync_error=reason_of(error))
        return replace(found, sync_s=time.perf_counter() - start)

    def read(self, written: Directory, *, present: Sequence[int]) -> Directory:
        """Return `written` and what this host sees of the others' files."""
        if written.error:
            return written
        with self._turning() if self._index == 0 else contextlib.nullcontext():
            unseen = tuple(index for index in present if not self._sees(index))
            torn, reads = (0, 0) if 0 in unseen else self._watch()
        return replace(written, unseen=unseen, torn=torn, reads=reads)

    def clean(self) -> None:
        """Remove what this host has written, and the last one the directory too."""
        with contextlib.suppress(OSError):
            self._file(self._index).unlink(missing_ok=True)
            if self._index == 0:
                for path in (self._page, _beside(self._page)):
                    path.unlink(missing_ok=True)
            self._place.rmdir()

    def _sees(self, index: int) -> bool:
        deadline_s = time.monotonic() + _SEEN_WITHIN_S
        while True:
            with contextlib.suppress(OSError):
                if self._file(index).read_bytes() == b"%d" % index:
                    return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)

    def _watch(self) -> tuple[int, int]:
        """Read the page over and over; return how many reads were torn, and how many were made.

        A whole page is of one byte alone.
        """
        torn = reads = 0
        deadline_s = time.monotonic() + _TURNING_S
        while time.monotonic() < deadline_s:
            try:
                page = self._page.read_bytes()
                torn += len(page) != _PAGE_BYTES or page.count(page[:1]) != _PAGE_BYTES
            except OSError as error:
                if error.errno == errno.ESTALE:  # NFS says of itself that it is to be read again
                    continue
                torn += 1
            reads += 1
        return torn, reads

    @contextlib.contextmanager
    def _turning(self) -> Iterator[None]:
        """Replace the page again and again while the block runs."""
        done = threading.Event()

        def turn() -> None:
            number = 0
            while not done.is_set():
                number = (number + 1) % 256
                with contextlib.suppress(OSError):
                    _turn(self._page, number)

        thread = threading.Thread(target=turn, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _turn(page: Path, number: int) -> None:
    _beside(page).write_bytes(bytes([number]) * _PAGE_BYTES)
    _beside(page).replace(page)


def _beside(page: Path) -> Path:
    return page.with_suffix(".next")
