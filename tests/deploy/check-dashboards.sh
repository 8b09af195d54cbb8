#!/usr/bin/env bash
# Dashboards and alerts against the real thing: starts a server under load, once with an embedded pool and once with worker
# processes, and a Prometheus that scrapes it; checks the metrics, the rules and each alert's test with promtool; runs every
# query of the dashboard and fails where one returns nothing; draws the panels, so that a person can look.
#
#   tests/deploy/check-dashboards.sh [OUT]     OUT: where the pages and, where Chromium is there, their pictures go
#                                        (default build/dashboards)
#
# Needs Debian's prometheus (installed where it is missing, as root or by sudo) and about two minutes. MESHFILL names a
# built binary; without it the release preset is built.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/dashboards}
mkdir -p "$out"

deploy/install-packages.sh
command -v promtool >/dev/null || deploy/install-packages.sh prometheus
if [ -z "${MESHFILL:-}" ]; then
  cmake --preset release >/dev/null
  cmake --build --preset release --target meshfill --parallel "$(nproc)"
  MESHFILL=build/release/server/meshfill
fi

echo "Rules"
(cd deploy/prometheus && promtool check config prometheus.yml && promtool test rules alerts_test.yml) | grep -v '^$'
deploy/prometheus/make_prometheus_rule.py --check
cp deploy/prometheus/pools_test.yml "$out/"
sed '1,/^spec:/d; s/^  //' deploy/prometheus/prometheus-rule.yaml >"$out/rules.yml"
promtool test rules "$out/pools_test.yml"
deploy/grafana/make_dashboard.py --check
exec python3 tests/deploy/check_dashboards.py "$MESHFILL" "$out"
