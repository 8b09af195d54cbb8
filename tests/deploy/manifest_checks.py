"""What is checked of rendered manifests: each function yields what is wrong with them."""
import ast
import json
import math
import os
import pathlib
import re

import jsonschema
import kubernetes_validate
import yaml
from manifests import (DEPLOY, ROOT, containers_of, name_of, named, of_kind, pods_of, processes_of, ranks_of, runs, volumes_of)

VERSIONS = ("1.27", "1.31", "1.37")
NEWEST = VERSIONS[-1:]
CRDS = os.environ.get("MESHFILL_CRDS")
VOLUME_KINDS = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret"}
PROBES = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}  # and what they ask
PATIENCE_SECONDS = 5  # of one probe: health answers in 2 ms, and late where the CPU limit holds the process back
OUTAGE_SECONDS = 60  # a container that answers no probe for less is not restarted
LOAD_SECONDS = 1800  # the model's fetch and load, after the last pod has drained
EVIDENCE_SECONDS = 3600  # no longer, either: until then Kubernetes refuses a change of the Job's model
RETRIES = 10  # of a download, over half an hour: 10 s after the first failure, then twice as long, at most 6 minutes
APPLIED_BYTES = 262144  # kubectl apply keeps an object in an annotation of its own, which is bounded


def closed(properties, required=()):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS, DURATION = {"type": "object", "additionalProperties": TEXT}, {"type": "string", "pattern": r"^\d+[smh]$"}
CUSTOM = {  # of each custom resource, the fields that are used here: anything else is a typing error
    "PodMonitor": ("monitoring.coreos.com/v1", closed({
        "jobLabel": TEXT, "selector": closed({"matchLabels": TEXTS}),
        "podMetricsEndpoints": {"type": "array", "items": closed({
            "port": TEXT, "interval": DURATION,
            "relabelings": {"type": "array", "items": closed({"targetLabel": TEXT, "replacement": TEXT})}})}}, ["selector"])),
    "PrometheusRule": ("monitoring.coreos.com/v1", closed({"groups": {"type": "array", "items": closed({
        "name": TEXT, "rules": {"type": "array", "items": {"oneOf": [
            closed({"record": TEXT, "expr": TEXT, "labels": TEXTS}, ["record", "expr"]),
            closed({"alert": TEXT, "expr": TEXT, "for": DURATION, "labels": TEXTS, "annotations": TEXTS},
                   ["alert", "expr", "labels", "annotations"])]}}}, ["name", "rules"])}}, ["groups"])),
    "ScaledObject": ("keda.sh/v1alpha1", closed({
        "scaleTargetRef": closed({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}, ["name"]),
        "minReplicaCount": COUNT, "maxReplicaCount": COUNT, "pollingInterval": COUNT,
        "advanced": closed({"horizontalPodAutoscalerConfig": closed({"behavior": closed({
            "scaleDown": closed({"stabilizationWindowSeconds": COUNT})})})}),
        "triggers": {"type": "array", "minItems": 1, "items": closed({"type": TEXT, "metadata": TEXTS}, ["type", "metadata"])}},
        ["scaleTargetRef", "triggers"])),
}


def definitions():
    """{(kind, apiVersion): schema of the whole object} of the folder MESHFILL_CRDS."""
    found = {}
    for path in pathlib.Path(CRDS).glob("*.yaml") if CRDS else []:
        documents = [each for each in yaml.safe_load_all(path.read_text()) if each]
        for crd in [item for each in documents for item in each.get("items", [each])]:  # kubectl get makes a List
            for version in crd["spec"]["versions"]:
                key = (crd["spec"]["names"]["kind"], f"{crd['spec']['group']}/{version['name']}")
                found[key] = version["schema"]["openAPIV3Schema"]
    return found


def check_schemas(documents, versions):
    known = definitions()
    for document in documents:
        if document["kind"] in CUSTOM:
            api, schema = CUSTOM[document["kind"]]
            if document["apiVersion"] != api:
                yield f"{name_of(document)}: apiVersion is {document['apiVersion']}, not {api}"
            errors = [*jsonschema.Draft202012Validator(schema).iter_errors(document["spec"])]
            if (document["kind"], api) in known:
                errors += jsonschema.Draft202012Validator(known[document["kind"], api]).iter_errors(document)
            elif CRDS:
                yield f"{name_of(document)}: {CRDS} has no definition of it"
            yield from (f"{name_of(document)}: {error.json_path}: {error.message}" for error in errors)
            continue
        for version in NEWEST if uses_image_volume(document) else versions:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{name_of(document)}: Kubernetes {version}: {error}"


