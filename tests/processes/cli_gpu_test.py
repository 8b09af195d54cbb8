#!/usr/bin/env python3
"""The command line on GPUs: the binary over a CUDA runtime and an NCCL that the host plays (tests/fake_cuda), each
process with two devices of its own.

Usage: cli_gpu_test.py PATH_OF_MESHFILL_FAKE [unittest arguments]
"""
import json
import signal
import time
import unittest

from cli_harness import TIMEOUT_SECONDS, Server, run
from pool_harness import PoolTestCase


class CliGpuTest(PoolTestCase):
    def setUp(self):
        self.leader_environment = {}  # each test starts what it needs

    def test_benches_run_on_the_device(self):
        shape = ("--hidden", 64, "--intermediate", 96, "--q-heads", 4, "--kv-heads", 2, "--head-dim", 16)
        layer = json.loads(self.succeed("bench", "layer", "--device", "cuda", *shape, "--tokens", 300, "--repeats", 1, "--json"))
        self.assertEqual((layer["backend"], layer["dtype"]), ("cuda/sm90", "bf16"))
        self.assertGreater(layer["attention_seconds"], 0)
        self.assertLess(layer["attention_seconds"], layer["seconds"])
        bench = json.loads(self.succeed("bench", "prefill", "--device", "cuda", "--model", self.model, "--tokens", 300, "--tile",
                                        "1x2", "--repeats", 1, "--idle", "--json"))
        self.assertEqual(bench["backend"], "cuda/sm90")
        self.assertGreaterEqual(bench["runs"][0]["idle_share"], 0)
        self.assertLess(bench["runs"][0]["idle_share"], 1)

    def test_plans_by_what_is_free_on_the_device(self):
        config = self.tmp / "gpu.yaml"
        config.write_text(f"model: {{path: {self.model}}}\npool: {{embedded: {{device: cuda}}}}\n")
        plan = json.loads(self.succeed("plan", "--config", config, "--tokens", 10_000, "--json"))
        self.assertGreater(plan["predicted"]["peak_bytes"], 10_000 * 64 * 4)
        config.write_text(f"model: {{path: {self.model}}}\npool: {{embedded: {{device: cuda, memory_bytes: 1MiB}}}}\n")
        refused = run("plan", "--config", config, "--tokens", 10_000)
        self.assertEqual(refused.returncode, 1)
        self.assertIn(b"1048576", refused.stderr)

    def test_a_worker_of_two_gpus_answers_as_the_embedded_pool_does(self):
        bf16 = ("--set", "model.dtype=bf16")
        embedded = json.loads(self.succeed("prefill", "--config", self.config, *bf16, "--set", "pool.embedded.device=cuda",
                                           "--set", "pool.embedded.ranks=2", "--tile", "1x2", "--tokens", self.prompt, "--json"))
        self.start_leader("model.dtype=bf16")
        self.worker("gpus", "model.dtype=bf16", "pool.worker.device=cuda", "pool.worker.ranks=2", "pool.worker.nccl_ctas=2"
                    ).wait_for("joined the pool")
        for _ in range(3):  # the second and third over the first's communicators
            answer = self.prefill(self.prompt, "--tile", "1x2")
            self.assertEqual(answer["top"], embedded["top"])

    def test_two_gpus_share_weights(self):
        shared = ("--set", "model.dtype=bf16", "--set", "pool.embedded.device=cuda", "--set", "pool.embedded.ranks=2")
        answers = [json.loads(self.succeed("prefill", "--config", self.config, *shared, "--set", f"model.weights={weights}",
                                           "--tile", "1x2", "--tokens", self.prompt, "--json"))
                   for weights in ("resident", "sharded")]
        self.assertEqual(*(answer["top"] for answer in answers))
        config = self.tmp / "shared.yaml"
        config.write_text(f"model: {{path: {self.model}, dtype: bf16, weights: sharded}}\n"
                          "pool: {embedded: {device: cuda, ranks: 2}}\nlisten: 127.0.0.1:0\nmetrics_listen: ''\n")
        plan = json.loads(self.succeed("plan", "--config", config, "--tokens", 1000, "--json"))
        self.assertEqual(plan["weights"]["mode"], "sharded")
        self.assertEqual([mode["mode"] for mode in plan["weights"]["modes"]], ["resident", "sharded", "streamed"])
        bench = json.loads(self.succeed("bench", "weights", "--config", config, "--shared", "--tokens", 300, "--rounds", 1,
                                        "--json"))
        self.assertEqual({"resident", "sharded", "sharded_over_resident"}, set(bench) - {"tokens", "rounds"})
        self.assertIn("Fake GPU, which has nobody to share with", self.refuse(
            "serve", "--config", config, "--set", "pool.embedded.ranks=1"))

    def test_a_server_whose_device_has_failed_ends(self):
        server = Server("--config", self.config, "--set", "model.dtype=bf16", "--set", "pool.embedded.device=cuda",
                        "--set", "pool.embedded.ranks=2")
        self.addCleanup(server.stop)
        server.process.send_signal(signal.SIGRTMIN)  # tests/fake_cuda/break_signal.cc
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (failed := server.prefill_tokens("1 2 3")).returncode == 0:  # the signal may be handled after it
            self.assertLess(time.monotonic(), deadline)
        self.assertEqual(failed.returncode, 1)
        self.assertRegex(failed.stderr.decode(), "has failed")
        self.assertEqual(server.process.wait(TIMEOUT_SECONDS), 1)
        server.wait_for_line("stopped: a device of this pool has failed; start the server anew")

    def refuse(self, *arguments):
        done = run(*arguments)
        self.assertEqual(done.returncode, 2)
        return done.stderr.decode()

    def test_a_margin_that_leaves_nothing_to_attention_is_refused(self):
        worker = self.worker_that_ends("pool.worker.device=cuda", "pool.worker.attention_sm_margin=64")
        self.assertRegex(worker.stderr.decode(), r"(?m)^meshfill worker: GPU 0 .* pool\.worker\.attention_sm_margin\n\Z")
        self.assertEqual(worker.returncode, 2)

    def test_devices_that_are_not_there_are_refused(self):
        worker = self.worker_that_ends("pool.worker.device=cuda", "pool.worker.devices=7")
        self.assertRegex(worker.stderr.decode(), r"(?m)^meshfill worker: pool\.worker\.devices names GPU 7, .*\n\Z")
        self.assertEqual(worker.returncode, 2)

    def worker_that_ends(self, *settings):
        arguments = [word for setting in settings for word in ("--set", setting)]
        return run("worker", "--config", self.worker_config, "--join", "127.0.0.1:1", *arguments)


if __name__ == "__main__":
    unittest.main(verbosity=2)
