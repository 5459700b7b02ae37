"""What the pages promise exists: links, files, names, fields; and their Python is Python."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfdist
from tfdist.configs import FIELDS, FREE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
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
    """The first line and the code of each block that is marked as Python.

    Those that are marked `py`, another side's code, need what is not installed here and run in
    tests/migrations; the others run in tests/integration/test_docs_python.py.
    """
    text = page.read_text()
    for match in _FENCE.finditer(text):
        if match[2] == language:
            first_line = text.count("\n", 0, match.start()) + 1
            yield first_line, re.sub(rf"(?m)^ {{{len(match[1])}}}", "", match[3])


def anchors(page: Path) -> set[str]:
    """What headings can be linked by, as GitHub makes it of them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page):
    broken = []
    for link in _LINK.findall(_CODE.sub("", prose(page))):
        if _SCHEME.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_there = target.exists() and target.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_is_named_is_there(page):
    missing = [path for path in _PATH.findall(prose(page)) if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_in_the_pages_is_python(page):
    for line, code in [*python_blocks(page), *python_blocks(page, "py")]:
        try:
            ast.parse(code)
        except SyntaxError as error:
            at = line + (error.lineno or 0)
            pytest.fail(f"{name_of(page)}, line {at}: {error.msg}: {(error.text or '').strip()}")


def test_python_that_does_not_run_here_runs_where_its_library_is():
    tests = (ROOT / "tests" / "migrations" / "test_pages.py").read_text()
    others = [name_of(page) for page in PAGES if any(python_blocks(page, "py"))]
    assert len(others) == 5
    assert [page for page in others if f'"{page}", ' not in tests] == []
    assert sum(1 for page in PAGES for _ in python_blocks(page)) > 30


@pytest.mark.parametrize("name", tfdist.__all__)
def test_every_public_name_is_in_the_docs(name):
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert re.search(rf"\btfdist\.{re.escape(name)}\b", text)


def test_the_docs_name_nothing_that_tfdist_does_not_have():
    modules = {path.stem for path in (ROOT / "tfdist").iterdir()}
    known = {*tfdist.__all__, *modules}
    for page in PAGES:
        for name in re.findall(r"`tfdist\.(\w+)", prose(page)):
            assert name in known, f"{name_of(page)}: tfdist.{name}"


def test_the_reading_list_is_an_afternoons():
    text = (DOCS / "architecture.md").read_text().split("## The reading list")[1]
    files = [ROOT / name for name in re.findall(r"^\d+\. `([\w/]+\.py)`$", text, re.MULTILINE)]
    assert 0 < len(files) <= 13
    assert sum(len(file.read_text().splitlines()) for file in files) <= 4000


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.name != "index.md"]
    assert [page for page in pages if f"({page})" not in index] == []


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_field_of_a_configuration_is_in_the_table_as_it_is(field):
    bounds = [", ".join(f"`{choice}`" for choice in field.choices)] if field.choices else []
    bounds += [f"{field.least} or more"] if field.least is not None else []
    bounds += [f"more than {field.above}"] if field.above is not None else []
    bounds += [f"less than {field.below}"] if field.below is not None else []
    row = f"| `{field.name}` | `{field.default!r}` | {'; '.join(bounds)} | {field.help} |"
    assert row in (DOCS / "configs.md").read_text().splitlines()


def test_the_fields_that_may_differ_are_named():
    text = " ".join((DOCS / "configs.md").read_text().split())
    named = text.partition("these fields may differ: ")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", named)) == FREE
