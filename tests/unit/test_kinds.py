"""Kinds of strategies: their registry is the only place that knows them by name."""

import ast
from pathlib import Path

import pytest

import tfdist
from tfdist.cluster import AUTO, KINDS, kind_of
from tfdist.kinds import load

PACKAGE = Path(tfdist.__file__).parent
OWN = ("kinds.py", "ps/", "pipeline/", "elastic/")
"""The registry, and the rooms of one kind."""

OF_TASKS = (".type", "type_", ".job")
"""Ends of expressions with the type of a task, of which "ps" is one, too."""


def names_in(node):
    """Return the names of kinds in an expression, or in the display of several expressions."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    parts = node.keys if isinstance(node, ast.Dict) else parts
    parts = [
        p.slice if isinstance(p, ast.Subscript) and ast.unparse(p.value) == "KINDS" else p
        for p in parts
    ]
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
        of_text = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("swith")
        if of_text and any(map(names_in, node.args)):
            yield node.lineno, ast.unparse(node)
        displays = ast.Tuple | ast.List | ast.Set | ast.Dict
        if isinstance(node, displays) and len(set(names_in(node))) > 1:
            yield node.lineno, ast.unparse(node)
        for field in ("id", "attr", "arg", "name"):
            if str(getattr(node, field, "")).startswith(("is_ps", "_is_ps")):
                yield node.lineno, ast.unparse(node)


def test_only_the_registry_compares_kinds_by_name():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(OWN):
            found[name] = [*comparisons(ast.parse(path.read_text()))]
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "kind.name == 'elastic'",
        "kind in (AUTO, KINDS['single'])",
        "name not in ['ps', other]",
        "strategy.startswith('multi') or strategy.startswith('ps')",
        "{'ps': 1, 'pipeline': 2}[kind.name]",
        "job.is_ps",
    ],
)
def test_each_form_of_a_comparison_is_found(text):
    assert [*comparisons(ast.parse(text))]
    assert not [*comparisons(ast.parse("task.type == 'ps' or kind.is_elastic or KINDS['ps']"))]


def test_templates_ask_for_properties_of_a_kind():
    texts = [path.read_text() for path in PACKAGE.rglob("*.j2")]
    assert texts
    assert not [text for text in texts if "is_ps" in text or "kind.name ==" in text]


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_a_kind_names_its_maker_and_engine(kind):
    assert kind_of(kind.name) is kind
    assert kind.is_one_process != kind.has_several_tasks
    assert callable(load(kind.make))
    assert load(kind.engine).run.__doc__


def test_auto_is_no_kind():
    assert AUTO.name not in KINDS
    assert not AUTO.is_one_process | AUTO.has_several_tasks
