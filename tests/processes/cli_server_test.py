#!/usr/bin/env python3
"""`meshfill serve` and `meshfill prefill --server`: the real binary against itself.

Usage: cli_server_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time
import unittest
import urllib.request

from cli_harness import MESHFILL, TIMEOUT_SECONDS, VOCAB, CliTestCase, Server, crowding, run
from raw_http2 import DATA, Connection, frame, header_message

CERTIFICATES = pathlib.Path(__file__).parent.parent / "server" / "pool" / "certificates"


class CliServerTest(CliTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server = Server("--config", cls.config)

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()
        super().tearDownClass()

    def test_server_and_embedded_agree_to_the_bit(self):
        files = [self.tmp / "served.logits", self.tmp / "embedded.logits"]
        options = ["--tokens", self.prompt, "--tile", "2x2", "--top-k", 9, "--request-id", "same", "--logits-out"]
        served = json.loads(
            self.succeed("prefill", "--server", self.server.address, "--json", *options, files[0],
                         "--tenant", "t", "--priority", -1, "--deadline", 100)
        )
        embedded = self.embedded(*options, files[1])
        self.check_prefill_object(served, len(self.ids), ranks=4, top_k=9)
        for key in ("request_id", "tokens", "first_token", "top", "plan", "comm_bytes"):
            self.assertEqual(served[key], embedded[key], key)
        self.assertEqual(files[0].read_bytes(), files[1].read_bytes())

    def running_request(self, server):
        """The oldest request, once it runs."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            requests = json.loads(self.succeed("status", "--server", server.address, "--json"))["requests"]
            if requests and requests[0]["phase"] == "running":
                return requests[0]
            self.assertLess(time.monotonic(), deadline)

    def test_status_shows_a_prefill_and_cancel_ends_it(self):
        at = ("--server", self.server.address)
        idle = json.loads(self.succeed("status", *at, "--json"))
        self.assertEqual((idle["state"], idle["ranks"], idle["requests"]), ("STATE_READY", 4, []))
        self.assertRegex(self.succeed("status", *at), r"\Apool +ready, 4 ranks of cpu.*\nmodel .*\nqueue +0 waiting, 0 tokens\n\Z")
        running = subprocess.Popen(
            [MESHFILL, "prefill", *at, "--tokens", str(self.long_prompt), "--format", "bytes", "--request-id", "a\x1b[2Jb",
             "--tenant", "somebody"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        request = self.running_request(self.server)
        self.assertEqual((request["id"], request["tokens"]), ("a\x1b[2Jb", 400_000))
        text = self.succeed("status", *at)
        self.assertRegex(text, r"\nrequest +tenant +phase +tokens +layers +elapsed +rest\na\?\[2Jb +somebody +running +400,000 +\d/2 ")
        self.assertEqual(self.succeed("cancel", *at, "a\x1b[2Jb"), "cancelled a\x1b[2Jb\n")
        out, error = running.communicate(timeout=TIMEOUT_SECONDS)
        self.assertEqual((running.returncode, out), (1, b""))
        self.assertRegex(error.decode(), r"meshfill prefill: .*cancelled by a call of Cancel\n\Z")
        self.refuse("cancel", *at, "a\x1b[2Jb", status=2, message=r"^meshfill cancel: .*no live request has the id.*ended")
        self.refuse("cancel", *at, status=2, message=r"^meshfill cancel: ID is required")
        self.refuse("status", "--server", "127.0.0.1:1", status=1, message=r"^meshfill status: .*listening there\?")

    def test_a_server_says_what_it_would_run(self):
        at = ("plan", "--server", self.server.address)
        for options in ([], ["--tile", "1x4", "--stripe", 32], ["--heads", 2, "--layout", "zigzag"]):
            arguments = ["--tokens", len(self.ids), *options]
            asked = json.loads(self.succeed(*at, *arguments, "--json"))
            own = json.loads(self.succeed("plan", "--config", self.config, *arguments, "--json"))
            self.assertEqual(list(asked), list(own))
            self.assertEqual(asked["weights"]["modes"], [])
            for key in ("ranks", "heads", "a", "b", "layout", "stripe", "steps") if options else ("ranks",):
                self.assertEqual(asked[key], own[key], key)
            self.assertGreater(asked["predicted"]["seconds"], 0)
            ran = json.loads(self.succeed("prefill", "--server", self.server.address, "--tokens", self.prompt, *options, "--json"))
            if options:
                self.assertEqual({key: asked[key] for key in ran["plan"]}, ran["plan"])
        text = self.succeed(*at, "--tokens", len(self.ids), "--tile", "2x2")
        self.assertRegex(text, rf"\Atokens +{len(self.ids):,}\nplan +4 ranks: 1 head group of 2x2, striped .*\npredicted ")
        self.assertRegex(text, r"\nweights +resident, [^,]+ of memory\n\nstep +comm .*(.*\n)+.*  <- chosen\n")
        self.refuse(*at, "--tokens", 5, "--tile", "5x1", status=2, message=r"^meshfill plan: .*5")
        self.refuse(*at, "--tokens", 1 << 40, status=2, message=r"^meshfill plan: .*the prompt has 1099511627776 tokens")
        self.refuse(*at, "--tokens", 5, "--ranks", 2, status=2, message=r"^meshfill plan: .*--server")
        self.refuse("plan", "--server", "127.0.0.1:1", "--tokens", 5, status=1, message=r"^meshfill plan: .*listening there\?")

    def test_ttft_is_what_the_client_waits_for(self):
        at = ("prefill", "--tokens", self.prompt)
        served = self.succeed(*at, "--server", self.server.address)
        self.assertRegex(served, r"(?m)^TTFT +[^(]+ \(upload [^,]+, queue [^,]+, prefill [^,]+\)$")
        self.assertRegex(self.succeed(*at, "--config", self.config), r"(?m)^TTFT +[^(]+ \(queue [^,]+, prefill [^,]+\)$")

    def test_kv_of_server_and_embedded_pool_agree_to_the_byte(self):
        for options in (["--tile", "2x2"], ["--heads", 2, "--layout", "zigzag"], ["--stripe", 3]):
            files = [self.tmp / "served.kv", self.tmp / "embedded.kv"]
            common = ["--tokens", self.prompt, *options, "--kv-out"]
            self.succeed("prefill", "--server", self.server.address, "--json", "--tenant", "t", *common, files[0])
            self.embedded(*common, files[1])
            self.assertEqual(files[0].read_bytes(), files[1].read_bytes(), options)

    def test_server_refuses_bad_requests_and_serves_the_next(self):
        server = self.server
        good = json.loads(server.prefill_tokens("1 2 3", "--tile", "2x2").stdout)["top"]
        for text, options, status, message in (
            ("1 2 999", [], 2, r"token 2 has id 999"),
            ("1 2 3", ["--tile", "3x2"], 2, r"3x2.*4"),
            ("1 2 3", ["--top-k", VOCAB + 1], 2, r"top_k"),
            ("1 2 3", ["--heads", 3], 2, r"3 head groups.*1, 2, 4"),
            ("1 2 3", ["--request-id", "x" * 129], 2, r"128"),
            (" ".join(["7"] * ((1 << 20) + 1)), [], 2, r"1048577"),
        ):
            with self.subTest(message):
                self.refuse("prefill", "--server", server.address, "--tokens", "-", *options,
                            stdin=text.encode(), status=status, message=message)
                self.assertEqual(json.loads(server.prefill_tokens("1 2 3", "--tile", "2x2").stdout)["top"], good)

    def test_a_server_that_takes_small_messages(self):
        server = Server("--config", self.config, "--set", "limits.max_message_bytes=64KiB")
        self.addCleanup(server.stop)
        ids = [VOCAB - 1] * 65_536 + [VOCAB]  # 128 KiB of two bytes each, and one that is told of at the end
        self.refuse("prefill", "--server", server.address, "--tokens", "-", status=2,
                    stdin=" ".join(map(str, ids)).encode(), message=rf"token 65536 has id {VOCAB}")

    def test_no_server_there(self):
        self.refuse("prefill", "--server", "127.0.0.1:1", "--tokens", self.prompt, status=1,
                    message=r"127\.0\.0\.1:1.*meshfill serve")

    def test_a_name_without_a_host(self):
        self.refuse("prefill", "--server", "no-such-host.invalid:1", "--tokens", self.prompt, status=2,
                    message=r"server no-such-host\.invalid:1: no host of this name")

    def test_a_model_alone_is_served(self):
        server = Server("--model", self.model, "--listen", "127.0.0.1:0", "--metrics-listen", "")
        try:
            self.assertEqual(server.prefill_tokens("[1, 2, 3]").stdout[:15], server.prefill_tokens("1 2 3").stdout[:15])
            self.assertTrue(any(" on 1 rank of " in line for line in server.lines), server.lines)
        finally:
            self.assertEqual(server.stop(), 0)

    def test_the_log_says_where_the_pools_speed_comes_from(self):
        profile = self.tmp / "served" / "speed.json"
        notes = []
        for extra in ((), (), ("--measure",)):
            server = Server("--config", self.config, "--set", f"plan.profile_path={profile}", *extra)
            self.assertEqual(server.stop(), 0)
            notes += [line.split(" ", 1)[1].strip() for line in server.lines if "the pool's speed" in line]
        measured = f"the pool's speed: measured now, and kept in {profile}"
        self.assertEqual([notes[0], notes[2]], [measured, measured])
        self.assertRegex(notes[1], rf"\Athe pool's speed: kept in {profile}, measured \d{{4}}-\d\d-\d\dT[\d:]{{8}}Z\Z")
        self.assertEqual(len(notes), 3)

    def test_a_prefill_at_the_metrics_port_names_the_other(self):
        server = Server("--config", self.config, "--set", "metrics_listen=127.0.0.1:0")
        try:
            pages = next(match.group(1) for line in server.lines if (match := re.search(r"metrics listening on (\S+)", line)))
            done = run("prefill", "--server", pages, "--tokens", "-", stdin=b"1 2 3")
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertRegex(done.stderr.decode(), r"no port of the API \(metrics_listen\?\): give the server's `listen`\n\Z")
        finally:
            self.assertEqual(server.stop(), 0)

    def test_what_cannot_serve_does_not_say_that_it_listens(self):
        for bad, message in (("model.path=/no/such/model", "no such folder"),
                             ("pool.control_listen=0.0.0.0:0", "pool.tls.insecure=true"),
                             ("listen=0.0.0.0:0", "api.tls.insecure=true")):
            config = self.tmp / "plain.yaml"
            config.write_text(f"model:\n  path: {self.model}\nlisten: 127.0.0.1:0\nmetrics_listen: ''\n")
            done = run("serve", "--config", config, "--set", bad)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(message, done.stderr.decode())
            self.assertNotIn("listening on", done.stderr.decode())
            self.assertNotIn("loading", done.stderr.decode())

    def test_tls_and_tokens(self):
        tokens = {name: self.tmp / f"{name}.token" for name in ("alice", "mallory")}
        for name, file in tokens.items():
            file.write_text(f"{name}-secret\n")
        credentials = self.tmp / "credentials"
        credentials.write_text(f"alice client a sha256:{hashlib.sha256(b'alice-secret').hexdigest()}\n")
        keys = ["--set", f"api.tls.cert={CERTIFICATES}/leader.pem", "--set", f"api.tls.key={CERTIFICATES}/leader.key",
                "--set", f"api.credentials={credentials}"]
        ca = ("--ca", CERTIFICATES / "authority.pem")
        server = Server("--config", self.config, *keys, client=(*ca, "--token-file", tokens["alice"]))
        try:
            good = server.prefill_tokens("1 2 3", "--kv-out", self.tmp / "kv.safetensors")
            self.assertEqual(good.returncode, 0, good.stderr)
            self.assertGreater((self.tmp / "kv.safetensors").stat().st_size, 0)
            at = ("prefill", "--server", server.address, "--tokens", "-")
            for options, status, message in (
                    ((), 1, r"server 127"),
                    (("--tls",), 1, r"server 127"),
                    (("--ca", CERTIFICATES / "other_authority.pem"), 1, r"server 127"),
                    (ca, 1, r"no credential; send"),
                    ((*ca, "--token-file", tokens["mallory"]), 1, r"this bearer token is not known here"),
                    ((*ca, "--token-file", tokens["alice"], "--tenant", "b"), 1, r'for the tenant "a" alone'),
                    ((*ca, "--token-file", "/nowhere"), 2, r"--token-file: /nowhere cannot be read"),
                    (("--ca", "/nowhere"), 2, r"--ca: /nowhere cannot be read"),
                    (("--cert", CERTIFICATES / "leader.pem"), 2, r"--key"),
                    ((*ca, "--cert", CERTIFICATES / "leader.pem", "--key", CERTIFICATES / "worker.key"), 2,
                     r"--key: .* is not the key of the certificate")):
                self.refuse(*at, *options, stdin=b"1 2 3", status=status, message=message)
            log = "".join(server.lines)
            self.assertNotIn("secret", log)
        finally:
            self.assertEqual(server.stop(), 0)

    def test_a_hangup_ends_nothing(self):
        server = Server("--config", self.config)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line("SIGHUP")
        self.assertEqual(server.prefill_tokens("1 2 3").returncode, 0)
        self.assertEqual(server.stop(), 0)

    def test_sigterm_finishes_what_runs_and_refuses_what_comes(self):
        server = Server("--config", self.config)
        running = subprocess.Popen(
            [MESHFILL, "prefill", "--server", server.address, "--tokens", "-", "--format", "bytes", "--json"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        answer = []
        prompt = self.long_prompt.read_bytes()[:20_000]
        waiter = threading.Thread(target=lambda: answer.extend(running.communicate(prompt)))
        waiter.start()
        self.running_request(server)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("draining")
        late = server.prefill_tokens("1 2 3")
        self.assertEqual(late.returncode, 1)
        self.assertRegex(late.stderr.decode(), r"\Ameshfill prefill: [^\n]+\n\Z")
        waiter.join(TIMEOUT_SECONDS)
        self.assertEqual(running.returncode, 0, answer)
        self.check_prefill_object(json.loads(answer[0]), len(prompt), ranks=4)
        self.assertEqual(server.wait(), 0)

    def test_a_drain_ends_at_its_timeout(self):
        server = Server("--config", self.config, "--set", "limits.drain_timeout=0.3s")
        connection = Connection(server.address)
        self.addCleanup(connection.close)
        connection.send(frame(DATA, 0, connection.open_stream(), header_message(3)))  # its tokens never come
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not json.loads(self.succeed("status", "--server", server.address, "--json"))["requests"]:
            self.assertLess(time.monotonic(), deadline)
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(server.wait(), 1)
        self.assertRegex("".join(server.lines), r"requests still ran, or leases still lived, after limits\.drain_timeout of 300ms")

    def test_pages_that_cannot_listen_are_said(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            self.refuse("serve", "--config", self.config, "--set", f"metrics_listen=127.0.0.1:{port}", status=1,
                        message=r"metrics_listen: .*in use")

    def test_stops_and_failing_starts_take_no_time(self):
        def stop(*, uploading):
            server = Server("--config", self.config, "--set", "metrics_listen=127.0.0.1:0")
            pages = next(match.group(1) for line in server.lines if (match := re.search(r"metrics listening on (\S+)", line)))
            connection = Connection(server.address)  # it stays, and hangs up for nothing
            if uploading:
                connection.send(frame(DATA, 0, connection.open_stream(), header_message(3)))
                while b"meshfill_queue_requests 1\n" not in urllib.request.urlopen(f"http://{pages}/metrics").read():
                    time.sleep(0.01)
                server.process.send_signal(signal.SIGTERM)
                server.wait_for_line("draining")
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            self.assertEqual(server.wait(), 1 if uploading else 0)
            seconds = time.monotonic() - begin
            connection.close()
            return seconds

        def fail_to_start():
            begin = time.monotonic()
            self.refuse("serve", "--config", self.config, "--set", f"listen={self.server.address}", status=1, message="in use")
            return time.monotonic() - begin

        # The least of a few: what else the machine does is no matter.
        for kind in (lambda: stop(uploading=False), lambda: stop(uploading=True), fail_to_start):
            self.assertLess(min(kind() for _ in range(4)), 0.5 * TIMEOUT_SECONDS / 120 * crowding())

    def test_a_stop_while_the_model_is_loaded(self):
        folder = self.tmp / "slow"
        self.succeed("make-model", "--arch", "llama", "--out", folder, "--layers", 2, "--hidden", 1024, "--heads", 8,
                     "--kv-heads", 8, "--dtype", "f32")
        config = self.tmp / "slow_worker.yaml"
        config.write_text(f"model: {{path: {folder}}}\npool: {{worker: {{threads: 1, metrics_listen: ''}}}}\n")
        for command in (("serve", "--config", self.config), ("worker", "--join", "127.0.0.1:1", "--config", config)):
            for number in (signal.SIGINT, signal.SIGTERM):
                for _ in range(5):  # where this process does not run for a second, the load ends before the signal comes
                    status, said = self.signal_a_load(number, *command, "--set", f"model.path={folder}")
                    if " ready: " not in said and "loaded model" not in said:
                        break
                self.assertRegex(said, r"stopped while loading the model\n\Z")
                self.assertEqual(status, 0)

    def signal_a_load(self, number, *command):
        """The exit status, and what the process said after its first line."""
        # The pool's speed is measured at each start, which takes a second.
        process = subprocess.Popen([MESHFILL, *command, "--set", "plan.measure=true"], stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        self.assertIn(b" loading ", process.stderr.readline())
        process.send_signal(number)
        said = process.communicate(timeout=TIMEOUT_SECONDS)[1].decode()
        return process.returncode, said

    def test_ctrl_c_stops_the_servers_ranks(self):
        self.interrupt("--server", self.server.address)
        start = time.monotonic()
        self.assertEqual(self.server.prefill_tokens("1 2 3").returncode, 0)
        self.assertLess(time.monotonic() - start, 5 * crowding())

    def test_deadline_passes(self):
        self.refuse("prefill", "--server", self.server.address, "--tokens", self.long_prompt, "--format", "bytes",
                    "--deadline", 1, status=1, message=r"(?i)deadline")
        self.assertEqual(self.server.prefill_tokens("1 2 3").returncode, 0)

    def test_a_prompt_of_four_million_ids(self):
        folder = self.tmp / "windowed"
        # As narrow as a model can be: what counts here is the ids.
        self.succeed("make-model", "--arch", "mistral", "--out", folder, "--layers", 1, "--hidden", 4, "--heads", 1,
                     "--kv-heads", 1, "--intermediate", 4, "--sliding-window", 64)
        server = Server("--config", self.config, "--set", f"model.path={folder}")
        try:
            result = json.loads(self.succeed("prefill", "--server", server.address, "--tokens", "-", "--format", "bytes",
                                             "--json", stdin=bytes(4_000_000)))
            self.check_prefill_object(result, 4_000_000, ranks=4)
        finally:
            server.stop()


if __name__ == "__main__":
    unittest.main(verbosity=2)
