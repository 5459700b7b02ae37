"""Checks a config file of tfdist.train from its text, without running it.

What is computed at run time is taken to be right; tfdist.train checks all of it when it starts.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

from tfdist.lint.config_assignments import Assignments, read_assignments
from tfdist.lint.config_values import Setting, check_batch, check_one, check_together
from tfdist.lint.findings import Finding, Place

_HEAVY = ("tensorflow", "keras")


def check_config_file(text: str, file: str, *, replicas: int | None = None) -> Iterator[Finding]:
    """Yields what is wrong with a config file; `replicas` is how many the job will have."""
    try:
        tree = _parsed(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        yield _not_python(error, file)
        return
    yield from _imports(tree, file)
    function = get_config(tree)
    if function is None:
        if not _comes_from_elsewhere(tree):
            yield Finding(
                code="CFG002",
                place=Place(file=file, line=1),
                received="a file without get_config()",
                expected="a function get_config()",
                fix="def get_config(): config = base(); ...; return config",
            )
        return
    read = read_assignments(tree, function, file=file)
    yield from _frame(function, read, file)
    yield from _settings(read, Place(file=file, line=function.lineno), replicas=replicas)


def settings_of(text: str, file: str) -> dict[str, Setting] | None:
    """Returns what a config file sets, None where that cannot be told from its text."""
    try:
        tree = _parsed(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    function = get_config(tree)
    read = read_assignments(tree, function, file=file) if function else None
    return read.last() if read and read.is_whole else None


def _parsed(text: str) -> ast.Module:
    """Parses Python without the warnings that it has for some of what it takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def get_config(tree: ast.Module) -> ast.FunctionDef | None:
    """Returns the function of this name."""
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return next((function for function in functions if function.name == "get_config"), None)


def _settings(read: Assignments, place: Place, *, replicas: int | None) -> Iterator[Finding]:
    found = [finding for setting in read.settings for finding in check_one(setting)]
    yield from found
    yield from _twice(read)
    if not read.is_whole:
        return
    if not found:
        yield from check_together(read.last(), place=place, replicas=replicas)
    elif all(finding.code == "CFG003" for finding in found):
        known = {s.name: s for s in read.settings if s.place not in [f.place for f in found]}
        yield from check_batch(known, place=place, replicas=replicas)


def _twice(read: Assignments) -> Iterator[Finding]:
    seen: dict[str, Setting] = {}
    for setting in read.settings:
        before = seen.get(setting.name)
        if before and before.known and setting.known and setting.name not in read.read_names:
            yield Finding(
                code="CFG019",
                place=setting.place,
                received=f"{setting.name} once more, which line {before.place.line} sets",
                expected="each field once",
                fix="take one of the two out",
            )
        seen[setting.name] = setting


def _frame(function: ast.FunctionDef, read: Assignments, file: str) -> Iterator[Finding]:
    if read.begins_empty:
        yield Finding(
            code="CFG007",
            place=Place(file=file, line=read.begin_line),
            received="a ConfigDict without the fields of tfdist.train",
            expected="config = base()",
            fix="from tfdist.configs import base, and begin with it",
        )
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    if not any(node.value is not None for node in returns):
        yield Finding(
            code="CFG008",
            place=Place(file=file, line=function.lineno),
            received="get_config() without a return",
            expected="the configuration that it made",
            fix=f"end it with: return {read.name or 'config'}",
        )


def _imports(tree: ast.Module, file: str) -> Iterator[Finding]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in _HEAVY:
                yield Finding(
                    code="CFG022",
                    place=Place(file=file, line=getattr(node, "lineno", None)),
                    received=f"import of {name}",
                    expected="a config file that sets fields",
                    fix="leave TensorFlow to the program",
                )


def _comes_from_elsewhere(tree: ast.Module) -> bool:
    """Returns whether get_config is imported or assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.asname or alias.name for alias in node.names]
            if "get_config" in names or "*" in names:
                return True
        if isinstance(node, ast.Name) and node.id == "get_config":
            return isinstance(node.ctx, ast.Store)
    return False


def _not_python(error: Exception, file: str) -> Finding:
    line = error.lineno if isinstance(error, SyntaxError) else None
    text = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
    why = error.msg if isinstance(error, SyntaxError) else type(error).__name__
    return Finding(
        code="CFG001",
        place=Place(file=file, line=line or 1),
        received=f"{text[:60]!r} ({why})",
        expected="a file of Python",
        fix="correct the line; configs/ has examples",
    )
