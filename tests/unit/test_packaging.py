"""Files that describe the package agree: metadata, pinned versions, hooks, citation."""

import configparser
import re
from pathlib import Path

import tfdist

ROOT = Path(__file__).parents[2]
PINS = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    """Return the pinned versions of a file by normalized name."""
    found = PINS.findall((ROOT / name).read_text())
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_the_lock_has_the_pinned_versions_and_a_hash_of_each_package():
    lock, constraints = (ROOT / "requirements.lock").read_text(), pins("constraints.txt")
    locked = pins("requirements.lock")
    assert {name: locked.get(name) for name in constraints} == constraints
    entries = re.split(r"\n(?! )", lock.strip())
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert len(entries) == len(locked)
    assert "://" not in lock
    assert "index-url" not in lock


def test_every_required_package_is_in_the_lock():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    extras = metadata["options.extras_require"]
    wanted = [metadata["options"]["install_requires"]]
    wanted += [text for name, text in extras.items() if name not in ("gpu", "ray")]
    names = re.findall(r"^([\w-]+)(?![\w\[-])", "\n".join(wanted), re.MULTILINE)
    normalized = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    assert normalized - pins("requirements.lock").keys() == set()


def test_hooks_have_the_pinned_ruff():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"ruff==([\d.]+)", hooks)) == {pins("constraints.txt")["ruff"]}


def test_the_citation_names_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {tfdist.__version__}\n" in citation
