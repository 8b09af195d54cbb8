"""Holds the rendered manifests to schemas, to pod security, and to what the binary really has.

Usage: check_kubernetes.py    (tests/deploy/check-kubernetes.sh calls it, and says more)
"""
import copy
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jsonschema
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
VERSION = "1.31"
MESHFILL, CRDS = os.environ.get("MESHFILL"), os.environ.get("MESHFILL_CRDS")
READINESS_SERVICE = "meshfill.v1.PrefillService"
VOLUME_KINDS = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
CONFIG_FOLDER = "/etc/meshfill/"


def closed(properties, required=()):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, COUNT, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
CUSTOM = {  # of each custom resource, the fields that are used here: anything else is a typing error
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1", closed({
        "replicas": COUNT, "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "leaderWorkerTemplate": closed({
            "size": {"type": "integer", "minimum": 1}, "workerTemplate": ANY,
            "restartPolicy": {"enum": ["Default", "None", "RecreateGroupOnPodRestart"]}}, ["workerTemplate"])},
        ["leaderWorkerTemplate"])),
    "PodMonitor": ("monitoring.coreos.com/v1", closed({
        "jobLabel": TEXT, "selector": closed({"matchLabels": {"type": "object", "additionalProperties": TEXT}}),
        "podMetricsEndpoints": {"type": "array", "items": closed(
            {"port": TEXT, "interval": {"type": "string", "pattern": r"^\d+[smh]$"}})}}, ["selector"])),
    "ScaledObject": ("keda.sh/v1alpha1", closed({
        "scaleTargetRef": closed({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}, ["name"]),
        "minReplicaCount": COUNT, "maxReplicaCount": COUNT, "pollingInterval": COUNT,
        "advanced": closed({"horizontalPodAutoscalerConfig": closed({"behavior": closed({
            "scaleDown": closed({"stabilizationWindowSeconds": COUNT})})})}),
        "triggers": {"type": "array", "minItems": 1, "items": closed(
            {"type": TEXT, "metadata": {"type": "object", "additionalProperties": TEXT}}, ["type", "metadata"])}},
        ["scaleTargetRef", "triggers"])),
}


def render(folder):
    text = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True).stdout
    return [each for each in yaml.safe_load_all(text) if each]


def name_of(document):
    return f"{document['kind']}/{document['metadata']['name']}"


def of_kind(documents, *kinds):
    return [each for each in documents if each["kind"] in kinds]


def pod_of(document):
    """The pod template of a workload; None of anything else."""
    spec = document.get("spec", {})
    if document["kind"] == "LeaderWorkerSet":
        return spec["leaderWorkerTemplate"]["workerTemplate"]
    return spec.get("template") if document["kind"] in ("Deployment", "StatefulSet") else None


def pods_of(documents):
    return [(name_of(each), pod_of(each)) for each in documents if pod_of(each)]


def containers_of(pod):
    return pod["spec"].get("initContainers", []) + pod["spec"]["containers"]


def definitions():
    """{kind: schema of the whole object} of the folder MESHFILL_CRDS."""
    found = {}
    for path in pathlib.Path(CRDS).glob("*.yaml") if CRDS else []:
        documents = [each for each in yaml.safe_load_all(path.read_text()) if each]
        for crd in [item for each in documents for item in each.get("items", [each])]:  # kubectl get makes a List
            for version in crd["spec"]["versions"]:
                key = (crd["spec"]["names"]["kind"], f"{crd['spec']['group']}/{version['name']}")
                found[key] = version["schema"]["openAPIV3Schema"]
    return found


