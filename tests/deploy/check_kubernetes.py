"""Holds the rendered manifests to schemas, to pod security, and to what the binary really has.

Usage: check_kubernetes.py    (tests/deploy/check-kubernetes.sh calls it, and says more)
"""
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap

import check_chart
import yaml
from manifest_checks import NEWEST, problems
from manifests import DEPLOY, KUBERNETES, ROOT, name_of, of_kind, processes_of, render
from planted_manifests import planted

MESHFILL = os.environ.get("MESHFILL")
CONFIG_FOLDER = "/etc/meshfill/"
OTHER_NAMESPACE = "elsewhere"
REPLACED = {"deployment": "Deployment", "statefulset": "StatefulSet", "job": "Job", "pvc": "PersistentVolumeClaim"}  # with a model


def check_with_binary(documents):
    """The pods' own command lines, run where there is no model and no certificate: only that may be wrong with them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, _, container, text in processes_of(documents):
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


def own_overlay(lines):
    """What an overlay of one's own renders, with these lines. KUBERNETES in them is the folder of ours."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        text = "\n".join(lines).replace("KUBERNETES", os.path.relpath(KUBERNETES, folder))
        (pathlib.Path(folder) / "kustomization.yaml").write_text(text)
        return render(folder)


def check_own_overlays():
    """An overlay of one's own in another namespace, and one with the model as an image, as the comments there say it."""
    for overlay in ("base", "overlays/h100x8", "overlays/vllm"):
        documents = own_overlay([f"namespace: {OTHER_NAMESPACE}", f"resources: [KUBERNETES/{overlay}]"])
        spaces = {each["metadata"]["name"] if each["kind"] == "Namespace" else each["metadata"].get("namespace")
                  for each in documents if each["kind"] != "PriorityClass"}
        if spaces != {OTHER_NAMESPACE}:
            yield f"{overlay} in namespace {OTHER_NAMESPACE}: also in {spaces - {OTHER_NAMESPACE}}"
        documents = own_overlay([f"resources: [KUBERNETES/{overlay}]", "components: [KUBERNETES/components/model-image]",
                                 "images: [{name: meshfill-model, newName: registry.example.com/q, newTag: '1'}]"])
        yield from (f"{overlay} with the model as an image: {each}" for each in problems(documents, NEWEST))
        images = [volume["image"]["reference"] for _, pod, _, _ in processes_of(documents)
                  for volume in pod["spec"]["volumes"] if "image" in volume]
        if set(images) != {"registry.example.com/q:1"}:
            yield f"{overlay} with the model as an image: {images}"


def check_documented_egress():
    """The patch of docs/operating.md lets the front-end, and nothing else, go to the collector."""
    block = re.search(r"^    patches:\n((?:    .*\n)+)", (ROOT / "docs/operating.md").read_text(), re.M)[0]
    for overlay in ("base", "overlays/h100x8"):
        documents = own_overlay([f"resources: [KUBERNETES/{overlay}]", *textwrap.dedent(block).split("\n")])
        yield from problems(documents, NEWEST)
        found = [document["metadata"]["name"] for document in documents if document["kind"] == "NetworkPolicy"
                 for rule in document["spec"]["egress"] if rule.get("ports") == [{"port": 4318}]]
        if found != ["meshfill-front-end"]:
            yield f"{overlay}: {found} may go to the collector"


def documented_overlay():
    """The lines of the overlay of one's own in docs/operating.md."""
    block = re.search(r"^    # kustomization.yaml\n((?:    .*\n)+)", (ROOT / "docs/operating.md").read_text(), re.M)[1]
    return textwrap.dedent(block).replace("meshfill/deploy/kubernetes/", "KUBERNETES/").split("\n")


def check_documented_overlay(lines):
    """It is sound, and every alert leads to where it says that this page is read."""
    documents = own_overlay(lines)
    yield from problems(documents)
    text = yaml.safe_dump_all(documents)
    url = re.search(r"operating=(\S+)\]", "\n".join(lines))[1]
    alerts = (DEPLOY / "prometheus/alerts.yml").read_text()
    for alert in re.findall(r"alert: (\w+)", alerts):
        if f"{url}#{alert.lower()}\n" not in text:
            yield f"{alert} does not lead to {url}"
    if "https://example.com/meshfill" in text:
        yield "a runbook_url is left as it was"
    if any(each["metadata"]["name"].startswith("documentation") for each in documents):
        yield "the ConfigMap documentation is applied, too"


