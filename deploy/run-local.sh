#!/usr/bin/env bash
# Meshfill on this machine, end to end: installs what is missing, builds, makes a demo model, starts a server with an embedded
# pool of 4 CPU ranks, and prefills a document as a mesh, as a ring and on one rank. It shows the three beside each other, lets
# the model go on for a line, and leaves the pictures of both plans.
#
#   deploy/run-local.sh          stops the server at the end
#   deploy/run-local.sh --keep   leaves it running
#
# MESHFILL_DEMO_TOKENS is the document's length, 32768 unless set. MESHFILL names a binary to run instead of building one.
set -euo pipefail
cd "$(dirname "$0")/.."
case "$*" in
  "") keep= ;;
  --keep) keep=1 ;;
  *) echo "run-local.sh: '$*' was not expected; the one option is --keep" >&2; exit 2 ;;
esac
tokens=${MESHFILL_DEMO_TOKENS:-32768}
out=build/run-local
mkdir -p "$out"
server=
finish() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  [ -z "$server" ] || wait "$server" 2>/dev/null || true
}
trap finish EXIT
started=$SECONDS
step() { printf '%3d s  %s\n' $((SECONDS - started)) "$*"; }
# Runs a command whose output matters only where it fails.
quietly() {
  "$@" >"$out/build.log" 2>&1 || { tail -n 30 "$out/build.log" >&2; echo "run-local.sh: failed: $*" >&2; exit 1; }
}
# Ninja's 200 lines as one that counts up, on a terminal.
build() {
  cmake --build --preset release --target meshfill --parallel "$(nproc)" >"$out/build.log" 2>&1 &
  local ninja=$!
  while kill -0 "$ninja" 2>/dev/null; do
    [ ! -t 1 ] || printf '\r       %s' "$(grep -o '^\[[0-9]*/[0-9]*\]' "$out/build.log" | tail -n 1)"
    sleep 0.5
  done
  [ ! -t 1 ] || printf '\r\033[K'
  wait "$ninja" || { tail -n 30 "$out/build.log" >&2; echo "run-local.sh: the build failed, see $out/build.log" >&2; exit 1; }
}

if [ -z "${MESHFILL:-}" ]; then
  step "Installing what is missing"
  quietly deploy/install-packages.sh
  step "Building (the first time some 10 minutes on 2 cores)"
  quietly cmake --preset release
  build
  MESHFILL=build/release/server/meshfill
fi

if [ ! -f build/demo-model/config.json ] || [ deploy/make_demo_model.py -nt build/demo-model/config.json ]; then
  step "Making build/demo-model: a token is a byte, and it goes on as the document did before"
  rm -rf build/demo-model
  python3 deploy/make_demo_model.py build/demo-model
fi

# A real document: this repository's own text, again and again, a token a byte. It ends in words of its first lines.
find README.md proto kernels engine server configs -type f \( -name '*.md' -o -name '*.proto' -o -name '*.h' -o -name '*.cc' \
  -o -name '*.yaml' \) | LC_ALL=C sort | xargs cat >"$out/text"
while [ "$(stat -c %s "$out/text")" -lt "$tokens" ]; do cat "$out/text" "$out/text" >"$out/twice"; mv "$out/twice" "$out/text"; done
question=$'\n\nMeshfill runs the transformer\'s forward pa'
{ head -c "$((tokens - ${#question}))" "$out/text"; printf %s "$question"; } >"$out/document"

step "Starting the server (log: $out/server.log)"
"$MESHFILL" serve --config configs/local.yaml --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 2>"$out/server.log" &
server=$!
address_of() { sed -n "s/^[^ ]* $1 //p" "$out/server.log" | head -n 1; }
for _ in $(seq 600); do
  if grep -q ' ready: ' "$out/server.log"; then break; fi
  if ! kill -0 "$server" 2>/dev/null; then cat "$out/server.log" >&2; server=; exit 1; fi
  sleep 0.1
done
api=$(address_of 'listening on')
pages=$(address_of 'metrics listening on')
step "Status page, while it works: http://$pages/"

