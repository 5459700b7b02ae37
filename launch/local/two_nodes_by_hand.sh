#!/usr/bin/env bash
# The digits on two machines without the launcher. On each of them, at about the same time:
#
#   machine 0:  ./two_nodes_by_hand.sh 0 machine0:12345 machine1:12345
#   machine 1:  ./two_nodes_by_hand.sh 1 machine0:12345 machine1:12345
#
# Both need the same code and configuration, and a run directory; only that of machine 0, which is
# chief, is written. TensorFlow's servers run what anyone sends to their ports: open the ports to
# the other machine alone.
set -euo pipefail
if (($# < 3)); then
    echo "usage: $0 INDEX HOST0:PORT HOST1:PORT [flags of tfdist.train]" >&2
    exit 2
fi
index=$1 first=$2 second=$3
shift 3
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

TF_CONFIG=$(printf '{"cluster": {"worker": ["%s", "%s"]}, "task": {"type": "worker", "index": %d}}' \
    "$first" "$second" "$index")
export TF_CONFIG
exec "$PYTHON" -m tfdist.train --config configs/digits_multiworker.py \
    --config.run_dir=runs/two_nodes "$@"
