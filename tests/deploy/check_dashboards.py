"""Runs a server under load and a Prometheus on it, and holds the dashboard to what is really there.

Usage: check_dashboards.py PATH_OF_MESHFILL OUT    (tests/deploy/check-dashboards.sh calls it, and says more)
"""
import concurrent.futures
import json
import math
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

import dashboard_lint
from demo_server import RANKS, DemoServer, get, stop, wait_for
from draw_panels import draw_panels, size

MESHFILL, OUT = sys.argv[1], pathlib.Path(sys.argv[2])
DEPLOY = pathlib.Path(__file__).parent.parent.parent / "deploy"
LOAD_SECONDS = 30
NO_COLLECTOR = "http://127.0.0.1:9"  # requests have traces, which nobody takes
VARIABLES = {"namespace": ".*", "job": ".+", "instance": ".+", "rank": ".+", "window": f"{LOAD_SECONDS}s"}
MISTAKES = ["sum(rate(meshfill_mfu))", "avg by op (meshfill_mfu)", "meshfill_mfu{job=$job}", "rate(meshfill_mfu[5])"]


class Prometheus:
    def __init__(self, folder, target):
        settings = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(DEPLOY.resolve() / "prometheus" / name) for name in ("recording.yml", "alerts.yml")],
                    "scrape_configs": [{"job_name": "meshfill", "static_configs": [{"targets": [target]}]}]}
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                 "--web.listen-address=127.0.0.1:0", "--enable-feature=exemplar-storage"], stderr=log, stdout=log)
        self.url = "http://" + wait_for("Prometheus' start", self._address)
        wait_for("Prometheus' first scrape", lambda: self.query("up"))

    def _address(self):
        match = re.search(r'msg="Listening on" address=(\S+)', self.log.read_text())
        return match and match.group(1)

    def _api(self, path, **arguments):
        return json.loads(get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments, doseq=True)}"))["data"]

    def query(self, expression):
        try:
            return self._api("query", query=expression)["result"]
        except OSError:
            return []

    def query_range(self, expression, begin, end):
        return self._api("query_range", query=expression, start=begin, end=end, step=1)["result"]

    def traces(self, expression, begin, end):
        """The traces that exemplars of the expression's series name."""
        found = self._api("query_exemplars", query=expression, start=begin, end=end)
        return {exemplar["labels"]["trace_id"] for each in found for exemplar in each["exemplars"]}

    def label_values(self, label, series):
        return self._api(f"label/{label}/values", **{"match[]": series})


def check_lint():
    """Whether the dashboard keeps the linter's rules, and each rule finds what is planted for it."""
    dashboard = json.loads((DEPLOY / "grafana" / "meshfill.json").read_text())
    excluded = dashboard_lint.exclusions(DEPLOY / "grafana" / ".lint")
    found = dashboard_lint.lint(dashboard, excluded)
    found += [f"target-promql-rule: {where}" for where, target in dashboard_lint.targets(dashboard) if not is_promql(target["expr"])]
    missed = dashboard_lint.missed(dashboard) + [each for each in MISTAKES if is_promql(each)]
    count = len(MISTAKES) + len([*dashboard_lint.planted(dashboard)])
    print(f"lint: {len(dashboard_lint.RULES) + 1} rules, {len(excluded)} excluded, {len(found)} complaints, "
          f"{len(missed)} of {count} planted mistakes missed")
    for each in found + missed:
        print(" ", each)
    return not found and not missed


def is_promql(expression):
    """Whether promtool takes it for the query of a rule."""
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as rules:
        json.dump({"groups": [{"name": "x", "rules": [{"record": "x", "expr": fill_in(expression)}]}]}, rules)  # JSON is YAML
        rules.flush()
        return subprocess.run(["promtool", "check", "rules", rules.name], capture_output=True, check=False).returncode == 0


