"""Holds the Helm chart to the manifests: with the values of an overlay it renders what the overlay does.

check_kubernetes.py calls it.
"""
import copy
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import yaml
from manifest_checks import NEWEST, problems
from manifests import DEPLOY, KUBERNETES, WORKLOADS, name_of, of_kind, render

CHART, VALUES = DEPLOY / "helm/meshfill", DEPLOY / "helm/values"
RELEASE, OTHER = ("meshfill", "meshfill"), ("pool-7", "elsewhere")  # of Kustomize's names, and others: (name, namespace)
NEEDS = {"vllm": ["infiniband"]}  # values that come on top of others


def helm(chart, values, release=RELEASE, options=()):
    """(rendered documents, error)."""
    name, namespace = release
    command = ["helm", "template", name, chart, "--namespace", namespace, *options]
    for each in values:
        command += ["--values", VALUES / f"{each}.yaml"]
    result = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False)
    lines = [line for line in result.stderr.splitlines() if line and "symbolic link" not in line]
    documents = [each for each in yaml.safe_load_all(result.stdout) if each]
    for each in documents:
        each["metadata"].setdefault("namespace", namespace)  # as helm install does
    return documents, "\n".join(lines)


def plain(value, key=""):
    """Without what only one of both has: namespaces, hashes, the release's label, what is empty; lists of names in order."""
    if isinstance(value, dict):
        made = {name: plain(each, name) for name, each in value.items()}
        for name in ("namespace", "checksum/config", "app.kubernetes.io/instance", "helm.sh/resource-policy"):
            made.pop(name, None)
        if made.get("imagePullPolicy") == "IfNotPresent":  # Kubernetes' own default for images with a version
            del made["imagePullPolicy"]
        if made.get("readOnly") is False:
            del made["readOnly"]
        return {name: each for name, each in made.items() if each not in ({}, [])}
    if isinstance(value, list):
        made = [plain(each, key) for each in value]
        named = all(isinstance(each, dict) and ("name" in each or "mountPath" in each) for each in made)
        return sorted(made, key=lambda each: each.get("mountPath", each.get("name", ""))) if named else made
    if isinstance(value, str) and re.fullmatch(r"\d+\.\d+e\d+", value):
        return float(value)  # PyYAML wants a sign in the exponent
    if isinstance(value, str) and key == "name":
        return re.sub(r"^(meshfill-(?:front-end|worker))-[a-z0-9]{10}$", r"\1", value)
    return value


def comparable(documents):
    found = {}
    for document in documents:
        if document["kind"] == "Namespace":
            continue
        document = plain(copy.deepcopy(document))
        if document["kind"] == "ConfigMap":
            document["data"] = {file: plain(yaml.safe_load(text)) for file, text in document["data"].items()}
        if document["kind"] in WORKLOADS:
            for container in document["spec"]["template"]["spec"]["containers"]:
                if "--kv-transfer-config" in container.get("args", []):
                    container["args"] = [yaml.safe_load(each) if each.startswith("{") else each for each in container["args"]]
        found[name_of(document)] = document
    return found


