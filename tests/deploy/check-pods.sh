#!/usr/bin/env bash
# What the pods would run, without a cluster: the front-end and four workers of deploy/kubernetes/base, with the ConfigMaps'
# very configurations and the manifests' arguments, each in a network namespace with an address and names of its own, and certificates as cert-manager would make them. Prefills run while one worker is killed, comes back under its
# name at another address, and one is drained; each prefill must answer, and answer the same.
#
#   tests/deploy/check-pods.sh
#
# Needs root (network namespaces), iproute2, openssl, python3-grpcio, python3-yaml and, for kubectl, PyPI in reach. MESHFILL names a built
# binary; without it the release preset is built.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "$(id -u)" -eq 0 ] || { echo "check-pods.sh: needs root, for network namespaces" >&2; exit 1; }
deploy/install-packages.sh iproute2 openssl python3-grpcio python3-yaml
tests/deploy/install-kubernetes-tools.sh
export PATH="$PWD/build/kubernetes-tools:$PATH"
if [ -z "${MESHFILL:-}" ]; then
  cmake --preset release >/dev/null
  cmake --build --preset release --target meshfill --parallel "$(nproc)"
  MESHFILL=build/release/server/meshfill
fi
exec /usr/bin/python3 tests/deploy/check_pods.py "$MESHFILL"
