#!/usr/bin/env bash
# The digits in one process. Arguments go to tfdist.train: ./single.sh --config.total_examples=57600
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

exec "$PYTHON" -m tfdist.train --config configs/digits_single.py "$@"
