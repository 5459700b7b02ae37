#!/usr/bin/env bash
# What the tests here start, from Debian: ip, tc and ss, and iptables. As root, where it is missing.
set -euo pipefail
need=()
command -v ip >/dev/null && command -v tc >/dev/null && command -v ss >/dev/null || need+=(iproute2)
command -v iptables >/dev/null || need+=(iptables)
if ((${#need[@]})); then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "${need[@]}"
fi
