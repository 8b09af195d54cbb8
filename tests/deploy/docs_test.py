#!/usr/bin/env python3
"""Documents and dashboards name what is really there: every metric, every alert, every key."""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).parent.parent.parent


def read(path):
    return (ROOT / path).read_text()


def metric_names():
    return set(re.findall(r'"(meshfill_[a-z_]+)"', read("server/observe/metrics.cc")))


def without_suffix(name):
    """The family of a histogram's series."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


class DocsTest(unittest.TestCase):
    def test_generated_files_are_up_to_date(self):
        for script in ("deploy/make_api_docs.py", "deploy/grafana/make_dashboard.py", "docs/pictures/make_causal_balance.py"):
            result = subprocess.run([sys.executable, ROOT / script, "--check"], capture_output=True, text=True, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)

    def test_every_field_of_the_api_has_a_meaning(self):
        for path in ("docs/api.md", "docs/configuration.md"):
            self.assertGreater(len(re.findall(r"^- `[\w.]+`.*:", read(path), re.M)), 40, path)
            self.assertEqual(re.findall(r"^- `[\w.]+`.*: *\n(?!  )", read(path), re.M), [], path)

    def test_every_metric_is_documented_and_no_other(self):
        documented = set(re.findall(r"^\| `(meshfill_\w+)`", read("docs/metrics.md"), re.M))
        self.assertGreater(len(documented), 30)
        self.assertEqual(documented, metric_names())

    def test_queries_ask_for_metrics_that_are_there(self):
        known = metric_names()
        for path in ("deploy/prometheus/recording.yml", "deploy/prometheus/alerts.yml", "deploy/grafana/meshfill.json"):
            asked = {without_suffix(name) for name in re.findall(r"\bmeshfill_[a-z_]+", read(path))}
            self.assertTrue(asked, path)
            self.assertLessEqual({name for name in asked if not name.startswith("meshfill_recording")}, known, path)

    def test_recorded_series_are_recorded(self):
        recorded = set(re.findall(r"record: (\S+)", read("deploy/prometheus/recording.yml")))
        for path in ("deploy/prometheus/alerts.yml", "deploy/grafana/meshfill.json"):
            asked = set(re.findall(r"meshfill(?::\w+)+", read(path)))
            self.assertTrue(asked, path)
            self.assertLessEqual(asked, recorded, path)

    def test_every_alert_has_a_runbook_and_two_tests(self):
        alerts = re.findall(r"alert: (\w+)", read("deploy/prometheus/alerts.yml"))
        self.assertGreater(len(alerts), 9)
        runbook, tests = read("docs/operating.md"), read("deploy/prometheus/alerts_test.yml")
        for alert in alerts:
            self.assertIn(f"\n### {alert}\n", runbook)
            self.assertIn(f"docs/operating.md#{alert.lower()}\"", read("deploy/prometheus/alerts.yml"))
            self.assertIn(f"  - name: {alert} fires\n", tests)
            self.assertIn(f"  - name: {alert} stays silent\n", tests)

    def test_keys_in_the_docs_are_keys_of_the_configuration(self):
        fields = set(re.findall(r"\b(\w+) = \d+;", read("proto/meshfill/v1/config.proto")))
        for path in sorted((ROOT / "docs").glob("*.md")):
            for key in re.findall(r"`((?:model|pool|queue|plan|limits)\.[a-z_.]+)\b", path.read_text()):
                for part in key.split("."):
                    self.assertIn(part, fields, f"{path.name}: {key}")

    def test_links_lead_somewhere(self):
        for path in sorted((ROOT / "docs").glob("*.md")):
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
                self.assertTrue((path.parent / target).exists(), f"{path.name}: {target}")


if __name__ == "__main__":
    unittest.main()