# With --logits-out each prefill computes the whole document, whatever the server has cached of it.
prefill() { "$MESHFILL" prefill --tokens "$out/document" --format bytes --json --logits-out "$out/$1.logits" "${@:2}" >"$out/$1.json"; }
draw() { "$MESHFILL" plan --config configs/local.yaml --tokens "$tokens" --tile "$1" --svg "$2" >"$out/plan.txt"; }
draw 1x4 "$out/ring.svg"
draw 2x2 "$out/mesh.svg"
step "Prefilling $tokens tokens as Mesh-Attention 2x2: each rank computes 2 x 2 blocks"
prefill mesh --server "$api" --tile 2x2
step "The same as Ring Attention 1x4"
prefill ring --server "$api" --tile 1x4
step "The same on one rank, which has all cores"
prefill one --config configs/local.yaml --ranks 1
step "Going on for 32 bytes, each behind what the server has cached"

PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=deploy python3 - "$out" "$MESHFILL" "$api" <<'PY'
import json, pathlib, struct, subprocess, sys
from make_demo_model import BYTES, continuation
out, meshfill, api = pathlib.Path(sys.argv[1]), *sys.argv[2:]
def character(byte):
    return repr(chr(byte)) if 32 <= byte < 127 else f"byte {byte}"
def mib(value):
    return f"{value / 2**20:.1f} MiB"
print(f"\n{'':16}{'seconds':>9}{'tokens/s':>10}{'sent by a rank':>16}{'comm wait':>11}  first token")
for name, file in (("Mesh 2x2", "mesh"), ("Ring 1x4", "ring"), ("one rank", "one")):
    result = json.loads((out / f"{file}.json").read_text())
    seconds = result["seconds"]
    print(f"{name:16}{seconds['prefill']:9.1f}{result['tokens'] / seconds['prefill']:10,.0f}"
          f"{mib(sum(result['comm_bytes'].values())):>16}{seconds['comm_wait']:9.2f} s  "
          f"{result['first_token']} ({character(result['first_token'])})")
def logits(name):
    data = (out / f"{name}.logits").read_bytes()
    return struct.unpack("<256f", data[-1024:])
mesh, one = logits("mesh"), logits("one")
print(f"\nThe logits of the mesh and of one rank differ by {max(abs(a - b) for a, b in zip(mesh, one)):.1g} at most, of {max(one):.3g}.")
document = (out / "document").read_bytes()
byte, count = continuation(document)
if byte is not None:
    often = f"once before, in front of {character(byte)}" if count == 1 else f"{count} times before, mostly in front of {character(byte)}"
    print(f"The model answers what followed the last {BYTES} bytes before. A plain search finds them {often}.")
going_on = document
for _ in range(32):
    command = [meshfill, "prefill", "--server", api, "--tokens", "-", "--format", "bytes", "--json"]
    answer = subprocess.run(command, input=going_on, stdout=subprocess.PIPE, check=True).stdout
    going_on += bytes([json.loads(answer)["first_token"]])
asked, answered = document[document.rfind(b"\n") + 1:], going_on[len(document):]
print(f"\n  document ends  {asked.decode(errors='replace')}\n  model goes on  {answered.decode(errors='replace')!r}\n")
print("On one machine all plans share the same cores: the mesh's gain is in the bytes, which count between machines.")
PY

cat <<NEXT

Next:
  PATH=\$PWD/build/release/server:\$PATH          # or see "Install" in README.md
  meshfill plan --config configs/local.yaml --tokens 1000000
  $out/mesh.svg and $out/ring.svg, in a browser   # who computes what, and when
  docs/quickstart.md                             # your own model, two machines, Kubernetes, vLLM
NEXT
if [ -n "$keep" ]; then
  echo "  meshfill prefill --server $api --tokens README.md --format bytes"
  echo "  http://$pages/                         # the status page"
  echo "  kill $server                                   # stops the server"
  disown "$server"
  server=
fi
