#!/usr/bin/env bash
# The digits on all devices of this machine; the config says how many.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

exec "$PYTHON" -m tfdist.train --config configs/digits_mirrored.py "$@"
