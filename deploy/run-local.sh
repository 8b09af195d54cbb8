#!/usr/bin/env bash
# Meshfill on this machine, end to end: installs what is missing, builds, makes a demo model of random weights, starts a
# server with an embedded pool of CPU ranks, sends it a document of 48 Ki tokens, prints the answer, the plan and the
# metrics that matter, and stops everything. MESHFILL_DEMO_TOKENS changes the document's length.
set -euo pipefail
cd "$(dirname "$0")/.."
tokens=${MESHFILL_DEMO_TOKENS:-49152}
work=$(mktemp -d)
server=
finish() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  [ -z "$server" ] || wait "$server" 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

say "Building"
deploy/install-packages.sh
cmake --preset release >/dev/null
cmake --build --preset release --target meshfill --parallel "$(nproc)"
meshfill=build/release/server/meshfill

if [ ! -d build/demo-model ]; then
  say "Making a demo model (random weights, byte vocabulary)"
  "$meshfill" make-model --arch llama --layers 4 --hidden 256 --heads 4 --kv-heads 2 --vocab 256 --out build/demo-model
fi

# A real document: this repository's own text, a token a byte.
find README.md proto kernels engine server configs -type f \( -name '*.md' -o -name '*.proto' -o -name '*.h' -o -name '*.cc' \
  -o -name '*.yaml' \) | LC_ALL=C sort | xargs cat >"$work/text"
while [ "$(stat -c %s "$work/text")" -lt "$tokens" ]; do cat "$work/text" "$work/text" >"$work/twice"; mv "$work/twice" "$work/text"; done
head -c "$tokens" "$work/text" >"$work/document"

say "Starting the server"
"$meshfill" serve --config configs/local.yaml --set listen=127.0.0.1:0 --set metrics_listen=127.0.0.1:0 >"$work/server.log" 2>&1 &
server=$!
address_of() { sed -n "s/^[^ ]* $1 //p" "$work/server.log" | head -n 1; }
for _ in $(seq 600); do
  if grep -q ' ready: ' "$work/server.log"; then break; fi
  if ! kill -0 "$server" 2>/dev/null; then cat "$work/server.log" >&2; server=; exit 1; fi
  sleep 0.1
done
cat "$work/server.log"
api=$(address_of 'listening on')
metrics=$(address_of 'metrics listening on')

say "Plan for $tokens tokens"
"$meshfill" plan --config configs/local.yaml --tokens "$tokens" --tile 2x2

say "Prefilling $tokens tokens as a 2x2 mesh"
"$meshfill" prefill --server "$api" --tokens "$work/document" --format bytes --tile 2x2 --top-k 3

say "Metrics (http://$metrics/metrics)"
python3 - "$metrics" <<'PY'
import re, sys, urllib.request
text = urllib.request.urlopen(f"http://{sys.argv[1]}/metrics", timeout=10).read().decode()
wanted = re.compile(r"meshfill_(ttft_seconds_(sum|count)|prompt_tokens|comm_wait_seconds|comm_bytes|mfu|attention_mfu|overlap|requests_total)")
print("\n".join(sorted(line for line in text.splitlines() if wanted.match(line) and not line.endswith("} 0"))))
PY

say "Stopping"
kill -TERM "$server"
wait "$server"
server=
tail -n 2 "$work/server.log"
