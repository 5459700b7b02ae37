#!/usr/bin/env bash
# Starts multiworker.sh on all hosts over ssh, from the checkout on the first of them:
#
#   ./start_all.sh a b
#
# Each host needs the checkout at the same path, and the token in ~/.tfdist_token (see README.md).
# Ctrl-C here stops the job on all hosts, with the save: the launcher of this one hears it.
set -euo pipefail
if (($# < 2)); then
    echo "usage: $0 HOST0 HOST1 [HOST...]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
token='TFDIST_RENDEZVOUS_TOKEN=$(cat ~/.tfdist_token)'
hosts=("$@")
for ((rank = 1; rank < ${#hosts[@]}; rank++)); do
    ssh -n "${hosts[rank]}" "$token $here/multiworker.sh $rank ${hosts[*]}" &
done
TFDIST_RENDEZVOUS_TOKEN=$(cat ~/.tfdist_token) "$here/multiworker.sh" 0 "${hosts[@]}" && code=0 || code=$?
wait
exit "$code"
