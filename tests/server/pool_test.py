#!/usr/bin/env python3
"""`meshfill serve` as the leader of `meshfill worker` processes on loopback: joins, answers, deaths, refusals.

Usage: pool_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import json
import os
import re
import signal
import socket
import subprocess
import time
import unittest
import urllib.request

from cli_harness import MESHFILL, TIMEOUT_SECONDS, CliTestCase, run
from pool_process import Process


class PoolTest(CliTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.pool_config = cls.tmp / "pool.yaml"
        cls.pool_config.write_text(
            f"model:\n  path: {cls.model}\nlisten: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\n"
            "pool:\n  control_listen: 127.0.0.1:0\n  empty_timeout: 5s\n"
        )
        cls.worker_config = cls.tmp / "worker.yaml"
        cls.worker_config.write_text(
            f"model:\n  path: {cls.model}\npool:\n  worker:\n    threads: 1\n    peak_flops: 1e11\n"
            "    memory_bytes: 2GiB\n"
        )

    def setUp(self):
        self.leader = self.start("serve", "--config", self.pool_config)
        self.address = self.leader.wait_for(r" listening on (\S+:\d+)").group(1)
        self.metrics_address = self.leader.wait_for(r"metrics listening on (\S+:\d+)").group(1)
        self.control = self.leader.wait_for(r"workers join at (\S+:\d+)").group(1)

    def start(self, *arguments):
        process = Process(*arguments)
        self.addCleanup(process.end)
        return process

    def worker(self, name, *settings):
        arguments = ["worker", "--config", self.worker_config, "--join", self.control, "--set",
                     f"pool.worker.name={name}"]
        for setting in settings:
            arguments += ["--set", setting]
        return self.start(*arguments)

    def workers(self, *names):
        processes = [self.worker(name) for name in names]
        for process in processes:
            process.wait_for("joined the pool")
        return processes

    def prefill(self, tokens, *arguments):
        return json.loads(self.succeed("prefill", "--server", self.address, "--json", "--tokens", tokens, *arguments))

    def prefill_later(self, tokens, *arguments):
        return subprocess.Popen(
            [MESHFILL, "prefill", "--server", self.address, "--json", "--tokens", str(tokens), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def metric(self, name):
        text = urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=5).read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(name + r"[ {]", line))

    def test_pool_and_embedded_agree_to_the_bit(self):
        refused = run("prefill", "--server", self.address, "--tokens", self.prompt)
        self.assertEqual(refused.returncode, 1)
        self.assertIn(b"no workers", refused.stderr)
        two_ranks = self.worker("a", "pool.worker.ranks=2")
        two_ranks.wait_for("joined the pool")
        self.workers("b", "c")
        files = [self.tmp / "pool.logits", self.tmp / "one.logits"]
        options = ["--tile", "2x2", "--top-k", 5, "--logits-out"]
        pool = self.prefill(self.prompt, *options, files[0])
        embedded = self.embedded("--tokens", self.prompt, *options, files[1])
        self.check_prefill_object(pool, len(self.ids), ranks=4, top_k=5)
        for key in ("tokens", "first_token", "top", "plan", "comm_bytes"):
            self.assertEqual(pool[key], embedded[key], key)
        self.assertEqual(files[0].read_bytes(), files[1].read_bytes())
        again = self.tmp / "again.logits"
        self.prefill(self.prompt, *options, again)
        self.assertEqual(files[0].read_bytes(), again.read_bytes())
        self.assertEqual(self.metric("meshfill_worker_joins_total"), 3)
        self.assertEqual(self.metric('meshfill_ranks{state="ready"}'), 4)

    def test_a_worker_dies_and_one_is_stopped_in_the_middle(self):
        workers = self.workers("a", "b", "c", "d")
        prompt = self.tmp / "middle.bytes"
        prompt.write_bytes(self.long_prompt.read_bytes()[:60_000])
        for number, victim in ((signal.SIGKILL, workers[1]), (signal.SIGSTOP, workers[2])):
            with self.subTest(number):
                ranks = int(self.metric("meshfill_ranks"))
                running = self.prefill_later(prompt, "--format", "bytes")
                deadline = time.monotonic() + 10
                while self.metric('meshfill_ranks{state="running"}') == 0 and time.monotonic() < deadline:
                    time.sleep(0.02)
                time.sleep(0.3)
                victim.signal(number)
                start = time.monotonic()
                self.leader.wait_for("is lost", count=5 - ranks)
                noticed = time.monotonic() - start
                self.assertLess(noticed, 0.5 if number == signal.SIGKILL else 3)
                out, error = running.communicate(timeout=TIMEOUT_SECONDS)
                self.assertEqual(running.returncode, 0, error)
                result = json.loads(out)
                self.check_prefill_object(result, 60_000, ranks=result["plan"]["ranks"])
                self.assertLess(result["plan"]["ranks"], ranks)
        alone = self.embedded("--tokens", prompt, "--format", "bytes")
        self.assertEqual(result["first_token"], alone["first_token"])
        self.assertGreaterEqual(self.metric("meshfill_requests_retried_total"), 2)
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 2)
        workers[2].signal(signal.SIGCONT)  # it comes back by itself
        self.leader.wait_for('worker "c" joined', count=2)

    def test_workers_that_do_not_fit_are_refused_with_the_reason(self):
        self.workers("a")
        other = self.tmp / "other"
        made = run("make-model", "--arch", "llama", "--out", other, "--layers", 1, "--hidden", 64, "--heads", 4,
                   "--kv-heads", 2, "--vocab", 256, "--dtype", "f32")
        self.assertEqual(made.returncode, 0, made.stderr)
        stranger = self.worker("stranger", f"model.path={other}")
        self.assertEqual(stranger.process.wait(TIMEOUT_SECONDS), 1)
        stranger.wait_for("another config.json")
        seeded = self.tmp / "seeded"
        made = run("make-model", "--arch", "llama", "--out", seeded, "--layers", 2, "--hidden", 64, "--heads", 4,
                   "--kv-heads", 2, "--vocab", 256, "--dtype", "f32", "--context", 1 << 20, "--seed", 99)
        self.assertEqual(made.returncode, 0, made.stderr)
        weights = self.worker("weights", f"model.path={seeded}")
        self.assertEqual(weights.process.wait(TIMEOUT_SECONDS), 1)
        weights.wait_for("weights")
        twin = self.worker("a")
        twin.wait_for("a worker named a is in the pool")
        time.sleep(1)
        self.assertEqual(sum('worker "a" refused' in line for line in self.leader.lines), 1, "logged once")
        host, port = self.control.rsplit(":", 1)
        for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b""):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(junk)
        self.assertEqual(self.prefill(self.prompt)["plan"]["ranks"], 1)

    def test_workers_come_back_to_a_new_leader_and_drain(self):
        workers = self.workers("a", "b")
        first = self.prefill(self.prompt, "--tile", "1x2")
        self.leader.end()
        self.leader = self.start("serve", "--config", self.pool_config, "--set", f"pool.control_listen={self.control}")
        self.address = self.leader.wait_for(r" listening on (\S+:\d+)").group(1)
        self.metrics_address = self.leader.wait_for(r"metrics listening on (\S+:\d+)").group(1)
        for name in ("a", "b"):
            self.leader.wait_for(f'worker "{name}" joined', seconds=5)
        self.assertEqual(self.prefill(self.prompt, "--tile", "1x2")["top"], first["top"])

        prompt = self.tmp / "drain.bytes"
        prompt.write_bytes(self.long_prompt.read_bytes()[:60_000])
        running = self.prefill_later(prompt, "--format", "bytes")
        deadline = time.monotonic() + 10
        while self.metric('meshfill_ranks{state="running"}') < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        workers[0].signal(signal.SIGTERM)
        out, error = running.communicate(timeout=TIMEOUT_SECONDS)
        self.assertEqual(running.returncode, 0, error)
        self.assertEqual(json.loads(out)["plan"]["ranks"], 2)
        self.assertEqual(workers[0].process.wait(TIMEOUT_SECONDS), 0)
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 0)
        self.assertEqual(self.prefill(self.prompt)["plan"]["ranks"], 1)

    def test_cancel_frees_the_pool_at_once(self):
        self.workers("a", "b")
        self.interrupt("--server", self.address)
        start = time.monotonic()
        self.prefill(self.prompt)
        self.assertLess(time.monotonic() - start, 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
