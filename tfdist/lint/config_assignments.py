"""What a config file sets, read from its syntax: fields, values where they are literals, lines."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tfdist.configs import FIELDS
from tfdist.lint.config_values import Setting
from tfdist.lint.findings import Place

_GROUPS = frozenset(f.name.partition(".")[0] for f in FIELDS if "." in f.name)
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_MAX_NUMBER = 1e18


class _Unknown(Exception):
    """A value that only running the file would tell."""


@dataclass(kw_only=True, slots=True)
class Assignments:
    """What was read.

    Attributes:
      name: the variable that holds the configuration.
      settings: each field that is set, in order.
      is_whole: whether `settings` is all that is set, on top of base().
      begins_empty: whether it begins with an empty ConfigDict.
      read_names: the fields that the file itself reads.
    """

    name: str = ""
    settings: list[Setting] = field(default_factory=list)
    is_whole: bool = False
    begins_empty: bool = False
    begin_line: int = 1
    read_names: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)

    def last(self) -> dict[str, Setting]:
        """Returns what each field is set to in the end; without value where that is unsure."""
        made = {setting.name: setting for setting in self.settings}
        place = self.settings[0].place if self.settings else Place(file="")
        for name in self.unsure:
            at = made[name].place if name in made else place
            made[name] = Setting(name=name, value=None, place=at, known=False)
        return made


def read_assignments(tree: ast.Module, function: ast.FunctionDef, *, file: str) -> Assignments:
    """Returns what `function` sets in the configuration that it makes."""
    reader = _Reader(file)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            reader.bind(node)
    reader.block(function.body, certain=True)
    return reader.read


class _Reader:
    """Goes through the statements of get_config() in order."""

    def __init__(self, file: str) -> None:
        self.read = Assignments()
        self._file = file
        self._known: dict[str, Any] = {}

    def block(self, body: list[ast.stmt], *, certain: bool) -> None:
        for statement in body:
            self._statement(statement, certain=certain)

    def bind(self, node: ast.Assign | ast.AnnAssign) -> None:
        """Remembers a plain variable with a literal value."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and node.value is not None:
                try:
                    self._known[target.id] = self._value(node.value)
                except _Unknown:
                    self._known.pop(target.id, None)

    def _statement(self, node: ast.stmt, *, certain: bool) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            self._assign(node, certain=certain)
        elif isinstance(node, ast.AugAssign):
            self._forget(node.target)
        elif isinstance(node, ast.With):
            self.block(node.body, certain=certain and self._is_unlocked(node))
        elif isinstance(node, ast.If | ast.For | ast.While | ast.Try):
            for inner in ("body", "orelse", "finalbody"):
                self.block(getattr(node, inner, []), certain=False)
            for handler in getattr(node, "handlers", []):
                self.block(handler.body, certain=False)
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            self._expression(node.value, certain=certain)
        elif not isinstance(node, ast.Return | ast.Pass | ast.Expr | ast.Import | ast.ImportFrom):
            self._escapes(node)

    def _assign(self, node: ast.Assign | ast.AnnAssign, *, certain: bool) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            name = self._field(target)
            if name is not None and node.value is not None:
                self._set(name, node.value, target.lineno, certain=certain)
            elif isinstance(target, ast.Name) and self._begins(target.id, node.value):
                self.read.name, self.read.begin_line = target.id, node.lineno
            elif node.value is not None:
                self._escapes(node.value)
                self.bind(node)

    def _begins(self, variable: str, value: ast.expr | None) -> bool:
        """Notices the call that makes the configuration."""
        if not isinstance(value, ast.Call):
            return False
        called = value.func.attr if isinstance(value.func, ast.Attribute) else ""
        called = value.func.id if isinstance(value.func, ast.Name) else called
        self.read.is_whole |= called == "base"
        self.read.begins_empty |= called == "ConfigDict" and not value.args
        return called in ("base", "ConfigDict") or called == "get_config"

    def _set(self, name: str, value: ast.expr, line: int, *, certain: bool) -> None:
        place = Place(file=self._file, line=line, path=name)
        if name in _GROUPS:
            self.read.is_whole = False
            return
        try:
            known = self._value(value)
        except _Unknown:
            self.read.unsure.add(name)
            if name not in {f.name for f in FIELDS}:
                self.read.settings.append(Setting(name=name, value=0, place=place, known=False))
            return
        self.read.settings.append(Setting(name=name, value=known, place=place, known=certain))
        if certain:
            self.read.unsure.discard(name)
        else:
            self.read.unsure.add(name)

    def _expression(self, node: ast.expr, *, certain: bool) -> None:
        """Reads ``config.update(...)``, and takes any other call to change what it is given."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if isinstance(of, ast.Name) and of.id == self.read.name and self.read.name:
                if node.func.attr in ("lock", "unlock"):
                    return
                if node.func.attr == "update" and not node.args:
                    for keyword in node.keywords:
                        if keyword.arg:
                            line = keyword.value.lineno
                            self._set(keyword.arg, keyword.value, line, certain=certain)
                    return
        self._escapes(node)

    def _escapes(self, node: ast.AST) -> None:
        """What is done with the configuration itself, beside its fields, cannot be followed."""
        inside = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == self.read.name and self.read.name:
                self.read.is_whole &= id(inner) in inside
            if isinstance(inner, ast.Attribute) and self._field(inner) in _GROUPS:
                self.read.is_whole &= id(inner) in inside

    def _forget(self, target: ast.expr) -> None:
        name = self._field(target)
        if name is not None:
            self.read.unsure.add(name)
            self.read.read_names.add(name)
        elif isinstance(target, ast.Name):
            self._known.pop(target.id, None)

    def _field(self, node: ast.expr) -> str | None:
        """Returns ``augmentation.mean`` for ``config.augmentation.mean``, None for others."""
        parts: list[str] = []
        while True:
            if isinstance(node, ast.Attribute):
                parts.append(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                parts.append(str(node.slice.value))
            else:
                break
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id == self.read.name != "":
            return ".".join(reversed(parts))
        return None

    def _is_unlocked(self, node: ast.With) -> bool:
        calls = (item.context_expr for item in node.items)
        return all(
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("unlocked", "ignore_type")
            for call in calls
        )

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Tuple | ast.List):
            made = [self._value(element) for element in node.elts]
            return tuple(made) if isinstance(node, ast.Tuple) else made
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -_number(self._value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._computed(node)
        name = self._field(node)
        if name is not None:
            return self._of_field(name)
        if isinstance(node, ast.Name) and node.id in self._known:
            return self._known[node.id]
        raise _Unknown

    def _computed(self, node: ast.BinOp) -> Any:
        left, right = (_number(self._value(side)) for side in (node.left, node.right))
        try:
            made = _OPERATORS[type(node.op)](left, right)
        except ArithmeticError:
            raise _Unknown from None
        return _number(made)

    def _of_field(self, name: str) -> Any:
        self.read.read_names.add(name)
        last = self.read.last() if self.read.is_whole else {}
        if name in last and last[name].known:
            return last[name].value
        defaults = {f.name: f.default for f in FIELDS}
        if name in defaults and name not in last and self.read.is_whole:
            return defaults[name]
        raise _Unknown


def _number(value: Any) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < _MAX_NUMBER:
        raise _Unknown
    return value
