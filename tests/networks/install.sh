#!/usr/bin/env bash
# Programs that the tests here start, from Debian. Run it as root if one is missing.
set -euo pipefail
for program in ip tc ss slirp4netns /usr/sbin/sshd; do
    if ! command -v "$program" >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y iproute2 slirp4netns openssh-server
        break
    fi
done
