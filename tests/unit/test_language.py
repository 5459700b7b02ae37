"""The English of docstrings, messages and pages stays plain (tests/tools/language.py)."""

import pytest

from tests.tools.language import figures, over_budget, texts

TEXTS = texts()


@pytest.mark.parametrize("kind", TEXTS)
def test_the_language_stays_within_its_budgets(kind):
    found = figures(TEXTS[kind])
    print(found)
    assert over_budget(found) == []


def test_unclear_text_is_over_budget():
    text = "What comes alone is nothing whose ones go; where it went nobody told. " * 3
    assert set(over_budget(figures([text]))) > {"what", "alone", "comes, goes", "semicolons"}