def uses_image_volume(document):
    return any("image" in volume for _, pod in pods_of([document]) for volume in volumes_of(pod).values())


def check_pod_security(documents):
    """The restricted standard, and that nothing writes to the image or holds a token."""
    for name, pod in pods_of(documents):
        spec = pod["spec"]
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.get(key):
                yield f"{name}: {key}"
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{name}: mounts a service account token"
        for volume in spec.get("volumes", []):
            for kind in set(volume) - {"name"} - VOLUME_KINDS:
                yield f"{name}: volume {volume['name']} is a {kind}"
        whole = spec.get("securityContext", {})
        for container in containers_of(pod):
            where = f"{name}: container {container['name']}"
            own = container.get("securityContext", {})
            effective = {**whole, **own}
            if effective.get("runAsNonRoot") is not True or effective.get("runAsUser", 0) == 0:
                yield f"{where}: may run as root"
            if effective.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
                yield f"{where}: no seccomp profile"
            if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
                yield f"{where}: may gain privileges"
            if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
                yield f"{where}: keeps capabilities"
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{where}: can write to its image"
            if not {"cpu", "memory"} <= container.get("resources", {}).get("limits", {}).keys():
                yield f"{where}: no limits"
            if ":" not in container["image"] or container["image"].endswith(":latest"):
                yield f"{where}: image {container['image']} has no version"
            if any("hostPort" in port for port in container.get("ports", [])):
                yield f"{where}: takes a port of its host"


def seconds(duration):
    value, unit = re.fullmatch(r"(\d+)(ms|s|m|h)", duration).groups()
    return int(value) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]


def ports_of_services(documents):
    return {each["metadata"]["name"]: [port["port"] for port in each["spec"].get("ports", [])]
            for each in of_kind(documents, "Service")}


def progress_deadline(documents, name):
    """Seconds after which a Deployment's rollout has failed; no other kind has one."""
    deployment = next((each for each in of_kind(documents, "Deployment") if name_of(each) == name), None)
    return deployment["spec"].get("progressDeadlineSeconds", 600) if deployment else math.inf


def check_wiring(documents):
    """Ports, files, names and times: each says in two places what must be the same."""
    services = ports_of_services(documents)
    for name, pod, container, text in processes_of(documents):
        if text is None:
            yield f"{name}: its --config is no key of a ConfigMap that it mounts"
            continue
        config = yaml.safe_load(text)
        metrics = config.get("metrics_listen") or config.get("pool", {}).get("worker", {}).get("metrics_listen")
        listens = {config.get("listen"), metrics, config.get("pool", {}).get("control_listen"),
                   config.get("kv", {}).get("listen")} - {None}
        if {int(each.rsplit(":", 1)[1]) for each in listens} != {port["containerPort"] for port in container.get("ports", [])}:
            yield f"{name}: its ports are not those of its configuration"
        numbers = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for probe, wanted in PROBES.items():
            if probe == "startupProbe" and not runs(container, "serve"):
                continue  # a worker that loads lives
            found = container.get(probe, {}).get("httpGet", {})
            if found.get("path") != wanted or not str(metrics).endswith(f":{numbers.get(found.get('port'))}"):
                yield f"{name}: {probe} does not ask {wanted} where metrics are served"
        if pod["spec"]["terminationGracePeriodSeconds"] <= seconds(config.get("limits", {}).get("drain_timeout", "1h")):
            yield f"{name}: is killed before limits.drain_timeout"
        loads = progress_deadline(documents, name) - pod["spec"]["terminationGracePeriodSeconds"]
        if loads < LOAD_SECONDS:
            yield f"{name}: its rollout fails {loads} s after the last pod's drain"
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        tls = config.get("pool", {}).get("tls", {})
        for file in [config["model"]["path"], *(tls.get(key) for key in ("cert", "key", "ca"))]:
            if file and not any(file.startswith(mount + "/") for mount in mounts):
                yield f"{name}: {file} is on no volume"
        if "--join" in container["args"]:
            host, port = container["args"][container["args"].index("--join") + 1].rsplit(":", 1)
            if int(port) not in services.get(host, []):
                yield f"{name}: joins {host}:{port}, which no Service offers"
    for page in ("healthz", "readyz"):
        if not any(f'"/{page}"' in source.read_text() for source in (ROOT / "server/observe").glob("*.cc")):
            yield f"/{page} is no page of the server"


