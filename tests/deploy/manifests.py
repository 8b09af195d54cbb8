"""Rendered manifests, and what is found in them: pods, containers, configurations."""
import pathlib
import subprocess

import yaml

ROOT = pathlib.Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
WORKLOADS = ("Deployment", "StatefulSet", "Job")


def render(folder):
    text = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True).stdout
    return [each for each in yaml.safe_load_all(text) if each]


def name_of(document):
    return f"{document['kind']}/{document['metadata']['name']}"


def of_kind(documents, *kinds):
    return [each for each in documents if each["kind"] in kinds]


def named(documents, kind, name):
    """The document of that kind and name; None where there is none."""
    return next((each for each in of_kind(documents, kind) if each["metadata"]["name"] == name), None)


def pods_of(documents):
    """[(name, pod template)] of the workloads."""
    return [(name_of(each), each["spec"]["template"]) for each in of_kind(documents, *WORKLOADS)]


def containers_of(pod):
    return pod["spec"].get("initContainers", []) + pod["spec"]["containers"]


def volumes_of(pod):
    return {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}


def runs(container, *commands):
    """Whether it runs one of these commands of meshfill."""
    return "command" not in container and container.get("args", [""])[0] in commands


def processes_of(documents):
    """[(name, pod, container, configuration's text)] of the pods that run `meshfill serve` or `meshfill worker`. The text is
    None where --config is no key of a ConfigMap that is mounted there."""
    found = []
    for name, pod in pods_of(documents):
        container = pod["spec"]["containers"][0]
        if runs(container, "serve", "worker"):
            found.append((name, pod, container, config_of(pod, container, documents)))
    return found


def config_of(pod, container, documents):
    file = container["args"][container["args"].index("--config") + 1]
    for mount in container["volumeMounts"]:
        if mount["mountPath"] == file:
            config_map = named(documents, "ConfigMap", volumes_of(pod)[mount["name"]]["configMap"]["name"])
            return config_map and config_map["data"].get(mount["subPath"])
    return None


def ranks_of(config):
    """The section that says what ranks a process has; {} of a front-end with workers."""
    pool = config["pool"]
    return pool.get("worker") or pool.get("embedded") or {}
