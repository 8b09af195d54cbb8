#!/usr/bin/env python3
"""Pictures and traces of the real binary: plan --svg, simulate --svg, prefill --trace-out.

Usage: cli_pictures_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import collections
import json
import pathlib
import re
import unittest
import xml.etree.ElementTree as ElementTree

from cli_harness import CliTestCase

SVG = "{http://www.w3.org/2000/svg}"
OPERATIONS = {"recv_q", "recv_kv", "send_o", "all_to_all"}
WORK = {"embed", "projections", "merge", "convert", "reorder", "output projection", "mlp", "keep kv", "lm head"}


def check_page(case, root):
    """All that is drawn is on the page."""
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
        case.assertTrue(0 <= x and x + w <= width + 0.1 and 0 <= y and y + h <= height + 0.1, rect.attrib)
    for text in root.iter(f"{SVG}text"):
        case.assertTrue(0 <= float(text.get("x")) <= width and 0 < float(text.get("y")) <= height, text.text)


class PlanSvgTest(CliTestCase):
    def draw(self, *arguments):
        path = self.tmp / "plan.svg"
        out = self.succeed("plan", "--config", self.config, "--tokens", 5000, "--svg", path, "--json", *arguments)
        return json.loads(out), path.read_text()

    def titles(self, root, name):
        return [group.find(f"{SVG}title").text for group in root.iter(f"{SVG}g") if group.get("class") == name]

    def test_every_rank_and_every_step_is_drawn(self):
        for shape in (["--ranks", 1], ["--ranks", 9, "--tile", "3x3"], ["--ranks", 7, "--tile", "1x7"],
                      ["--ranks", 8, "--tile", "2x2", "--heads", 2], ["--ranks", 64, "--tile", "8x8"]):
            with self.subTest(shape):
                plan, svg = self.draw(*shape)
                root = ElementTree.fromstring(svg)
                self.assertEqual(root.tag, f"{SVG}svg")
                ranks, heads = plan["ranks"], plan["heads"]
                numbers = collections.Counter(
                    int(re.match(r"rank (\d+): ", title).group(1)) for title in self.titles(root, "rank"))
                # The matrix has the ranks of one mesh, the timeline all.
                expected = collections.Counter(range(ranks)) + collections.Counter(range(0, ranks, heads))
                self.assertEqual(numbers, expected)

                steps = self.titles(root, "step")
                self.assertEqual(len(steps), len(plan["steps"]))
                comm = {"none": "no message", "q": "Recv Q#", "kv": "Recv KV#", "o": "Send O#"}
                for number, (title, step) in enumerate(zip(steps, plan["steps"])):
                    blocks = " ".join(f"({u},{v})" for u, v in step["blocks"])
                    self.assertRegex(title, rf"\Astep {number}: {comm[step['comm']]}\d*; blocks {re.escape(blocks)}\Z")

    def test_it_stands_alone_and_stays_on_its_page(self):
        _, svg = self.draw("--ranks", 12, "--tile", "3x4")
        root = ElementTree.fromstring(svg)
        for banned in ("image", "script", "use", "foreignObject", "a"):
            self.assertIsNone(root.find(f".//{SVG}{banned}"), banned)
        self.assertNotRegex(svg, r"href|@import|@font-face|url\((?!#)")
        self.assertIn("prefers-color-scheme: dark", svg)
        check_page(self, root)

    def test_the_tiles_are_the_assignment_matrix(self):
        _, svg = self.draw("--ranks", 6, "--tile", "2x3")
        root = ElementTree.fromstring(svg)
        tiles = [title for title in self.titles(root, "rank") if "KV" in title]
        # Q group: a consecutive ranks. KV group: every a-th. Each in the order of arrival.
        self.assertEqual(tiles, [
            "rank 0: Q 0, 1; KV 0, 2, 4", "rank 1: Q 1, 0; KV 1, 3, 5", "rank 2: Q 2, 3; KV 2, 4, 0",
            "rank 3: Q 3, 2; KV 3, 5, 1", "rank 4: Q 4, 5; KV 4, 0, 2", "rank 5: Q 5, 4; KV 5, 1, 3"])

    def test_a_file_that_cannot_be_written(self):
        self.refuse("plan", "--config", self.config, "--tokens", 9, "--svg", "/no/such/folder/x.svg", status=2,
                    message=r"/no/such")


class SimulateSvgTest(CliTestCase):
    SCENARIO = pathlib.Path(__file__).resolve().parent.parent.parent / "configs" / "scenarios" / "ethernet.yaml"

    def test_every_strategy_is_drawn_or_named(self):
        path = self.tmp / "simulation.svg"
        text = self.succeed("simulate", "--scenario", self.SCENARIO, "--svg", path)
        self.assertEqual(text, self.succeed("simulate", "--scenario", self.SCENARIO), "the picture changes no figure")
        root = ElementTree.fromstring(path.read_text())
        check_page(self, root)
        texts = [text.text for text in root.iter(f"{SVG}text")]
        self.assertRegex(texts[0], r"1048576 tokens on 64 GPUs")
        self.assertRegex(texts[1], r"^Nodes of 8 GPUs, 180 TFLOP/s .* 11 GB/s out of a node\.$")
        for strategy in ("Ring Attention", "USP", "BurstAttention", "LoongTrain", "StarTrail", "Mesh-Attention (paper)",
                         "Meshfill's plan", "The same, two lanes"):
            self.assertTrue(any(text.startswith(f"{strategy}: ") or f" {strategy} (" in text for text in texts), strategy)

    def test_a_file_that_cannot_be_written(self):
        self.refuse("simulate", "--scenario", self.SCENARIO, "--svg", "/no/such/folder/x.svg", status=2,
                    message=r"/no/such")


class TraceTest(CliTestCase):
    def trace(self, *arguments):
        path = self.tmp / "trace.json"
        result = self.embedded("--tokens", self.prompt, "--trace-out", path, *arguments)
        return result, json.loads(path.read_text())

    def test_schema_names_and_sums(self):
        for shape in (["--ranks", 4, "--tile", "2x2"], ["--ranks", 6, "--tile", "3x1", "--heads", 2], ["--ranks", 1]):
            with self.subTest(shape):
                result, trace = self.trace(*shape)
                ranks = result["plan"]["ranks"]
                self.assertEqual(trace["otherData"], {"ranks": ranks, "dropped_spans": 0})
                self.check_metadata(trace["traceEvents"], ranks)
                spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
                self.assertEqual(len(spans), sum(event["ph"] != "M" for event in trace["traceEvents"]))
                self.check_spans(spans, result["plan"])
                self.check_lanes(spans, ranks)
                waits = collections.Counter()
                for span in spans:
                    waits[span["pid"]] += span["dur"] * 1e-6 if span["cat"] == "wait" else 0
                self.assertAlmostEqual(max(waits.values()), result["seconds"]["comm_wait"],
                                       delta=0.01 * result["seconds"]["comm_wait"] + 1e-6)

    def check_metadata(self, events, ranks):
        names = {(event["name"], event["pid"], event["tid"]): event["args"].get("name")
                 for event in events if event["ph"] == "M"}
        for rank in range(ranks):
            self.assertEqual(names["process_name", rank, 0], f"rank {rank}")
            self.assertEqual(names["thread_name", rank, 0], "compute")
            self.assertEqual(names["thread_name", rank, 1], "comm")

    def check_spans(self, spans, plan):
        blocks = {f"block ({u},{v})" for u in range(plan["a"]) for v in range(plan["b"])}
        names = {"work": WORK | blocks, "wait": {f"wait {name}" for name in OPERATIONS}, "transfer": OPERATIONS}
        for span in spans:
            self.assertIn(span["name"], names[span["cat"]])
            self.assertEqual(span["tid"], 1 if span["cat"] == "transfer" else 0)
            self.assertGreaterEqual(span["ts"], 0)
            self.assertGreaterEqual(span["dur"], 0)
        self.assertLessEqual(blocks | {"embed", "projections", "mlp"}, {span["name"] for span in spans})
        self.assertEqual({span["args"]["layer"] for span in spans if "args" in span}, {0, 1})

    def check_lanes(self, spans, ranks):
        lanes = collections.defaultdict(list)
        for span in spans:
            lanes[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
        self.assertEqual(len(lanes), 2 * ranks if ranks > 1 else 1)
        for lane in lanes.values():
            lane.sort()
            for (_, end), (start, _) in zip(lane, lane[1:]):
                self.assertLessEqual(end, start + 1e-6)

    def test_refusals(self):
        self.refuse("prefill", "--server", "h:1", "--trace-out", self.tmp / "x", "--tokens", self.prompt, status=2,
                    message=r"--trace-out.*embedded pool.*--config")
        self.refuse("prefill", "--config", self.config, "--trace-out", "/no/such/folder/x", "--tokens", self.prompt,
                    status=2, message=r"/no/such")


if __name__ == "__main__":
    unittest.main(verbosity=2)