def check_schemas(documents):
    known = definitions()
    for document in documents:
        if document["kind"] in CUSTOM:
            api, schema = CUSTOM[document["kind"]]
            if document["apiVersion"] != api:
                yield f"{name_of(document)}: apiVersion is {document['apiVersion']}, not {api}"
            for error in jsonschema.Draft202012Validator(schema).iter_errors(document["spec"]):
                yield f"{name_of(document)}: {error.json_path}: {error.message}"
            if (document["kind"], api) in known:
                for error in jsonschema.Draft202012Validator(known[document["kind"], api]).iter_errors(document):
                    yield f"{name_of(document)}: {error.json_path}: {error.message}"
            elif CRDS:
                yield f"{name_of(document)}: {CRDS} has no definition of it"
            if not pod_of(document):
                continue
            document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "template"}, "spec": pod_of(document)["spec"]}
        try:
            kubernetes_validate.validate(document, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{name_of(document)}: {error}"


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


def config_of(pod, documents):
    """(the configuration's text, the container) of the pod's command."""
    container = pod["spec"]["containers"][0]
    file = container["args"][container["args"].index("--config") + 1]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    for mount in container["volumeMounts"]:
        if mount["mountPath"] == file:
            config_map = volumes[mount["name"]]["configMap"]["name"]
            for document in of_kind(documents, "ConfigMap"):
                if document["metadata"]["name"] == config_map:
                    return document["data"].get(mount["subPath"]), container
    return None, container


def check_wiring(documents):
    """Ports, files, names and times: each says in two places what must be the same."""
    claims = {each["metadata"]["name"] for each in of_kind(documents, "PersistentVolumeClaim")}
    services = {each["metadata"]["name"]: each for each in of_kind(documents, "Service")}
    for name, pod in pods_of(documents):
        text, container = config_of(pod, documents)
        if text is None:
            yield f"{name}: its --config is no key of a ConfigMap that it mounts"
            continue
        config = yaml.safe_load(text)
        listens = {config.get("listen"), config.get("metrics_listen"), config.get("pool", {}).get("control_listen")} - {None}
        if {int(each.rsplit(":", 1)[1]) for each in listens} != {port["containerPort"] for port in container.get("ports", [])}:
            yield f"{name}: its ports are not those of its configuration"
        if pod["spec"]["terminationGracePeriodSeconds"] <= seconds(config.get("limits", {}).get("drain_timeout", "1h")) \
                and container["args"][0] == "serve":
            yield f"{name}: is killed before limits.drain_timeout"
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if container["args"][0] == "serve":
                wanted = READINESS_SERVICE if probe == "readinessProbe" else ""
                found = container.get(probe, {}).get("grpc", {})
                if found.get("service", "") != wanted or f":{found.get('port')}" not in config["listen"]:
                    yield f"{name}: {probe} does not ask the API's health for \"{wanted}\""
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        tls = config.get("pool", {}).get("tls", {})
        for file in [config["model"]["path"], *(tls.get(key) for key in ("cert", "key", "ca"))]:
            if file and not any(file.startswith(mount + "/") for mount in mounts):
                yield f"{name}: {file} is on no volume"
        threads = (config["pool"].get("worker") or config["pool"].get("embedded") or {}).get("threads")
        cpus = container["resources"].get("limits", {}).get("cpu")
        if threads is not None and str(threads) != str(cpus):
            yield f"{name}: {threads} threads, but a CPU limit of {cpus}"
        for volume in pod["spec"]["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in claims:
                yield f"{name}: no PersistentVolumeClaim {claim}"
        if "--join" in container["args"]:
            host, port = container["args"][container["args"].index("--join") + 1].rsplit(":", 1)
            if f":{int(port):04X} 01 " not in container.get("readinessProbe", {}).get("exec", {}).get("command", []):
                yield f"{name}: its readiness is not a connection to port {port}"
            if int(port) not in [each["port"] for each in services.get(host, {"spec": {"ports": []}})["spec"]["ports"]]:
                yield f"{name}: joins {host}:{port}, which no Service offers"
    if READINESS_SERVICE.rsplit(".", 1)[1] not in (ROOT / "proto/meshfill/v1/prefill.proto").read_text():
        yield f"{READINESS_SERVICE} is not in the proto"


def check_gpus(documents):
    """A rank has a GPU or none has; with GPUs, their image, memory to share, and NCCL's settings where it leaves the node."""
    for name, pod in pods_of(documents):
        text, container = config_of(pod, documents)
        pool = yaml.safe_load(text)["pool"]
        ranks = pool.get("worker") or pool.get("embedded") or {}
        gpus = int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        if gpus != (ranks["ranks"] if ranks.get("device") == "cuda" else 0):
            yield f"{name}: {gpus} GPUs for {ranks}"
        if not gpus:
            continue
        if not container["image"].endswith("-cuda"):
            yield f"{name}: image {container['image']} has no CUDA"
        memory = {volume["name"] for volume in pod["spec"]["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"}
        if not any(mount["mountPath"] == "/dev/shm" and mount["name"] in memory for mount in container["volumeMounts"]):
            yield f"{name}: 64 MiB of /dev/shm"
        if "--join" in container["args"] and not any(each["name"] == "NCCL_SOCKET_IFNAME" for each in container["env"]):
            yield f"{name}: NCCL chooses its own network"


def check_selectors(documents):
    """Every selector finds pods, and every pod has a NetworkPolicy for both directions."""
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
    for name in labels.keys() - guarded:
        yield f"{name}: no NetworkPolicy"
    metrics = set(re.findall(r'"(meshfill_[a-z_]+)"', (ROOT / "server/observe/metrics.cc").read_text()))
    for document in of_kind(documents, "ScaledObject"):
        for trigger in document["spec"]["triggers"]:
            for name in set(re.findall(r"meshfill_[a-z_]+", trigger["metadata"]["query"])) - metrics:
                yield f"{name_of(document)}: {name} is no metric of the server"


def check_with_binary(documents):
    """The pods' own command lines, run where there is no model and no certificate: only that may be wrong with them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, pod in pods_of(documents):
            text, container = config_of(pod, documents)
            file = pathlib.Path(folder) / "config.yaml"
            file.write_text(text)
            arguments = [str(file) if each.startswith(CONFIG_FOLDER) else each for each in container["args"]]
            arguments += ["--set", f"model.path={folder}/no-model"]
            if "serve" in arguments:
                arguments += ["--set", "listen=127.0.0.1:0", "--set", "metrics_listen=127.0.0.1:0"]
            for section, values in yaml.safe_load(text)["pool"].items():
                if isinstance(values, dict) and values.get("device") == "cuda":
                    arguments += ["--set", f"pool.{section}.device=cpu"]  # there may be no GPU here
            result = subprocess.run([MESHFILL, *arguments], capture_output=True, text=True, timeout=60, check=False)
            last = result.stderr.splitlines()[-1]
            if "no-model" not in last and f"{CONFIG_FOLDER}tls" not in last:
                yield f"{name}: {last}"


CHECKS = [check_schemas, check_pod_security, check_wiring, check_gpus, check_selectors]


def problems(documents):
    return [found for check in CHECKS for found in check(documents)]


def changing(documents):
    def change(what, kind, edit):
        broken = copy.deepcopy(documents)
        edit(of_kind(broken, kind)[0])
        return what, broken
    return change


def pod(document):
    return pod_of(document)["spec"]


def first(document):
    return pod(document)["containers"][0]


def break_each(documents):
    """(what is broken, the broken documents) for every kind of problem that the checks claim to find in the base."""
    change = changing(documents)
    yield change("a misspelt field", "Deployment", lambda d: first(d).update(imagePullPolice="Always"))
    yield change("a misspelt field of a template in a custom resource", "LeaderWorkerSet", lambda d: pod(d).update(nodeSelectr={}))
    yield change("a misspelt field of a custom resource", "LeaderWorkerSet", lambda d: d["spec"].update(replica=2))
    yield change("a wrong type", "Service", lambda d: d["spec"].update(ports="all"))
    yield change("the host's network", "Deployment", lambda d: pod(d).update(hostNetwork=True))
    yield change("a host path", "Deployment", lambda d: pod(d)["volumes"][2].update(hostPath={"path": "/"}))
    yield change("a root user", "Deployment", lambda d: pod(d)["securityContext"].update(runAsUser=0))
    yield change("privileges", "LeaderWorkerSet", lambda d: first(d)["securityContext"].pop("allowPrivilegeEscalation"))
    yield change("capabilities", "LeaderWorkerSet", lambda d: first(d)["securityContext"]["capabilities"].update(add=["SYS_PTRACE"]))
    yield change("no seccomp", "Deployment", lambda d: pod(d)["securityContext"].pop("seccompProfile"))
    yield change("a writable image", "Deployment", lambda d: first(d)["securityContext"].pop("readOnlyRootFilesystem"))
    yield change("no limits", "LeaderWorkerSet", lambda d: first(d)["resources"].pop("limits"))
    yield change("an image without version", "Deployment", lambda d: first(d).update(image="meshfill"))
    yield change("another port", "Deployment", lambda d: first(d)["ports"][0].update(containerPort=50050))
    yield change("a short grace period", "Deployment", lambda d: pod(d).update(terminationGracePeriodSeconds=30))
    yield change("readiness of the process alone", "Deployment", lambda d: first(d)["readinessProbe"]["grpc"].pop("service"))
    yield change("a lost claim", "Deployment", lambda d: pod(d)["volumes"][2]["persistentVolumeClaim"].update(claimName="x"))
    yield change("another readiness", "LeaderWorkerSet", lambda d: first(d)["readinessProbe"]["exec"]["command"].pop(2))
    yield change("GPUs of no rank", "LeaderWorkerSet", lambda d: first(d)["resources"]["limits"].update({"nvidia.com/gpu": "8"}))
    yield change("a join at nothing", "LeaderWorkerSet", lambda d: first(d)["args"].__setitem__(4, "meshfill:1"))
    yield change("too many threads", "LeaderWorkerSet", lambda d: first(d)["resources"]["limits"].update(cpu="8"))
    yield change("a selector of nothing", "Service", lambda d: d["spec"]["selector"].update(app="x"))
    yield change("a pod without policy", "NetworkPolicy", lambda d: d["spec"].update(policyTypes=["Ingress"]))


def break_gpus(documents):
    """The same of the workers with GPUs."""
    change = changing(documents)
    limits = lambda document: first(document)["resources"]["limits"]
    yield change("a rank without a GPU", "LeaderWorkerSet", lambda d: limits(d).update({"nvidia.com/gpu": "4"}))
    yield change("an image without CUDA", "LeaderWorkerSet", lambda d: first(d).update(image="meshfill:0.1.0-cpu"))
    yield change("a small /dev/shm", "LeaderWorkerSet", lambda d: pod(d)["volumes"][-1]["emptyDir"].pop("medium"))
    yield change("NCCL on any network", "LeaderWorkerSet", lambda d: first(d).update(env=first(d)["env"][:2]))


def main():
    failed = False
    folders = [DEPLOY / "kubernetes/base", *sorted((DEPLOY / "kubernetes/overlays").iterdir())]
    if MESHFILL:
        CHECKS.append(check_with_binary)
    for folder in folders:
        documents = render(folder)
        found = problems(documents)
        failed |= bool(found)
        print(f"{folder.relative_to(DEPLOY)}: {len(documents)} objects, {len(found)} problems")
        for each in found:
            print("  ", each)
    if MESHFILL:
        CHECKS.remove(check_with_binary)
    broken = [*break_each(render(folders[0])), *break_gpus(render(DEPLOY / "kubernetes/overlays/infiniband"))]
    for what, documents in broken:
        if not problems(documents):
            failed = True
            print(f"NOT FOUND: {what}")
    print(f"{len(broken)} manifests broken on purpose were looked at")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
