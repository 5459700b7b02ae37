"""The documentation site: `make docs` writes it to build/site.

The Markdown of the repository is the source, as it is read on a forge. It is copied to
build/pages with the files that it links to and the date of its last commit. The navigation is the
order of docs/index.md. The generator makes the rest by docs/zensical.toml: the API reference, and
the check of every link.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
PAGES, SITE = BUILD / "pages", BUILD / "site"
SOURCES = ("*.md", "docs/**/*.md", "launch/**/*.md", "benchmarks/*.md")
DECISIONS = "docs/adr/README.md"
_LISTED = re.compile(r"^- ((?:\[[^\]]*\]\([^)]*\)(?:,\s+)?)+)", re.MULTILINE)
"""The links with which an item of a list begins."""
_LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


def main() -> int:
    """Build the site; return 1 after a warning of the generator."""
    shutil.rmtree(BUILD / "pages", ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    dates = dates_of_files()
    for source in sorted({file for pattern in SOURCES for file in ROOT.glob(pattern)}):
        _copy(source)
        if date := dates.get(str(source.relative_to(ROOT))):
            page = PAGES / source.relative_to(ROOT)
            page.write_text(f"---\nrevision_date: {date}\n---\n{page.read_text()}")
        for linked in _files_linked_by(source):
            _copy(linked)
    for file in (ROOT / "docs/style/site.css", ROOT / "docs/images/logo.svg"):
        _copy(file)
    config = (ROOT / "docs" / "zensical.toml").read_text()
    config = config.replace("nav = []", f"nav = {_as_toml(navigation())}")
    package = (ROOT / "tfdist/__init__.py").read_text()
    config = config.replace("VERSION", re.findall(r'__version__ = "(.+)"', package)[0])
    (BUILD / "zensical.toml").write_text(config)
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    done = subprocess.run(
        [*command, "--config-file", BUILD / "zensical.toml"],
        cwd=BUILD,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout, end="")
    is_wrong = any(line.startswith("griffe:") for line in done.stdout.splitlines())
    return 1 if done.returncode or is_wrong else 0


def dates_of_files() -> dict[str, str]:
    """Return the date of the last commit of each file, empty without git or outside a checkout."""
    if not shutil.which("git"):
        return {}
    log = subprocess.run(
        ["git", "log", "--format=date %cs", "--name-only"], cwd=ROOT, capture_output=True, text=True
    )
    dates: dict[str, str] = {}
    date = ""
    for line in log.stdout.splitlines():
        if line.startswith("date "):
            date = line.removeprefix("date ")
        elif line:
            dates.setdefault(line, date)
    return dates


def _copy(file: Path) -> None:
    target = PAGES / file.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)


def _files_linked_by(page: Path) -> Iterator[Path]:
    """Yield the files of the checkout, other than pages, that a page links to."""
    for link in _LINK.findall(page.read_text()):
        file = (page.parent / link).resolve()
        if not _SCHEME.match(link) and file.is_file() and file.suffix != ".md":
            yield file


def navigation() -> list[object]:
    """Return the tabs of the site: the sections of docs/index.md, with their parts and pages."""
    tabs: list[object] = ["README.md"]
    seen = {"README.md"}
    text = (ROOT / "docs/index.md").read_text()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        tab: list[object] = ["docs/index.md"] if len(tabs) == 1 else []
        for part in re.split(r"^### ", section, flags=re.MULTILINE):
            lists = "".join(_LISTED.findall(part))
            linked = re.findall(r"\(([^)#]+\.md)\)", lists)
            pages = [str((ROOT / "docs" / link).resolve().relative_to(ROOT)) for link in linked]
            if DECISIONS in pages:
                folder = (ROOT / DECISIONS).parent
                pages += sorted(str(page.relative_to(ROOT)) for page in folder.glob("0*.md"))
            pages = [page for page in dict.fromkeys(pages) if page not in seen]
            seen |= {*pages}
            if not section.startswith(part) and pages:
                tab.append({part.partition("\n")[0]: pages})
            else:
                tab += pages
        tabs.append({section.partition("\n")[0]: tab})
    return tabs


def _as_toml(entry: object) -> str:
    """Return pages, and sections of pages, as TOML."""
    if isinstance(entry, list):
        return "[" + ", ".join(map(_as_toml, entry)) + "]"
    if isinstance(entry, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_as_toml(v)}" for k, v in entry.items()) + "}"
    return json.dumps(entry)


if __name__ == "__main__":
    sys.exit(main())
