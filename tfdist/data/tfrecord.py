"""TFRecord files as a source that reads records by number in graph operations."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from tfdist.data.cache import cached_file
from tfdist.data.source import GraphSource, Nest, Transform
from tfdist.errors import UsageError, require

# A record: length (uint64), checksum of the length (uint32), bytes, checksum of the bytes (uint32).
_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
MEMORY_LIMIT_BYTES = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordIndex:
    """Offset and length of each record in a set of files."""

    files: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    file_numbers: np.ndarray[Any, Any]  # int64[num_records]
    offsets: np.ndarray[Any, Any]  # int64[num_records]: offset of the record's header in its file
    lengths: np.ndarray[Any, Any]  # int64[num_records]: bytes of the record's content

    def within(self, spans: Sequence[tuple[str, int, int]]) -> RecordIndex:
        """Return the index of these spans of records: (file, first record in the file, count)."""
        starts = np.searchsorted(self.file_numbers, np.arange(len(self.files) + 1))
        runs = []
        for file, first, count in spans:
            begin, end = starts[self.files.index(_absolute(file)) :][:2]
            require(
                0 <= first <= first + count <= end - begin,
                "TFRecordSource: spans",
                f"{file} has {end - begin} records, but the span is {count} records from {first}",
                fix="count records from 0, within the file",
                code="out-of-range",
            )
            runs.append(begin + np.arange(first, first + count))
        chosen = np.concatenate(runs)
        return dataclasses.replace(
            self,
            file_numbers=self.file_numbers[chosen],
            offsets=self.offsets[chosen],
            lengths=self.lengths[chosen],
        )


class TFRecordSource(GraphSource):
    """Uncompressed TFRecord files. `parse` converts a batch of records to examples.

    `files` is a path, a pattern, or a list of them. The matches of a pattern are sorted. `parse` is
    a graph function, string[b] -> nest of [b, ...], for example `tf.io.parse_example`. If all files
    together have up to `memory_limit_bytes`, they are held in memory as a single string. Otherwise
    each record is read from its file. The constructor scans the headers for offsets and saves these
    in `cache_dir`. It scans again if a file has changed. `spans` restricts the source to spans of
    records, each (file, first, count). Raises `UsageError` if a file is missing, compressed or
    truncated.
    """

    kind = "TFRecord files"

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        parse: Callable[[tf.Tensor], Nest],
        *,
        transform: Transform | None = None,
        spans: Sequence[tuple[str, int, int]] | None = None,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        cache_dir: Path | None = None,
    ) -> None:
        index = load_index(_expand(files), cache_dir=cache_dir)
        self.index = index if spans is None else index.within(spans)
        self.transform = transform
        self._parse = tf.autograph.experimental.do_not_convert(parse)
        self._in_memory = sum(self.index.sizes_bytes) <= memory_limit_bytes
        self._held: dict[str, tf.Tensor] | None = None
        self.num_examples: int = len(self.index.lengths)
        self.element_spec = _parsed_spec(self._parse)

    @tf.autograph.experimental.do_not_convert
    def gather(self, indices: tf.Tensor, *, arrays: Nest = None) -> Nest:
        """Return the parsed records at `indices`: int64[b] -> nest of [b, ...]."""
        if arrays is None:
            arrays = self._held_arrays()
        return self._parse(self._records(indices, arrays))

    @tf.autograph.experimental.do_not_convert
    def arrays(self) -> Nest:
        """Return the index, and the bytes of the files if they are held in memory.

        In a graph, operations read the files in the process that runs the graph. The files need the
        same paths there.
        """
        return self._held_arrays() if tf.executing_eagerly() else self._make_arrays()

    def _held_arrays(self) -> dict[str, tf.Tensor]:
        if self._held is None:
            with tf.init_scope(), tf.device("/CPU:0"):
                self._held = self._make_arrays()
        return self._held

    def _make_arrays(self) -> dict[str, tf.Tensor]:
        index = self.index
        if self._in_memory:
            starts = np.cumsum([0, *index.sizes_bytes[:-1]])[index.file_numbers]
            content = tf.strings.join([tf.io.read_file(file) for file in index.files])
            begin = tf.constant(starts + index.offsets + _HEADER.size, tf.int64)
            return {"content": content, "begin": begin, "length": tf.constant(index.lengths)}
        return {
            "files": tf.constant(index.files),
            "file_number": tf.constant(index.file_numbers),
            "offset": tf.constant(index.offsets),
        }

    def _records(self, indices: tf.Tensor, arrays: dict[str, tf.Tensor]) -> tf.Tensor:
        if self._in_memory:
            begin = tf.gather(arrays["begin"], indices)
            return tf.strings.substr(arrays["content"], begin, tf.gather(arrays["length"], indices))
        numbers = tf.gather(arrays["file_number"], indices)
        files = tf.gather(arrays["files"], numbers)
        offsets = tf.gather(arrays["offset"], indices)
        return tf.map_fn(
            _read_record, (files, offsets), fn_output_signature=tf.TensorSpec([], tf.string)
        )


def load_index(files: Sequence[str], *, cache_dir: Path | None = None) -> RecordIndex:
    """Return the index of these files, from the cache if no file has changed."""
    states = [tf.io.gfile.stat(file) for file in files]
    sizes = tuple(int(state.length) for state in states)
    key = repr([(f, s, state.mtime_nsec) for f, s, state in zip(files, sizes, states, strict=True)])

    def write(target: Path) -> None:
        scanned = [list(_scan(file, size)) for file, size in zip(files, sizes, strict=True)]
        numbers = np.repeat(np.arange(len(files)), [len(found) for found in scanned])
        both = np.array([pair for found in scanned for pair in found], np.int64).reshape(-1, 2)
        with open(target, "wb") as output:
            np.savez(output, file_numbers=numbers, offsets=both[:, 0], lengths=both[:, 1])

    purpose = f"index of {files[0]}" + (f" and {len(files) - 1} more" if files[1:] else "")
    cached = cached_file(
        key, suffix=".index.npz", write=write, cache_dir=cache_dir, purpose=purpose
    )
    with cached as path, np.load(path, allow_pickle=False) as saved:
        columns = {name: saved[name].astype(np.int64) for name in saved.files}
    if len(columns["lengths"]) == 0:
        raise _bad_file(
            files[0], "the file has no records", "check the program that wrote the file"
        )
    return RecordIndex(files=tuple(files), sizes_bytes=sizes, **columns)


def _expand(files: str | Path | Sequence[str | Path]) -> list[str]:
    patterns = [files] if isinstance(files, str | Path) else list(files)
    found: list[str] = []
    for pattern in map(str, patterns):
        exists = tf.io.gfile.exists(pattern)  # a path may contain brackets
        matches = [pattern] if exists else sorted(tf.io.gfile.glob(pattern))
        if not matches:
            raise _bad_file(pattern, "the file does not exist", "correct the path or pattern")
        if any(map(tf.io.gfile.isdir, matches)):
            raise _bad_file(pattern, "the path is a directory", "name its files, for example DIR/*")
        found.extend(map(_absolute, matches))
    if not found:
        raise _bad_file("TFRecordSource", "the list of files is empty", "pass a path or a pattern")
    return found


def _absolute(file: str) -> str:
    return file if "://" in file else os.path.abspath(file)


def _scan(file: str, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each record. Read only the headers."""
    with _open(file) as handle:
        offset = 0
        while offset < size_bytes:
            handle.seek(offset)
            header = handle.read(_HEADER.size)
            length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else size_bytes
            following = offset + _HEADER.size + length + _FOOTER_BYTES
            if following > size_bytes:
                raise _bad_file(
                    file,
                    f"the record at byte {offset} ends after the file's {size_bytes} bytes, so the "
                    "file is cut off, compressed or no TFRecord file",
                    "write or copy the file again, without compression",
                )
            yield offset, length
            offset = following


