#!/usr/bin/env bash
# The digits on WORKERS processes that compute each step together.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

exec "$PYTHON" -m tfdist.launch --strategy multiworker --workers "${WORKERS:-2}" \
    -m tfdist.train --config configs/digits_multiworker.py "$@"
