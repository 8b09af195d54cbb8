"""Manifests that are broken on purpose, one for each kind of problem that manifest_checks.py claims to find."""
import copy
import functools

import yaml
from manifests import KUBERNETES, named, render

BASE, INFINIBAND, H100, SCALED, VLLM = "base", "overlays/infiniband", "overlays/h100x8", "overlays/autoscaled", "overlays/vllm"


@functools.lru_cache(maxsize=None)
def rendered(folder):
    return render(KUBERNETES / folder)


def change(what, folder, kind, name, edit):
    """(what, the documents of the folder, changed)."""
    broken = copy.deepcopy(rendered(folder))
    edit(next(each for each in broken if each["kind"] == kind and each["metadata"]["name"].startswith(name)))
    return what, broken


def without(what, folder, kind, name):
    broken = copy.deepcopy(rendered(folder))
    broken.remove(named(broken, kind, name))
    return what, broken


def pod(document):
    return document["spec"]["template"]["spec"]


def first(document):
    return pod(document)["containers"][0]


def limits(document):
    return first(document)["resources"]["limits"]


def volume(document, name):
    return next(each for each in pod(document)["volumes"] if each["name"] == name)


def reconfigure(config_map, edit):
    (file, text), = config_map["data"].items()
    config = yaml.safe_load(text)
    edit(config)
    config_map["data"][file] = yaml.safe_dump(config)


def set_argument(document, old, new):
    args = first(document)["args"]
    changed = [each.replace(old, new) for each in args]
    assert changed != args, old
    args[:] = changed


def set_variable(document, name, value):
    next(each for each in first(document)["env"] if each["name"] == name)["value"] = value


def follow(document, labels):
    (term,) = pod(document)["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    term["labelSelector"]["matchLabels"].update(labels)


def fail_at(job, codes):
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] = codes


FRONT_END, WORKER = ("Deployment", "meshfill-front-end"), ("StatefulSet", "meshfill-worker")
FRONT_END_CONFIG, WORKER_CONFIG = ("ConfigMap", "meshfill-front-end"), ("ConfigMap", "meshfill-worker")