def check_probes(documents):
    """A process that computes on all the CPU it may have answers late, and is not restarted for it."""
    for name, pod in pods_of(documents):
        for container in pod["spec"]["containers"]:
            for probe in PROBES:
                found = container.get(probe)
                if found and found.get("timeoutSeconds", 1) < PATIENCE_SECONDS:
                    yield f"{name}: {probe} gives up after {found.get('timeoutSeconds', 1)} s"
            liveness = container.get("livenessProbe")
            if liveness and liveness.get("periodSeconds", 10) * liveness.get("failureThreshold", 3) < OUTAGE_SECONDS:
                yield f"{name}: is restarted after less than {OUTAGE_SECONDS} s"
    for name, _, container, text in processes_of(documents):
        ranks = ranks_of(yaml.safe_load(text)) if text else {}
        if not ranks or ranks.get("device") == "cuda":
            continue
        cpus = float(container["resources"].get("limits", {}).get("cpu", 0))
        if ranks.get("threads", 0) > max(1, cpus - 1):  # without a number it is one below the limit
            yield f"{name}: {ranks['threads']} threads leave nothing of {cpus:g} CPUs for health"


def check_model(documents):
    """The model is in a claim that can be provisioned and is filled, in an image, or made by the pod; and it is waited for."""
    claims = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "PersistentVolumeClaim")}
    writers = {}
    for name, pod in pods_of(documents):
        for volume in volumes_of(pod).values():
            claim = volume.get("persistentVolumeClaim")
            if not claim:
                continue
            if claim["claimName"] not in claims:
                yield f"{name}: no PersistentVolumeClaim {claim['claimName']}"
            writers.setdefault(claim["claimName"], []).append(not claim.get("readOnly"))
        model = volumes_of(pod).get("model", {})
        waits = [each for each in pod["spec"].get("initContainers", []) if each["name"] == "model"]
        if "image" not in model and not waits and not name.startswith("Job/"):
            yield f"{name}: starts before its model is there"
    for document in of_kind(documents, "Job"):
        yield from (f"{name_of(document)}: {each}" for each in unpinned(document))
    for name, spec in claims.items():
        modes = spec["accessModes"]
        pods = sum(each["spec"].get("replicas", 1) for each in of_kind(documents, "Deployment", "StatefulSet")
                   if any(v.get("persistentVolumeClaim", {}).get("claimName") == name
                          for v in each["spec"]["template"]["spec"].get("volumes", [])))
        if modes != (["ReadWriteMany"] if pods > 1 else ["ReadWriteOnce"]):
            yield f"PersistentVolumeClaim/{name}: {modes} for {pods} pods"
        if sum(writers.get(name, [])) != 1:
            yield f"PersistentVolumeClaim/{name}: {sum(writers.get(name, []))} workloads fill it"


def check_claims_of_one_node(documents):
    """Of the pods with a ReadWriteOnce claim one is placed freely. The others follow it, and its node takes them."""
    for claim in of_kind(documents, "PersistentVolumeClaim"):
        if "ReadWriteOnce" not in claim["spec"]["accessModes"]:
            continue
        pods = {name: pod for name, pod in pods_of(documents)
                if any(volume.get("persistentVolumeClaim", {}).get("claimName") == claim["metadata"]["name"]
                       for volume in volumes_of(pod).values())}
        free = [name for name, pod in pods.items() if not any(follows(pod, other) for other in pods.values() if other is not pod)]
        if len(free) != 1:
            yield f"{name_of(claim)}: {' and '.join(free)} may be placed on two nodes"
            continue
        leader = pods[free[0]]["spec"]
        for name, pod in pods.items():
            for taint in leader.get("tolerations", []):
                if taint not in pod["spec"].get("tolerations", []):
                    yield f"{name}: does not tolerate {taint['key']}, as {free[0]} does"
            if not pod["spec"].get("nodeSelector", {}).items() <= leader.get("nodeSelector", {}).items():
                yield f"{name}: cannot be where {free[0]} is"


def follows(pod, other):
    """Whether a pod is placed on the node of the other one and nowhere else."""
    terms = pod["spec"].get("affinity", {}).get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    return any(term["topologyKey"] == "kubernetes.io/hostname"
               and term["labelSelector"]["matchLabels"].items() <= other["metadata"]["labels"].items() for term in terms)


