#!/usr/bin/env python3
"""Random signals to servers and workers under load: nothing accepted is lost, and every exit is as documented.

HUP, USR1 and USR2 change nothing; STOP and CONT lose nothing; TERM drains, and a second one stops at once. Every answer
is compared with that of an undisturbed pool. MESHFILL_SIGNALS (default 40) says how many signals each test sends.

Usage: signals_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import json
import os
import re
import select
import signal
import sys
import threading
import time
import unittest
import urllib.request

from cli_harness import TIMEOUT_SECONDS, Server, crowding, run
from pool_harness import SILENCE_SECONDS, PoolTestCase
from raw_http2 import DATA, END_STREAM, PREFILL, Connection, frame, header_message, message, tokens_message

HEALTH = "/grpc.health.v1.Health/Watch"
SIGNALS = int(os.environ.get("MESHFILL_SIGNALS", "40"))
CLIENTS = 3
LENGTHS = (40, 700, 4_000, 12_000)
HARMLESS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
AT_ONCE_SECONDS = 5 * int(os.environ.get("MESHFILL_TIMEOUT_SCALE", "1"))
STOP_SECONDS = 0.2 * int(os.environ.get("MESHFILL_TIMEOUT_SCALE", "1"))
ATTEMPTS = 10  # of a stop that another process on this machine may have held up


class Clients:
    """Send prompts one after the other until they are told to end, and keep what came of each."""

    def __init__(self, test, address):
        self.test, self.address = test, address
        self.begun, self.answers = [], []  # ids; (id, prompt, exit status, standard output, standard error, end)
        self.quit = threading.Event()
        self.threads = [threading.Thread(target=self._send, args=(client,)) for client in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def _send(self, client):
        count = 0
        while not self.quit.is_set():
            name, prompt = f"{client}.{count}", self.test.random.choice(self.test.prompts)
            count += 1
            self.begun.append(name)
            done = run("prefill", "--server", self.address, "--tokens", prompt, "--format", "bytes", "--request-id", name, "--json")
            self.answers.append((name, prompt, done.returncode, done.stdout, done.stderr.decode(), time.monotonic()))
            if done.returncode != 0:
                time.sleep(0.02)

    def end(self):
        self.quit.set()
        for thread in self.threads:
            thread.join(TIMEOUT_SECONDS)


def wait_for_end(process):
    """Popen.wait would look every 50 ms."""
    descriptor = os.pidfd_open(process.pid)
    try:
        select.select([descriptor], [], [], TIMEOUT_SECONDS)
    finally:
        os.close(descriptor)
    return process.wait(1)


class SignalsTest(PoolTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.prompts, cls.expected = [], {}
        for length in LENGTHS:
            prompt = cls.tmp / f"{length}.bytes"
            prompt.write_bytes(cls.random.randbytes(length))
            done = run("prefill", "--config", cls.config, "--tokens", prompt, "--format", "bytes", "--json")
            assert done.returncode == 0, done.stderr
            cls.prompts.append(prompt)
            cls.expected[prompt] = json.loads(done.stdout)["top"][0]

    def check_answer(self, answer):
        _, prompt, status, out, error, _ = answer
        self.assertEqual((status, error), (0, ""), answer)
        best = json.loads(out)["top"][0]
        self.assertEqual(best["token"], self.expected[prompt]["token"], answer)
        self.assertAlmostEqual(best["logit"], self.expected[prompt]["logit"], delta=1e-3, msg=str(answer))

    def strike(self, process):
        """One signal that costs nothing, or a stop that is shorter than any patience."""
        number = self.random.choice((*HARMLESS, signal.SIGSTOP))
        process.send_signal(number)
        time.sleep(self.random.uniform(0, 0.2 if number == signal.SIGSTOP else 0.1))
        if number == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)

    def test_a_server(self):
        sent = answered = refused = lives = 0
        while sent < SIGNALS:
            lives += 1
            server = Server("--config", self.config, "--set", "metrics_listen=127.0.0.1:0", "--set", "kv.cache=false")
            pages = next(match.group(1) for line in server.lines if (match := re.search(r"metrics listening on (\S+)", line)))
            clients = Clients(self, server.address)
            for _ in range(20):
                self.strike(server.process)
                sent += 1
            with urllib.request.urlopen(f"http://{pages}/status.json", timeout=TIMEOUT_SECONDS) as status:
                accepted = {request["id"] for request in json.load(status)["pool"]["requests"]}
            drained_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            sent += 1
            for _ in range(self.random.randrange(3)):
                self.strike(server.process)
                sent += 1
            at_once = lives % 2 == 0
            if at_once:
                server.process.send_signal(signal.SIGTERM)
                sent += 1
                deadline = time.monotonic() + AT_ONCE_SECONDS
                while server.process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.01)
            drained = server.process.poll() == 0  # before the second signal came
            status = server.wait()
            clients.end()
            log = "".join(server.lines)
            self.assertLess(time.monotonic() - drained_at, TIMEOUT_SECONDS)
            self.assertEqual(status, 1 if at_once and not drained else 0, log)
            for answer in clients.answers:
                name, _, code, out, error, ended = answer
                if ended < drained_at or (name in accepted and status == 0):
                    self.check_answer(answer)
                elif code == 0:
                    self.check_answer(answer)
                else:
                    refused += 1
                    self.assertEqual((code, out), (1, b""), answer)
                    self.assertRegex(error, r"\Ameshfill prefill: server \S+: [^\n]+\n\Z")
                answered += code == 0
            self.assertNotRegex(log, r"code=(?!OK|UNAVAILABLE)", "each ended well, or was refused")
        print(f"{sent} signals to {lives} servers: {answered} answers, {refused} refused while they drained", file=sys.stderr)
        self.assertGreater(answered, 0)

    def assert_stops(self, start, status, signals=1):
        """`start` gives a process in some state; it is gone soon after the last of its SIGTERMs."""
        least = float("inf")
        for _ in range(ATTEMPTS):
            process = start()
            for _ in range(signals):
                time.sleep(0.1)
                begin = time.monotonic()
                process.send_signal(signal.SIGTERM)
            self.assertEqual(wait_for_end(process), status)
            least = min(least, time.monotonic() - begin)
            self.doCleanups()
            most = STOP_SECONDS * crowding()
            if least <= most:
                return
        self.fail(f"at best {least:.2f} s, more than {most:.2f} s")

    def test_stops_at_once(self):
        def serving():
            server = Server("--config", self.config, "--set", "metrics_listen=127.0.0.1:0")
            self.addCleanup(server.stop)
            self.metrics_address = next(match[1] for line in server.lines if (match := re.search(r"metrics listening on (\S+)", line)))
            return server

        def with_stream(*messages, flags=0, window=65535, path=PREFILL):
            server = serving()
            connection = Connection(server.address, window)
            self.addCleanup(connection.close)
            stream = connection.open_stream(path)
            if messages:
                connection.send(frame(DATA, flags, stream, b"".join(messages)))
            return server

        def with_connection():
            server = serving()
            self.addCleanup(Connection(server.address).close)
            return server.process

        def computing():
            server = serving()
            self.address = server.address
            client = self.prefill_later(self.long_prompt, "--format", "bytes")
            self.addCleanup(client.communicate)
            self.wait_until(lambda: "running" in self.phases().values())
            return server.process

        def uploading():
            server = with_stream(header_message(3))
            self.wait_until(self.phases)
            return server.process

        def unread():
            server = with_stream(*whole, flags=END_STREAM, window=0)
            self.wait_until(lambda: sum("code=OK" in line for line in list(server.lines)) == 2)  # its first was Server's own
            return server.process

        def leader():
            self.start_leader()
            self.workers("a", "b")
            return self.leader.process

        def worker():
            self.start_leader()
            return self.workers("a")[0].process

        whole = (header_message(3), tokens_message([1, 2, 3]))
        for name, start, status, signals in (
            ("idle", lambda: serving().process, 0, 1),
            ("a connection", with_connection, 0, 1),
            ("a stream without a header", lambda: with_stream().process, 0, 1),
            ("half a header", lambda: with_stream(header_message(3)[:6]).process, 0, 1),
            ("somebody watches its health", lambda: with_stream(message(b""), flags=END_STREAM, path=HEALTH).process, 0, 1),
            ("an upload", uploading, 1, 2),
            ("a result that is not read", unread, 1, 2),
            ("a prefill that runs", computing, 1, 2),
            ("a leader with workers", leader, 0, 1),
            ("a worker", worker, 0, 1),
        ):
            with self.subTest(name):
                self.assert_stops(start, status, signals)

    def test_a_pool(self):
        names = ("a", "b", "c")
        workers = dict(zip(names, self.workers(*names)))
        clients = Clients(self, self.address)
        drained = 0
        for count in range(SIGNALS):
            name = self.random.choice((*names, "leader"))
            if name != "leader" and count % 20 == 10:  # it leaves, and comes back
                workers[name].signal(signal.SIGTERM)
                self.strike(workers[name].process)
                self.assertEqual(workers[name].wait(), 0, "".join(workers[name].lines))
                workers[name] = self.worker(name)
                workers[name].wait_for("joined the pool")
                drained += 1
            elif name != "leader" and count % 200 == 199:  # it is lost, and comes back
                workers[name].signal(signal.SIGSTOP)
                time.sleep(SILENCE_SECONDS + 1)
                workers[name].signal(signal.SIGCONT)
            else:
                self.strike((self.leader if name == "leader" else workers[name]).process)
        clients.end()
        for answer in clients.answers:
            self.check_answer(answer)
        self.assertGreaterEqual(len(clients.answers), CLIENTS)
        self.leader.signal(signal.SIGTERM)
        self.assertEqual(self.leader.wait(), 0, "".join(self.leader.lines))
        for worker in workers.values():
            worker.signal(signal.SIGTERM)
            self.assertEqual(worker.wait(), 0, "".join(worker.lines))
        print(f"{SIGNALS} signals to a pool: {len(clients.answers)} answers; {drained} workers left and came back", file=sys.stderr)


if __name__ == "__main__":
    unittest.main()
