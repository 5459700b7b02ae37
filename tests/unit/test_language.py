"""The English of docstrings, messages and pages stays plain (tests/tools/language.py)."""

import pytest

from tests.tools.language import figures, over_budget, texts

TEXTS = texts()
OVER = {
    ("docstrings", "one, ones as a pronoun"): 4.25,
    ("messages", "one, ones as a pronoun"): 4.2,
    ("messages", "conditions"): 2.85,
}
"""Figures that miss their budget, and their own limits. Most of these "one" are numbers."""


@pytest.mark.parametrize("kind", TEXTS)
def test_the_language_stays_within_its_budgets(kind):
    found = figures(TEXTS[kind])
    print(found)
    over = {name: value for (of, name), value in OVER.items() if of == kind}
    assert {*over_budget(found)} <= {*over}
    for name, limit in over.items():
        assert found[name] >= limit if name == "conditions" else found[name] <= limit


def test_what_nobody_understands_would_be_seen():
    text = "What comes alone is nothing whose ones go; where it went nobody told. " * 3
    assert set(over_budget(figures([text]))) > {"what", "alone", "comes, goes", "semicolons"}
