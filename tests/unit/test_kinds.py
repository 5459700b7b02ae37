"""Kinds of strategies: their registry is the only place that knows them by name."""

import ast
from pathlib import Path

import pytest

import tfdist
from tfdist.cluster import AUTO, KINDS, kind_of
from tfdist.kinds import load

PACKAGE = Path(tfdist.__file__).parent
OWN = ("kinds.py", "ps/", "pipeline/")
"""The registry, and the rooms of one kind."""

OF_TASKS = (".type", "type_", ".job")
"""Ends of expressions with the type of a task, of which "ps" is one, too."""


def names_in(node):
    """Return the names of kinds in an expression, or in the display of several expressions."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [p.value for p in parts if isinstance(p, ast.Constant) and p.value in KINDS]


def comparisons(tree):
    """Yield line and text of each comparison with a kind's name, and of each name `is_ps`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_of_task = any(ast.unparse(side).endswith(OF_TASKS) for side in sides)
            if any(map(names_in, sides)) and not is_of_task:
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.MatchValue) and names_in(node.value):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and len(set(names_in(node))) > 1:
            yield node.lineno, ast.unparse(node)
        for field in ("id", "attr", "arg", "name"):
            if str(getattr(node, field, "")).startswith(("is_ps", "_is_ps")):
                yield node.lineno, ast.unparse(node)


def test_no_file_but_the_registry_and_its_own_room_compares_a_kind_by_name():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(OWN):
            found[name] = [*comparisons(ast.parse(path.read_text()))]
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_templates_ask_for_properties_of_a_kind():
    texts = [path.read_text() for path in PACKAGE.rglob("*.j2")]
    assert texts
    assert not [text for text in texts if "is_ps" in text or "kind.name ==" in text]


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_a_kind_names_what_makes_and_runs_its_jobs(kind):
    assert kind_of(kind.name) is kind
    assert kind.is_one_process != kind.has_several_tasks
    assert callable(load(kind.make))
    assert load(kind.engine).run.__doc__


def test_auto_is_no_kind():
    assert AUTO.name not in KINDS
    assert not AUTO.is_one_process | AUTO.has_several_tasks
