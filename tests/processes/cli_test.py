#!/usr/bin/env python3
"""The real binary without a server: its commands, their JSON, their errors and exit statuses.

Usage: cli_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

from cli_harness import (
    COMM_BYTES_KEYS,
    MESHFILL,
    PLAN_SUMMARY_KEYS,
    PREDICTION_KEYS,
    TIMEOUT_SECONDS,
    VOCAB,
    CliTestCase,
    floats,
    read_safetensors,
    run,
)


ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class CliTest(CliTestCase):
    # ---- prefill, embedded.

    def test_json_object_is_the_designs(self):
        result = self.embedded("--tokens", self.prompt, "--top-k", 5, "--request-id", "r-7")
        self.check_prefill_object(result, len(self.ids), ranks=4, top_k=5)
        self.assertEqual(result["request_id"], "r-7")
        self.assertEqual(result["plan"]["layout"], "striped")
        self.assertEqual(result["seconds"]["queue"], 0)

    def test_each_run_has_a_request_id_of_its_own(self):
        names = {self.embedded("--tokens", self.prompt)["request_id"] for _ in range(2)}
        self.assertEqual(len(names), 2)
        self.assertNotIn("", names)

    def test_plan_options_are_obeyed(self):
        result = self.embedded("--tokens", self.prompt, "--tile", "1x6", "--ranks", 6, "--stripe", 16)
        self.assertEqual(result["plan"], dict(ranks=6, heads=1, a=1, b=6, layout="striped", stripe=16))
        result = self.embedded("--tokens", self.prompt, "--tile", "4x1", "--layout", "zigzag", "--heads", 1)
        self.assertEqual((result["plan"]["a"], result["plan"]["b"], result["plan"]["layout"]), (4, 1, "zigzag"))

    def test_comm_bytes_are_the_formulas(self):
        # The formula for 2x2, equal chunks, f32: one Q chunk, one KV chunk, one O chunk with its LSE.
        tokens, layers, q_heads, kv_heads, head_dim = 1024, 2, 4, 2, 16
        result = self.embedded("--tokens", "-", "--format", "bytes", "--tile", "2x2", stdin=bytes(tokens))
        chunk = tokens // 4
        self.assertEqual(result["comm_bytes"], {
            "q": layers * chunk * q_heads * head_dim * 4,
            "kv": layers * chunk * 2 * kv_heads * head_dim * 4,
            "o": layers * chunk * q_heads * (head_dim * 4 + 4),
            "all_to_all": 0,
        })

    def test_head_groups_give_the_same_answer(self):
        # Two groups of two ranks, then one of four whose two KV heads are replicated: (h-1) of h shares of Q and of O,
        # and KV of each rank's chunk to every other member.
        tokens, layers, q_heads, head_dim = 1024, 2, 4, 16
        prompt = dict(stdin=bytes(range(256)) * 4)
        ring = self.embedded("--tokens", "-", "--format", "bytes", "--tile", "1x4", "--top-k", 5, **prompt)
        chunk_head_bytes = tokens // 4 * head_dim * 4
        for heads, kv_heads, kv_rings in ((2, 1, 1), (4, 1, 0)):
            result = self.embedded("--tokens", "-", "--format", "bytes", "--heads", heads, "--tile", f"1x{4 // heads}",
                                   "--top-k", 5, **prompt)
            self.assertEqual([result["plan"][key] for key in ("heads", "a", "b")], [heads, 1, 4 // heads])
            self.assertEqual([t["token"] for t in result["top"]], [t["token"] for t in ring["top"]])
            self.assertEqual(result["comm_bytes"], {
                "q": 0,
                "kv": layers * kv_rings * heads * chunk_head_bytes * 2 * kv_heads,
                "o": 0,
                "all_to_all": layers * (heads - 1) * chunk_head_bytes * (2 * q_heads // heads + 2 * kv_heads),
            })

    def test_formats_and_standard_input_agree(self):
        raw = struct.pack(f"<{len(self.ids)}I", *self.ids)
        expected = self.embedded("--tokens", self.prompt, "--tile", "2x2", "--top-k", VOCAB)["top"]
        for format, data in (("ids", self.prompt.read_bytes()), ("ids", json.dumps(self.ids).encode()),
                             ("ids", ",".join(map(str, self.ids)).encode()), ("u32le", raw), ("bytes", bytes(self.ids))):
            result = self.embedded("--tokens", "-", "--format", format, "--tile", "2x2", "--top-k", VOCAB, stdin=data)
            self.assertEqual(result["top"], expected, format)

    def test_logits_and_kv_files(self):
        runs = {}
        for ranks in (1, 4):
            logits, kv = self.tmp / f"logits{ranks}", self.tmp / f"kv{ranks}"
            result = self.embedded("--tokens", self.prompt, "--ranks", ranks, "--dtype", "f32", "--top-k", 1,
                                   "--logits-out", logits, "--kv-out", kv)
            dtype, shape, data = read_safetensors(logits)["logits"]
            self.assertEqual((dtype, shape), ("F32", [VOCAB]))
            values = floats(data)
            self.assertEqual(values[result["first_token"]], max(values))
            self.assertEqual(values[result["first_token"]], result["top"][0]["logit"])
            tensors = read_safetensors(kv)
            self.assertEqual(sorted(tensors), ["layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"])
            for dtype, shape, _ in tensors.values():
                self.assertEqual((dtype, shape), ("F32", [len(self.ids), 2, 16]))
            runs[ranks] = {"logits": values, **{name: floats(entry[2]) for name, entry in tensors.items()}}
        for name, one in runs[1].items():
            scale = max(map(abs, one))
            for x, y in zip(one, runs[4][name]):
                self.assertLess(abs(x - y), 1e-4 * scale, name)

    def test_same_plan_same_bits(self):
        outputs = []
        for i in range(2):
            path = self.tmp / f"again{i}"
            self.embedded("--tokens", self.prompt, "--tile", "2x2", "--logits-out", path)
            outputs.append(path.read_bytes())
        self.assertEqual(*outputs)

    def test_a_person_reads_the_answer(self):
        out = self.succeed("prefill", "--config", self.config, "--tokens", self.prompt, "--tile", "2x2")
        for label in ("first token", "TTFT", "tokens/s", "comm wait", "MFU", "plan"):
            self.assertRegex(out, rf"(?m)^{label} ")
        self.assertRegex(out, r"2x2, striped in stripes of 64 tokens, partial outputs in f32, ranks row-first\n")
        for command in ("prefill", "plan"):
            tokens = self.prompt if command == "prefill" else 777
            out = self.succeed(command, "--config", self.config, "--tokens", tokens, "--layout", "zigzag", "--heads", 1)
            self.assertRegex(out, r"zigzag, partial outputs in f32, ranks row-first\n")
            self.assertNotIn("in stripes of", out)

    def test_progress_bar_on_a_terminal(self):
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [MESHFILL, "prefill", "--config", self.config, "--tokens", self.long_prompt, "--format", "bytes"],
            stdout=subprocess.DEVNULL, stderr=slave)
        os.close(slave)
        seen = b""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"%" not in seen and time.monotonic() < deadline:
            if select.select([master], [], [], 1)[0]:
                seen += os.read(master, 4096)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(TIMEOUT_SECONDS), 128 + signal.SIGINT)
        while select.select([master], [], [], 0.2)[0]:
            try:
                seen += os.read(master, 4096)
            except OSError:  # the terminal's other side is closed
                break
        os.close(master)
        self.assertRegex(seen.decode(), r"prefill \[[=> ]+\] ")
        self.assertTrue(seen.endswith(b"\r\x1b[Kmeshfill prefill: cancelled\r\n"), seen[-200:])

    # ---- Ending early.

    def test_ctrl_c_stops_an_embedded_run(self):
        self.interrupt("--config", self.config)

    def test_deadline_passes(self):
        self.refuse("prefill", "--config", self.config, "--tokens", self.long_prompt, "--format", "bytes",
                    "--deadline", 1, status=1, message=r"deadline")

    # ---- plan.

    def test_plan_object_is_the_designs(self):
        plan = json.loads(self.succeed("plan", "--config", self.config, "--tokens", 32768, "--ranks", 6, "--json"))
        self.assertEqual(list(plan), PLAN_SUMMARY_KEYS + ["steps", "predicted", "candidates", "weights"])
        self.assertEqual(plan["ranks"], 6)
        self.assertEqual(plan["a"] * plan["b"] * plan["heads"], 6)
        blocks = [tuple(block) for step in plan["steps"] for block in step["blocks"]]
        self.assertEqual(sorted(blocks), [(u, v) for u in range(plan["a"]) for v in range(plan["b"])])
        comms = [step["comm"] for step in plan["steps"]]
        self.assertEqual(comms.count("q"), plan["a"] - 1)
        self.assertEqual(comms.count("kv"), plan["b"] - 1)
        self.assertEqual(comms.count("o"), plan["a"] - 1)
        self.assertLessEqual(set(comms), {"q", "kv", "o", "none"})
        self.assertEqual(list(plan["predicted"]), PREDICTION_KEYS)
        self.assertEqual(list(plan["predicted"]["comm_bytes"]), COMM_BYTES_KEYS)
        self.assertEqual(sorted((c["heads"], c["a"], c["b"]) for c in plan["candidates"]),
                         [(1, 1, 6), (1, 2, 3), (1, 3, 2), (1, 6, 1), (2, 1, 3), (2, 3, 1)])
        for candidate in plan["candidates"]:
            self.assertEqual(list(candidate)[:4], ["a", "b", "heads", "seconds"])
        seconds = [candidate["seconds"] for candidate in plan["candidates"]]
        self.assertEqual(seconds, sorted(seconds))
        self.assertEqual([plan["candidates"][0][key] for key in ("heads", "a", "b")],
                         [plan[key] for key in ("heads", "a", "b")])

    def test_plan_with_a_cached_prefix(self):
        cold, warm = (
            json.loads(self.succeed("plan", "--config", self.config, "--tokens", 512, "--tile", "1x4", "--json", *cached))
            for cached in ([], ["--cached", 65536])
        )
        self.assertGreater(warm["predicted"]["compute_seconds"], cold["predicted"]["compute_seconds"])
        self.assertEqual(warm["predicted"]["comm_bytes"]["kv"], 129 * cold["predicted"]["comm_bytes"]["kv"])
        self.assertEqual(warm["predicted"]["comm_bytes"]["q"], cold["predicted"]["comm_bytes"]["q"])

    def test_plan_for_more_workers_than_a_host_has_ranks(self):
        config = self.tmp / "workers.yaml"
        config.write_text(f"model: {{path: {self.model}}}\npool: {{control_listen: '127.0.0.1:0'}}\n")
        workers = ["plan", "--config", config, "--tokens", 32768]
        plan = json.loads(self.succeed(*workers, "--ranks", 256, "--ranks-per-host", 8, "--json"))
        self.assertEqual(plan["heads"] * plan["a"] * plan["b"], 256)
        self.refuse(*workers, "--ranks", 65, status=2, message=r"--ranks 65: one host has at most 64; give --ranks-per-host")
        self.refuse(*workers, "--ranks", 4097, status=2, message=r"--ranks.*4096")
        self.refuse("plan", "--config", self.config, "--tokens", 500, "--ranks", 65, status=2, message=r"--ranks 65.*64")

    def test_plan_of_pieces_needs_room_for_their_kv(self):
        tight = ["plan", "--config", self.config, "--tokens", 65536, "--set", "pool.embedded.memory_bytes=32MiB"]
        plan = json.loads(self.succeed(*tight, "--set", "kv.memory_bytes=32MiB", "--json"))  # 512 bytes a token
        self.assertGreater(plan["pieces"], 1)
        for room in ([], ["--set", "kv.memory_bytes=31MiB"]):
            self.refuse(*tight, *room, status=1, message=r"in pieces its K and V take 33554432 bytes.* raise kv\.memory_bytes")

    def test_a_host_with_fewer_ranks_gives_them_no_more(self):
        wide = self.tmp / "wide"  # no machine has the memory for its activations
        wide.mkdir()
        config = json.loads((self.model / "config.json").read_text())
        config |= {"hidden_size": 65536, "num_hidden_layers": 1, "max_position_embeddings": 1 << 30}
        (wide / "config.json").write_text(json.dumps(config))
        workers = self.tmp / "uneven_workers.yaml"
        workers.write_text(f"model: {{path: {wide}}}\npool: {{control_listen: '127.0.0.1:0'}}\n")

        def budget(ranks):
            refused = run("plan", "--config", workers, "--tokens", 1 << 29, "--layout", "zigzag", "--ranks", ranks,
                          "--ranks-per-host", 8)
            self.assertEqual(refused.returncode, 1)
            found = re.search(r"memory budget of (\d+) bytes", refused.stderr.decode())
            self.assertIsNotNone(found, refused.stderr)
            return int(found[1])

        for _ in range(20):  # a budget is of what is free at its moment
            before, wider, after = budget(8), budget(9), budget(8)
            if abs(after - before) < 0.1 * before:
                break
        else:
            self.fail("the free memory of this machine did not stand still")
        self.assertLess(wider, 1.5 * before)  # a whole host more would be 2

    def test_a_pools_speed_is_kept(self):
        profile = self.tmp / "kept" / "speed.json"
        kept = ["plan", "--config", self.config, "--tokens", 3000, "--json", "--set", f"plan.profile_path={profile}"]
        first = self.succeed(*kept)
        self.assertTrue(profile.exists())
        self.assertEqual(self.succeed(*kept), first)
        (pool,) = json.loads(profile.read_text())["pools"]
        self.assertRegex(pool["measured"], r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z")
        slow = {**pool, "measured": "2000-01-01T00:00:00Z", "speed": {**pool["speed"], "gemm_flops_per_second": 1}}
        profile.write_text(json.dumps({"version": 1, "pools": [slow]}))
        self.assertGreater(json.loads(self.succeed(*kept))["predicted"]["seconds"], 1000)
        anew = json.loads(self.succeed(*kept, "--set", "plan.measure=true"))
        self.assertLess(anew["predicted"]["seconds"], 1000)
        self.assertNotIn("2000-01-01", profile.read_text())
        profile.write_text("{")
        broken = run(*kept)
        self.assertEqual(broken.returncode, 0)
        self.assertRegex(broken.stderr.decode(), r"\Ameshfill: [^\n]*speed.json: no JSON object; delete[^\n]*\n\Z")
        self.succeed(*kept)

    def test_plan_takes_a_shape(self):
        def plan(*shape):
            return json.loads(self.succeed("plan", "--config", self.config, "--tokens", 4096, "--ranks", 8, *shape,
                                           "--json"))
        for shape, expected in ((("--tile", "2x4"), [(1, 2, 4)]), (("--heads", 4), [(4, 1, 2), (4, 2, 1)]),
                                (("--heads", 2, "--tile", "4x1"), [(2, 4, 1)])):
            with self.subTest(shape):
                got = plan(*shape)
                self.assertEqual(sorted((c["heads"], c["a"], c["b"]) for c in got["candidates"]), expected)
                self.assertIn((got["heads"], got["a"], got["b"]), expected)
        for option, value in (("layout", "zigzag"), ("layout", "contiguous"), ("stripe", 128), ("stripe", 32)):
            self.assertEqual(plan(f"--{option}", value)[option], value)
        halved = [plan("--tile", "2x4", "--dtype", dtype)["predicted"]["comm_bytes"]["kv"] for dtype in ("f32", "bf16")]
        self.assertEqual(halved[0], 2 * halved[1])
        self.refuse("plan", "--config", self.config, "--tokens", 4096, "--ranks", 8, "--heads", 8, status=2,
                    message=r"8 head groups.*1, 2, 4$")
        self.refuse("plan", "--config", self.config, "--tokens", 4096, "--ranks", 8, "--heads", 4, "--tile", "2x4",
                    status=2, message=r"2x4 with 4 head groups.*8")

    def test_plan_needs_no_weights(self):
        folder = self.tmp / "config-alone"
        folder.mkdir()
        (folder / "config.json").write_text((self.model / "config.json").read_text())
        out = self.succeed("plan", "--config", self.config, "--set", f"model.path={folder}", "--tokens", 1000,
                           "--tile", "2x2")
        for part in ("2x2", "step", "(0,0)", "chosen"):
            self.assertIn(part, out)

    def test_plan_streams_what_no_host_holds(self):
        folder = self.tmp / "larger-than-memory"
        folder.mkdir()
        config = json.loads((self.model / "config.json").read_text())
        config |= {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1024}  # 900 GB in bf16
        (folder / "config.json").write_text(json.dumps(config))
        pool = pathlib.Path(__file__).resolve().parents[2] / "configs/pool.yaml"
        plan = json.loads(self.succeed("plan", "--config", pool, "--model", folder, "--tokens", 100, "--ranks", 2,
                                       "--ranks-per-host", 1, "--json"))
        self.assertEqual(plan["weights"]["mode"], "streamed")
        modes = {mode["mode"]: mode for mode in plan["weights"]["modes"]}
        self.assertFalse(modes["resident"]["fits"])
        self.assertNotIn("seconds", modes["resident"])
        self.assertEqual(modes["streamed"]["seconds"], plan["predicted"]["seconds"])

    def test_an_output_that_cannot_be_written_is_said(self):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([MESHFILL, "plan", "--config", self.config, "--tokens", "1000"], stdout=full, stderr=subprocess.PIPE,
                                  timeout=TIMEOUT_SECONDS)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr.decode(), r"meshfill plan: standard output cannot be written; is the disk full\?\n\Z")

    def test_plan_for_gpus_that_are_not_here(self):
        root = pathlib.Path(__file__).resolve().parents[2]
        cluster = root / "configs/scenarios/h100_nodes.yaml"
        models = sorted(path.parent for path in root.glob("configs/models/*/config.json"))
        self.assertGreater(len(models), 3)

        def plan(model, tokens, ranks, *options):
            return json.loads(self.succeed("plan", "--cluster", cluster, "--model", model, "--tokens", tokens,
                                           "--ranks", ranks, *options, "--json"))

        for model in models:
            with self.subTest(model.name):
                few, many = (plan(model, 100_000, ranks) for ranks in (16, 128))
                for each in (few, many):
                    seconds = [mode["seconds"] for mode in each["weights"]["modes"] if "seconds" in mode]
                    self.assertEqual(each["predicted"]["seconds"], min(seconds))
                self.assertLess(many["predicted"]["compute_seconds"], few["predicted"]["compute_seconds"])
                self.assertEqual([mode["mode"] for mode in few["weights"]["modes"]], ["resident", "sharded", "streamed"])
                for each in (few, many):
                    # Between nodes only where the parts of a node's GPUs are too large for them.
                    gathers = each["predicted"]["comm_bytes"].get("gather", 0) > 0
                    self.assertEqual(each.get("not_yet", []), ["weights that several nodes share"] if gathers else [])
                    resident = each["weights"]["modes"][0]["bytes"]
                    self.assertEqual(gathers, each["weights"]["mode"] == "sharded" and resident / 8 > 75e9)
        llama = root / "configs/models/llama-3.1-405b"
        text = self.succeed("plan", "--cluster", cluster, "--model", llama, "--tokens", 100_000, "--ranks", 64)
        self.assertRegex(text, r"resident would need 7\d\d\.\d GiB of a GPU, more than is free")
        self.assertRegex(text, r"not yet +weights that several nodes share")
        fast = self.tmp / "fast.yaml"
        fast.write_text(re.sub("host_bytes_per_second: .*", "host_bytes_per_second: 500e9", cluster.read_text()))
        text = self.succeed("plan", "--cluster", fast, "--model", llama, "--tokens", 100_000, "--ranks", 64)
        self.assertRegex(text, r"weights +streamed")
        self.assertNotIn("not yet", text)
        self.assertEqual(plan(llama, 100_000, 8, "--tile", "2x4", "--heads", 1)["a"], 2)
        good = ("plan", "--cluster", cluster, "--model", llama, "--tokens", 1000)
        self.assertIn("8 ranks", self.succeed(*good))  # a node
        self.refuse("plan", "--model", llama, "--tokens", 1000, status=2, message="--config FILE, as configs.local.yaml, or --cluster FILE")
        self.refuse("plan", "--cluster", cluster, "--tokens", 1000, status=2, message="model.path")
        self.refuse("plan", "--cluster", "nowhere.yaml", "--model", llama, "--tokens", 1000, status=2,
                    message=r"nowhere\.yaml: cannot be read")
        self.refuse(*good, "--ranks-per-host", 4, status=2, message="--ranks-per-host")
        self.refuse("plan", "--cluster", root / "configs/scenarios/ethernet.yaml", "--model", llama, "--tokens", 1000,
                    status=2, message=r"ethernet\.yaml: cluster\.gemm_flops_per_second")
        self.refuse("plan", "--cluster", cluster, "--model", llama, "--tokens", 1 << 21, status=2,
                    message="above the model's context.*--context")
        minimax, longer = root / "configs/models/minimax-m2", 1 << 18
        self.assertEqual(plan(minimax, longer, 16, "--context", longer)["ranks"], 16)
        for context in ([], ["--context", longer - 1], ["--context", longer, "--cached", 1]):
            self.refuse("plan", "--cluster", cluster, "--model", minimax, "--tokens", longer, "--ranks", 16, *context,
                        status=2, message="above the model's context")
        # Nodes whose hosts hold no copy of the weights.
        low = self.tmp / "low.yaml"
        low.write_text(fast.read_text().replace("host_memory_bytes: 2TB", "host_memory_bytes: 512GB"))
        modes = {name: {mode["mode"]: mode for mode in json.loads(self.succeed(
            "plan", "--cluster", name, "--model", llama, "--tokens", 100_000, "--ranks", 64, "--json"))["weights"]["modes"]}
            for name in (fast, low)}
        self.assertTrue(modes[fast]["streamed"]["fits"])
        self.assertFalse(modes[low]["streamed"]["fits"])
        self.assertNotIn("seconds", modes[low]["streamed"])
        self.assertEqual(modes[low]["streamed"]["host_memory_bytes"], 512e9)
        self.assertGreater(modes[low]["streamed"]["host_bytes"], 512e9)
        self.assertEqual(modes[low]["sharded"], {**modes[fast]["sharded"], "host_memory_bytes": 512e9})
        text = self.succeed("plan", "--cluster", low, "--model", llama, "--tokens", 100_000, "--ranks", 64)
        self.assertRegex(text, r"weights +sharded")
        self.assertRegex(text, r"streamed would need \d+\.\d GiB of a GPU, 7\d\d\.\d GiB of each node's host, which has 476\.8 GiB\n")
        self.refuse("plan", "--cluster", low, "--model", llama, "--tokens", 1000, "--ranks", 1, status=1,
                    message="do not fit 1 GPU.*streamed.* GB of a node's host, which has 512.0 GB.*hosts with more memory")
        # Experts cost more where their products are slower, and a dense model's no more.
        even = self.tmp / "even.yaml"
        even.write_text(re.sub("experts_gemm_share: .*", "experts_gemm_share: 1", cluster.read_text()))
        for model, slower in ((minimax, True), (llama, False)):
            slow, quick = (json.loads(self.succeed("plan", "--cluster", name, "--model", model, "--tokens", 100_000, "--ranks", 32,
                                                   "--json"))["predicted"]["compute_seconds"] for name in (cluster, even))
            (self.assertGreater if slower else self.assertEqual)(slow, quick)
        even.write_text(even.read_text().replace("experts_gemm_share: 1", "experts_gemm_share: 1.5"))
        self.refuse("plan", "--cluster", even, "--model", llama, "--tokens", 1000, status=2, message="even.yaml:.*experts_gemm_share: must be")
        small = self.tmp / "small.yaml"
        small.write_text(cluster.read_text().replace(" memory_bytes: 80GB", " memory_bytes: 8GB"))
        self.refuse("plan", "--cluster", small, "--model", llama, "--tokens", 1000, "--ranks", 1, status=1,
                    message="do not fit 1 GPU of 8.0 GB.*resident.*streamed.*--ranks more")

    def test_plan_takes_the_models_folder(self):
        plans = [self.succeed("plan", "--config", self.config, *model, "--tokens", 1000, "--tile", "2x2", "--json")
                 for model in ((), ("--model", self.model))]
        self.assertEqual(*(json.loads(plan)["steps"] for plan in plans))
        self.refuse("plan", "--config", self.config, "--model", "/nowhere", "--tokens", 1000, status=2,
                    message="model.path: /nowhere: no such folder")

    # ---- make-model.

    def test_models_of_every_architecture_run(self):
        experts = ("qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "gpt_oss")
        for arch in ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3", *experts):
            folder = self.tmp / f"model-{arch}"
            options = ["--sliding-window", 100] if arch in ("mistral", "gemma3") else []
            if arch in experts:
                options = ["--experts", 5, "--experts-used", 3, "--expert-width", 48]
            self.succeed("make-model", "--arch", arch, "--out", folder, "--hidden", 64, "--layers", 1, *options)
            result = self.embedded("--model", folder, "--tokens", self.prompt)
            self.check_prefill_object(result, len(self.ids), ranks=4)

    def test_models_of_narrow_weights_run(self):
        rows = ("--fp8-scales", "channel")
        for arch, dtype, *options in (("qwen3", "fp8"), ("qwen3", "fp8", *rows), ("qwen3_moe", "fp8"), ("glm4_moe", "fp8", *rows),
                                      ("gpt_oss", "mxfp4")):
            folder = self.tmp / f"model-{arch}-{dtype}{len(options)}"
            self.succeed("make-model", "--arch", arch, "--out", folder, "--hidden", 192, "--layers", 2, "--dtype", dtype, *options)
            result = self.embedded("--model", folder, "--tokens", self.prompt)
            self.check_prefill_object(result, len(self.ids), ranks=4)

    def test_same_seed_same_model(self):
        files = {}
        for name, seed in (("a", 5), ("b", 5), ("c", 6)):
            folder = self.tmp / f"seed-{name}"
            self.succeed("make-model", "--arch", "qwen3", "--out", folder, "--hidden", 64, "--seed", seed)
            files[name] = (folder / "model.safetensors").read_bytes()
        self.assertEqual(files["a"], files["b"])
        self.assertNotEqual(files["a"], files["c"])

    # ---- bench.

    def test_benches_print_their_ratio(self):
        out = self.succeed("bench", "prefill", "--model", self.model, "--tokens", 2000, "--tile", "2x2", "--compare",
                           "1x1", "--repeats", 1, "--json")
        bench = json.loads(out)
        self.assertEqual([run["ranks"] for run in bench["runs"]], [4, 1])
        self.assertGreater(bench["tokens_per_second_ratio"], 0)
        self.assertNotIn("idle_share", bench["runs"][0])
        self.assertGreater(bench["peak_resident_bytes"], 1 << 20)
        out = self.succeed("bench", "prefill", "--model", self.model, "--tokens", 600, "--repeats", 1, "--idle", "--json")
        self.assertLess(json.loads(out)["runs"][0]["idle_share"], 0.5)
        compared = json.loads(self.succeed("bench", "schedules", "--side", 3, "--max-cost", 2, "--json"))
        for ratios in (compared["greedy_time"], compared["optimal_time"]):
            self.assertTrue(ratios["min"] <= ratios["mean"] <= ratios["max"], ratios)
        out = self.succeed("bench", "attention", "--tokens", 500, "--repeats", 1, "--json")
        self.assertGreater(json.loads(out)["ratio"], 0)

    def test_bench_layer_says_its_time_and_mfu(self):
        shape = ("--tokens", 300, "--hidden", 64, "--intermediate", 96, "--q-heads", 4, "--kv-heads", 2, "--head-dim", 16)
        layer = json.loads(self.succeed("bench", "layer", *shape, "--dtype", "f32", "--repeats", 1, "--json"))
        self.assertEqual((layer["tokens"], layer["hidden"], layer["dtype"]), (300, 64, "f32"))
        flops = 300 * 2 * (64 * 16 * 12 + 3 * 64 * 96) + 4 * 16 * 4 * 300 * 301 / 2
        self.assertAlmostEqual(layer["flops_per_second"] * layer["seconds"] / flops, 1)
        self.assertAlmostEqual(layer["mfu"], layer["flops_per_second"] / layer["peak_flops_per_second"])
        self.assertLess(layer["attention_seconds"], layer["seconds"])
        self.assertIn("MFU", self.succeed("bench", "layer", *shape, "--repeats", 1))

    def test_bench_experts_compares_them_with_a_dense_layer(self):
        shape = ("--tokens", 300, "--layers", 2, "--hidden", 64, "--experts", 5, "--experts-used", 3, "--expert-width", 32,
                 "--q-heads", 4, "--kv-heads", 2, "--head-dim", 16)
        bench = json.loads(self.succeed("bench", "experts", *shape, "--dtype", "f32", "--repeats", 1, "--json"))
        self.assertEqual((bench["tokens"], bench["experts"], bench["experts_used"], bench["dtype"]), (300, 5, 3, "f32"))
        for model in ("with_experts", "dense"):
            flops = 300 * 2 * 6 * 64 * 3 * 32
            self.assertAlmostEqual(bench[model]["mlp_flops_per_second"] * bench[model]["mlp_seconds"] / flops, 1)
            self.assertLess(bench[model]["mlp_seconds"], bench[model]["seconds"])
        self.assertAlmostEqual(bench["mlp_ratio"], bench["dense"]["mlp_seconds"] / bench["with_experts"]["mlp_seconds"])
        self.assertIn("experts over dense", self.succeed("bench", "experts", *shape, "--repeats", 1))

    def test_bench_weights_streams_from_the_disk(self):
        command = ["bench", "weights", "--config", self.config, "--tokens", 300, "--rounds", 2]
        warm = json.loads(self.succeed(*command, "--json"))
        self.assertEqual(warm["streamed_over_resident"], warm["resident"]["seconds"] / warm["streamed"]["seconds"])
        self.assertNotIn("disk", warm)
        refused = run(*map(str, command), "--cold", "--workers", "2")
        self.assertEqual(refused.returncode, 2)
        self.assertRegex(refused.stderr.decode(), "--cold.*--workers|--workers.*--cold")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # in memory
            shutil.copytree(self.model, folder, dirs_exist_ok=True)
            self.refuse(*command, "--cold", "--set", f"model.path={folder}", status=1,
                        message=r"model\.safetensors stay in the page cache; put the model on a disk")
        cold = run(*map(str, command), "--cold", "--json")
        if cold.returncode == 1 and b"stay in the page cache; put the model on a disk" in cold.stderr:
            self.skipTest("the temporary folder lies on no disk")
        self.assertEqual(cold.returncode, 0, cold.stderr)
        cold = json.loads(cold.stdout)
        self.assertEqual(cold["disk"]["bytes"], sum(path.stat().st_size for path in self.model.glob("*.safetensors")))
        self.assertEqual(cold["cold_over_least"],
                         cold["streamed"]["seconds"] / max(cold["resident"]["seconds"], cold["disk"]["seconds"]))

    # ---- What is wrong with the command line, and with its files.

    def test_help_and_version(self):
        self.assertRegex(self.succeed("--version"), r"\Ameshfill \d+\.\d+\.\d+\n\Z")
        commands = ("serve", "prefill", "plan", "make-model", "bench")
        for command in commands:
            self.assertIn(command, self.succeed("--help"))
            self.assertIn("--help", self.succeed(command, "--help"))
            self.assertEqual(self.succeed("help", command), self.succeed(command, "--help"))
        for command in (("status",), ("cancel",), ("bench", "serve")):
            self.assertIn("=127.0.0.1:50051", self.succeed(*command, "--help"))
        self.assertEqual(self.succeed("help"), self.succeed("--help"))
        for bench in ("attention", "layer", "prefill"):
            self.assertIn("--json", self.succeed("bench", bench, "--help"))

    def test_bad_usage(self):
        config, prompt = self.config, self.prompt
        for arguments, message in (
            ([], r"serve, worker, prefill, plan, status, cancel, simulate, make-model, bench"),
            (["train"], r"'train' is no command"),
            (["bench"], r"attention, comm, experts, gemm, kv, layer, mix, pieces, plan, prefix, prefill, schedules, serve, weights"),
            (["bench", "fft"], r"'fft' is no command; there are attention, .*; see `meshfill bench --help`$"),
            (["bench", "layer", "--q-heads", 4, "--kv-heads", 3, "--hidden", 64], r"key_value_heads"),
            (["--no-such-option"], r"no-such-option|serve, prefill"),
            (["prefil"], r"'prefil' is no command; did you mean prefill\?"),
            (["prefil", "--help"], r"'prefil' is no command; did you mean prefill\?"),
            (["bench", "atention", "--help"], r"'atention' is no command; did you mean attention\?"),
            (["prefill", "--sever", "h:1"], r"'--sever' is no option; did you mean --server\?"),
            (["prefill", "--text", "F"], r"'--text' is no option; .*`python -m meshfill prefill --text FILE --tokenizer DIR`"),
            (["serve", "--model", self.model, "--port", 8000], r"'--port' is no option; .*--listen 127\.0\.0\.1:8000"),
            (["prefill", "--tokens", prompt, "--port=8000"], r"'--port' is no option; .*--server 127\.0\.0\.1:8000"),
            (["simulate", "--port", 8000], r"'--port' is no option; see `meshfill simulate --help`$"),
            (["help", "prefil"], r"'prefil' is no command; did you mean prefill\?"),
            (["prefill", "--tokens", prompt, "--confg=x"], r"'--confg' is no option; did you mean --config\?"),
            (["serve"], r"--model DIR or --config"),
            (["serve", "--listen", "127.0.0.1:0"], r"model\.path: not set"),
            (["serve", "--model", self.model, "--listen", "here"], r"listen: .*here"),
            (["worker"], r"--config"),
            (["worker", "--config", config], r"`meshfill serve` alone reads this key.*configs/worker\.yaml"),
            (["worker", "--config", ROOT / "configs/worker.yaml"], r"--join is required.*pool\.control_listen"),
            (["serve", "--model", self.model / "config.json"], rf"config\.json is a file; give its folder, {self.model}$"),
            (["serve", "--model", "/no/such/model"], r"\Ameshfill serve: model\.path: /no/such/model: no such folder"),
            (["prefill", "--model", self.model, "--tokens", prompt], r"--config FILE, as configs/local\.yaml"),
            (["plan", "--model", self.model, "--tokens", 9], r"--config FILE, as configs/local\.yaml"),
            (["prefill"], r"--tokens"),
            (["prefill", "--tokens", prompt], r"--server HOST:PORT or --config FILE"),
            (["prefill", "--config", config], r"--tokens"),
            (["prefill", "--config", config, "--server", "h:1", "--tokens", prompt], r"--server|--config"),
            (["prefill", "--server", "h:1", "--dtype", "f32", "--tokens", prompt], r"--dtype.*--config"),
            (["prefill", "--server", "nowhere", "--tokens", prompt], r"--server.*nowhere"),
            (["prefill", "--config", config, "--tokens", prompt, "--tile", "2by2"], r"--tile.*2by2.*2x2"),
            (["prefill", "--config", config, "--tokens", prompt, "--tile", "0x4"], r"--tile.*0x4"),
            (["prefill", "--config", config, "--tokens", prompt, "--tile", "3x3"], r"3x3 does not .* 4 ranks.*give one that does, as 1x4"),
            (["prefill", "--config", config, "--tokens", prompt, "--tile", "3x2"], r"3x2.*4"),
            (["prefill", "--config", config, "--tokens", prompt, "--format", "text"], r"--format.*text.*bytes"),
            (["prefill", "--config", config, "--tokens", prompt, "--layout", "spiral"], r"--layout.*spiral"),
            (["prefill", "--config", config, "--tokens", prompt, "--dtype", "f16"], r"--dtype.*f16"),
            (["prefill", "--config", config, "--tokens", prompt, "--top-k", 0], r"--top-k"),
            (["prefill", "--config", config, "--tokens", prompt, "--top-k", VOCAB + 1], r"top_k"),
            (["prefill", "--config", config, "--tokens", prompt, "--ranks", 65], r"--ranks.*64"),
            (["prefill", "--config", config, "--tokens", prompt, "--ranks", "many"], r"--ranks.*many"),
            (["prefill", "--config", config, "--tokens", prompt, "--stripe", 0], r"--stripe"),
            (["prefill", "--config", config, "--tokens", prompt, "surplus"], r"surplus"),
            (["prefill", "--config", config, "--tokens", prompt, "--set", "pool.embedded.memory_bytes=900TiB"],
             r": pool\.embedded\.memory_bytes is 921600\.0 GiB, but this machine or its container has [\d.]+ GiB; give less"),
            (["prefill", "--config", config, "--tokens", prompt, "--logits-out", "/no/such/folder/x"], r"/no/such"),
            (["plan", "--config", config], r"--tokens"),
            (["plan", "--config", config, "--tokens", 0], r"--tokens.*'0' is no whole number of 1 or more"),
            (["plan", "--config", config, "--tokens", 9, "--cached", -1], r"--cached"),
            (["plan", "--config", config, "--tokens", 9, "--cached", 1 << 20], r"--cached 1048576"),
            (["plan", "--config", config, "--tokens", 9, "--cached", 2**63 - 1], r"--cached 9223372036854775807"),
            (["plan", "--config", config, "--tokens", 2**63 - 1, "--cached", 2**63 - 1], r"--tokens 9223372036854775807"),
            (["plan", "--config", config, "--tokens", (1 << 20) + 1], r"1048577"),
            (["plan", "--config", config, "--tokens", 9, "--tile", "5x1"], r"5x1.*4"),
            (["make-model", "--arch", "gpt", "--out", self.tmp / "x"], r"--arch.*gpt.*llama"),
            (["make-model", "--arch", "llama"], r"--out"),
            (["make-model", "--out", self.tmp / "x"], r"--arch.*--config-json"),
            (["make-model", "--out", self.tmp / "x", "--config-json", self.tmp / "none.json"], r"none\.json"),
            (["make-model", "--out", self.tmp / "x", "--config-json", "x", "--layers", 2], r"--layers"),
            (["make-model", "--arch", "llama", "--out", self.model], r"model"),
            (["make-model", "--arch", "llama", "--out", self.tmp / "x", "--heads", 4, "--kv-heads", 3], r"key_value_heads"),
            (["make-model", "--arch", "llama", "--out", self.tmp / "x", "--layers", 0], r"--layers"),
        ):
            with self.subTest(" ".join(map(str, arguments))):
                self.refuse(*arguments, status=2, message=message)

    def test_bad_prompts(self):
        folder = self.tmp
        for name, data in (("empty", b""), ("words", b"1 2\n3 four\n"), ("huge", b"4294967296"), ("odd", b"12345")):
            (folder / name).write_bytes(data)
        for tokens, options, message in (
            (folder / "missing", [], r"missing: no such file"),
            ("hello world", [], r"hello world: no such file; .*text belongs in a file, with --format bytes"),
            (folder, [], r"cannot be read"),
            (folder / "empty", [], r"empty: holds no tokens"),
            (folder / "words", [], r"words:2:3: unexpected 'f'"),
            (folder / "huge", [], r"huge:1:10: .*4294967295"),
            (folder / "odd", ["--format", "u32le"], r"odd: .*multiple of 4"),
            (folder / "odd", [], r"token 0 has id 12345"),
        ):
            with self.subTest(message):
                self.refuse("prefill", "--config", self.config, "--tokens", tokens, *options, status=2, message=message)

    def test_bad_configs(self):
        bad = self.tmp / "bad.yaml"
        for text, message in (
            ("pool:\n  embeded:\n    ranks: 2\n", r"bad\.yaml:2: .*embeded"),
            ("pool:\n  embedded:\n    ranks: many\n", r"bad\.yaml:3: .*ranks"),
            ("pool: [", r"bad\.yaml"),
            ("listen: 127.0.0.1:0\n", r"bad\.yaml: model\.path: not set"),
            ("", r"bad\.yaml: model\.path: not set"),
        ):
            bad.write_text(text)
            for command in ("prefill", "plan"):
                with self.subTest(text):
                    tokens = self.prompt if command == "prefill" else 5
                    self.refuse(command, "--config", bad, "--tokens", tokens, status=2, message=message)
        self.refuse("serve", "--config", self.tmp / "none.yaml", status=2, message=r"none\.yaml")
        self.refuse("serve", "--config", self.config, "--set", "pool.ranks=3", status=2, message=r"pool\.ranks|ranks")

    @unittest.skipIf(b"san_init" in open(MESHFILL, "rb").read(), "a sanitizer takes more address space than a limit leaves")
    def test_too_little_memory_for_threads_is_one_line(self):
        for kib in (350_000, 450_000, 600_000):
            with self.subTest(kib):
                many = ["--ranks", "64", "--set", "pool.embedded.threads=64", "--set", "plan.profile_path="]
                limited = ["bash", "-c", f'ulimit -v {kib}; exec "$@"', "bash", MESHFILL, "prefill", "--config", self.config,
                           "--tokens", self.prompt, *many]
                done = subprocess.run(limited, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, r"\Ameshfill[^\n]*(thread|memory)[^\n]*\n\Z")

    @unittest.skipIf(os.path.exists("/dev/nvidiactl"), "this machine has an NVIDIA driver")
    def test_cuda_without_a_gpu(self):
        cuda = ("--config", self.config, "--set", "pool.embedded.device=cuda", "--tokens", self.prompt)
        self.refuse("prefill", *cuda, status=2, message=r"device cuda: (no NVIDIA driver|this build has no CUDA).*device cpu")

    def test_bad_models(self):
        for name, damage, message in (
            ("no-config", lambda f: (f / "config.json").unlink(), r"config\.json"),
            ("no-weights", lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors|no-weights"),
            ("broken-json", lambda f: (f / "config.json").write_text("{"), r"config\.json"),
            ("truncated", lambda f: os.truncate(f / "model.safetensors", 5000), r"model\.safetensors"),
            ("oversized", self.append_a_byte, r"model\.safetensors"),
            ("lying", self.lie_about_a_shape, r"model\.safetensors"),
        ):
            folder = self.tmp / f"bad-{name}"
            folder.mkdir()
            for source in self.model.iterdir():
                (folder / source.name).write_bytes(source.read_bytes())
            damage(folder)
            with self.subTest(name):
                self.refuse("prefill", "--config", self.config, "--model", folder, "--tokens", self.prompt, status=2,
                            message=message)
        self.refuse("prefill", "--config", self.config, "--model", "/no/such/model", "--tokens", self.prompt, status=2,
                    message=r"/no/such/model")

    def append_a_byte(self, folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes() + b"x")

    def lie_about_a_shape(self, folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = data[8 : 8 + size].replace(b"[64]", b"[65]", 1)
        self.assertNotEqual(header, data[8 : 8 + size])
        path.write_bytes(data[:8] + header + data[8 + size :])


if __name__ == "__main__":
    unittest.main(verbosity=2)
