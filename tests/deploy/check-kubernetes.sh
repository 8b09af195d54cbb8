#!/usr/bin/env bash
# Renders the base and every overlay, and checks what comes out: against the Kubernetes schemas, against the restricted pod
# security standard, against this repository (flags, keys and ports that are really there), and the checks themselves
# against manifests that are broken on purpose.
#
#   tests/deploy/check-kubernetes.sh
#
# Needs kubectl 1.27 or later, for its kustomize, and python3-venv with PyPI in reach, for kubernetes-validate. MESHFILL
# names a built binary: with it, the pods' arguments and configurations are given to it, too. MESHFILL_CRDS names a folder
# with the CustomResourceDefinitions of LeaderWorkerSet, PodMonitor and ScaledObject, as their projects publish them or a
# cluster has them (kubectl get crd -o yaml leaderworkersets.leaderworkerset.x-k8s.io podmonitors.monitoring.coreos.com
# scaledobjects.keda.sh >FOLDER/crds.yaml): with it, these are validated against them, and else against the fields that this
# repository knows of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! kubectl kustomize deploy/kubernetes/base >/dev/null; then
  echo "check-kubernetes.sh: kubectl 1.27 or later is needed; see https://kubernetes.io/docs/tasks/tools" >&2
  exit 1
fi
venv=build/kubernetes-venv
if [ ! -x "$venv/bin/kubernetes-validate" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q 'kubernetes-validate>=1.31' pyyaml jsonschema
fi
exec "$venv/bin/python" tests/deploy/check_kubernetes.py
