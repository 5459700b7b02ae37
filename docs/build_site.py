"""The documentation site: `make docs` writes it to build/site.

The Markdown of the repository is the source, as it is read on a forge. It is copied to
build/pages with the files that it links to; the navigation is the order of docs/index.md, the API
reference is made of the docstrings of every public name, and each link of the result is followed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
PAGES, SITE = BUILD / "pages", BUILD / "site"
SOURCES = ("*.md", "docs/**/*.md", "launch/**/*.md", "benchmarks/*.md")
_LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


def main() -> int:
    """Build the site; return 1 after a warning of the generator's or a link that leads nowhere."""
    shutil.rmtree(BUILD / "pages", ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    for source in sorted({file for pattern in SOURCES for file in ROOT.glob(pattern)}):
        _copy(source)
        for linked in _files_linked_by(source):
            _copy(linked)
    (PAGES / "docs" / "api.md").write_text(api_page())
    config = (ROOT / "docs" / "zensical.toml").read_text()
    config = config.replace("nav = []", f"nav = {_as_toml(navigation())}")
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
    if done.returncode:
        return 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("griffe:")]
    broken = [f"broken link: {line}" for line in sorted(broken_links(SITE))]
    print("".join(f"{line}\n" for line in broken), end="", file=sys.stderr)
    return 1 if wrong or broken else 0


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
    """Return the sections of docs/index.md with their pages, as the generator takes them."""
    sections: list[object] = ["README.md", "docs/index.md"]
    seen = {*sections}
    for part in re.split(r"^## ", (ROOT / "docs/index.md").read_text(), flags=re.MULTILINE)[1:]:
        cells = "".join(re.findall(r"^\| (\[.*?) \|", part, re.MULTILINE))
        linked = re.findall(r"\(([^)#]+\.md)\)", cells)
        pages = [str((ROOT / "docs" / link).resolve().relative_to(ROOT)) for link in linked]
        pages = [page for page in dict.fromkeys(pages) if page not in seen]
        title = part.partition("\n")[0]
        if title == "Names":
            pages = ["docs/api.md"]
        seen |= {*pages}
        if pages:
            sections.append({title: pages})
    return sections


def api_page() -> str:
    """Return the page of all public names, which the generator fills with their docstrings."""
    sys.path.insert(0, str(ROOT))
    import tfdist

    lines = ["# API reference", "", "`import tfdist` loads no TensorFlow.", ""]
    for name in sorted(tfdist._HOME_OF, key=str.casefold):
        home = tfdist._HOME_OF[name]
        is_module = home == f"tfdist.{name}"
        lines += [f"::: {home if is_module else f'{home}.{name}'}", "    options:"]
        lines += ["      show_root_heading: true", "      heading_level: 2"]
        lines += [f"      heading: tfdist.{name}", f"      toc_label: tfdist.{name}", ""]
    return "\n".join(lines)


def _as_toml(nav: list[object]) -> str:
    """Return a list of strings and of tables of one list each as TOML."""
    entries = [
        json.dumps(entry)
        if isinstance(entry, str)
        else ", ".join(f"{{{json.dumps(k)} = {json.dumps(v)}}}" for k, v in entry.items())
        for entry in nav
    ]
    return "[" + ", ".join(entries) + "]"


class _Page(HTMLParser):
    """Ids and links of a built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {values.get("id") or ""}
        self.links += [link for link in (values.get("href"), values.get("src")) if link]


def broken_links(site: Path) -> Iterator[str]:
    """Yield page and link for each link within the site that leads to no file or no anchor."""
    pages = {file: _Page(file.read_text()) for file in site.rglob("*.html")}
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or file.name == "404.html":
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and anchor not in pages[target].ids):
                yield f"{file.relative_to(site)}: {link}"


if __name__ == "__main__":
    sys.exit(main())