def _open(file: str) -> BinaryIO:
    if "://" in file:
        return tf.io.gfile.GFile(file, "rb")
    return open(file, "rb", buffering=0)  # a buffer would read the skipped bytes


def _read_record(place: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    """Read the record at an offset of a file: the first element of a dataset from there on."""
    file, offset = place
    kinds = {"output_types": [tf.string], "output_shapes": [tf.TensorShape([])]}
    records = tf.raw_ops.TFRecordDatasetV2(
        filenames=file[None],
        compression_type="",
        buffer_size=tf.constant(0, tf.int64),
        byte_offsets=offset[None],
    )
    first = tf.raw_ops.TakeDataset(input_dataset=records, count=tf.constant(1, tf.int64), **kinds)
    return tf.raw_ops.DatasetToSingleElement(dataset=first, **kinds)[0]


def _parsed_spec(parse: Callable[[tf.Tensor], Nest]) -> Nest:
    traced = tf.function(parse, autograph=False).get_concrete_function(
        tf.TensorSpec([None], tf.string)
    )

    def of_example(spec: Any) -> tf.TensorSpec:
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank in (None, 0):
            raise UsageError(
                "TFRecordSource",
                f"parse returns {spec}, not dense tensors with a batch axis",
                fix="parse with FixedLenFeature, or call to_dense() and ensure_shape()",
                code="unsupported-data",
            )
        return tf.TensorSpec(spec.shape[1:], spec.dtype)

    outputs = tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)
    return tf.nest.map_structure(of_example, outputs)


def _bad_file(file: str, problem: str, fix: str) -> UsageError:
    return UsageError(file, problem, fix=fix, code="unreadable")
