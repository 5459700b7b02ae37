"""Reads YAML into plain values that remember their lines, and nothing that YAML could run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfdist.lint.findings import Finding, Place

_MAX_DEPTH = 60


class Map(dict[str, Any]):
    """A mapping, with the line of each key."""

    def __init__(self, line: int = 0) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}

    def line_of(self, key: str) -> int:
        """Returns the line of a key, or where the mapping begins."""
        return self.lines.get(key, self.line)


class Seq(list[Any]):
    """A list, with the line of each element."""

    def __init__(self, line: int = 0) -> None:
        super().__init__()
        self.line = line
        self.lines: list[int] = []


def read_documents(text: str, file: str) -> tuple[list[Map], list[Finding]]:
    """Returns the mappings of a YAML text, and what is wrong with it as YAML."""
    import yaml  # type: ignore[import-untyped]  # here, as it is for manifests only

    found: list[Finding] = []
    documents: list[Map] = []
    try:
        for node in yaml.compose_all(text, Loader=yaml.SafeLoader):
            made = _Reader(yaml, file, found).read(node)
            documents += [made] if isinstance(made, Map) else []
    except yaml.YAMLError as error:
        found.append(_not_yaml(error, file))
    except (RecursionError, ValueError, OverflowError):
        found.append(_unreadable(file, "values that nest without end, or that are none"))
    return documents, found


class _Reader:
    """Turns nodes into values; each node once, as anchors may stand for it many times."""

    def __init__(self, yaml: Any, file: str, found: list[Finding]) -> None:
        self._yaml = yaml
        self._scalars = yaml.constructor.SafeConstructor()
        self._made: dict[int, Any] = {}
        self._file, self._found = file, found

    def read(self, node: Any, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise RecursionError
        if id(node) not in self._made:
            self._made[id(node)] = self._new(node, depth)
        return self._made[id(node)]

    def _new(self, node: Any, depth: int) -> Any:
        line = node.start_mark.line + 1
        if isinstance(node, self._yaml.MappingNode):
            return self._mapping(node, Map(line), depth)
        if isinstance(node, self._yaml.SequenceNode):
            made = Seq(line)
            for element in node.value:
                made.append(self.read(element, depth + 1))
                made.lines.append(element.start_mark.line + 1)
            return made
        try:
            return self._scalars.construct_object(node)
        except self._yaml.YAMLError:
            return node.value  # a tag of somebody else's

    def _mapping(self, node: Any, made: Map, depth: int) -> Map:
        merged: list[Any] = []
        for key_node, value_node in node.value:
            value = self.read(value_node, depth + 1)
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged += value if isinstance(value, Seq) else [value]
                continue
            key, line = str(self.read(key_node, depth + 1)), key_node.start_mark.line + 1
            if key in made:
                self._found.append(_twice(self._file, line, key, made.lines[key]))
            made[key], made.lines[key] = value, line
        for other in (m for m in merged if isinstance(m, Map)):
            for key in other:
                if key not in made:
                    made[key], made.lines[key] = other[key], other.lines[key]
        return made


def texts(value: Any) -> Iterator[str]:
    """Yields the strings of a list; nothing for anything else."""
    if isinstance(value, Seq):
        yield from (str(element) for element in value)


def _twice(file: str, line: int, key: str, before: int) -> Finding:
    return Finding(
        code="K8S002",
        place=Place(file=file, line=line, path=key),
        received=f"the key {key!r} again, after line {before}",
        expected="each key once",
        fix="join the two, or take one out",
    )


def _not_yaml(error: Any, file: str) -> Finding:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return Finding(
        code="K8S001",
        place=Place(file=file, line=mark.line + 1 if mark else 1),
        received=f"{' '.join(str(problem).split())} at column {mark.column + 1 if mark else 1}",
        expected="YAML",
        fix="correct the indentation, the quotes or the tabs there",
    )


def _unreadable(file: str, received: str) -> Finding:
    return Finding(
        code="K8S001",
        place=Place(file=file, line=1),
        received=received,
        expected="YAML of a few levels",
        fix="write the manifest out",
    )
