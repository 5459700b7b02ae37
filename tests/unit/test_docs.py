"""What the pages promise exists: links, files, names, fields; their Python is Python; the site."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tfdist
from tests.tools import options_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
site = SimpleNamespace(**runpy.run_path(str(DOCS / "build_site.py")))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "launch").rglob("*.md")])

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")
# A file or folder of the checkout in backticks; what a run or a build makes is not one.
_PATH = re.compile(r"`((?:tfdist|tests|configs|launch|docs|benchmarks)/[\w./-]*)`")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCE.sub("", page.read_text())


def python_blocks(page: Path, language: str = "python") -> Iterator[tuple[int, str]]:
    """The first line and the code of each block that is marked as Python, or is a diff of it.

    Those that are marked `py`, another side's code, need what is not installed here and run in
    tests/migrations; the others run in tests/integration/test_docs_python.py.
    """
    text = page.read_text()
    for match in _FENCE.finditer(text):
        first_line = text.count("\n", 0, match.start()) + 1
        if match[2] == language:
            yield first_line, re.sub(rf"(?m)^ {{{len(match[1])}}}", "", match[3])
        elif match[2] == "diff" and language == "python":
            yield first_line, re.sub(r"(?m)^[+ ]|^-.*\n", "", match[3])


def anchors(page: Path) -> set[str]:
    """What headings can be linked by, as GitHub makes it of them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def leads_nowhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    is_there = target.exists() and target.is_relative_to(ROOT)
    return not is_there or (bool(anchor) and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_paths_and_python_of_pages_are_valid(page):
    text = prose(page)
    links = [link for link in _LINK.findall(_CODE.sub("", text)) if not _SCHEME.match(link)]
    assert [link for link in links if leads_nowhere(page, link)] == []
    paths = [] if page.name == "changelog-0.2.md" else _PATH.findall(text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for line, code in [*python_blocks(page), *python_blocks(page, "py")]:
        compile("\n" * line + code, name_of(page), "exec", ast.PyCF_ONLY_AST)


def test_python_of_other_libraries_has_its_own_tests():
    tests = (ROOT / "tests" / "migrations" / "test_pages.py").read_text()
    others = [name_of(page) for page in PAGES if any(python_blocks(page, "py"))]
    assert len(others) == 5
    assert [page for page in others if f'"{page}", ' not in tests] == []
    assert sum(1 for page in PAGES for _ in python_blocks(page)) > 30


def test_pages_name_all_public_names_and_no_others():
    texts = {page: page.read_text() for page in PAGES}
    text = "\n".join(texts[page] for page in PAGES if DOCS in page.parents)
    named = set(re.findall(r"\btfdist\.(\w+)\b", text))
    assert set(tfdist.__all__) - named == set()
    known = {*tfdist.__all__, *(path.stem for path in (ROOT / "tfdist").iterdir())}
    changelogs = {ROOT / "CHANGELOG.md", DOCS / "changelog-0.2.md"}  # they name what was removed
    for page in set(PAGES) - changelogs:
        assert set(re.findall(r"`tfdist\.(\w+)", prose(page))) <= known, name_of(page)


def test_the_reading_list_takes_one_afternoon():
    text = (DOCS / "architecture.md").read_text().split("## The reading list")[1]
    files = [ROOT / name for name in re.findall(r"^\d+\. `([\w/]+\.py)`$", text, re.MULTILINE)]
    assert 0 < len(files) <= 13
    assert sum(len(file.read_text().splitlines()) for file in files) <= 4000


def pages_of(entry: Any) -> Iterator[str]:
    """The pages of a part of the site's navigation."""
    if isinstance(entry, str):
        yield entry
        return
    for part in entry.values() if isinstance(entry, dict) else entry:
        yield from pages_of(part)


def test_every_page_is_in_the_navigation_once():
    listed = list(pages_of(site.navigation()))  # the order of docs/index.md
    pages = {name_of(page) for page in DOCS.rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert pages - set(listed) == set()
    beside = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/api.md"}
    assert set(listed) - pages - beside == {
        f"benchmarks/{page.name}" for page in (ROOT / "benchmarks").glob("*.md")
    }


def test_the_page_of_options_equals_the_tables():
    """`python -m tests.tools.options_page` writes it."""
    assert options_page.PAGE.read_text() == options_page.page()


def test_the_api_reference_has_every_public_name():
    text = (DOCS / "api.md").read_text()
    named = {name for name in tfdist.__all__ if f"::: tfdist.{name}\n" in text}
    assert {*tfdist.__all__} - named == {*filter(tfdist.errors.__dict__.get, tfdist.__all__)} | {
        "__version__"
    }
