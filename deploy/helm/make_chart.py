#!/usr/bin/env python3
"""Writes the templates of the Helm chart from the manifests of deploy/kubernetes, and the schema of its values.

Usage: make_chart.py            write meshfill/templates/ and meshfill/values.schema.json
       make_chart.py --check    exit 1 where they are not what this would write

Objects are taken as `kubectl kustomize` renders them. What a chart lets its user choose is put in place of what is there: Value
and Tree print values, If and With print a part only where it is wanted, More adds to a list. Names begin with the release's.
The chart's files/ are links to the configurations, the rules and the dashboard. tests/deploy/check_chart.py holds what the
chart renders to the manifests. Needs kubectl and PyYAML: tests/deploy/install-kubernetes-tools.sh brings both.
"""
import json
import pathlib
import re
import subprocess
import sys

import yaml

HERE = pathlib.Path(__file__).parent
CHART = HERE / "meshfill"
KUBERNETES = HERE.parent / "kubernetes"
HEAD = "{{- /* Made by deploy/helm/make_chart.py from deploy/kubernetes. */ -}}\n"
WORKERS, TLS = ".Values.workers.enabled", "and .Values.workers.enabled .Values.tls.enabled"
CLAIM = "not (or .Values.model.image .Values.model.demo)"
NAME = re.compile(r"meshfill(-(front-end|worker|control|model|vllm)(-tls|-token)?)?$")
NAMED_BY = {("metadata", "name"), ("configMap", "name"), ("scaleTargetRef", "name"), ("secretKeyRef", "name")}


class Value(str):
    """A scalar: text with expressions in it."""


class Tree(str):
    """A path whose value is printed as YAML."""


class With(str):
    """As Tree; the key is left out where the value is empty."""


class More(str):
    """In a list: the items of this path, if any."""


class If:
    """A part that is there under a condition, in a mapping or a list; otherwise `other`, if given."""

    def __init__(self, condition, part, other=None):
        self.condition, self.part, self.other = condition, part, other


def scalar(value):
    if isinstance(value, Value):
        text = "Release" in value or not re.fullmatch(r"{{[^}]*}}", value)
        return f'"{value}"' if text else str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def block(value, indent):
    """The lines of a value below its key or dash, or what stands beside it."""
    if isinstance(value, Tree):
        return [f" {{{{- toYaml {value} | nindent {indent} }}}}"]
    if isinstance(value, str) and "\n" in value and not isinstance(value, Value):
        return [" |"] + [" " * indent + line for line in value.rstrip("\n").split("\n")]
    if isinstance(value, (dict, list)) and value:
        return [""] + lines(value, indent)
    return [f" {scalar(value)}"] if not isinstance(value, (dict, list)) else [" {}" if isinstance(value, dict) else " []"]


def entry(key, value, indent):
    space = " " * indent
    if isinstance(value, If):
        other = ["{{- else }}"] + entry(key, value.other, indent) if value.other is not None else []
        return [f"{{{{- if {value.condition} }}}}", *entry(key, value.part, indent), *other, "{{- end }}"]
    if isinstance(value, With):
        return [f"{{{{- with {value} }}}}", f"{space}{key}: {{{{- toYaml . | nindent {indent + 2} }}}}", "{{- end }}"]
    first, *rest = block(value, indent + 2)
    return [f"{space}{key}:{first}", *rest]


def item(value, indent):
    space = " " * indent
    if isinstance(value, If):
        other = ["{{- else }}"] + item(value.other, indent) if value.other is not None else []
        return [f"{{{{- if {value.condition} }}}}", *item(value.part, indent), *other, "{{- end }}"]
    if isinstance(value, More):
        return [f"{{{{- with {value} }}}}", f"{{{{- toYaml . | nindent {indent} }}}}", "{{- end }}"]
    if isinstance(value, dict):
        below = lines(value, indent + 2)
        return [f"{space}- {below[0].lstrip()}", *below[1:]]
    return [f"{space}- {scalar(value)}"] if "\n" not in str(value) else [f"{space}-{block(value, indent + 2)[0]}",
                                                                         *block(value, indent + 2)[1:]]


