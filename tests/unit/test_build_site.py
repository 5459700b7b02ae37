"""The site has every page once and every public name, and a link that leads nowhere is found."""

import runpy
from types import SimpleNamespace

import pytest

import tfdist
from tests.unit.test_docs import DOCS, ROOT

site = SimpleNamespace(**runpy.run_path(str(DOCS / "build_site.py")))


def test_every_page_is_in_the_navigation_once():
    listed: list[str] = []
    for entry in site.navigation():
        listed += (
            [entry] if isinstance(entry, str) else [p for pages in entry.values() for p in pages]
        )
    pages = {str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert pages - set(listed) == set()
    assert set(listed) - pages == {
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/api.md"),
        *(f"benchmarks/{page.name}" for page in (ROOT / "benchmarks").glob("*.md")),
    }


def test_the_api_page_has_every_public_name():
    page = site.api_page()
    assert [
        n for n in tfdist.__all__ if n != "__version__" and f"heading: tfdist.{n}\n" not in page
    ] == []


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("b.html#there", False),
        ("b.html#missing", True),
        ("missing.html", True),
        ("folder/", True),
        ("#top", False),
        ("https://example.org/missing", False),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path, link, is_broken):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.html").write_text(f'<p id="top"><a href="{link}">x</a>')
    (tmp_path / "b.html").write_text('<h2 id="there">')
    assert list(site.broken_links(tmp_path)) == ([f"a.html: {link}"] if is_broken else [])
