"""``tfdist demo``: train a CNN on the digits with 4 workers and 1 parameter server.

`tfdist.launch` runs the job, and `tfdist.train` trains with its default configuration. The demo
uses only CPUs, so that it runs on any machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tfdist.argument_parser import show
from tfdist.errors import UsageError, require_packages

_SHAPE = {"strategy": "ps", "workers": "4", "ps": "1"}
_HELP = """usage: tfdist demo [flags of tfdist launch] [flags of tfdist train]
       python -m tfdist.demo

Train a CNN on scikit-learn's digits: --strategy ps --workers 4 --ps 1 on the CPUs of this machine,
in about a minute. To change the job, pass --strategy:

  tfdist demo --strategy multiworker --workers 2
  tfdist demo --config.total_examples=2000"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code of its job."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(flags):
        return show("tfdist.demo", _HELP)
    try:
        require_packages("the demo's data", "sklearn", "tensorflow_datasets", extra="digits")
    except UsageError as error:
        print(f"tfdist.demo: {error}", file=sys.stderr)
        return error.exit_code
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from tfdist.launch.__main__ import main as launch

    return launch(command(flags))


def command(flags: Sequence[str]) -> list[str]:
    """Return the launcher's arguments: the demo's job, unless `flags` set a strategy."""
    given = {word.removeprefix("--").partition("=")[0] for word in flags if word[:2] == "--"}
    ours = {} if "strategy" in given else _SHAPE
    return [*(f"--{name}={ours[name]}" for name in ours if name not in given), *flags]


if __name__ == "__main__":
    sys.exit(main())
