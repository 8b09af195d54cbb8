#!/usr/bin/env bash
# The steps of deploy/Dockerfile without a container engine: each stage is a debootstrap chroot, COPY and RUN are done in
# it, and the image's entry point, as its user, answers a prefill.
#
#   tests/deploy/check-image.sh [cpu|cuda]     default cpu
#
# Needs root, debootstrap (installed where it is missing), a Debian mirror, about 6 GB under TMPDIR, and the time of a whole
# build. The tree is what git has at HEAD. MESHFILL_MIRROR names another mirror; MESHFILL_GRPC a tag of gRPC's to build from
# source; MESHFILL_CUDA_HOME a toolkit that is mounted in place of NVIDIA's packages.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "$(id -u)" -eq 0 ] || { echo "check-image.sh: needs root, for chroots" >&2; exit 1; }
command -v debootstrap >/dev/null || deploy/install-packages.sh debootstrap
exec python3 tests/deploy/check_image.py "${1:-cpu}"
