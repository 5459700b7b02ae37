#!/usr/bin/env bash
# The digits on several hosts, TASKS (1) workers on each. On each of them, at about the same time:
#
#   host a:  ./multiworker.sh 0 a b
#   host b:  ./multiworker.sh 1 a b
#
# All need the same checkout, the same token (see README.md), and a network in which only they are.
set -euo pipefail
if (($# < 3)); then
    echo "usage: $0 RANK HOST0 HOST1 [HOST...] [-- flags of tfdist.train]" >&2
    exit 2
fi
rank=$1
shift
hosts=()
while (($#)) && [[ $1 != -- ]]; do
    hosts+=("$1:${TASKS:-1}")
    shift
done
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

exec "$PYTHON" -m tfdist.launch --strategy multiworker \
    --hosts "$(IFS=,; echo "${hosts[*]}")" --node_rank "$rank" --max_restarts 3 \
    --run_dir "${RUN_DIR:-runs/hosts}" \
    -m tfdist.train --config configs/digits_multiworker.py "${@:2}"
