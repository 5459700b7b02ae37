#!/usr/bin/env bash
# Installs Chromium from Debian, where it is not there yet. Needs root for that.
set -euo pipefail
command -v chromium >/dev/null && exit
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium
