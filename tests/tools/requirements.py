"""Write the requirements of setup.cfg to build/ for deptry, which does not read setup.cfg."""

from __future__ import annotations

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Write requirements.txt and requirements-dev.txt."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    extras = dict(metadata["options.extras_require"])
    dev = extras.pop("dev")
    (ROOT / "build").mkdir(exist_ok=True)
    _write("requirements.txt", [metadata["options"]["install_requires"], *extras.values()])
    _write("requirements-dev.txt", [dev])


def _write(name: str, texts: list[str]) -> None:
    lines = {line for text in texts for line in text.split("\n") if line}
    own = sorted(line for line in lines if not line.startswith("tfdist["))
    (ROOT / "build" / name).write_text("\n".join(own) + "\n")


if __name__ == "__main__":
    main()
