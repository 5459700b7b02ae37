#!/usr/bin/env bash
# The digits on several hosts, TASKS (1) workers on each, started by ssh from one of them:
#
#   ./multiworker.sh a b
#
# All need the same checkout on a shared file system, and a network in which only they are.
set -euo pipefail
if (($# < 2)); then
    echo "usage: $0 HOST0 HOST1 [HOST...] [-- flags of tfdist.train]" >&2
    exit 2
fi
hosts=()
while (($#)) && [[ $1 != -- ]]; do
    hosts+=("$1:${TASKS:-1}")
    shift
done
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

exec "$PYTHON" -m tfdist.launch --strategy multiworker \
    --hosts "$(IFS=,; echo "${hosts[*]}")" --max_restarts 3 \
    --run_dir "${RUN_DIR:-runs/hosts}" \
    -m tfdist.train --config configs/digits_multiworker.py "${@:2}"