def load(server):
    """Prompts of several lengths and shapes, three at a time so that a queue forms, and a bad one now and then."""
    end = time.monotonic() + LOAD_SECONDS
    shapes = [["--tile", "2x2"], ["--tile", "1x4"], ["--tile", "4x1"], ["--tile", "1x2", "--heads", "2"], []]

    def client(seed):
        chooser = random.Random(seed)
        while time.monotonic() < end:
            server.prefill(chooser.choice([300, 4000, 12000]), *chooser.choice(shapes))

    with concurrent.futures.ThreadPoolExecutor() as clients:
        for seed in range(3):
            clients.submit(client, seed)
        while time.monotonic() < end:
            server.prefill(100, "--tile", "3x3")  # refused: the pool has 4 ranks
            time.sleep(5)


def fill_in(expression):
    for name, value in sorted(VARIABLES.items(), key=lambda entry: -len(entry[0])):
        expression = expression.replace("$" + name, value)
    return expression


def has_data(series):
    values = [value for each in series for _, value in each.get("values") or [each["value"]]]
    return any(not math.isnan(float(value)) for value in values)


def check_variables(prometheus, dashboard):
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query" or variable["name"] == "namespace":  # a label that only Kubernetes adds
            continue
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()
        if not prometheus.label_values(label, fill_in(series)):
            yield f"variable {variable['name']}: {variable['query']}"


def check_panels(prometheus, dashboard, begin, end):
    """What returned nothing; fills in each target's series, for the drawing."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = fill_in(target["expr"])
            if target["instant"]:
                target["series"] = prometheus.query(expression)
            else:
                target["series"] = prometheus.query_range(expression, begin, end)
            if not has_data(target["series"]):
                yield f"panel {panel['title']}: {expression}"


def exemplar_traces(prometheus, dashboard, begin, end):
    """The traces that the dashboard's dots name."""
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []) if target.get("exemplar")]
    return {trace for query in queries for trace in prometheus.traces(fill_in(query), begin, end)}


def draw(dashboard, name):
    width, height = size(dashboard)
    for night in (False, True):
        page = OUT / f"{name}{'-night' if night else ''}.html"
        page.write_text(draw_panels(dashboard, night))
        print(f"  look at {page}")
        if shutil.which("chromium"):
            picture = page.with_suffix(".png")
            subprocess.run(["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}",
                            f"--screenshot={picture}", page.resolve().as_uri()], capture_output=True, check=True, timeout=120)
            print(f"       and {picture}")


def check_pool(workers):
    """Whether a server with this kind of pool shows data in every panel, and metrics that promtool likes."""
    name = "workers" if workers else "embedded"
    print(f"{name}: {RANKS} ranks, load for {LOAD_SECONDS} s")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        server = DemoServer(MESHFILL, folder, workers, [f"trace.endpoint={NO_COLLECTOR}"])
        prometheus = Prometheus(folder, server.pages)
        try:
            begin = time.time()
            load(server)
            time.sleep(2)
            linted = subprocess.run(["promtool", "check", "metrics"], input=get(f"http://{server.pages}/metrics"), text=True,
                                    capture_output=True, check=False)
            print("  promtool check metrics:", linted.stderr.strip() or "no complaint")
            dashboard = json.loads((DEPLOY / "grafana" / "meshfill.json").read_text())
            traces = exemplar_traces(prometheus, dashboard, begin, time.time())
            empty = [*check_variables(prometheus, dashboard), *check_panels(prometheus, dashboard, begin, time.time())]
        finally:
            stop(prometheus.process)
            server.stop()
    count = sum(len(panel.get("targets", [])) for panel in dashboard["panels"])
    print(f"  {count} queries, {len(empty)} without data")
    print(f"  exemplars of TTFT name {len(traces)} traces")
    for each in empty:
        print("  no data:", each)
    draw(dashboard, name)
    return not empty and traces and linted.returncode == 0


if __name__ == "__main__":
    sys.exit(0 if all([check_lint(), check_pool(workers=False), check_pool(workers=True)]) else 1)
