"""Checkpoints and models in buckets and other file systems of fsspec (extra ``remote``).

The store writes a checkpoint to a local directory. A thread then uploads the shard and, last, the
manifest: a remote checkpoint with a manifest is complete. Before an upload the thread claims the
serial number with a conditional put (write only a new file). If two jobs write to one URL, the
later job fails. Without conditional puts, both jobs may continue if they claim at the same moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfdist.checkpoint.format import MANIFEST
from tfdist.checkpoint.store import NAME, CheckpointStore, SecondWriter
from tfdist.data.cache import private_cache_dir
from tfdist.errors import TfdistError, UsageError, named, require_packages
from tfdist.files import fsync, move_aside, one_line_errors, open_untrusted, write_text
from tfdist.strategy import run_dir

_LOG = logging.getLogger(__name__)
_CLAIMS, _WRITER, _NEWEST = "claims", "writer", "newest"
_FILES = ("arrays.bin", MANIFEST)
_TRIES = 3
_RETRY_S = 1.0


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL of fsspec, such as ``s3://bucket/run``.

    Raises:
      UsageError: pathlib has removed a slash of a URL.
    """
    text = os.fspath(path)
    if re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", text):
        problem = "pathlib removed a slash of this URL, so it would name a local path"
        fix = f"pass the URL as text, {text.replace(':/', '://', 1)!r}"
        raise UsageError(text, problem, fix=fix, code="path-of-url")
    return "://" in text


def opened(url: str) -> tuple[Any, str]:
    """Return a URL's file system and its path there. Raise UsageError for an unknown protocol."""
    require_packages(url, "fsspec", extra="remote")
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        fix = "install the package of this protocol, such as s3fs or gcsfs, or correct the URL"
        raise UsageError(url, str(error).rstrip("."), fix=fix, code="unknown-value") from None
    return system, root.rstrip("/")


def files_in(system: Any, root: str) -> list[str]:
    """Return the paths of all files below a path, relative to it."""
    try:
        return [path[len(root) + 1 :] for path in system.find(root)]
    except FileNotFoundError:
        return []


def put(local: Path, url: str, *, last: Sequence[str] = ()) -> None:
    """Upload a file or a directory. The files named in `last` are uploaded last, in this order."""
    system, root = opened(url)
    if local.is_file():
        system.put_file(str(local), root)
        return
    files = [path for path in local.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name in last and last.index(path.name) + 1):
        system.put_file(str(path), f"{root}/{path.relative_to(local).as_posix()}")


@contextlib.contextmanager
def local_copy(url: str, *, best: bool) -> Iterator[str]:
    """Yield the path of a local copy of a file, or of a directory's newest or best checkpoint.

    Raises TfdistError if the URL cannot be read.
    """
    system, root = opened(url)
    with tempfile.TemporaryDirectory(prefix="tfdist-") as directory:
        path = Path(directory)
        with reading_from(url):
            if system.isfile(root):
                path /= root.rpartition("/")[2]
                system.get_file(root, str(path))
            else:
                _download_one(url, path, best=best)
        yield str(path)


@contextlib.contextmanager
def reading_from(url: str) -> Iterator[None]:
    """Raise TfdistError for any error in the block: each file system has its own types."""
    try:
        yield
    except TfdistError:
        raise
    except Exception as error:
        raise TfdistError(f"{url} cannot be read: {_said(error)}") from error


def _download_one(url: str, directory: Path, *, best: bool) -> None:
    copy = RemoteCheckpoints(url, CheckpointStore(directory))
    for name in reversed(copy.complete()):
        if (not best or copy.is_best(name)) and copy.download(name):
            return
    raise UsageError(
        f"checkpoints in {url}",
        "no complete checkpoint is marked best" if best else "there is no complete checkpoint",
        fix="check the URL",
        code="no-checkpoint",
    )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no details'}"[:300]


def local_directory(url: str) -> Path:
    """Return the local directory of a URL's checkpoints: in the run directory, or in the cache."""
    name = f"remote-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    try:
        return run_dir() / name
    except UsageError:
        return (private_cache_dir() or Path(tempfile.mkdtemp(prefix="tfdist-"))) / name