def differences(ours, chart, path=""):
    if isinstance(ours, dict) and isinstance(chart, dict):
        for key in sorted(ours.keys() | chart.keys()):
            yield from differences(ours.get(key, "nothing"), chart.get(key, "nothing"), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(chart, list) and len(ours) == len(chart):
        for index, (mine, theirs) in enumerate(zip(ours, chart)):
            yield from differences(mine, theirs, f"{path}/{index}")
    elif ours != chart:
        yield f"{path}: {str(ours)[:200]} by Kustomize, {str(chart)[:200]} by Helm"


def check_same(overlay, values, chart=CHART):
    documents, error = helm(chart, values)
    if error:
        return [error]
    return [*differences(comparable(render(KUBERNETES / overlay)), comparable(documents))]


def pairs():
    """[(overlay, the values that make it)]."""
    return [("base", [])] + [(f"overlays/{path.stem}", [*NEEDS.get(path.stem, []), path.stem])
                             for path in sorted(VALUES.glob("*.yaml"))]


def check_chart():
    result = subprocess.run([sys.executable, DEPLOY / "helm/make_chart.py", "--check"], capture_output=True, text=True, check=False)
    if result.returncode:
        yield result.stderr.strip()
    result = subprocess.run(["helm", "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    if result.returncode or "[WARNING]" in result.stdout or "[ERROR]" in result.stdout:
        yield f"helm lint: {result.stdout}"
    overlays = {f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir()}
    yield from (f"{each}: the chart has no values for it" for each in overlays - {overlay for overlay, _ in pairs()})
    for overlay, values in pairs():
        yield from (f"{overlay}: {each}" for each in check_same(overlay, values))
        documents, error = helm(CHART, values, release=OTHER)
        if error:
            yield f"{overlay} as {OTHER[0]}: {error}"
        yield from (f"{overlay} as {OTHER[0]}: {each}" for each in problems(documents, NEWEST))
        yield from (f"{overlay}: helm uninstall deletes {name_of(each)}" for each in of_kind(documents, "PersistentVolumeClaim")
                    if each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") != "keep")
    documents, error = helm(CHART, [], options=["--set", "model.image=registry.example.com/q:1"])
    yield from ([error] if error else (f"with the model as an image: {each}" for each in problems(documents, NEWEST)))
    rule = {"to": [{"podSelector": {"matchLabels": {"app": "collector"}}}], "ports": [{"port": 4318}]}
    documents, error = helm(CHART, [], options=["--set-json", f"frontEnd.egress={json.dumps([rule])}"])
    yield from ([error] if error else (f"with a rule of egress: {each}" for each in problems(documents, NEWEST)))
    policies = {each["metadata"]["name"]: each["spec"]["egress"] for each in documents if each["kind"] == "NetworkPolicy"}
    if [name for name, rules in policies.items() if rule in rules] != ["meshfill-front-end"]:
        yield "frontEnd.egress is no rule of the front-end's NetworkPolicy alone"
    yield from check_vllm()
    url = "https://git.example.com/meshfill"
    documents, _ = helm(CHART, [], options=["--set", f"monitoring.documentation={url}"])
    runbooks = [rule["annotations"]["runbook_url"] for each in documents if each["kind"] == "PrometheusRule"
                for group in each["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    yield from (f"monitoring.documentation: a runbook_url is {each}" for each in runbooks or ["not there"]
                if not each.startswith(f"{url}/docs/operating.md#"))
    yield from (f"planted, and not found: {each}" for each in missed())


def check_vllm():
    """Whether vLLM gets what the values give it beside the overlay's."""
    token = {"name": "token", "secret": {"secretName": "token"}}
    mount = {"name": "token", "mountPath": "/token", "readOnly": True}
    given = {"vllm": {"args": ["--disable-hybrid-kv-cache-manager"], "volumes": [token], "volumeMounts": [mount],
                      "connector": {"tls": True, "min_tokens": 9, "server_name": "it's", "token_file": "/token/token"}}}
    options = [each for key, value in given["vllm"].items() for each in ("--set-json", f"vllm.{key}={json.dumps(value)}")]
    documents, error = helm(CHART, NEEDS["vllm"] + ["vllm"], release=OTHER, options=options)
    yield from ([error] if error else (f"vLLM's values: {each}" for each in problems(documents, NEWEST)))
    for workload in (each for each in documents if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("-vllm")):
        spec = workload["spec"]["template"]["spec"]
        container, = spec["containers"]
        flag = json.loads(container["args"][container["args"].index("--kv-transfer-config") + 1])
        if flag["kv_connector_extra_config"] != {"server": f"{OTHER[0]}:50051", **given["vllm"]["connector"]}:
            yield f"vllm.connector: the flag is {flag}"
        if container["args"][-1:] != given["vllm"]["args"] or mount not in container["volumeMounts"] or token not in spec["volumes"]:
            yield "vllm.args, vllm.volumes or vllm.volumeMounts are not in the pod"
        return
    yield "vLLM's values: there is no vLLM"


REFUSED_VALUES = {  # combinations that cannot work: what the error names
    "vllm.enabled=true,model.demo=true": "set model.demo=false",
    "autoscaling.enabled=true,workers.enabled=false": "set workers.enabled=true",
    "workers.createPriorityClass=true": "set workers.priorityClassName",
}
WRONG_VALUES = ("workers.replica=2", "workers.replicas=many", "model.claim.mode=x", "vllm.enabled=yes!")
MISTAKES = (  # (file, what is there, what is planted)
    ("templates/workers.yaml", "podManagementPolicy", "podManagmentPolicy"),
    ("templates/workers.yaml", "timeoutSeconds: 5", "timeoutSeconds: 1"),
    ("templates/front-end.yaml", "containerPort: 9464", "containerPort: 9465"),
    ("templates/front-end.yaml", 'name: "{{ .Release.Name }}-front-end"', "name: front-end"),
    ("templates/network-policies.yaml", "openshift-dns", "openshift"),
    ("templates/model.yaml", "ttlSecondsAfterFinished: 3600", "ttlSecondsAfterFinished: 600"),
    ("templates/monitoring.yaml", "grafana_dashboard", "dashboard"),
    ("templates/configs.yaml", "files/worker.yaml", "files/front-end.yaml"),
    ("values.yaml", "replicas: 4", "replicas: 3"),
    ("values.yaml", "size: 200Gi", "size: 20Gi"),
)


def missed():
    for wrong in WRONG_VALUES:
        if not helm(CHART, [], options=["--set", wrong])[1]:
            yield wrong
    for values, advice in REFUSED_VALUES.items():
        if advice not in helm(CHART, [], options=["--set", values])[1]:
            yield values
    with tempfile.TemporaryDirectory() as folder:
        chart = pathlib.Path(folder) / "meshfill"
        shutil.copytree(CHART, chart)  # links as files
        for file, there, mistake in MISTAKES:
            text = (chart / file).read_text()
            assert there in text, f"{file}: {there}"
            (chart / file).write_text(text.replace(there, mistake))
            if not check_same("base", [], chart):
                yield f"{file}: {mistake}"
            (chart / file).write_text(text)


def rendered():
    """[(what, documents)] of the chart with each overlay's values."""
    return [(f"chart as {overlay}", helm(CHART, values)[0]) for overlay, values in pairs()]