def unpinned(job):
    """What may be another one tomorrow: the model, the image, what pip installs there with all that it stands on."""
    container, = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "") for each in container["env"]}
    if not re.fullmatch(r"[0-9a-f]{40}", variables["MODEL_REVISION"]):
        yield f"MODEL_REVISION {variables['MODEL_REVISION']} is no commit"
    if not re.search(r":\d+\.\d+\.\d+\b", container["image"]):
        yield f"image {container['image']} has no whole version"
    for command in re.findall(r"^pip install (.*)$", re.sub(r"\\\n\s*", " ", container["args"][0]), re.M):
        words = [word for word in command.split() if not word.startswith(("-", "/"))]
        yield from (f"pip takes any {word}" for word in words if "==" not in word)
        if "--no-deps" not in command:
            yield "pip takes any version of what the packages stand on"


def check_job_failure(documents):
    """What no retry can change fails a Job at once, by an exit code of its own. Its pod stays, with the log that says why. What
    bash and Python exit with is tried again."""
    for job in of_kind(documents, "Job"):
        name, spec = name_of(job), job["spec"]
        final = {code for rule in spec.get("podFailurePolicy", {}).get("rules", []) if rule["action"] == "FailJob"
                 and rule.get("onExitCodes", {}).get("operator") == "In" for code in rule["onExitCodes"]["values"]}
        codes = {int(code) for container in spec["template"]["spec"]["containers"]
                 for code in re.findall(r"\bexit ([1-9]\d*)", container["args"][0])}
        if not codes or codes != final or codes & {1, 2}:
            yield f"{name}: exits with {codes or 'no code'} where no retry helps, and fails at once after {final or 'no code'}"
        if spec["template"]["spec"]["restartPolicy"] != "Never":
            yield f"{name}: the pod that failed is deleted, with its log"
        if spec.get("ttlSecondsAfterFinished", math.inf) < EVIDENCE_SECONDS:
            yield f"{name}: its logs are deleted {spec['ttlSecondsAfterFinished']} s after it has failed"
        if spec.get("backoffLimit", 6) < RETRIES:
            yield f"{name}: gives up after {spec.get('backoffLimit', 6)} broken downloads"


def check_cache(documents):
    """Where there are ranks, their measured speed is kept in a volume that outlives the container."""
    for name, pod, container, text in processes_of(documents):
        config = yaml.safe_load(text) if text else {"pool": {}}
        if not ranks_of(config):
            continue
        path = config.get("plan", {}).get("profile_path", "")
        kept = [mount for mount in container["volumeMounts"] if path.startswith(mount["mountPath"] + "/")
                and not mount.get("readOnly") and "medium" not in volumes_of(pod)[mount["name"]].get("emptyDir", {})]
        if not kept:
            yield f"{name}: plan.profile_path {path!r} is on no volume that it can write"