def documented_replacement():
    """The lines of docs/operating.md that replace a pool's model, each with what continues it."""
    section = re.search(r"^### Another model\n(.*?)^### ", (ROOT / "docs/operating.md").read_text(), re.M | re.S)[1]
    return re.findall(r"^    (.*)$", section.replace("\\\n", " "), re.M)


def chosen(command, pool, documents):
    """Names of the objects that a `kubectl delete KIND,KIND -l SELECTOR` chooses."""
    words = shlex.split(command.replace("$POOL", pool))
    kinds = [REPLACED[each] for each in words[words.index("delete") + 1].split(",")]
    labels = dict(each.split("=") for each in words[words.index("-l") + 1].split(","))
    return {name_of(each) for each in of_kind(documents, *kinds) if labels.items() <= each["metadata"]["labels"].items()}


def check_documented_replacement(lines):
    """It drains the front-end while the workers are there, then deletes what is left of the pool and of no other release."""
    first, then = (line for line in lines if " delete " in line)
    if not {"--cascade=foreground", "--wait"} <= {*first.split()}:
        yield "it does not wait for the front-end's pod"
    ours, charts = (shlex.split(line, comments=True)[0].partition("=")[2] for line in lines if line.startswith("POOL="))
    charts = charts.replace("RELEASE", check_chart.OTHER[0])
    release, other = (check_chart.helm(check_chart.CHART, [], each)[0] for each in (check_chart.OTHER, check_chart.RELEASE))
    pools = [(ours, render(KUBERNETES / overlay)) for overlay, _ in check_chart.pairs()]
    for pool, documents in [*pools, (charts, release)]:
        front_end = {name_of(each) for each in of_kind(documents, "Deployment") if name_of(each).endswith("-front-end")}
        if chosen(first, pool, documents) != front_end:
            yield f"{pool}: deletes {chosen(first, pool, documents)} first"
        left = {name_of(each) for each in of_kind(documents, *REPLACED.values())} - chosen(then, pool, documents)
        if left:
            yield f"{pool}: leaves {left}"
    if found := chosen(then, charts, other):
        yield f"{charts}: deletes {found} of another release"


def report(what, found):
    print(f"{what}, {len(found)} problems")
    for each in found:
        print("  ", each)
    return bool(found)


def main():
    failed = False
    for folder in sorted(path.parent for path in KUBERNETES.glob("**/kustomization.yaml") if "components" not in path.parts):
        documents = render(folder)
        found = problems(documents)
        if MESHFILL:
            found += check_with_binary(documents)
        failed |= report(f"{folder.relative_to(DEPLOY)}: {len(documents)} objects", found)
    failed |= report("overlays of one's own", [*check_own_overlays()])
    failed |= report("the overlay of docs/operating.md", [*check_documented_overlay(documented_overlay())])
    failed |= report("the egress of docs/operating.md", [*check_documented_egress()])
    failed |= report("the replacement of a model in docs/operating.md", [*check_documented_replacement(documented_replacement())])
    failed |= report(f"helm/meshfill, with {len(check_chart.pairs())} sets of values", [*check_chart.check_chart()])
    for what, documents in check_chart.rendered() if MESHFILL else []:
        failed |= report(f"{what}, given to the binary", [*check_with_binary(documents)])
    broken = [*planted()]
    for what, documents in broken:
        if not problems(documents, NEWEST):
            failed = True
            print(f"NOT FOUND: {what}")
    for old, new in (("runbook_url]", "summary]"), ("local-config", "other"), ("infiniband", "no-such-overlay")):
        try:
            found = [*check_documented_overlay([line.replace(old, new) for line in documented_overlay()])]
        except subprocess.CalledProcessError as error:
            found = [error]
        if not found:
            failed = True
            print(f"NOT FOUND: {new} in the documented overlay")
    for old, new in (("--cascade=foreground", ""), (",app.kubernetes.io/component=front-end", ""), (",pvc", ""),
                     ("statefulset,", ""), (",app.kubernetes.io/instance=RELEASE", "")):
        if not [*check_documented_replacement([line.replace(old, new) for line in documented_replacement()])]:
            failed = True
            print(f"NOT FOUND: a replacement of a model without {old}")
    print(f"{len(broken)} manifests broken on purpose were looked at")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
