#!/usr/bin/env python3
"""The log of `meshfill serve` and `meshfill worker` as JSON, and the trace that a request belongs to.

Usage: log_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import datetime
import json
import re
import signal
import socket
import time
import unittest

from cli_harness import TIMEOUT_SECONDS, CliTestCase, Server, run
from pool_process import Process
from raw_http2 import DATA, END_STREAM, Connection, frame, header_message, tokens_message

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
JSON = ("--set", "log.format=json")


class LogTest(CliTestCase):
    def serve(self, *arguments):
        server = Server("--config", self.config, *arguments)
        self.addCleanup(server.stop)
        return server

    def entries(self, lines):
        """Every line is an object that begins alike."""
        entries = [json.loads(line) for line in lines]
        for entry in entries:
            self.assertEqual(list(entry)[:3], ["time", "level", "message"])
            self.assertLessEqual(set(entry), {"time", "level", "message", "request_id", "tenant", "traceparent"})
            self.assertIn(entry["level"], ["info", "warning", "error"])
            self.assertRegex(entry["time"], r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\Z")
            datetime.datetime.fromisoformat(entry["time"].removesuffix("Z"))
        return entries

    def line_of(self, server, request_id):
        """The text's line has the id in its words, JSON in its field."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            for line in list(server.lines):
                found = json.loads(line).get("request_id") == request_id if line.startswith("{") else request_id in line
                if found:
                    return line
            time.sleep(0.01)
        raise AssertionError(f"no line of {request_id} in:\n" + "".join(server.lines))

    def ask(self, server, request_id, tokens=(1, 2, 3), **metadata):
        connection = Connection(server.address)
        body = header_message(len(tokens), request_id) + tokens_message(tokens)
        connection.send(frame(DATA, END_STREAM, connection.open_stream(**metadata), body))
        connection.wait_for_ends(1)
        connection.close()
        return self.line_of(server, request_id)

    def test_every_line_of_a_server_is_an_object(self):
        server = self.serve(*JSON)
        good = json.loads(self.ask(server, "good", traceparent=TRACE))
        self.assertEqual((good["level"], good["request_id"], good["traceparent"]), ("info", "good", TRACE))
        self.assertNotIn("tenant", good)
        self.assertRegex(good["message"], r"^request id=\"good\" .* code=OK$")
        self.assertNotIn(TRACE, good["message"])
        bad = json.loads(self.ask(server, "bad", tokens=(1, 999_999), traceparent=TRACE[:-1]))
        self.assertEqual((bad["level"], bad["request_id"]), ("warning", "bad"))
        self.assertNotIn("traceparent", bad)
        self.assertEqual(json.loads(self.ask(server, 'a"b\\c\n{é'))["request_id"], 'a"b\\c\n{é')
        named = server.prefill_tokens("1 2 3", "--request-id", "named", "--tenant", "te\"am")
        self.assertEqual(named.returncode, 0, named.stderr.decode())
        self.assertEqual(json.loads(self.line_of(server, "named"))["tenant"], 'te"am')
        self.assertEqual(server.stop(), 0)
        messages = [entry["message"] for entry in self.entries(server.lines)]
        self.assertTrue(any(message.startswith("ready: ") for message in messages), messages)
        self.assertEqual(messages[-1], "stopped")

    def test_text_has_the_trace_at_the_end_of_the_line(self):
        server = self.serve()
        self.assertRegex(self.ask(server, "traced", traceparent=TRACE), rf" code=OK traceparent={TRACE}\n\Z")
        self.assertRegex(self.ask(server, "untraced"), r" code=OK\n\Z")
        for number, garbage in enumerate(["", "x" * 120, TRACE.upper(), TRACE.replace("00-", "ff-", 1)]):
            line = self.ask(server, f"garbage-{number}", traceparent=garbage)
            self.assertRegex(line, r" code=OK\n\Z")

    def test_the_error_that_ends_a_process_is_an_object(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = "127.0.0.1:%d" % taken.getsockname()[1]
            ended = run("serve", "--config", self.config, "--set", f"listen={address}", *JSON)
        self.assertEqual(ended.returncode, 1)
        last = self.entries(ended.stderr.decode().splitlines())[-1]
        self.assertEqual(last["level"], "error")
        self.assertTrue(last["message"].startswith("meshfill serve: listen: "), last)

    def test_every_line_of_a_worker_is_an_object(self):
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            join = "127.0.0.1:%d" % nobody.getsockname()[1]
        config = self.tmp / "worker.yaml"
        config.write_text(f"model:\n  path: {self.model}\nlog:\n  format: json\npool:\n  worker:\n    peak_flops: 1e11\n")
        profile = self.tmp / "worker_speed.json"
        profile.write_text("{")
        worker = Process("worker", "--config", config, "--join", join, "--set", f"plan.profile_path={profile}", "--set",
                         "pool.worker.name=left")
        try:
            worker.wait_for("cannot join yet")
        finally:
            worker.process.send_signal(signal.SIGTERM)
            status = worker.process.wait(TIMEOUT_SECONDS)
            worker.reader.join(TIMEOUT_SECONDS)
            worker.process.stderr.close()
        self.assertEqual(status, 0)
        entries = self.entries(worker.lines)
        loaded = [entry["message"] for entry in entries if entry["message"].startswith("loaded model")]
        self.assertRegex(loaded[0], rf'^loaded model \S+: \d+ ranks? of cpu\S*; joining {re.escape(join)} as "left"$')
        levels = {entry["message"].split(":")[0]: entry["level"] for entry in entries}
        self.assertEqual(levels["cannot join yet"], "warning")
        self.assertEqual((levels[str(profile)], levels["the pool's speed"]), ("warning", "info"))
        self.assertEqual(levels["stopped"], "info")

    def test_a_format_that_there_is_not(self):
        self.refuse("serve", "--config", self.config, "--set", "log.format=xml", status=2, message=r"log\.format.*json")


if __name__ == "__main__":
    unittest.main()
