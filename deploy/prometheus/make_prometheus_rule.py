#!/usr/bin/env python3
"""Writes prometheus-rule.yaml, the rules as the Prometheus operator wants them, from recording.yml and alerts.yml.

Usage: make_prometheus_rule.py            write it beside this file
       make_prometheus_rule.py --check    exit 1 where the file is not what this would write
"""
import pathlib
import sys

NAMESPACE = "meshfill"  # of deploy/kubernetes/base
HERE = pathlib.Path(__file__).parent
OUTPUT = HERE / "prometheus-rule.yaml"
HEAD = """\
# Made by make_prometheus_rule.py from recording.yml and alerts.yml. MeshfillAbsent asks for the namespace's own front-end: an
# overlay with another one replaces it (docs/operating.md). The label is the one that the chart kube-prometheus-stack
# looks for, unless its release has another name.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: meshfill
  labels: {release: kube-prometheus-stack}
spec:
  groups:
"""


def groups(path):
    """The lines below `groups:`, two spaces further in."""
    lines = path.read_text().split("\n")
    return [f"  {line}".rstrip() for line in lines[lines.index("groups:") + 1:]]


def main():
    rules = [line for name in ("recording.yml", "alerts.yml") for line in groups(HERE / name) if line]
    text = HEAD + "\n".join(rules) + "\n"
    text = text.replace("absent(up{", f'absent(up{{namespace="{NAMESPACE}",')
    if sys.argv[1:] == ["--check"]:
        if not OUTPUT.exists() or OUTPUT.read_text() != text:
            sys.exit(f"{OUTPUT} is not what make_prometheus_rule.py writes; run it")
    else:
        OUTPUT.write_text(text)


if __name__ == "__main__":
    main()
