#!/usr/bin/env bash
# A run that can be stopped at any time (Ctrl-C, kill) and goes on when this is called again:
# what makes it so is a run directory with a name of its own. Once finished, it says so and ends;
# --overwrite moves the finished run aside and begins anew.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
RUN_DIR=${RUN_DIR:-runs/resume}

exec "$PYTHON" -m tfdist.launch --strategy multiworker --workers "${WORKERS:-2}" \
    --run_dir "$RUN_DIR" \
    -m tfdist.train --config configs/digits_multiworker.py --config.backup_every_steps=50 "$@"