def check_gpus(documents):
    """A rank has a GPU or none has; with GPUs their image, memory to share, NCCL's settings and near nodes where it leaves the
    node, and the tuning of configs/h100x8.yaml."""
    tuned = yaml.safe_load((ROOT / "configs/h100x8.yaml").read_text())
    cuda = False
    for name, pod, container, text in processes_of(documents):
        config = yaml.safe_load(text)
        ranks = ranks_of(config)
        gpus = int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        if gpus != (ranks["ranks"] if ranks.get("device") == "cuda" else 0):
            yield f"{name}: {gpus} GPUs for {ranks}"
        if not gpus:
            continue
        cuda = True
        if not container["image"].endswith("-cuda"):
            yield f"{name}: image {container['image']} has no CUDA"
        memory = {volume["name"] for volume in pod["spec"]["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"}
        if not any(mount["mountPath"] == "/dev/shm" and mount["name"] in memory for mount in container["volumeMounts"]):
            yield f"{name}: 64 MiB of /dev/shm"
        if "--join" in container["args"]:
            if not any(each["name"] == "NCCL_SOCKET_IFNAME" for each in container["env"]):
                yield f"{name}: NCCL chooses its own network"
            near = pod["spec"].get("affinity", {}).get("podAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution", [])
            if "network.topology.nvidia.com/leaf" not in [each["podAffinityTerm"]["topologyKey"] for each in near]:
                yield f"{name}: is placed on any nodes"
            if "priorityClassName" not in pod["spec"]:
                yield f"{name}: has no priority"
            elif not named(documents, "PriorityClass", pod["spec"]["priorityClassName"]):
                yield f"{name}: there is no PriorityClass {pod['spec']['priorityClassName']}"
    for name, _, container, text in processes_of(documents) if cuda else []:
        config = yaml.safe_load(text)
        for section in ("model", "queue", "plan") if "embedded" in config["pool"] else ("model", "plan"):
            for key, value in tuned[section].items():
                reads = section == "model" or runs(container, "serve")
                if reads and config.get(section, {}).get(key) != value:
                    yield f"{name}: {section}.{key} is {config.get(section, {}).get(key)}, in configs/h100x8.yaml {value}"


def check_selectors(documents):
    """Every selector finds pods, every pod has a NetworkPolicy for both directions, and whoever asks for names may."""
    labels = {name: pod["metadata"]["labels"] for name, pod in pods_of(documents)}

    def matches(selector):
        return [name for name, has in labels.items() if selector.items() <= has.items()]

    for document in of_kind(documents, "Service"):
        if not matches(document["spec"]["selector"]):
            yield f"{name_of(document)}: selects nothing"
    for document in of_kind(documents, "PodDisruptionBudget", "PodMonitor"):
        if not matches(document["spec"]["selector"]["matchLabels"]):
            yield f"{name_of(document)}: selects nothing"
    guarded = set()
    for document in of_kind(documents, "NetworkPolicy"):
        found = matches(document["spec"]["podSelector"]["matchLabels"])
        if not found:
            yield f"{name_of(document)}: selects nothing"
        if set(document["spec"]["policyTypes"]) == {"Ingress", "Egress"}:
            guarded.update(found)
        egress = document["spec"].get("egress", [])
        if egress and not any(resolves_names(rule) for rule in egress):
            yield f"{name_of(document)}: cannot resolve names on every kind of cluster"
    for name in labels.keys() - guarded:
        yield f"{name}: no NetworkPolicy"


def resolves_names(rule):
    """DNS of kube-system and OpenShift, and of caches on the node's link-local addresses."""
    ports = {(port.get("port"), port.get("protocol")) for port in rule.get("ports", [])}
    named_spaces = {value for to in rule.get("to", []) for each in to.get("namespaceSelector", {}).get("matchExpressions", [])
                    for value in each["values"]}
    blocks = {to["ipBlock"]["cidr"] for to in rule.get("to", []) if "ipBlock" in to}
    return ({(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")} <= ports
            and {"kube-system", "openshift-dns"} <= named_spaces and "169.254.20.10/32" in blocks)


def check_placement(documents):
    """A worker belongs to nobody but its set, so that none goes with another; workers are placed together."""
    for document in of_kind(documents, "StatefulSet"):
        if document["spec"].get("podManagementPolicy") != "Parallel":
            yield f"{name_of(document)}: one pod waits for another"
        if not document["spec"]["template"]["spec"].get("affinity", {}).get("podAffinity"):
            yield f"{name_of(document)}: nothing places its pods together"
    for _, pod, container, _ in processes_of(documents):
        if "--join" in container["args"] and pod["metadata"]["labels"].get("sidecar.istio.io/inject") != "false":
            yield "a service mesh's sidecar would stand between workers, and before what readiness looks for"


def check_monitoring(documents):
    """The labels that Prometheus and Grafana look for, queries of this pool alone, and metrics that are there."""
    metrics = set(re.findall(r'"(meshfill_[a-z_]+)"', (ROOT / "server/observe/metric_families.h").read_text()))
    for document in of_kind(documents, "PodMonitor", "PrometheusRule"):
        if "release" not in document["metadata"].get("labels", {}):
            yield f"{name_of(document)}: no label release, by which Prometheus chooses"
    if of_kind(documents, "PodMonitor"):
        yield from check_scrapes(documents)
        if not of_kind(documents, "PrometheusRule"):
            yield "no PrometheusRule"
        dashboards = [each["data"] for each in of_kind(documents, "ConfigMap")
                      if each["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
        if dashboards != [{"meshfill.json": (DEPLOY / "grafana/meshfill.json").read_text()}]:
            yield "no ConfigMap with deploy/grafana/meshfill.json for Grafana's sidecar"
    for document in of_kind(documents, "PrometheusRule"):
        absent, = (rule["expr"] for group in document["spec"]["groups"] for rule in group["rules"]
                   if rule.get("alert") == "MeshfillAbsent")
        if f'namespace="{document["metadata"]["namespace"]}"' not in absent:
            yield f"{name_of(document)}: MeshfillAbsent is silent while a pool of another namespace lives"
    for document in documents:
        if len(json.dumps(document)) > APPLIED_BYTES:
            yield f"{name_of(document)}: too large for kubectl apply"
    for document in of_kind(documents, "ScaledObject"):
        for trigger in document["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            for name in set(re.findall(r"meshfill_[a-z_]+", query)) - metrics:
                yield f"{name_of(document)}: {name} is no metric of the server"
            namespaces = re.findall(r'meshfill_[a-z_]+\{namespace="([^"]*)"', query)
            if set(namespaces) != {document["metadata"]["namespace"]} or len(namespaces) != query.count("meshfill_"):
                yield f"{name_of(document)}: its query is not of namespace {document['metadata']['namespace']} alone"


def check_scrapes(documents):
    """Prometheus asks every process, may reach it, and takes no worker for a front-end."""
    jobs = {}
    for document in of_kind(documents, "PodMonitor"):
        for name, pod in pods_of(documents):
            if document["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items():
                endpoint, = document["spec"]["podMetricsEndpoints"]
                label = pod["metadata"]["labels"].get(document["spec"].get("jobLabel"), "")
                changed = [each["replacement"] for each in endpoint.get("relabelings", []) if each["targetLabel"] == "job"]
                jobs.setdefault(name, []).append((endpoint["port"], *(changed or [label])))
    for name, pod, container, _ in processes_of(documents):
        wanted = ("metrics", "meshfill-worker" if "--join" in container["args"] else "meshfill")
        if jobs.get(name) != [wanted]:
            yield f"{name}: Prometheus asks it for {jobs.get(name)}, not for {wanted} alone"
        let_in = [space for document in of_kind(documents, "NetworkPolicy")
                  if document["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
                  for rule in document["spec"].get("ingress", []) if {"port": "metrics"} in rule.get("ports", [])
                  for each in rule["from"] for space in each.get("namespaceSelector", {}).get("matchLabels", {}).values()]
        if "monitoring" not in let_in:
            yield f"{name}: its NetworkPolicy keeps Prometheus out"


def connector_settings():
    """(keys of kv_connector_extra_config, tested versions of vLLM), from the connector's source."""
    tree = ast.parse((ROOT / "python/meshfill/vllm/settings.py").read_text())
    settings = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Settings")
    tested = next(each for each in tree.body if isinstance(each, ast.Assign) and each.targets[0].id == "TESTED_VLLM")
    return {each.target.id for each in settings.body if isinstance(each, ast.AnnAssign)}, ast.literal_eval(tested.value)


def check_vllm(documents):
    """vLLM asks a Service of the pool, with keys that the connector has, and may reach it; it serves the pool's model."""
    keys, tested = connector_settings()
    services = ports_of_services(documents)
    for name, pod in pods_of(documents):
        args = pod["spec"]["containers"][0].get("args", [])
        if "--kv-transfer-config" not in args:
            continue
        transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
        extra = transfer["kv_connector_extra_config"]
        if (transfer["kv_connector"], transfer["kv_connector_module_path"]) != ("MeshfillConnector", "meshfill.vllm"):
            yield f"{name}: {transfer['kv_connector']} is not Meshfill's connector"
        for key in extra.keys() - keys:
            yield f"{name}: the connector has no key {key}"
        host, _, port = extra["server"].partition(":")
        if int(port) not in services.get(host, []):
            yield f"{name}: asks {extra['server']}, which no Service offers"
        if pod["metadata"]["labels"].get("meshfill-client") != "true":
            yield f"{name}: the front-end's NetworkPolicy keeps it out"
        for _, _, _, text in processes_of(documents):
            if yaml.safe_load(text)["model"] != {"path": args[0], "dtype": "bf16"} or "--dtype=bfloat16" not in args:
                yield f"{name}: serves another model than the pool, or in another dtype"
    image = re.search(r"^ARG VLLM=\S+:v(\S+)$", (DEPLOY / "vllm.Dockerfile").read_text(), re.M).group(1)
    if image not in tested:
        yield f"deploy/vllm.Dockerfile: vLLM {image} is not one of those tested ({', '.join(tested)})"


CHECKS = [check_pod_security, check_wiring, check_probes, check_model, check_claims_of_one_node, check_job_failure, check_cache,
          check_gpus, check_selectors, check_placement, check_monitoring, check_vllm]


def problems(documents, versions=VERSIONS):
    """What the schemas say; where they say nothing, what the other checks say, which rest on them."""
    return [*check_schemas(documents, versions)] or [found for check in CHECKS for found in check(documents)]
