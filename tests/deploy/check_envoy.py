#!/usr/bin/env python3
"""deploy/envoy/meshfill.yaml in front of a server; see check-envoy.sh.

Usage: check_envoy.py PATH_OF_MESHFILL PATH_OF_ENVOY [unittest arguments]
"""
import pathlib
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import unittest
import urllib.request

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/processes"))
ENVOY = sys.argv.pop(2)

from cli_harness import TIMEOUT_SECONDS, CliTestCase, Server  # noqa: E402
from raw_http2 import (CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, Connection, frame,  # noqa: E402
                       header_message, message, request_headers, tokens_message, varint)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def prefill(request_id):
    return header_message(3, request_id) + tokens_message([1, 2, 3])


def kept_prefill():
    """Its K and V are kept for a minute."""
    options = b"\x08\x01\x10" + varint(60)
    header = b"\x18" + varint(3) + b"\x52" + varint(len(options)) + options
    return message(b"\x0a" + varint(len(header)) + header) + tokens_message([1, 2, 3])


def of_lease(name):
    """RenewKvRequest, FetchKvRequest and ReleaseKvRequest all begin with the lease."""
    return message(b"\x0a" + varint(len(name)) + name)


class EnvoyTest(CliTestCase):
    def setUp(self):
        tls = self.tmp / "tls"
        tls.mkdir(exist_ok=True)
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                        "-keyout", tls / "tls.key", "-out", tls / "tls.crt", "-days", "2", "-subj", "/CN=localhost",
                        "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
        self.server = Server("--config", self.config, "--set", "metrics_listen=127.0.0.1:0")
        self.addCleanup(self.server.stop)
        self.port, self.admin = free_port(), free_port()
        config = (ROOT / "deploy/envoy/meshfill.yaml").read_text()
        for old, new in {"/etc/meshfill/tls": tls, "port_value: 50051": f"port_value: {self.server.address.split(':')[1]}",
                         "0.0.0.0, port_value: 8443": f"127.0.0.1, port_value: {self.port}",
                         "port_value: 9901": f"port_value: {self.admin}"}.items():
            self.assertIn(old, config)
            config = config.replace(old, str(new))
        path = self.tmp / "envoy.yaml"
        path.write_text(config)
        checked = subprocess.run([ENVOY, "--mode", "validate", "-c", path], capture_output=True, text=True)
        self.assertEqual(checked.returncode, 0, checked.stderr)
        self.assertNotRegex(checked.stderr, r"\[(warning|error|critical)\]")
        self.trust = ssl.create_default_context(cafile=tls / "tls.crt")
        self.trust.set_alpn_protocols(["h2"])
        self.envoy = subprocess.Popen([ENVOY, "-c", path, "--concurrency", "1", "--log-level", "warning"],
                                      stderr=subprocess.DEVNULL)
        self.addCleanup(self.stop_envoy)
        self.wait_until(lambda: "::health_flags::healthy" in self.admin_page("clusters"))

    def stop_envoy(self):
        self.envoy.kill()
        self.envoy.wait()

    def admin_page(self, name):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/{name}", timeout=5).read().decode()
        except OSError:
            return ""

    def statistic(self, name):
        return int(re.search(rf"^{re.escape(name)}: (\d+)$", self.admin_page("stats"), re.M).group(1))

    def wait_until(self, condition):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            self.assertLess(time.monotonic(), deadline, "".join(self.server.lines))
            time.sleep(0.02)

    def connect(self):
        def wrap(plain):
            return self.trust.wrap_socket(plain, server_hostname="127.0.0.1")

        return Connection(f"127.0.0.1:{self.port}", wrap=wrap)

    def line_of(self, request_id):
        return next((line for line in list(self.server.lines) if f'"{request_id}"' in line), "")

    def assert_served(self, request_id):
        connection = self.connect()
        connection.send(frame(DATA, END_STREAM, connection.open_stream(), prefill(request_id)))
        connection.wait_for_ends(1)
        connection.close()
        self.wait_until(lambda: self.line_of(request_id))
        self.assertIn("code=OK", self.line_of(request_id))

    def assert_closed(self, connection, flood):
        """The flood ends because the connection does."""
        with self.assertRaises(OSError):
            for data in flood:
                connection.send(data)
            while connection.socket.recv(1 << 16):
                pass
            raise ConnectionResetError("closed in order")
        connection.close()

    def test_prefills_pass(self):
        for number in range(20):
            self.assert_served(f"good-{number}")

    def test_plain_text_is_not_served(self):
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            try:
                self.assertNotIn(b"\x00\x00\x04", plain.recv(100)[:3])
            except ConnectionError:
                pass

    def test_what_is_not_the_api_stays_here(self):
        connection = self.connect()
        before = self.statistic("cluster.meshfill.upstream_rq_total")
        for path in ("/", "/metrics", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
            connection.send(frame(DATA, END_STREAM, connection.open_stream(path), b""))
            connection.wait_for_ends(1)
        connection.close()
        self.assertEqual(self.statistic("cluster.meshfill.upstream_rq_total"), before)

    def test_rapid_resets_end_the_connection(self):
        connection = self.connect()
        before = self.statistic("cluster.meshfill.upstream_rq_total")
        headers = request_headers()
        reset = b"\x00\x00\x00\x08"
        self.assert_closed(connection, (frame(HEADERS, END_HEADERS, stream, headers) + frame(RST_STREAM, 0, stream, reset)
                                        for stream in range(1, 40_001, 2)))
        self.assertLess(self.statistic("cluster.meshfill.upstream_rq_total") - before, 1000)
        self.assertGreater(self.statistic("http.api.downstream_rq_too_many_premature_resets"), 0)
        self.assert_served("after-resets")

    def test_endless_headers_end_the_connection(self):
        connection = self.connect()
        before = self.statistic("cluster.meshfill.upstream_rq_total")
        more = b"".join(b"\x00" + bytes([2]) + b"x%d" % (i % 10) + bytes([100]) + b"v" * 100 for i in range(10))

        def flood():
            yield frame(HEADERS, 0, 1, request_headers())
            for _ in range(20_000):
                yield frame(CONTINUATION, 0, 1, more)

        self.assert_closed(connection, flood())
        self.assertEqual(self.statistic("cluster.meshfill.upstream_rq_total"), before)
        self.assert_served("after-continuation")

    def call(self, method, request):
        """The messages of the answer; none where the call is refused."""
        connection = self.connect()
        stream = connection.open_stream(f"/meshfill.v1.PrefillService/{method}")
        connection.send(frame(DATA, END_STREAM, stream, request))
        _, body = connection.answer(stream)
        connection.close()
        return body

    def test_leases_live_on_while_the_server_drains(self):
        lease = re.search(rb"\x2a\x20([0-9a-f]{32})", self.call("Prefill", kept_prefill())).group(1)
        self.server.process.send_signal(signal.SIGTERM)
        self.server.wait_for_line("draining")
        checks = self.statistic("cluster.meshfill.health_check.attempt")
        self.wait_until(lambda: self.statistic("cluster.meshfill.health_check.attempt") >= checks + 4)
        self.assertIn(lease, self.call("RenewKv", of_lease(lease)))
        elements = 3 * 2 * 2 * 2 * 16  # tokens, layers, heads, K and V, head_dim
        self.assertGreater(len(self.call("FetchKv", of_lease(lease))), elements)
        before = self.statistic("cluster.meshfill.upstream_rq_total")
        self.assertEqual(self.call("Prefill", prefill("late")), b"")
        self.assertGreater(self.statistic("cluster.meshfill.upstream_rq_total"), before)  # the server refuses it
        self.call("ReleaseKv", of_lease(lease))
        self.assertEqual(self.server.wait(), 0)

    def test_a_server_that_is_gone_is_said_at_once(self):
        self.server.stop()
        self.wait_until(lambda: "::health_flags::/failed_active_hc" in self.admin_page("clusters"))
        connection = self.connect()
        begin = time.monotonic()
        connection.send(frame(DATA, END_STREAM, connection.open_stream(), prefill("nobody")))
        connection.wait_for_ends(1)
        connection.close()
        self.assertLess(time.monotonic() - begin, 2)


if __name__ == "__main__":
    unittest.main()