def lines(value, indent=0):
    """YAML of a mapping or a list. A mapping in a list begins with a plain scalar or tree, never with a condition."""
    if isinstance(value, dict):
        return [line for key, each in value.items() for line in entry(key if "/" not in key else json.dumps(key), each, indent)]
    return [line for each in value for line in item(each, indent)]


def document(value, condition=None):
    text = "\n".join(["---", *lines(value)])
    return f"{{{{- if {condition} }}}}\n{text}\n{{{{- end }}}}\n" if condition else text + "\n"


def render(folder):
    text = subprocess.run(["kubectl", "kustomize", KUBERNETES / folder], check=True, capture_output=True, text=True).stdout
    return [released(each) for each in yaml.safe_load_all(text)]


def released(value, parent="", key=""):
    """The same without namespace and names' hashes, with the release in names and selectors."""
    if isinstance(value, dict):
        made = {name: released(each, key, name) for name, each in value.items() if (key, name) != ("metadata", "namespace")}
        if "app.kubernetes.io/name" in made:
            made["app.kubernetes.io/instance"] = Value("{{ .Release.Name }}")
        return made
    if isinstance(value, list):
        return [released(each, parent, key) for each in value]
    if not isinstance(value, str):
        return value
    plain = re.sub(r"-[a-z0-9]{10}$", "", value)
    if ((parent, key) in NAMED_BY or key in ("claimName", "secretName", "serviceName")) and NAME.match(plain):
        return Value(re.sub("^meshfill", "{{ .Release.Name }}", plain))
    if key == "args":
        value = re.sub(r'^meshfill-control:', "{{ .Release.Name }}-control:", value)
        return Value(value) if "{{" in value else value
    return value


def find(documents, kind, name=""):
    return next(each for each in documents if each["kind"] == kind and each["metadata"]["name"].endswith(name))


def at(items, name):
    """The place of the item with that name in a list."""
    return next(index for index, each in enumerate(items) if isinstance(each, dict) and each.get("name") == name)


