#!/usr/bin/env bash
# The status page in a real browser: starts a server under load, once with an embedded pool and once with workers, opens the
# page in headless Chromium at 320, 420 and 1440 px, by day and by night, and fails where it does not show what runs, who waits,
# the pool, the last prefill with each rank, and its picture, where it does not fit or cuts a word, or where it asks anybody but
# the server for anything.
#
#   tests/deploy/check-status-page.sh [OUT]     OUT: where the screenshots go (default build/status-page)
#
# Needs Debian's chromium and chromium-driver (installed where they are missing, as root or by sudo). MESHFILL names a built binary; without it the
# release preset is built.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/status-page}
mkdir -p "$out"
deploy/install-packages.sh chromium chromium-driver fonts-dejavu-core
if [ -z "${MESHFILL:-}" ]; then
  deploy/install-packages.sh
  cmake --preset release >/dev/null
  cmake --build --preset release --target meshfill --parallel "$(nproc)"
  MESHFILL=build/release/server/meshfill
fi
exec python3 tests/deploy/check_status_page.py "$MESHFILL" "$out"
