#!/usr/bin/env bash
# The status page in a real browser: starts a server under load, once with an embedded pool and once with workers, opens the
# page in headless Chromium on a phone's and a desk's width, and fails where it does not show the pool, the queue, the last
# prefill with each rank, and its picture, or where it asks anybody but the server for anything.
#
#   tests/deploy/check-status-page.sh [OUT]     OUT: where the screenshots go (default build/status-page)
#
# Needs Debian's chromium (installed where it is missing, as root or by sudo). MESHFILL names a built binary; without it the
# release preset is built.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/status-page}
mkdir -p "$out"
command -v chromium >/dev/null || deploy/install-packages.sh chromium fonts-dejavu-core
if [ -z "${MESHFILL:-}" ]; then
  deploy/install-packages.sh
  cmake --preset release -DMESHFILL_BUILD_TESTS=OFF >/dev/null
  cmake --build --preset release --target meshfill --parallel "$(nproc)"
  MESHFILL=build/release/server/meshfill
fi
exec python3 tests/deploy/check_status_page.py "$MESHFILL" "$out"
