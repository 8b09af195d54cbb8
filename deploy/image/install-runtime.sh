#!/usr/bin/env bash
# In the image that runs: installs the packages of /usr/share/meshfill/packages and the system's authorities, which https
# collectors of traces and `--tls` without `--ca` are checked against. Writes what is installed then beside it.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
xargs apt-get install -y -qq --no-install-recommends ca-certificates </usr/share/meshfill/packages >/dev/null
rm -rf /var/lib/apt/lists/*
dpkg-query -W -f='${Package}\t${Version}\t${Architecture}\n' >/usr/share/meshfill/installed