def pod_of(workload, section):
    """Puts the values of `section` into the pod of a workload of Meshfill."""
    spec = workload["spec"]["template"]["spec"]
    meshfill, = spec["containers"]
    image = Value("{{ .Values.image.repository }}:{{ .Values.image.tag }}")
    for container in (meshfill, *spec["initContainers"]):
        container.update(image=image, imagePullPolicy=Value("{{ .Values.image.pullPolicy }}"))
    meshfill["resources"] = Tree(f".Values.{section}.resources")
    meshfill["volumeMounts"].append(More(f".Values.{section}.volumeMounts"))
    wait, = spec["initContainers"]
    demo = {key: each for key, each in wait.items() if key != "command"}
    demo.update(args="make-model --arch llama --layers 4 --hidden 256 --vocab 256 --out /models/model".split(),
                resources={"requests": {"cpu": "200m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}},
                volumeMounts=[{"name": "model", "mountPath": "/models"}])
    spec["initContainers"] = If("not .Values.model.image", [If(".Values.model.demo", demo, wait)])
    model = at(spec["volumes"], "model")
    spec["volumes"][model] = model_volume(spec["volumes"][model])
    spec["volumes"].append(More(f".Values.{section}.volumes"))
    spec["terminationGracePeriodSeconds"] = Value(f"{{{{ .Values.{section}.terminationGracePeriodSeconds }}}}")
    spec["imagePullSecrets"] = With(".Values.imagePullSecrets")
    for key in ("nodeSelector", "tolerations", "affinity"):
        spec[key] = With(f".Values.{section}.{key}")
    workload["spec"]["template"]["metadata"].setdefault("annotations", {})["checksum/config"] = Value(
        '{{ include "meshfill.%s" . | sha256sum }}' % section)
    return spec, meshfill


def model_volume(claim):
    image = {"name": "model", "image": {"reference": Value("{{ .Values.model.image }}"), "pullPolicy": "IfNotPresent"}}
    return If(".Values.model.image", image, If(".Values.model.demo", {"name": "model", "emptyDir": {}}, claim))


def only_with(condition, items, name):
    """Makes the item of that name conditional."""
    index = at(items, name)
    items[index] = If(condition, items[index])


def front_end(documents):
    workload = find(documents, "Deployment", "-front-end")
    spec, container = pod_of(workload, "frontEnd")
    workload["spec"]["progressDeadlineSeconds"] = Value("{{ .Values.frontEnd.progressDeadlineSeconds }}")
    only_with(WORKERS, container["ports"], "control")
    cache = {"name": "cache", "emptyDir": {"sizeLimit": "16Mi"}}
    container["volumeMounts"].insert(-1, If(f"not {WORKERS}", {"name": "cache", "mountPath": "/var/cache/meshfill"}))
    spec["volumes"].insert(-1, If(f"not {WORKERS}", cache))
    for items in (container["volumeMounts"], spec["volumes"]):
        only_with(TLS, items, "tls")
    api = next(each for each in documents if each["kind"] == "Service" and each["metadata"]["name"] == "{{ .Release.Name }}")
    return document(workload) + document(api) + document(find(documents, "Service", "-control"), WORKERS)


def workers(documents, priority):
    workload = find(documents, "StatefulSet", "-worker")
    spec, container = pod_of(workload, "workers")
    for items in (container["volumeMounts"], spec["volumes"]):
        only_with(TLS, items, "tls")
    container["env"].append(More(".Values.workers.env"))
    spec["priorityClassName"] = If(".Values.workers.priorityClassName", Value("{{ .Values.workers.priorityClassName }}"))
    workload["spec"]["replicas"] = If("not .Values.autoscaling.enabled", Value("{{ .Values.workers.replicas }}"))
    priority["metadata"]["name"] = Value("{{ .Values.workers.priorityClassName }}")
    return (document(workload, WORKERS) + document(find(documents, "Service", "-worker"), WORKERS)
            + document(find(documents, "PodDisruptionBudget"), WORKERS)
            + document(priority, f"and {WORKERS} .Values.workers.createPriorityClass"))


def model(documents):
    claim, job = find(documents, "PersistentVolumeClaim"), find(documents, "Job")
    class_name = ".Values.model.claim.storageClassName"
    claim["spec"] = {"accessModes": Tree(".Values.model.claim.accessModes"),
                     "storageClassName": If(class_name, Value(f"{{{{ {class_name} }}}}")),
                     "resources": {"requests": {"storage": Value("{{ .Values.model.claim.size }}")}}}
    claim["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}  # what it holds took hours to fetch
    container, = job["spec"]["template"]["spec"]["containers"]
    for name in ("repository", "revision"):
        variable = container["env"][at(container["env"], f"MODEL_{name.upper()}")]
        variable["value"] = Value(f"{{{{ .Values.model.{name} | quote }}}}")
    # As overlays/single-pod: a claim of one node is filled where the front-end is.
    beside = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {
        **job["metadata"]["labels"], "app.kubernetes.io/component": "front-end"}}}
    spec = job["spec"]["template"]["spec"]
    spec["affinity"] = If(f"not {WORKERS}", {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [beside]}})
    spec["tolerations"] = If(f"not {WORKERS}", With(".Values.frontEnd.tolerations"))
    policy = find(documents, "NetworkPolicy", "-model")
    return (document(claim, f"and .Values.model.claim.create ({CLAIM})")
            + "".join(document(each, f"and .Values.model.fetch ({CLAIM})") for each in (job, policy)))


def network_policies(documents):
    made = ""
    for name in ("-front-end", "-worker"):
        policy = find(documents, "NetworkPolicy", name)
        rules = policy["spec"]["ingress"]
        for index, rule in enumerate(rules):
            if rule.get("ports") == [{"port": "control"}]:
                rules[index] = If(WORKERS, rule)
            if rule.get("ports") == [{"port": "metrics"}]:
                space = rule["from"][0]["namespaceSelector"]["matchLabels"]
                space["kubernetes.io/metadata.name"] = Value("{{ .Values.monitoring.namespace }}")
        if name == "-front-end":
            policy["spec"]["egress"].append(More(".Values.frontEnd.egress"))
        made += document(policy, WORKERS if name == "-worker" else None)
    return made


