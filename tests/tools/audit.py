"""Print the known vulnerabilities of the packages of requirements.lock, as pip-audit finds them.

Exit with 1 after a finding, or if pip-audit fails by itself. If the network has no database of
vulnerabilities, print a line that says so, and exit with 0.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

REPORT = Path("build/audit.json")
NO_DATABASE = "audit: NOTHING CHECKED, because this network has no database of vulnerabilities"
_OF_NETWORK = re.compile("connect|timeout|ServiceError", re.IGNORECASE)


def main() -> int:
    """Run the pip-audit of this environment, and print its findings."""
    REPORT.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pip_audit", "--requirement", "requirements.lock"]
    options = ["--require-hashes", "--disable-pip", "--progress-spinner=off", "--format=json"]
    done = subprocess.run(
        [*command, *options, f"--output={REPORT}"], capture_output=True, text=True
    )
    text = REPORT.read_text() if REPORT.exists() else ""
    if not text:
        reason = (done.stderr.strip() or "no output").splitlines()[-1]
        if _OF_NETWORK.search(reason):
            print(f"{NO_DATABASE} ({reason})")
            return 0
        print(f"audit: pip-audit failed: {reason}")
        return 1
    packages = json.loads(text)["dependencies"]
    known = [package for package in packages if "vulns" in package]
    if not known:
        print(f"{NO_DATABASE} (it lacks all {len(packages)} packages)")
        return 0
    found = [(package, each) for package in known for each in package["vulns"]]
    for package, each in found:
        fixed = ", ".join(each["fix_versions"]) or "no version"
        print(f"{package['name']} {package['version']}: {each['id']} (fixed in {fixed})")
    count = len(packages) - len(known)
    if count:
        print(f"audit: not checked, as this network's database lacks them: {count} packages")
    print(f"audit: checked {len(known)} packages, found {len(found)} vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
