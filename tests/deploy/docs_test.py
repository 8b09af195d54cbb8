#!/usr/bin/env python3
"""Documents and dashboards name what is really there: every metric, alert, key and path. Documents have short lines."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "deploy"))
import dashboard_lint  # noqa: E402
import make_api_docs  # noqa: E402

DOCUMENTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
COLUMNS = 100
TOP_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {".git", "build"}
FIELDS = {"kv.keep", "kv.lease_seconds", "kv.ignore_cache"}  # of a request's header
# Readers took these the wrong way: they promise too much, give wrong advice, or cannot be understood where they stand.
MISLEADING = (
    "Restart them", "every result name the dtype", "All but the first need a claim", "it comes back elsewhere",
    "are placed together", "Mesh-Attention in every layer", "as in Embedded", "one that talks, but computes nothing",
    "on GPUs one for each", "refuse where the predicted wait", "a pure function of its inputs", "leaves half of the blocks",
    "| compressed messages | none", "| of it: ", "the peak that MFU refers to", "what their names say", "own row ends last",
    "merges what arrived", "that the host plays", "takes at least 0.999 times",
)
SOURCE = re.compile(r"\.(h|cc|cu|cuh|py|sh|md|proto|ya?ml|json|svg|txt|in)$")


def read(path):
    return (ROOT / path).read_text()


def metric_names():
    sources = sorted((ROOT / "server/observe").glob("*metric*"))
    return {name for path in sources for name in re.findall(r'"((?:meshfill|process)_[a-z_]+)"', path.read_text())}


def configuration_keys():
    """Every key, and every section that holds one."""
    keys = re.findall(r"^- `([\w.]+)`", read("docs/configuration.md"), re.M)
    return {".".join(key.split(".")[:count]) for key in keys for count in range(1, key.count(".") + 2)}


def unknown_keys(text, keys):
    """Code spans that look like keys of the configuration, and are none. Fields of the API have sections of the same names."""
    sections = {key.partition(".")[0] for key in keys if "." in key}
    found = re.findall(r"`((?:" + "|".join(sorted(sections)) + r")\.[a-z_.]+)\b", text)
    return [key for key in found if key.replace("tenants.", "tenants.NAME.") not in keys and key not in FIELDS]


def example_keys(text):
    """{key: value} of an example of a configuration, also of the lines that are comments; sections have the value ''."""
    found, sections = {}, []
    for line in re.sub(r"^( *)# ?", r"\1", text, flags=re.M).split("\n"):
        if match := re.fullmatch(r"( *)([a-z_]+):(?: (.*))?", line):
            depth = len(match[1])
            sections = [*(each for each in sections if each[0] < depth), (depth, match[2])]
            found[".".join(name for _, name in sections)] = match[3] or ""
    return found


def keys_of(command):
    """{key: its default, as docs/configuration.md has it} of the keys that `serve` or `worker` may have."""
    found = re.findall(r"^- `([\w.]+)` \(([^()]*(?:\([^()]*\)[^()]*)*)\):", read("docs/configuration.md"), re.M)
    about = {key: " ".join(text.split()) for key, text in found}
    other = {"serve": "worker", "worker": "serve"}[command]
    return {key: (re.search(r"default: (.*?)(?:; (?:of|read by) `\w+`|; read beside ranks)?$", text) or [""] * 2)[1] for key, text in about.items()
            if not text.endswith(f"of `{other}`")}


def unknown_metrics(text, known):
    """Names of metrics, written whole, that the server does not have."""
    found = re.findall(r"(?<![\w/.-])((?:meshfill|process)_[a-z_]+_[a-z_]*[a-z])(?![\w.*-])", text)
    return sorted({without_suffix(name) for name in found} - known)


def without_suffix(name):
    """The family of a histogram's series."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def long_lines(text):
    """Numbers of the lines above COLUMNS columns. Tables and code are lines like any other."""
    return [number for number, line in enumerate(text.split("\n"), 1) if len(line) > COLUMNS]


def code_of(text):
    """Code spans, and lines of code: what is between back-quotes, fenced or indented by four."""
    fenced = re.compile(r"^```.*?^```", re.M | re.S)
    yield from (line for block in fenced.findall(text) for line in block.split("\n")[1:-1])
    paragraphs = []
    for line in fenced.sub("", text).split("\n"):
        if line.startswith("    "):
            yield line
        else:
            paragraphs.append(line)
    yield from re.findall(r"`([^`]+)`", "\n".join(paragraphs))