def monitoring(documents):
    monitor, of_workers = (each for each in documents if each["kind"] == "PodMonitor")
    rules = find(documents, "PrometheusRule")
    dashboard = find(documents, "ConfigMap", "-dashboard")
    for each in (monitor, of_workers, rules):
        each["metadata"]["labels"]["release"] = Value("{{ .Values.monitoring.release }}")
    rules["spec"]["groups"] = "RULES"
    dashboard["metadata"]["name"] = Value("{{ .Release.Name }}-dashboard")
    dashboard["data"] = {"meshfill.json": "DASHBOARD"}
    text = document(monitor) + document(of_workers, WORKERS) + document(rules) + document(dashboard)
    text = text.replace('groups: "RULES"', '''groups:
    {{- range list "files/recording.yml" "files/alerts.yml" }}
    {{- $rules := $.Files.Get . | replace "https://example.com/meshfill" $.Values.monitoring.documentation }}
    {{- $rules = $rules | replace "absent(up{" (printf "absent(up{namespace=%q," $.Release.Namespace) }}
    {{- ($rules | fromYaml).groups | toYaml | nindent 4 }}
    {{- end }}''')
    text = text.replace('"DASHBOARD"', '|\n{{ .Files.Get "files/meshfill.json" | indent 4 }}')
    return f"{{{{- if .Values.monitoring.enabled }}}}\n{text}{{{{- end }}}}\n"


def autoscaling(documents):
    scaled = find(documents, "ScaledObject")
    spec, (trigger,) = scaled["spec"], scaled["spec"]["triggers"]
    spec["minReplicaCount"] = Value("{{ .Values.autoscaling.minReplicas }}")
    spec["maxReplicaCount"] = Value("{{ .Values.autoscaling.maxReplicas }}")
    query = re.sub(r'namespace="[^"]*"', 'namespace="{{ .Release.Namespace }}"', trigger["metadata"]["query"])
    trigger["metadata"] = {"query": "QUERY", "serverAddress": Value("{{ .Values.autoscaling.prometheus }}"),
                           "threshold": Value("{{ .Values.autoscaling.tokensPerWorker | quote }}")}
    text = document(scaled, f"and {WORKERS} .Values.autoscaling.enabled")
    return text.replace('query: "QUERY"', f"query: >-\n          {query}")


def vllm(documents):
    workload = find(documents, "Deployment", "-vllm")
    spec = workload["spec"]["template"]["spec"]
    main, = spec["containers"]
    for container in (main, *spec["initContainers"]):
        container["image"] = Value("{{ .Values.vllm.image.repository }}:{{ .Values.vllm.image.tag }}")
    spec["initContainers"] = If("not .Values.model.image", spec["initContainers"])
    main["resources"] = Tree(".Values.vllm.resources")
    main["volumeMounts"].append(More(".Values.vllm.volumeMounts"))
    transfer = main["args"].index("--kv-transfer-config") + 1
    flag = json.loads(main["args"][transfer])
    flag.pop("kv_connector_extra_config")
    main["args"][transfer] = "FLAG"
    main["args"].append(More(".Values.vllm.args"))
    spec["volumes"][at(spec["volumes"], "model")] = model_volume(spec["volumes"][at(spec["volumes"], "model")])
    spec["volumes"].append(More(".Values.vllm.volumes"))
    spec["imagePullSecrets"], spec["nodeSelector"] = With(".Values.imagePullSecrets"), With(".Values.vllm.nodeSelector")
    workload["spec"]["replicas"] = Value("{{ .Values.vllm.replicas }}")
    service, policy = find(documents, "Service", "-vllm"), find(documents, "NetworkPolicy", "-vllm")
    for rule in policy["spec"]["ingress"]:
        for peer in rule["from"]:
            if peer["namespaceSelector"]:
                peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] = Value("{{ .Values.monitoring.namespace }}")
    text = "".join(document(each) for each in (workload, service, policy))
    given = " ".join(f'"{key}" "{value}"' for key, value in flag.items())
    return ("{{- if .Values.vllm.enabled }}\n"
            '{{- $server := dict "server" (printf "%s:50051" .Release.Name) "min_tokens" (int .Values.vllm.minTokens) }}\n'
            f'{{{{- $flag := dict {given} "kv_connector_extra_config" (mergeOverwrite $server .Values.vllm.connector) }}}}\n'
            + text.replace('"FLAG"', "{{ $flag | toJson | toJson }}") + "{{- end }}\n")