class RemoteCheckpoints:
    """Copy of a local store's checkpoints at a URL (chief only).

    Attributes:
      error: Error that ended the uploads: another job writes to the URL.
    """

    def __init__(self, url: str, store: CheckpointStore) -> None:
        self.error: SecondWriter | None = None
        self._url = url.rstrip("/")
        self._system, self._root = opened(url)
        self._store = store
        self._pending: deque[str] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._best: dict[str, bool] = {}

    def fetch(self) -> None:
        """Download the newest complete checkpoint, unless the local store continues it.

        A note in the local directory has the serial number of the URL's newest checkpoint at the
        last upload or download. If another job has changed the URL since, move the local
        checkpoints aside that are not there. The caller has locked the local directory. If the URL
        cannot be written, log a warning and keep the local checkpoints. Raises TfdistError if there
        are none.
        """
        mine = self._store.newest_name()
        note = self._noted(_NEWEST)
        known = int(note) if note.isdigit() else 0
        self._store.first_serial = known + 1
        try:
            # Write first, to report a missing permission or bucket before training.
            self._system.pipe_file(f"{self._root}/{_WRITER}", self._id())
            found = files_in(self._system, self._root)
            complete = _complete(found)
            newest = _serial(complete[-1]) if complete else 0
            is_own = newest == known or (newest > known and self._has_claimed(newest))
        except Exception as error:
            problem = f"{self._url} cannot be written: {_said(error)}"
            if mine is None:
                raise TfdistError(f"{problem}. Fix: check the URL and its credentials") from error
            _LOG.warning("%s; using the checkpoints in %s", problem, self._store.directory)
            return
        names = {name for path in found if NAME.fullmatch(name := path.partition("/")[0])}
        taken = [*_claims(found).values(), *map(_serial, names)]
        self._store.first_serial = 1 + max(taken, default=0)
        if mine is None or _serial(mine) < newest or not is_own:
            self._set_aside(above=min(known, newest - 1))
            for name in reversed(complete):
                if (self._store.directory / name).exists() or self.download(name):
                    break
        self._note_newest(newest)

    def complete(self) -> list[str]:
        """Return the names of the complete checkpoints, oldest first."""
        return _complete(files_in(self._system, self._root))

    def is_best(self, name: str) -> bool:
        """Return whether a checkpoint is marked as the best."""
        if name not in self._best:
            manifest = json.loads(self._system.cat_file(f"{self._root}/{name}/{MANIFEST}"))
            self._best[name] = bool(manifest.get("best"))
        return self._best[name]

    def download(self, name: str) -> bool:
        """Download a checkpoint. Return False, with a warning, if it is damaged."""
        directory = self._store.directory
        unfinished = directory / f".unfinished-{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        with one_line_errors(directory):
            unfinished.mkdir(parents=True)
        for file in _FILES:
            self._system.get_file(f"{self._root}/{name}/{file}", str(unfinished / file))
            fsync(unfinished / file)
        os.replace(unfinished, directory / name)
        fsync(directory)
        if self._store.read_named(name) is not None:
            _LOG.info("%s: downloaded %s", self._url, name)
            return True
        _LOG.warning("%s: %s is damaged; using the previous checkpoint", self._url, name)
        shutil.rmtree(directory / name)
        return False

    def resume(self) -> None:
        """Upload the local checkpoints that a killed process has not uploaded."""
        with contextlib.suppress(Exception):  # unreachable: the next save retries
            newest = max(map(_serial, self.complete()), default=0)
            for name in self._store.names():
                if _serial(name) > newest:
                    self.upload(name)

    def upload(self, name: str) -> None:
        """Upload a local checkpoint in the background."""
        with self._changed:
            self._is_closing = False
            self._pending.append(name)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()

    def raise_error(self) -> None:
        """Raise the error that ended the uploads, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the last upload. If the URL stays unreachable, log an error and give up."""
        if self._thread is not None:
            with self._changed:
                self._is_closing = True
                self._changed.notify()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        failures, last_tries = 0, _TRIES
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closing)
                if not self._pending:
                    return
                name = self._pending[0]
            try:
                with self._store.holding(name) as exists:
                    if exists:  # newer checkpoints have not replaced it
                        self._upload(name)
            except SecondWriter as error:
                self.error = error
                _LOG.error("%s", error)
                self._pending.clear()
                return
            except Exception as error:
                if not failures:
                    _LOG.warning(
                        "%s: %s was not uploaded (%s). Training continues; the checkpoints are in "
                        "%s, and the upload is retried",
                        *(self._url, name, _said(error), self._store.directory),
                    )
                failures += 1
                last_tries -= self._is_closing
                if last_tries <= 0:
                    kept = self._store.directory
                    _LOG.error(
                        "%s: the last checkpoint was not uploaded; it is in %s", self._url, kept
                    )
                    self._pending.clear()
                    return
                delay_s = _RETRY_S if self._is_closing else _RETRY_S * 2.0 ** min(failures - 1, 6)
                with self._changed:  # `close` ends the wait, a new checkpoint does not
                    before = self._is_closing
                    self._changed.wait_for(lambda: self._is_closing != before, delay_s)  # noqa: B023
                continue
            if failures:
                _LOG.info("%s: uploads succeed again", self._url)
            failures, last_tries = 0, _TRIES
            self._pending.popleft()

    def _upload(self, name: str) -> None:
        # Newer checkpoints may have replaced some before their upload. Claim their serials, too:
        # another job may have continued there.
        for serial in range(min(self._store.first_serial, _serial(name)), _serial(name) + 1):
            self._claim(serial)
        self._store.first_serial = _serial(name) + 1
        for file in _FILES:
            path = str(self._store.directory / name / file)
            self._system.put_file(path, f"{self._root}/{name}/{file}")
        self._note_newest(_serial(name))
        found = files_in(self._system, self._root)
        newest = _complete(found)[-1]
        if _serial(newest) > _serial(name) and not (self._store.directory / newest).exists():
            raise self._second_writer()
        try:
            self._discard_old(found)
        except Exception as error:  # the next upload retries
            _LOG.info("%s: an old checkpoint was not removed: %s", self._url, _said(error))

    def _claim(self, serial: int) -> None:
        """Claim a serial number for this writer, or raise SecondWriter."""
        path = f"{self._root}/{_CLAIMS}/{serial:09d}"
        try:
            self._system.pipe_file(path, self._id(), mode="create")
        except Exception:  # each file system has its own error for an existing file
            if not self._system.exists(path):
                raise
            if self._system.cat_file(path) != self._id():
                raise self._second_writer() from None

    def _has_claimed(self, serial: int) -> bool:
        path = f"{self._root}/{_CLAIMS}/{serial:09d}"
        return self._system.exists(path) and self._system.cat_file(path) == self._id()

    def _second_writer(self) -> SecondWriter:
        return SecondWriter(
            f"checkpoints in {self._url}",
            "another job writes to this URL",
            fix="stop the other job, or use another URL",
            code="second-writer",
        )

    def _id(self) -> bytes:
        """Return the id of the local directory, which stays the same after a restart."""
        found = self._noted(_WRITER)
        if not re.fullmatch(rb"[0-9a-f]{32}", found):
            found = uuid.uuid4().hex.encode()
            write_text(self._store.directory / f".{_WRITER}", found.decode())
        return found

    def _noted(self, name: str) -> bytes:
        """Return a note in the local directory, or empty bytes. It may be forged."""
        path = self._store.directory / f".{name}"
        with contextlib.suppress(OSError), open(path, "rb", opener=open_untrusted) as file:
            return file.read(64)
        return b""

    def _note_newest(self, serial: int) -> None:
        with one_line_errors(self._store.directory):
            write_text(self._store.directory / f".{_NEWEST}", str(serial))

    def _discard_old(self, found: Sequence[str]) -> None:
        """Keep the best and the last `keep` checkpoints. Remove the others, each manifest first."""
        names = _complete(found)
        kept = names[-self._store.keep :]
        kept += [name for name in names if self.is_best(name)][-1:]
        oldest = min(map(_serial, kept))
        old = {name for path in found if NAME.fullmatch(name := path.partition("/")[0])}
        for name in sorted(old - set(kept)):
            if name in names or _serial(name) < oldest:
                files = sorted(p for p in found if p.startswith(f"{name}/"))
                for path in sorted(files, key=lambda path: not path.endswith(MANIFEST)):
                    self._system.rm_file(f"{self._root}/{path}")
        for path, serial in _claims(found).items():
            if serial < oldest:
                self._system.rm_file(f"{self._root}/{path}")

    def _set_aside(self, *, above: int) -> None:
        """Move the local checkpoints with higher serial numbers aside, with a warning."""
        names = [name for name in self._store.names() if _serial(name) > above]
        if names:
            with one_line_errors(self._store.directory):
                aside = move_aside(self._store.directory, names)
            text = "%s: checkpoints were removed or continued elsewhere; moved the local %s to %s"
            _LOG.warning(text, self._url, named(names), aside)


def _serial(name: str) -> int:
    return int(name.rpartition(".")[2])


def _claims(found: Sequence[str]) -> dict[str, int]:
    """Return the claimed serial numbers by the paths of the claims."""
    parts = {path: path.rpartition("/") for path in found}
    return {p: int(n) for p, (top, _, n) in parts.items() if top == _CLAIMS and n.isdecimal()}


def _complete(found: Sequence[str]) -> list[str]:
    """Return the checkpoints with a manifest among the found files, oldest first."""
    parts = [path.rpartition("/") for path in found]
    names = [name for name, _, file in parts if file == MANIFEST and NAME.fullmatch(name)]
    return sorted(names, key=_serial)