def planted():
    yield change("a misspelt field", BASE, *FRONT_END, lambda d: first(d).update(imagePullPolice="Always"))
    yield change("a misspelt field of a custom resource", BASE, "PodMonitor", "", lambda d: d["spec"].update(jobLable="x"))
    yield change("a misspelt field of a rule", BASE, "PrometheusRule", "",
                 lambda d: d["spec"]["groups"][-1]["rules"][0].update({"fro": "2m"}))
    yield change("a wrong type", BASE, "Service", "meshfill", lambda d: d["spec"].update(ports="all"))
    yield change("the host's network", BASE, *FRONT_END, lambda d: pod(d).update(hostNetwork=True))
    yield change("a host path", BASE, *FRONT_END, lambda d: volume(d, "model").update(hostPath={"path": "/"}))
    yield change("a root user", BASE, *FRONT_END, lambda d: pod(d)["securityContext"].update(runAsUser=0))
    yield change("privileges", BASE, *WORKER, lambda d: first(d)["securityContext"].pop("allowPrivilegeEscalation"))
    yield change("capabilities", BASE, *WORKER, lambda d: first(d)["securityContext"]["capabilities"].update(add=["SYS_PTRACE"]))
    yield change("no seccomp", BASE, "Job", "", lambda d: pod(d)["securityContext"].pop("seccompProfile"))
    yield change("a writable image", BASE, *FRONT_END, lambda d: first(d)["securityContext"].pop("readOnlyRootFilesystem"))
    yield change("a token", BASE, "Job", "", lambda d: pod(d).pop("automountServiceAccountToken"))
    yield change("no limits", BASE, *WORKER, lambda d: first(d)["resources"].pop("limits"))
    yield change("an image without version", BASE, *FRONT_END, lambda d: first(d).update(image="meshfill"))
    yield change("another port", BASE, *FRONT_END, lambda d: first(d)["ports"][0].update(containerPort=50050))
    yield change("a short grace period", BASE, *FRONT_END, lambda d: pod(d).update(terminationGracePeriodSeconds=30))
    yield change("a short grace period of workers", BASE, *WORKER, lambda d: pod(d).update(terminationGracePeriodSeconds=130))
    yield change("a rollout that fails while the last pod drains", BASE, *FRONT_END,
                 lambda d: d["spec"].pop("progressDeadlineSeconds"))
    yield change("readiness of the process alone", BASE, *FRONT_END,
                 lambda d: first(d)["readinessProbe"]["httpGet"].update(path="/healthz"))
    yield change("liveness of the pool", BASE, *WORKER, lambda d: first(d)["livenessProbe"]["httpGet"].update(path="/readyz"))
    yield change("no liveness", BASE, *WORKER, lambda d: first(d).pop("livenessProbe"))
    yield change("readiness at another port", BASE, *WORKER, lambda d: first(d)["readinessProbe"]["httpGet"].update(port="kv"))
    yield change("a join at nothing", BASE, *WORKER, lambda d: first(d)["args"].__setitem__(4, "meshfill:1"))
    yield change("an impatient probe", BASE, *FRONT_END, lambda d: first(d)["livenessProbe"].pop("timeoutSeconds"))
    yield change("an early restart", BASE, *FRONT_END, lambda d: first(d)["livenessProbe"].update(failureThreshold=3))
    yield change("as many threads as CPUs", BASE, *WORKER_CONFIG,
                 lambda d: reconfigure(d, lambda c: c["pool"]["worker"].update(threads=16)))
    yield change("a lost claim", BASE, *FRONT_END, lambda d: volume(d, "model")["persistentVolumeClaim"].update(claimName="x"))
    yield change("a claim that nobody can fill", BASE, "PersistentVolumeClaim", "",
                 lambda d: d["spec"].update(accessModes=["ReadOnlyMany"]))
    yield change("a claim of one node for many", BASE, "PersistentVolumeClaim", "",
                 lambda d: d["spec"].update(accessModes=["ReadWriteOnce"]))
    yield change("a shared claim for one pod", H100, "PersistentVolumeClaim", "",
                 lambda d: d["spec"].update(accessModes=["ReadWriteMany"]))
    yield change("a claim of one node that is filled on another", H100, "Job", "", lambda d: pod(d).pop("affinity"))
    yield change("a Job that follows nobody", H100, "Job", "", lambda d: follow(d, {"app.kubernetes.io/component": "worker"}))
    yield change("a Job that the GPU's node refuses", H100, "Job", "", lambda d: pod(d).pop("tolerations"))
    yield without("a claim that nobody fills", BASE, "Job", "meshfill-model")
    yield change("a model that may be another tomorrow", BASE, "Job", "", lambda d: set_variable(d, "MODEL_REVISION", "main"))
    yield change("any version of the client", BASE, "Job", "", lambda d: set_argument(d, "huggingface_hub==1.2.3", "huggingface_hub"))
    yield change("any version of what the client stands on", BASE, "Job", "", lambda d: set_argument(d, " --no-deps", ""))
    yield change("any Python", BASE, "Job", "", lambda d: first(d).update(image="python:3.12-slim"))
    yield change("a Job that tries what no retry can change", BASE, "Job", "", lambda d: d["spec"].pop("podFailurePolicy"))
    yield change("a refusal that looks like a broken download", BASE, "Job", "", lambda d: set_argument(d, "exit 3", "exit 1"))
    yield change("a broken download that is not tried again", BASE, "Job", "",
                 lambda d: set_argument(d, "exit 3", "exit 1") or fail_at(d, [1]))
    yield change("a Job that takes its log with it", BASE, "Job", "", lambda d: pod(d).update(restartPolicy="OnFailure"))
    yield change("a log for ten minutes", BASE, "Job", "", lambda d: d["spec"].update(ttlSecondsAfterFinished=600))
    yield change("a Job that gives up early", BASE, "Job", "", lambda d: d["spec"].pop("backoffLimit"))
    yield change("a start without the model", BASE, *WORKER, lambda d: pod(d).pop("initContainers"))
    yield change("speeds in the image", BASE, *WORKER_CONFIG, lambda d: reconfigure(d, lambda c: c.pop("plan")))
    yield change("speeds on no volume", BASE, *WORKER, lambda d: first(d)["volumeMounts"].pop())
    yield change("a selector of nothing", BASE, "Service", "meshfill", lambda d: d["spec"]["selector"].update(app="x"))
    yield change("a pod without policy", BASE, "NetworkPolicy", "meshfill-worker",
                 lambda d: d["spec"].update(policyTypes=["Ingress"]))
    yield change("names of one kind of cluster", BASE, "NetworkPolicy", "meshfill-worker",
                 lambda d: d["spec"]["egress"][-1]["to"][0]["namespaceSelector"]["matchExpressions"][0].update(values=["kube-system"]))
    yield change("no names from the node's cache", BASE, "NetworkPolicy", "meshfill-model",
                 lambda d: d["spec"]["egress"][-1]["to"].pop(1))
    yield change("a worker that waits for others", BASE, *WORKER, lambda d: d["spec"].pop("podManagementPolicy"))
    yield change("workers anywhere", BASE, *WORKER, lambda d: pod(d).pop("affinity"))
    yield change("a sidecar", BASE, *WORKER, lambda d: d["spec"]["template"]["metadata"]["labels"].pop("sidecar.istio.io/inject"))
    yield change("a monitor that no Prometheus takes", BASE, "PodMonitor", "", lambda d: d["metadata"]["labels"].pop("release"))
    yield without("workers that nobody scrapes", BASE, "PodMonitor", "meshfill-worker")
    yield change("workers that are taken for front-ends", BASE, "PodMonitor", "meshfill-worker",
                 lambda d: d["spec"].update(jobLabel="app.kubernetes.io/name") or d["spec"]["podMetricsEndpoints"][0].pop("relabelings"))
    yield change("workers that Prometheus cannot reach", BASE, "NetworkPolicy", "meshfill-worker",
                 lambda d: d["spec"]["ingress"].pop())
    yield change("an absence that another pool hides", BASE, "PrometheusRule", "",
                 lambda d: d["spec"]["groups"][-1]["rules"][1].update(expr='absent(up{job=~".*meshfill.*"})'))
    yield change("rules that no Prometheus takes", BASE, "PrometheusRule", "", lambda d: d["metadata"]["labels"].pop("release"))
    yield without("no rules", BASE, "PrometheusRule", "meshfill")
    yield change("a dashboard that no Grafana takes", BASE, "ConfigMap", "meshfill-dashboard",
                 lambda d: d["metadata"].pop("labels"))
    yield change("another dashboard", BASE, "ConfigMap", "meshfill-dashboard",
                 lambda d: d["data"].update({"meshfill.json": "{}"}))
    yield change("scaling on all pools", SCALED, "ScaledObject", "", lambda d: d["spec"]["triggers"][0]["metadata"].update(
        query='sum(meshfill_queue_tokens{job="meshfill"})'))
    yield change("scaling on another pool", SCALED, "ScaledObject", "", lambda d: d["metadata"].update(namespace="other"))
    yield change("scaling on no metric", SCALED, "ScaledObject", "", lambda d: d["spec"]["triggers"][0]["metadata"].update(
        query='sum(meshfill_queue_length{namespace="meshfill"})'))
    yield change("GPUs of no rank", BASE, *WORKER, lambda d: limits(d).update({"nvidia.com/gpu": "8"}))
    yield change("a rank without a GPU", INFINIBAND, *WORKER, lambda d: limits(d).update({"nvidia.com/gpu": "4"}))
    yield change("an image without CUDA", INFINIBAND, *WORKER, lambda d: first(d).update(image="meshfill:0.1.0-cpu"))
    yield change("a small /dev/shm", INFINIBAND, *WORKER, lambda d: volume(d, "shm")["emptyDir"].pop("medium"))
    yield change("NCCL on any network", INFINIBAND, *WORKER, lambda d: first(d).update(env=[
        each for each in first(d)["env"] if each["name"] != "NCCL_SOCKET_IFNAME"]))
    yield change("GPUs anywhere", INFINIBAND, *WORKER, lambda d: pod(d)["affinity"]["podAffinity"].update(
        preferredDuringSchedulingIgnoredDuringExecution=[]))
    yield change("no priority", INFINIBAND, *WORKER, lambda d: pod(d).pop("priorityClassName"))
    yield without("a priority that is not there", INFINIBAND, "PriorityClass", "meshfill-gpu")
    yield change("another stripe than tuned", H100, *FRONT_END_CONFIG,
                 lambda d: reconfigure(d, lambda c: c["plan"].update(stripe=64)))
    yield change("an unbounded queue", H100, *FRONT_END_CONFIG, lambda d: reconfigure(d, lambda c: c.pop("queue")))
    yield change("another dtype than tuned", INFINIBAND, *WORKER_CONFIG,
                 lambda d: reconfigure(d, lambda c: c["model"].pop("dtype")))
    yield change("a key that the connector lacks", VLLM, "Deployment", "meshfill-vllm",
                 lambda d: set_argument(d, "min_tokens", "least"))
    yield change("a server that is not there", VLLM, "Deployment", "meshfill-vllm",
                 lambda d: set_argument(d, "meshfill:50051", "meshfill:5"))
    yield change("a client that is kept out", VLLM, "Deployment", "meshfill-vllm",
                 lambda d: d["spec"]["template"]["metadata"]["labels"].pop("meshfill-client"))
    yield change("another model", VLLM, "Deployment", "meshfill-vllm",
                 lambda d: set_argument(d, "/models/model", "/models/other"))
