#!/usr/bin/env python3
"""What the real binary prints with --json keeps to docs/schemas, and so does /status.json.

Usage: schemas_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import copy
import json
import pathlib
import re
import unittest
import urllib.request

import jsonschema

from cli_harness import CliTestCase, Server

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs/schemas").glob("*.json")}


def complaint(value, schema):
    """None where `value` keeps to the schema."""
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    return error and f"{'/'.join(map(str, error.absolute_path))}: {error.message}"


def objects(value, schema):
    """Each object in `value` that has a list of keys in the schema, with that list's required keys."""
    if isinstance(value, list) and "items" in schema:
        for each in value:
            yield from objects(each, schema["items"])
    if isinstance(value, dict):
        if "required" in schema:
            yield value, schema["required"]
        for key, each in value.items():
            yield from objects(each, schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {})


class SchemasTest(CliTestCase):
    def check(self, text, name, part=None):
        """Keeps to the schema, and no longer does with a key too many or too few, wherever that is."""
        schema = SCHEMAS[name]["$defs"][part] if part else SCHEMAS[name]
        value = json.loads(text)
        self.assertIsNone(complaint(value, schema), name)
        count = len(list(objects(value, schema)))
        self.assertGreater(count, 0)
        for index in self.random.sample(range(count), min(count, 10)):
            for damage in ("more", "less"):
                damaged = copy.deepcopy(value)
                target, required = list(objects(damaged, schema))[index]
                if damage == "more":
                    target["planted"] = 1
                else:
                    del target[self.random.choice(required)]
                self.assertIsNotNone(complaint(damaged, schema), f"{name}: {damage}")
        return value

    def test_schemas_are_schemas(self):
        self.assertEqual(set(SCHEMAS), {"prefill", "plan", "simulate", "bench", "status"})
        for schema in SCHEMAS.values():
            jsonschema.Draft202012Validator.check_schema(schema)

    def test_prefill(self):
        for options in ([], ["--tile", "2x2", "--top-k", 5], ["--heads", 2], ["--layout", "zigzag", "--ranks", 1],
                        ["--set", "plan.partial_dtype=model", "--set", "model.dtype=bf16"]):
            value = self.check(self.succeed("prefill", "--config", self.config, "--json", "--tokens", self.prompt, *options), "prefill")
            self.assertEqual(value["plan"].get("partial_dtype"), "bf16" if "model.dtype=bf16" in options else None)

    def test_plan_names_what_prefill_names(self):
        for options in ([], ["--tile", "2x2"], ["--ranks", 6], ["--cached", 64]):
            plan = self.check(self.succeed("plan", "--config", self.config, "--json", "--tokens", 777, *options), "plan")
            text = self.succeed("plan", "--config", self.config, "--tokens", 777, *options)
            self.assertIn(f"partial outputs in {plan.get('partial_dtype', 'f32')}, ranks {plan.get('placement', 'row-first')}", text)

    def test_plan_for_a_cluster(self):
        plan = self.check(self.succeed("plan", "--cluster", ROOT / "configs/scenarios/h100_nodes.yaml", "--json", "--tokens", 100_000,
                                       "--model", ROOT / "configs/models/llama-3.1-405b", "--ranks", 64), "plan")
        self.assertIn("host_bytes", plan["weights"]["modes"][-1])

    def test_simulate(self):
        self.check(self.succeed("simulate", "--scenario", ROOT / "configs/scenarios/ethernet.yaml", "--json"), "simulate", "strategies")

    def test_simulate_a_sweep(self):
        scenario = self.tmp / "sweep.yaml"
        scenario.write_text(
            "report: sweep\n"
            "sweep:\n"
            "  clusters:\n"
            "    one: {attention_flops_per_second: 1e14, same_node: {flow_bytes_per_second: 1e11},"
            " between_nodes: {flow_bytes_per_second: 1e10}}\n"
            "  heads: 28/4\n"
            "  tokens: 65536\n"
            "attention: {head_dim: 64}\n"
            "gpus: 8, 16\n"
        )
        value = self.check(self.succeed("simulate", "--scenario", scenario, "--json"), "simulate", "sweep")
        self.assertEqual(len(value["sweep"]["cells"]), 2)

    def test_bench(self):
        shape = ("--hidden", 64, "--q-heads", 2, "--kv-heads", 1, "--intermediate", 64)
        for name, *arguments in (("attention", "--tokens", 64), ("gemm", "--tokens", 8, "--in-features", 16, "--out-features", 16),
                                 ("layer", "--tokens", 64, *shape), ("prefill", "--model", self.model, "--tokens", 99, "--repeats", 1),
                                 ("plan", "--model", self.model, "--shapes", 1, "--choices", 1, "--repeats", 1, "--max-seconds", 0.05),
                                 ("prefix", "--config", self.config, "--tokens", 128, "--cached", 64, "--rounds", 1),
                                 ("pieces", "--config", self.config, "--tokens", 2000, "--part", 2, "--rounds", 1),
                                 ("weights", "--config", self.config, "--tokens", 99, "--rounds", 1)):
            self.check(self.succeed("bench", name, "--json", *arguments), "bench", name)

    def test_bench_serve(self):
        server = Server("--config", self.config)
        try:
            for scenario in ("mix", "flight", "overload", "flood", "classes", "alone"):
                text = self.succeed("bench", "serve", "--server", server.address, "--scenario", scenario, "--json", "--tokens", 16,
                                    "--seconds", 0.5 if scenario == "mix" else 0.05, "--in-flight", 8, "--rounds", 1, "--max-age", 0.1)
                self.assertEqual(self.check(text, "bench", "serve")["scenario"], scenario)
        finally:
            server.stop()

    def test_status(self):
        server = Server("--config", self.config, "--set", "metrics_listen=127.0.0.1:0")
        try:
            pages = next(match[1] for match in (re.search(r"metrics listening on (\S+)", line) for line in server.lines) if match)
            with urllib.request.urlopen(f"http://{pages}/status.json", timeout=30) as answer:
                status = self.check(answer.read(), "status")
            self.assertEqual(status["last_prefill"]["tokens"], 3)
            told = json.loads(self.succeed("status", "--server", server.address, "--json"))
            self.assertEqual(list(told), list(status["pool"]))
            self.check(json.dumps({"pool": told, "last_prefill": None}), "status")
        finally:
            server.stop()


if __name__ == "__main__":
    unittest.main(verbosity=2)
