#!/bin/sh
# The whole table: makes the peers' environment if it is not there, measures, writes RESULTS.md.
set -eu
here="$(cd "$(dirname "$0")" && pwd)"
"$here/setup.sh"
exec "$here/../.venv/bin/python" "$here/run.py" "$@"
