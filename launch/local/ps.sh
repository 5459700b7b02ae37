#!/usr/bin/env bash
# The digits on WORKERS workers and PS parameter servers, and a chief that hands out the steps.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

exec "$PYTHON" -m tfdist.launch --strategy ps --workers "${WORKERS:-4}" --ps "${PS:-1}" \
    -m tfdist.train --config configs/digits_ps.py "$@"