def missing_paths(text, root=ROOT, folders=frozenset(TOP_FOLDERS)):
    """Paths of the repository in code that lead nowhere. Of `engine/<name>/x.h` or `docs/*.md` the folder counts."""
    missing = []
    for word in (word for code in code_of(text) for word in code.split()):
        top, slash, _ = word.partition("/")
        if not slash or not re.match(r"\.?\w", word) or "://" in word or top in ("build", ".."):
            continue
        if top not in folders and not SOURCE.search(word):
            continue
        plain = re.match(r"[\w./-]*", word)[0]
        path = plain if plain == word else plain.rpartition("/")[0]
        if not (root / path).exists():
            missing.append(word)
    return missing


def misleading(text):
    """What of MISLEADING is in a text, wherever its lines break."""
    return [phrase for phrase in MISLEADING if phrase in " ".join(text.split())]


def conflict_lines(text):
    """Numbers of the lines that a merge has left behind."""
    marks = re.compile(r"(<{7}|={7}|>{7})(?: .*)?$")
    return [number for number, line in enumerate(text.split("\n"), 1) if marks.match(line)]


def text_files(root):
    """Every file with a suffix of texts, less those that are built, and git's own."""
    for path in sorted(root.rglob("*")):
        top = path.relative_to(root).parts[0]
        if top not in ("build", ".git") and SOURCE.search(path.name) and path.is_file():
            yield path


def scripts_that_cannot_run(root):
    """Texts that name their interpreter, and that nobody may execute: documents call them by their paths."""
    return [str(path.relative_to(root)) for path in text_files(root)
            if path.read_bytes().startswith(b"#!") and not os.access(path, os.X_OK)]


class ChecksTest(unittest.TestCase):
    """The checks of this file find what is planted."""

    def test_a_long_line_is_found_wherever_it_is(self):
        self.assertEqual(long_lines("é" * 100 + "\n| " + "x " * 48 + "|\n"), [])
        for line in ("x" * 101, "    " + "x" * 97, "| " + "x " * 49 + "|", "```\n" + "y" * 101 + "\n```"):
            self.assertEqual(len(long_lines(f"short\n{line}\nshort\n")), 1, line)
        self.assertEqual(long_lines("a\n" + "b" * 101 + "\nc\n" + "d" * 101), [2, 4])

    def test_a_merge_that_was_not_ended_is_found(self):
        self.assertEqual(conflict_lines("a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> 76b563b (Add c)\n"), [2, 4, 6])
        self.assertEqual(conflict_lines("a << b\n====\n========\n  =======\n#=======\n"), [])

    def test_what_misleads_is_found_wherever_lines_break(self):
        self.assertEqual(misleading("Are they slow?\nRestart\n  them."), ["Restart them"])
        self.assertEqual(misleading("Restart the server."), [])

    def test_a_path_that_leads_nowhere_is_found(self):
        there = "`engine/mesh/mesh.h`, `docs/`, `tests/run.sh all`, `docs/*.md`, `engine/<folder>/x.h`"
        elsewhere = "`a/b`, `meshfill bench attention|gemm`, `/models/x.json`, `https://x.org/y.md`, `TFLOP/s`, engine/none.h"
        self.assertEqual(missing_paths(f"{there}\n{elsewhere}\n    build/release/server/meshfill x\n"), [])
        for text, path in (("see `engine/mesh.h`", "engine/mesh.h"), ("`src/mesh.cc`", "src/mesh.cc"),
                           ("`tests/nothing.sh all`", "tests/nothing.sh"),
                           ("`none/*`, `engine/none/*.h`", "engine/none/*.h"),
                           ("a span `over\nengine/none.h` two lines", "engine/none.h"),
                           ("text\n\n    deploy/none.sh --now\n", "deploy/none.sh"),
                           ("```\ndeploy/none.sh\n```\n`docs/`", "deploy/none.sh")):
            self.assertEqual(missing_paths(text), [path], text)

    def test_a_script_that_cannot_run_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, mode in (("good.sh", 0o755), ("bad.py", 0o644)):
                (root / name).write_text("#!/usr/bin/env python3\n")
                (root / name).chmod(mode)
            (root / "text.py").write_text("# no script\n")
            self.assertEqual(scripts_that_cannot_run(root), ["bad.py"])

    def test_a_key_that_is_none_is_found(self):
        keys = configuration_keys()
        self.assertEqual(unknown_keys("`pool.embedded`, `kv.keep`, `plan.stripe: 64`, `model.dtype=bf16`, `tenants.weight`", keys), [])
        for key in ("pool.ranks", "plan.embedded", "kv.tls", "log.level", "limits.max_wait"):
            self.assertEqual(unknown_keys(f"a `{key}` b", keys), [key])

    def test_keys_of_an_example_are_found_in_its_comments_too(self):
        text = "# Text: of a file\n\na: 1\n# b:\n#   # Why.\n#   c: x\n#   d:\n#     e: {f: 1}\ng:\n  # h or i: prose\n  # j: 2\nk: ''\n"
        self.assertEqual(example_keys(text), {"a": "1", "b": "", "b.c": "x", "b.d": "", "b.d.e": "{f: 1}", "g": "", "g.j": "2", "k": "''"})

    def test_a_metric_that_is_none_is_found(self):
        known = {"meshfill_ttft_seconds", "process_open_fds"}
        self.assertEqual(unknown_metrics("`meshfill_ttft_seconds_bucket{le=\"1\"}`, process_open_fds, meshfill_<folder>, x/meshfill_a_b", known), [])
        self.assertEqual(unknown_metrics("`meshfill_queue_lenght`, sum(meshfill_ttft_second_sum)", known),
                         ["meshfill_queue_lenght", "meshfill_ttft_second"])

    def test_generated_prose_is_wrapped(self):
        for text in ("word " * 60 + "`code that stays whole` " * 9 + "end", "default: 16777216. " * 20,
                     "x" * 90 + " see 12. - # + word"):
            for first, line in enumerate(make_api_docs.wrapped(text.strip(), "  ").split("\n")):
                self.assertLessEqual(len(line), COLUMNS)
                self.assertEqual(line.count("`") % 2, 0, line)
                if first:
                    self.assertNotRegex(line, r"^  ([-+*>#]+|\d+[.)]) ")
            self.assertEqual(make_api_docs.wrapped(text, "").split(), text.split())


