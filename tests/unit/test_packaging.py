"""Files that describe the package agree: metadata, pinned versions, hooks, citation."""

import configparser
import itertools
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import tfdist
from tfdist import env
from tfdist.versions import RECEIPTS, verdict, versions

ROOT = Path(__file__).parents[2]
PINS = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    """Return the pinned versions of a file by normalized name."""
    found = PINS.findall((ROOT / name).read_text())
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_the_lock_has_pinned_versions_with_hashes():
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


def test_the_citation_and_changelog_have_the_version():
    citation = (ROOT / "CITATION.cff").read_text()
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", citation, re.MULTILINE))
    assert cited["version"] == tfdist.__version__
    heading = f"## [{cited['version']}] - {cited['date-released']}\n"
    assert heading in (ROOT / "CHANGELOG.md").read_text()


# Versions


def table(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading."""
    _, _, *rows = (ROOT / page).read_text().split(heading)[1].splitlines()
    lines = itertools.takewhile(lambda row: row.startswith("|"), rows)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_readme_shows_the_receipts():
    serving = {"2.20": "2.20.0", "2.21": "2.21.0", "2.22": "2.21.0"}
    assert table("README.md", "| Python | TensorFlow | Keras |") == [
        [r.python, r.tensorflow, r.keras, serving[r.releases[1]], r.passed] for r in RECEIPTS
    ]


def test_the_cells_contain_each_pair_of_releases():
    for first, second in itertools.combinations(range(3), 2):
        pairs = {(receipt.releases[first], receipt.releases[second]) for receipt in RECEIPTS}
        assert len(pairs) == 9


def test_version_ranges_and_classifiers_match_the_tested_versions():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    classifiers = setup["metadata"]["classifiers"]
    pythons = re.findall(r"Python :: (3\.\d+)", classifiers)
    assert pythons == sorted({receipt.python for receipt in RECEIPTS})
    wanted = [Requirement(line) for line in setup["options"]["install_requires"].split()]
    ranges = {requirement.name: requirement.specifier for requirement in wanted}
    for name in ("tensorflow", "keras"):
        seen = sorted(Version(getattr(receipt, name)) for receipt in RECEIPTS)
        first, last = seen[0], seen[-1]
        limits = f">={first.major}.{first.minor},<{last.major}.{last.minor + 1}"
        assert ranges[name] == SpecifierSet(limits)


def test_the_nightly_release_counts_as_keras(monkeypatch):
    installed = {"tensorflow": "2.22.0rc0", "keras-nightly": "3.16.0.dev1"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    assert versions()["keras"] == "3.16.0.dev1"
    assert not verdict({**versions(), **installed}).startswith("known broken: keras and")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"python": "3.11.7", "tensorflow": "2.21.0", "keras": "3.15.1"}, "tested (one process, j"),
        ({"python": "3.11.7", "tensorflow": "2.19.1", "keras": "3.15.1"}, "untested: no test ran"),
        ({"python": "3.12.1", "tensorflow": "2.21.0", "keras": "3.15.1"}, "tested in pairs: tests"),
        ({"python": "3.11.7"}, "untested: no test ran with python 3.11, tensorflow none"),
        (
            {"python": "3.13.0", "tensorflow": "2.20.0", "keras-nightly": "3.16.0.dev1"},
            "tested (",
        ),
        ({"keras": "3.15.1", "keras-nightly": "3.16.0.dev1"}, "known broken: keras and keras-ni"),
    ],
)
def test_env_tells_whether_the_versions_are_tested(found, said):
    assert verdict(found).startswith(said)
    assert dict(env.report({}))["support"] == verdict(env.versions())
