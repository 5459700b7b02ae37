"""Run tests with other versions of Python, TensorFlow and Keras, each cell in its own environment.

``python -m tests.tools.versions [CELL ...]`` runs the cells of `tfdist.versions.RECEIPTS`, or the
given ones, such as ``3.13-2.22.0rc0-3.15.1``. TEST_ARGS holds arguments of pytest, to replace the
cell's own tests.
"""

from __future__ import annotations

import configparser
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tfdist.versions import RECEIPTS

ROOT = Path(__file__).parents[2]
SIDE_BY_SIDE = ["-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
CORE = ["-m", "not slow and not alone", "tests/unit", "tests/integration"]
OF_HUB = "tests/field/test_keras_hub.py"
WITH_JOBS = (
    "3.11-2.20.0-3.14.1",
    "3.11-2.21.0-3.15.1",
    "3.12-2.22.0rc0-3.14.1",
    "3.13-2.22.0rc0-3.15.1",
)
"""The oldest versions, the default, the newest TensorFlow and the newest Python also run jobs."""

# Packages that follow from the cell's TensorFlow and Keras.
_FREE = re.compile(r"(tensorflow.*|keras.*|protobuf|tensorboard|h5py|ml_dtypes|numpy|grpcio.*)==")
_OF_HUB = ("keras-hub", "tensorflow-text")


def main(names: list[str]) -> int:
    """Run the cells and return 1 if a test of them failed."""
    cells = [f"{r.python}-{r.tensorflow}-{r.keras}" for r in RECEIPTS]
    results = []
    for name in names or cells:
        began_s = time.monotonic()
        results.append(run(name))
        print(f"{name}: {results[-1]} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return int("failed" in results)


def run(name: str) -> str:
    """Return ``passed``, ``failed``, or why the cell has not run."""
    version, tensorflow, keras = name.split("-")
    interpreter = interpreter_of(version)
    if interpreter is None:
        return f"not run, because this machine has no Python {version}"
    has_hub = not tensorflow.startswith("2.22") and keras.startswith("3.15")
    try:
        python = environment(name, interpreter, has_hub=has_hub)
    except subprocess.CalledProcessError:
        return "failed"  # uv has printed the reason, and the other cells still run
    # keras-hub requires tensorflow-text, which has no release for TensorFlow 2.22, and Keras 3.15:
    # 3.16 moved private functions that it imports.
    jobs = ["tests/multiprocess"] if name in WITH_JOBS else []
    field = ["tests/field", *([] if has_hub else [f"--ignore={OF_HUB}"])]
    given = shlex.split(os.environ.get("TEST_ARGS", ""))
    codes = []
    for words in [given] if given else [[*SIDE_BY_SIDE, *CORE, *jobs], [*SIDE_BY_SIDE, *field]]:
        print(f"== {name}: pytest {shlex.join(words)}", flush=True)
        codes.append(subprocess.run([python, "-m", "pytest", *words], cwd=ROOT).returncode)
    return "failed" if any(codes) else "passed"


def interpreter_of(version: str) -> str | None:
    """Return a Python of this version that starts: of the path, or of pyenv."""
    of_pyenv = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    for candidate in itertools.chain([f"python{version}"], map(str, sorted(of_pyenv))):
        try:
            subprocess.run([candidate, "-c", ""], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue  # pyenv has a python3.13 that fails if no version is chosen
        return candidate
    return None


def environment(name: str, interpreter: str, *, has_hub: bool) -> Path:
    """Install a cell's packages once, and return its Python."""
    _, tensorflow, keras = name.split("-")
    folder = ROOT / f".venv-with-{name}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    inputs = (ROOT / "setup.cfg", ROOT / "constraints.txt", Path(__file__))
    if ready.exists() and all(file.stat().st_mtime < ready.stat().st_mtime for file in inputs):
        return python
    print(f"== {name}: installing", flush=True)
    subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
    pins = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(line for line in pins if not _FREE.match(line)))

    def pip(verb: str, *words: str) -> None:
        command = [ROOT / ".venv-tools" / "bin" / "uv", "pip", verb, "--quiet"]
        subprocess.run([*command, "--python", python, *words], check=True, cwd=ROOT)

    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    dev = metadata["options.extras_require"]["dev"].split()
    wanted = [line for line in dev if not line.startswith(_OF_HUB)]
    pip("install", f"tensorflow=={tensorflow}", "-e", ".[all]", *wanted, "-c", str(constraints))
    # TensorFlow's pre-releases require keras-nightly, which has the same files as keras.
    pip("uninstall", "keras", "keras-nightly")
    distribution = "keras-nightly" if ".dev" in keras else "keras"
    pip("install", "--no-deps", f"{distribution}=={keras}")
    if has_hub:
        text = f"tensorflow-text~={tensorflow.rpartition('.')[0]}.0"
        hub = next(line for line in pins if line.startswith("keras-hub")).strip()
        others = ("kagglehub", "kagglesdk", "regex", "sentencepiece", "tokenizers")
        pip("install", *others, "-c", str(constraints))
        pip("install", "--no-deps", hub, text)
    # Without bytecode, an import of TensorFlow takes three times as long, and pip alone compiles.
    subprocess.run([python, "-m", "compileall", "-q", "-j", "0", folder / "lib"])
    ready.touch()
    return python


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