class DocsTest(unittest.TestCase):
    def test_generated_files_are_up_to_date(self):
        for script in ("deploy/make_api_docs.py", "deploy/grafana/make_dashboard.py", "deploy/prometheus/make_prometheus_rule.py",
                       "docs/pictures/make_causal_balance.py", "docs/pictures/make_kv.py"):
            result = subprocess.run([sys.executable, ROOT / script, "--check"], capture_output=True, text=True, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)

    def test_every_field_of_the_api_has_a_meaning(self):
        for path in ("docs/api.md", "docs/configuration.md"):
            self.assertGreater(len(re.findall(r"^- `[\w.]+`.*:", read(path), re.M)), 40, path)
            self.assertEqual(re.findall(r"^- `[\w.]+`.*: *\n(?!  )", read(path), re.M), [], path)

    def test_no_merge_was_left_unended(self):
        left = {str(path.relative_to(ROOT)): lines for path in text_files(ROOT) if (lines := conflict_lines(path.read_text(errors="replace")))}
        self.assertEqual(left, {})

    def test_scripts_can_run(self):
        self.assertEqual(scripts_that_cannot_run(ROOT), [])

    def test_lines_are_short(self):
        for path in DOCUMENTS:
            self.assertEqual(long_lines(read(path)), [], f"{path}: lines above {COLUMNS} columns")

    def test_paths_lead_somewhere(self):
        for path in DOCUMENTS:
            self.assertEqual(missing_paths(read(path)), [], path)

    def test_every_metric_is_documented_and_no_other(self):
        documented = set(re.findall(r"^\| `((?:meshfill|process)_\w+)`", read("docs/metrics.md"), re.M))
        self.assertGreater(len(documented), 30)
        self.assertEqual(documented, metric_names())

    def test_queries_ask_for_metrics_that_are_there(self):
        known = metric_names()
        for path in ("deploy/prometheus/recording.yml", "deploy/prometheus/alerts.yml", "deploy/grafana/meshfill.json"):
            asked = {without_suffix(name) for name in re.findall(r"\b(?:meshfill|process)_[a-z_]+", read(path))}
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
            self.assertIn(f"/docs/operating.md#{alert.lower()}\n", read("deploy/prometheus/alerts.yml"))
            self.assertIn(f"  - name: {alert} fires\n", tests)
            self.assertIn(f"  - name: {alert} stays silent\n", tests)

    def test_every_alert_has_what_its_readers_expect(self):
        alerts = read("deploy/prometheus/alerts.yml").split("- alert: ")[1:]
        for alert in alerts:
            name = alert.split("\n")[0]
            self.assertRegex(alert, r"severity: (critical|warning)\}", name)
            for annotation in ("summary", "description", "runbook_url"):
                self.assertEqual(len(re.findall(rf"^          {annotation}: \S", alert, re.M)), 1, f"{name}: {annotation}")
            self.assertRegex(alert, rf"runbook_url: https://\S+#{name.lower()}\n", name)

    def test_alerts_name_the_row_that_shows_what_they_ask_for(self):
        rows = []
        for panel in json.loads(read("deploy/grafana/meshfill.json"))["panels"]:
            if panel["type"] == "row":
                rows.append("")
            rows[-1] += json.dumps(panel.get("targets", []))
        alerts = re.findall(r"- alert: (\w+)\n((?: {8}.*\n)+)", read("deploy/prometheus/alerts.yml"))
        named = [(name, text) for name, text in alerts if "dashboard's" in text]
        self.assertNotEqual(named, [])
        for name, text in named:
            row = ("first", "second", "third", "fourth").index(re.search(r"dashboard's (\w+) row", text)[1])
            metrics = re.findall(r"meshfill:(\w+):", text)
            self.assertTrue(any(metric in rows[row] for metric in metrics), f"{name}: row {row + 1} has no {metrics}")

    def test_the_dashboard_keeps_the_rules_of_grafanas_linter(self):
        dashboard = json.loads(read("deploy/grafana/meshfill.json"))
        self.assertEqual(dashboard_lint.lint(dashboard, dashboard_lint.exclusions(ROOT / "deploy/grafana/.lint")), [])
        self.assertEqual(dashboard_lint.missed(dashboard), [])

    def test_nothing_misleads_that_did(self):
        for path in (*DOCUMENTS, "proto/meshfill/v1/config.proto", "deploy/kubernetes/base/workers.yaml"):
            self.assertEqual(misleading(read(path)), [], path)

    def test_keys_in_the_docs_are_keys_of_the_configuration(self):
        for path in DOCUMENTS:
            self.assertEqual(unknown_keys(read(path), configuration_keys()), [], path)

    def test_keys_of_the_examples_are_keys_of_the_configuration(self):
        for path in sorted((ROOT / "configs").glob("*.yaml")):
            keys = {re.sub(r"^tenants\.\w+", "tenants.NAME", key) for key in example_keys(path.read_text())}
            self.assertEqual(keys - configuration_keys(), set(), path)

    def test_the_examples_limits_are_the_defaults(self):
        for name in ("local", "worker"):
            limits = {key: value for key, value in example_keys(read(f"configs/{name}.yaml")).items() if key.startswith("limits.")}
            defaults = keys_of("serve")
            self.assertEqual(limits, {key: defaults[key] for key in limits}, name)

    def test_the_workers_example_has_every_key_that_workers_read(self):
        text = read("configs/worker.yaml")
        wanted = keys_of("worker").keys() - make_api_docs.READ_BY_SERVE
        self.assertGreater(len(wanted), 30)
        missing = wanted - example_keys(text).keys()
        self.assertEqual({key for key in missing if not key.endswith(".insecure")}, set())
        self.assertEqual(text.count("or `insecure: true`"), sum(key.endswith(".insecure") for key in wanted))

    def test_the_examples_name_every_key(self):
        texts = [read(f"configs/{name}.yaml") for name in ("local", "pool", "worker")]
        for key in keys_of("serve").keys() | keys_of("worker").keys():
            name = key.rpartition(".")[2]
            self.assertTrue(any(key in example_keys(text) or re.search(rf"(# .*\W|`){name}\b", text) for text in texts), key)

    def test_keys_that_one_side_ignores_are_keys(self):
        self.assertLessEqual(make_api_docs.READ_BY_SERVE | make_api_docs.READ_BESIDE_RANKS, configuration_keys())
        self.assertEqual(make_api_docs.READ_BY_SERVE & make_api_docs.READ_BESIDE_RANKS, set())

    def test_metrics_in_the_docs_are_there(self):
        for path in DOCUMENTS:
            self.assertEqual(unknown_metrics(read(path), metric_names()), [], path)

    def test_what_one_command_alone_reads_are_keys(self):
        keys = set(re.findall(r"^- `([\w.]+)`", read("docs/configuration.md"), re.M))
        for key, command in re.findall(r'\{"([\w.]+)", "(serve|worker)"\}', read("server/config/config_reader.cc")):
            self.assertTrue(any(f"{each}.".startswith(f"{key}.") for each in keys), key)
            self.assertIn(f"of `{command}`", read("docs/configuration.md"))

    def test_links_lead_somewhere(self):
        for path in DOCUMENTS:
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(path)):
                self.assertTrue(((ROOT / path).parent / target).exists(), f"{path}: {target}")

    def test_anchors_are_headings(self):
        for path in DOCUMENTS:
            for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", read(path)):
                text = ((ROOT / path).parent / target if target else ROOT / path).read_text()
                headings = re.findall(r"^#+ (.*)$", text, re.M)
                anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
                self.assertIn(anchor, anchors, f"{path}: {target}#{anchor}")


if __name__ == "__main__":
    unittest.main()