REFUSED = (  # (values that cannot work together, what to do)
    ("and .Values.vllm.enabled .Values.model.demo (not .Values.model.image)",
     "vllm.enabled with model.demo: each pod makes a demo model for itself, and vLLM would wait for one for ever; set model.demo=false"),
    ("and .Values.autoscaling.enabled (not .Values.workers.enabled)",
     "autoscaling.enabled without workers: KEDA has nothing to scale; set workers.enabled=true or autoscaling.enabled=false"),
    ("and .Values.workers.createPriorityClass (not .Values.workers.priorityClassName)",
     "workers.createPriorityClass without a name; set workers.priorityClassName"),
)


def refused():
    return "".join(f"{{{{- if {condition} }}}}{{{{ fail {json.dumps(message)} }}}}{{{{ end -}}}}\n" for condition, message in REFUSED)


CONFIGS = """\
{{- define "meshfill.frontEnd" -}}
{{- $file := ternary "files/front-end.yaml" "files/single-pod.yaml" .Values.workers.enabled -}}
{{- $config := mergeOverwrite (.Files.Get $file | fromYaml) (deepCopy .Values.frontEnd.config) -}}
{{- if and .Values.workers.enabled (not .Values.tls.enabled) }}{{ $_ := set $config.pool "tls" (dict "insecure" true) }}{{ end -}}
{{- regexReplaceAll `(?m)^ *\\S+: null\\n` (printf "%s\\n" (toYaml $config)) "" | trimSuffix "\\n" }}
{{- end }}
{{- define "meshfill.workers" -}}
{{- $config := mergeOverwrite (.Files.Get "files/worker.yaml" | fromYaml) (deepCopy .Values.workers.config) -}}
{{- if not .Values.tls.enabled }}{{ $_ := set $config.pool "tls" (dict "insecure" true) }}{{ end -}}
{{- regexReplaceAll `(?m)^ *\\S+: null\\n` (printf "%s\\n" (toYaml $config)) "" | trimSuffix "\\n" }}
{{- end }}
"""


def configs(documents):
    made = CONFIGS
    for name, file, section, condition in (("-front-end", "front-end.yaml", "frontEnd", None),
                                           ("-worker", "worker.yaml", "workers", WORKERS)):
        config_map = find(documents, "ConfigMap", name)
        config_map["data"] = {file: "CONFIG"}
        made += document(config_map, condition).replace('"CONFIG"', f'|\n    {{{{- include "meshfill.{section}" . | nindent 4 }}}}')
    return made


def schema_of(value):
    """Closed mappings, but for those that are free: empty ones, and what Kubernetes itself checks."""
    if not isinstance(value, dict):
        kinds = {bool: "boolean", int: "integer", str: "string", list: "array"}
        return {"type": kinds[type(value)]}
    return {"type": "object", "properties": {
        key: {"type": "object"} if key in ("resources", "affinity", "config", "nodeSelector", "connector") else schema_of(each)
        for key, each in value.items()}, "additionalProperties": False}


def schema():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    made = schema_of(values)
    made["properties"]["global"] = {"type": "object"}  # Helm's own
    return json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **made}, indent=1) + "\n"


def files():
    base = render("base")
    return {
        "templates/configs.yaml": HEAD + configs(base),
        "templates/front-end.yaml": HEAD + front_end(base),
        "templates/workers.yaml": HEAD + workers(base, find(render("overlays/infiniband"), "PriorityClass")),
        "templates/model.yaml": HEAD + model(base),
        "templates/network-policies.yaml": HEAD + network_policies(base),
        "templates/monitoring.yaml": HEAD + monitoring(base),
        "templates/autoscaling.yaml": HEAD + autoscaling(render("overlays/autoscaled")),
        "templates/vllm.yaml": HEAD + vllm(render("overlays/vllm")),
        "templates/refused.yaml": HEAD + refused(),
        "values.schema.json": schema(),
    }


def main():
    for path, text in files().items():
        if sys.argv[1:] == ["--check"]:
            if not (CHART / path).exists() or (CHART / path).read_text() != text:
                sys.exit(f"{CHART / path} is not what make_chart.py writes; run it")
        else:
            (CHART / path).write_text(text)


if __name__ == "__main__":
    main()
