#!/usr/bin/env python3
"""The spans that `meshfill serve` sends to a collector: their tree and times, and a collector that is dead, slow or busy.

Usage: trace_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import http.server
import json
import re
import signal
import threading
import time
import unittest
import urllib.request

from cli_harness import TIMEOUT_SECONDS, CliTestCase, Server, run
from pool_harness import lasting_port
from raw_http2 import DATA, END_STREAM, Connection, frame, header_message, tokens_message

TRACE_ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT}-01"


class Collector:
    """Takes spans by OTLP over HTTP, after `delay` seconds, and answers with `status`."""

    def __init__(self, port=0):
        self.bodies, self.paths, self.delay, self.status = [], [], 0, 200
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(outer.delay)
                if outer.status == 200:
                    outer.bodies.append(json.loads(body))
                outer.paths.append(self.path)
                self.send_response(outer.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def spans(self):
        return [span for body in list(self.bodies) for group in body["resourceSpans"] for scope in group["scopeSpans"]
                for span in scope["spans"]]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def attributes(span):
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


def begin(span):
    return int(span["startTimeUnixNano"])


def end(span):
    return int(span["endTimeUnixNano"])


class TraceTest(CliTestCase):
    def collector(self):
        collector = Collector()
        self.addCleanup(collector.close)
        return collector

    def serve(self, endpoint, *settings):
        arguments = ["--config", self.config, "--set", f"trace.endpoint={endpoint}", "--set", "metrics_listen=127.0.0.1:0"]
        for setting in settings:
            arguments += ["--set", setting]
        server = Server(*arguments)
        self.addCleanup(server.stop)
        (self.metrics_address,) = (match.group(1) for line in server.lines
                                   if (match := re.search(r"metrics listening on (\S+:\d+)", line)))
        return server

    def wait_until(self, condition):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            self.assertLess(time.monotonic(), deadline, "it does not come to pass")
            time.sleep(0.02)

    def counted(self, result):
        text = urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=5).read().decode()
        return int(float(re.search(rf'^meshfill_trace_spans_total{{result="{result}"}} (\S+)$', text, re.M).group(1)))

    def exemplars(self):
        """The traces that buckets of TTFT name."""
        request = urllib.request.Request(f"http://{self.metrics_address}/metrics", headers={"Accept": OPEN_METRICS})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return re.findall(r'^meshfill_ttft_seconds_bucket{.*# {trace_id="(\w+)"}', answer.read().decode(), re.M)

    def ask(self, server, tokens=(1, 2, 3), request_id="42", **metadata):
        connection = Connection(server.address)
        body = header_message(len(tokens), request_id) + tokens_message(tokens)
        connection.send(frame(DATA, END_STREAM, connection.open_stream(**metadata), body))
        connection.wait_for_ends(1)
        connection.close()

    def trace_of(self, collector, request_id):
        """The spans of a request's trace, by name."""
        def root():
            return [span for span in collector.spans()
                    if span["name"] == "prefill" and attributes(span)["meshfill.request_id"] == request_id]

        self.wait_until(root)
        spans = {}
        for span in collector.spans():
            if span["traceId"] == root()[0]["traceId"]:
                spans.setdefault(span["name"], []).append(span)
        return spans

    def test_a_call_is_a_tree_in_its_callers_trace(self):
        collector = self.collector()
        server = self.serve(collector.endpoint)
        before = time.time_ns()
        self.ask(server, traceparent=TRACEPARENT)
        spans = self.trace_of(collector, "42")
        after = time.time_ns()
        self.assertEqual(set(collector.paths), {"/v1/traces"})
        (root,) = spans["prefill"]
        self.assertEqual((root["traceId"], root["parentSpanId"], root["kind"]), (TRACE_ID, PARENT, 2))
        self.assertEqual(attributes(root)["meshfill.tokens"], "3")
        self.assertLess(before, begin(root))
        self.assertLess(end(root), after)
        self.assertEqual(set(spans), {"prefill", "upload", "plan", "queue", "compute", "layer", "result"})
        (compute,) = spans["compute"]
        for name, children in spans.items():
            parent = {"prefill": None, "layer": compute}.get(name, root)
            for span in children:
                self.assertLessEqual(begin(span), end(span), name)
                if parent is not None:
                    self.assertEqual(span["parentSpanId"], parent["spanId"], name)
                    self.assertLessEqual(begin(parent), begin(span), name)
                    self.assertLessEqual(end(span), end(parent), name)
        phases = [spans[name][0] for name in ("upload", "queue", "compute", "result")]
        for one, next_one in zip(phases, phases[1:], strict=False):
            self.assertEqual(end(one), begin(next_one))
        layers = sorted(int(attributes(span)["meshfill.layer"]) for span in spans["layer"])
        self.assertEqual(layers, list(range(len(layers))))
        every = [span["spanId"] for children in spans.values() for span in children]
        self.assertEqual(len(set(every)), len(every))

    def test_who_is_sampled(self):
        collector = self.collector()
        server = self.serve(collector.endpoint)
        self.ask(server, request_id="unsampled", traceparent=TRACEPARENT[:-1] + "0")
        self.assertNotIn(TRACE_ID, self.exemplars())
        self.ask(server, request_id="bad", tokens=(10**9,))
        self.ask(server, request_id="own")
        own = self.trace_of(collector, "own")["prefill"][0]
        self.assertNotIn("parentSpanId", own)
        self.assertRegex(own["traceId"], r"\A[0-9a-f]{32}\Z")
        self.assertIn(own["traceId"], self.exemplars())  # beside the server's first one, where that took longer
        self.assertNotIn(TRACE_ID, self.exemplars())
        refused = self.trace_of(collector, "bad")
        self.assertEqual(refused["prefill"][0]["status"], {"code": 2, "message": "INVALID_ARGUMENT"})
        self.assertNotIn("compute", refused)
        self.assertFalse(any(span["traceId"] == TRACE_ID for span in collector.spans()))

    def test_long_names_are_cut(self):
        collector = self.collector()
        server = self.serve(collector.endpoint)
        refused = server.prefill_tokens("1 2 3", "--request-id", "x" * 20_000, "--tenant", "y" * 20_000)
        self.assertEqual(refused.returncode, 2)
        (root,) = self.trace_of(collector, "x" * 512)["prefill"]
        self.assertEqual(attributes(root)["meshfill.tenant"], "y" * 512)

    def test_a_drain_sends_what_is_left(self):
        collector = self.collector()
        server = self.serve(collector.endpoint)
        self.ask(server, request_id="last")
        self.assertEqual(server.stop(), 0)
        self.assertIn("last", [attributes(span).get("meshfill.request_id") for span in collector.spans()])

    def test_a_dead_collector_costs_no_request_and_comes_back(self):
        port = lasting_port()
        server = self.serve(f"http://127.0.0.1:{port}/my/path")
        for number in range(5):
            self.ask(server, request_id=f"dead{number}")
        self.wait_until(lambda: any("takes no spans" in line for line in server.lines))
        self.assertEqual(self.counted("exported"), 0)
        collector = Collector(port)
        self.addCleanup(collector.close)
        for number in range(5):
            self.trace_of(collector, f"dead{number}")  # they had their place in the queue
        self.wait_until(lambda: self.counted("exported") == len(collector.spans()))
        self.assertEqual(set(collector.paths), {"/my/path"})
        self.assertEqual(self.counted("dropped"), 0)
        self.wait_until(lambda: any("takes spans again" in line for line in server.lines))
        self.assertEqual(sum("takes no spans" in line for line in server.lines), 1, "one line a minute")

    def test_a_slow_collector_holds_up_nobody(self):
        collector = self.collector()
        collector.delay = 30
        server = self.serve(collector.endpoint, "trace.timeout=1h")
        begin_at = time.monotonic()
        for number in range(20):
            self.ask(server, request_id=str(number))
        self.assertLess(time.monotonic() - begin_at, 20)
        begin_at = time.monotonic()
        self.assertEqual(server.stop(), 0)
        self.assertLess(time.monotonic() - begin_at, 15, "a drain waits 3 s for a collector")

    def test_what_a_collector_refuses_is_dropped_and_counted(self):
        collector = self.collector()
        collector.status = 400
        server = self.serve(collector.endpoint)
        self.ask(server)
        self.wait_until(lambda: self.counted("dropped") > 0)
        self.wait_until(lambda: any("takes no spans: HTTP status 400" in line for line in server.lines))
        collector.status = 503  # it may change
        self.ask(server, request_id="kept")
        self.wait_until(lambda: len(collector.paths) >= 3)
        collector.status = 200
        self.trace_of(collector, "kept")

    def test_bad_endpoints_are_refused_at_the_start(self):
        for endpoint in ("127.0.0.1:4318", "ftp://127.0.0.1", "http://", "collector"):
            with self.subTest(endpoint):
                result = run("serve", "--config", self.config, "--set", f"trace.endpoint={endpoint}")
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertRegex(result.stderr.decode(), r"trace\.endpoint: .* is no URL of a collector")


if __name__ == "__main__":
    unittest.main(verbosity=2)
