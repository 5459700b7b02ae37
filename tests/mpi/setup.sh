#!/usr/bin/env bash
# Installs Open MPI's mpirun from Debian, where it is not there yet. Needs root for that.
set -euo pipefail
command -v mpirun >/dev/null && exit
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends openmpi-bin
