"""Print the covered lines of each room, of a report that `coverage json` writes."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path


def main(report: str) -> None:
    """Print a row for each room, and one for all."""
    lines, covered = collections.Counter[str](), collections.Counter[str]()
    for name, file in json.loads(Path(report).read_text())["files"].items():
        for room in (Path(name).with_suffix("").parts[1], "all"):
            lines[room] += file["summary"]["num_statements"]
            covered[room] += file["summary"]["covered_lines"]
    for room, count in sorted(lines.items(), key=lambda item: item[0] == "all"):
        print(f"{room:<16}{covered[room]:>7} of {count:>6} {covered[room] / max(count, 1):>7.1%}")


if __name__ == "__main__":
    main(sys.argv[1])
