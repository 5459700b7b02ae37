#!/usr/bin/env bash
# What the tests here start, from Debian: ip, tc and ss. As root, where it is missing.
set -euo pipefail
if ! command -v ip >/dev/null || ! command -v tc >/dev/null || ! command -v ss >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y iproute2
fi
