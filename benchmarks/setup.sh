#!/bin/sh
# Makes benchmarks/.venv, the environment of the peers. Safe to run again; --force makes it anew.
# PYTHON names the interpreter to use (3.11 by default).
set -eu
cd "$(dirname "$0")"
[ "${1:-}" = "--force" ] && rm -rf .venv
if [ -x .venv/bin/python ] && cmp -s requirements.txt .venv/requirements.txt; then
    exit 0
fi
[ -x .venv/bin/python ] || "${PYTHON:-python3.11}" -m venv .venv
.venv/bin/python -m pip install --quiet --requirement requirements.txt
cp requirements.txt .venv/requirements.txt
