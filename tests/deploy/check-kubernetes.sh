#!/usr/bin/env bash
# Renders the base, every overlay and the Helm chart, and checks what comes out: against the schemas of three versions of
# Kubernetes, against the restricted pod security standard, against this repository (flags, keys and ports that are really
# there), and the checks themselves against manifests that are broken on purpose. Runs the Job that fetches the model, too,
# against a hub that is played.
#
#   tests/deploy/check-kubernetes.sh
#
# Needs PyPI in reach, for tests/deploy/install-kubernetes-tools.sh. MESHFILL names a built binary: with it, the pods' arguments and configurations are
# given to it, too. MESHFILL_CRDS names a folder with the CustomResourceDefinitions of PodMonitor, PrometheusRule and
# ScaledObject, as their projects publish them or a cluster has them (kubectl get crd -o yaml podmonitors.monitoring.coreos.com
# prometheusrules.monitoring.coreos.com scaledobjects.keda.sh >FOLDER/crds.yaml): with it, these are validated against them, and
# else against the fields that this repository knows of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
tests/deploy/install-kubernetes-tools.sh
export PATH="$PWD/build/kubernetes-tools:$PATH"
build/kubernetes-tools/python/bin/python tests/deploy/check_kubernetes.py
exec build/kubernetes-tools/python/bin/python tests/deploy/check_model_job.py
