#!/usr/bin/env python3
"""`meshfill serve` and clients that mean no good: after each of them, the next good request is served.

Usage: hostile_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import json
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import time
import unittest

from cli_harness import MESHFILL, TIMEOUT_SECONDS, CliTestCase, Server, run
from raw_http2 import DATA, END_STREAM, Connection, frame, header_message, message, tokens_message

MIB = 1 << 20


def resident_bytes(pid):
    return int(re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text()).group(1)) << 10


def descriptors(count):
    """For a child: it may have `count` descriptors, and no more."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


class HostileTest(CliTestCase):
    def serve(self, *arguments, prepare=None):
        server = Server("--config", self.config, *arguments, prepare=prepare)
        self.addCleanup(server.stop)
        return server

    def assert_served(self, server, seconds=10):
        begin = time.monotonic()
        answer = server.prefill_tokens("1 2 3")
        self.assertEqual(answer.returncode, 0, answer.stderr.decode())
        self.assertEqual(json.loads(answer.stdout)["tokens"], 3)
        self.assertLess(time.monotonic() - begin, seconds)

    def test_more_connections_than_descriptors(self):
        server = self.serve(prepare=descriptors(256))
        host, port = server.address.rsplit(":", 1)
        old = Connection(server.address)
        idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(400)]
        server.wait_for_line("refused a connection")
        for connection in idle:
            connection.close()
        # The server hears of each that it is closed; until then another may be refused, too.
        deadline = time.monotonic() + 10
        while server.prefill_tokens("1 2 3").returncode != 0 and time.monotonic() < deadline:
            pass
        self.assert_served(server)
        old.close()

    def test_the_soft_limit_of_descriptors_is_raised(self):
        server = self.serve(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000)))
        self.assertEqual(resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE), (1000, 1000))

    def test_a_log_that_nobody_reads_stops_nobody(self):
        read_end, write_end = os.pipe()
        process = subprocess.Popen([MESHFILL, "serve", "--config", self.config], stderr=write_end, stdout=subprocess.DEVNULL)
        os.close(write_end)
        try:
            log = b""
            while b"ready:" not in log:
                log += os.read(read_end, 4096)
            address = re.search(rb"listening on (\S+:\d+)", log).group(1).decode()
            # Good requests' lines have no bound: more of them than a pipe holds.
            connection = Connection(address)
            connection.socket.settimeout(3)
            try:
                for round in range(500):
                    stream = connection.open_stream()
                    name = f"{round}" + "x" * 120
                    body = header_message(3, name) + tokens_message([1, 2, 3])
                    connection.send(frame(DATA, END_STREAM, stream, body))
                    connection.wait_for_ends(1)
            except OSError:
                pass  # the prefill below tells
            finally:
                connection.close()
            begin = time.monotonic()
            answer = subprocess.run([MESHFILL, "prefill", "--server", address, "--tokens", "-", "--json", "--deadline", "20"],
                                    input=b"1 2 3", capture_output=True, timeout=TIMEOUT_SECONDS)
            self.assertEqual(answer.returncode, 0, answer.stderr.decode())
            self.assertLess(time.monotonic() - begin, 10)
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(TIMEOUT_SECONDS), 0)
        finally:
            process.kill()
            process.wait()
            os.close(read_end)

    def test_a_flood_of_refused_requests_does_not_flood_the_log(self):
        server = self.serve()
        before = len(server.lines)
        connection = Connection(server.address)
        for _ in range(20):
            for _ in range(50):
                connection.send(frame(DATA, END_STREAM, connection.open_stream(), header_message(0)))
            connection.wait_for_ends(50)
        server.wait_for_line("left out")
        connection.close()
        self.assertLess(len(server.lines) - before, 1000)
        self.assertTrue(any(re.search(r"left out \d+ more lines of INVALID_ARGUMENT", line) for line in server.lines),
                        server.lines[-3:])
        self.assert_served(server)

    def test_the_log_has_nothing_of_a_prompt(self):
        server = self.serve()
        self.assertEqual(server.prefill_tokens("1 2 987654321").returncode, 2)
        self.assert_served(server)
        server.stop()
        self.assertIn("outside the vocabulary", "".join(server.lines))
        self.assertNotIn("987654321", "".join(server.lines))

    def test_weights_that_are_a_pipe(self):
        model = self.tmp / "piped"
        model.mkdir()
        (model / "config.json").write_bytes((self.model / "config.json").read_bytes())
        os.mkfifo(model / "model.safetensors")
        started = run("serve", "--config", self.config, "--set", f"model.path={model}")
        self.assertEqual(started.returncode, 2)
        self.assertIn("no regular file", started.stderr.decode())

    def test_json_that_is_a_pipe(self):
        def stderr_of(*command, model, config=self.config):
            started = run(*command, "--config", config, "--set", f"model.path={model}")
            self.assertEqual(started.returncode, 2)
            return started.stderr.decode()

        config = self.tmp / "piped-config"
        config.mkdir()
        os.mkfifo(config / "config.json")
        os.symlink(self.model / "model.safetensors", config / "model.safetensors")
        workers = self.tmp / "piped-workers.yaml"
        workers.write_text("listen: 127.0.0.1:0\nmetrics_listen: ''\npool: {control_listen: '127.0.0.1:0'}\n")
        for of, command in ((self.config, ("serve",)), (workers, ("serve",)), (self.config, ("plan", "--tokens", "100"))):
            self.assertIn("config.json: is no regular file", stderr_of(*command, model=config, config=of), command)
        index = self.tmp / "piped-index"
        index.mkdir()
        os.symlink(self.model / "config.json", index / "config.json")
        os.mkfifo(index / "model.safetensors.index.json")
        self.assertIn("index.json: is no regular file", stderr_of("serve", model=index))

    def test_messages_that_are_not_what_they_say(self):
        server = self.serve()
        zstd = b"\x28\xb5\x2f\xfd\x04\x00\x29\x00\x00abcde"
        undecodable, disabled = (3, b"PrefillRequest, uncompressed"), (12, b"is disabled")
        for headers, (status, said) in (({}, undecodable), ({"grpc-encoding": "zstd"}, undecodable),
                                        ({"grpc-encoding": "gzip"}, disabled), ({"grpc-encoding": "deflate"}, disabled)):
            connection = Connection(server.address)
            compressed = b"\x01" + message(zstd)[1:]
            connection.send(frame(DATA, END_STREAM, connection.open_stream(**headers), compressed))
            trailers = connection.wait_for_ends(1)
            connection.close()
            self.assertIn(b"grpc-status" + bytes([len(str(status))]) + str(status).encode(), trailers, headers)
            self.assertIn(said, trailers, headers)
            self.assert_served(server)

    def test_messages_that_are_never_complete(self):
        bound = 64 * MIB
        server = self.serve("--set", "limits.channel_memory_bytes=64MiB")
        before = resident_bytes(server.process.pid)
        most = before
        connections = []
        for _ in range(3):
            connection = Connection(server.address)
            connections.append(connection)
            connection.socket.settimeout(2)
            begin = message(bytes(4 * MIB - 16))[: 5 + 1]  # announces 4 MiB
            streams = [connection.open_stream() for _ in range(100)]
            try:
                for stream in streams:
                    connection.send(frame(DATA, 0, stream, begin))
                for _ in range(4):
                    for stream in streams:
                        connection.send(frame(DATA, 0, stream, bytes(16_000)))
                        most = max(most, resident_bytes(server.process.pid))
            except OSError:
                pass  # the server has ended the connection, or reads no more of it
        self.assertLess(most - before, 1.5 * bound)
        self.assert_served(server)
        for connection in connections:
            connection.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
