#!/usr/bin/env python3
"""Attacks on a server's memory: connections, half messages, results that nobody reads, cancels, bombs, and floods of HTTP/2.

With --tls all of it goes through TLS, by a client with a certificate.

Of each attack it prints the server's resident memory before, at most and afterwards, the longest health check meanwhile, and
whether the next good call is served. Each has a server of its own, which has computed a prompt before. Exits with 1 where one of
these does not hold: memory grows by limits.channel_memory_bytes at most, or for unread results by limits.unread_bytes, two results
that are under way and one for each arena of the allocator, and by 5 %; it comes back within 20 % of before; the next good call is
served.

Usage: hostile_memory.py PATH_OF_MESHFILL [--seconds N] [--connections N] [--tls] [--only PART_OF_A_NAME]
       hostile_memory.py grpcio --only flood [...]
           the core of Python's package, in an echo server with the server's own bounds
"""
import argparse
import dataclasses
import gzip
import os
import pathlib
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from raw_http2 import (ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PREFILL, RST_STREAM, SETTINGS, WINDOW_UPDATE, Connection,
                       frame, header_message, message, request_headers, text, tokens_message, varint)

GET_POOL = "/meshfill.v1.PrefillService/GetPool"
HEALTH = "/grpc.health.v1.Health/Check"
RESETS_AT_ONCE = 200
MIB = 1 << 20
CHANNEL_MIB, UNREAD_MIB = 512, 256  # the server's budgets, as they are by default
VOCAB = 2_000_000  # logits of 8 MB
RESULT_MIB = 4 * VOCAB / MIB
ARENAS = max(4, os.cpu_count())  # of the allocator, as server/process_setup.h has it
STREAMS = 100  # of a connection
LOGITS = message(b"\x0a\x04\x18\x01\x48\x01") + tokens_message([1])  # token_count 1, return_logits
LONGEST = 15_000  # tokens of a prompt that is computed
SETTLE_SECONDS = 40  # for memory to be given back
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


# Takes connections in plain text, and passes each on in TLS: ADDRESS CA CERTIFICATE KEY. One process, so that the attack does not
# share a core with it.
TUNNEL = """
import asyncio, resource, ssl, sys
address, ca, certificate, key = sys.argv[1:]
host, port = address.rsplit(":", 1)
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
context = ssl.create_default_context(cafile=ca)
context.load_cert_chain(certificate, key)
context.check_hostname = False
context.set_alpn_protocols(["h2"])
async def pass_on(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    writer.close()
async def take(reader, writer):
    try:
        there, back = await asyncio.open_connection(host, int(port), ssl=context)
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))
    except OSError:
        writer.close()
async def main():
    server = await asyncio.start_server(take, "127.0.0.1", 0, backlog=4096)
    print("%s:%d" % server.sockets[0].getsockname(), flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
CERTIFICATES = pathlib.Path(__file__).parent.parent / "server" / "pool" / "certificates"


def tls_settings(side):
    return [f"api.tls.cert={CERTIFICATES / side}.pem", f"api.tls.key={CERTIFICATES / side}.key",
            f"api.tls.ca={CERTIFICATES / 'authority.pem'}", "api.tls.client_certificates=true"]


class Tunnel:
    def __init__(self, address):
        files = [CERTIFICATES / name for name in ("authority.pem", "worker.pem", "worker.key")]
        self.process = subprocess.Popen([sys.executable, "-c", TUNNEL, address, *files], stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)
        self.address = self.process.stdout.readline().strip()


class Attacked:
    """A server: meshfill with a small model, or Python's gRPC."""

    def __init__(self, program, model, settings, descriptors, tls):
        if program == "grpcio":
            command = [sys.executable, "-c", ECHO]
        else:
            command = [program, "serve", "--model", model, "--listen", "127.0.0.1:0", "--set", "metrics_listen=", "--set",
                       "pool.embedded.peak_flops=1e11", "--set", "pool.embedded.ranks=2"]
            for setting in settings:
                command += ["--set", setting]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)))
        self.address, self.name = None, None
        for line in self.process.stdout:
            if match := re.search(r" listening on (\S+:\d+)|\Alistening on (\S+:\d+)", line):
                self.address = match.group(1) or match.group(2)
            if match := re.search(r"ready: (.*)", line):
                self.name = match.group(1)
                break
        if self.name is None:
            raise RuntimeError(f"{command} does not start")
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()
        self.attacked = self.address  # where the attack goes; good calls have a tunnel of their own
        self.tunnels = [Tunnel(self.address) for _ in range(2)] if tls else []
        if tls:
            self.attacked, self.address = (tunnel.address for tunnel in self.tunnels)

    def resident_mib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) / 1024

    def call_seconds(self):
        """How long a good call takes, of at most 10 s."""
        begin = time.monotonic()
        try:
            connection = Connection(self.address)
            stream = connection.open_stream(HEALTH)
            connection.send(frame(DATA, END_STREAM, stream, message(b"")))
            answered = connection.answer(stream)[0] == 0
            connection.close()
        except OSError:
            return 10.0
        return time.monotonic() - begin if answered else 10.0

    def prefill(self):
        """As long as any of an attack, so that the engine has what it keeps for the next."""
        connection = Connection(self.address, window=16 * MIB)
        stream = connection.open_stream()
        connection.send(frame(DATA, END_STREAM, stream, header_message(LONGEST) + tokens_message([1] * LONGEST)))
        connection.answer(stream)
        connection.close()

    def end(self):
        for process in (self.process, *(tunnel.process for tunnel in self.tunnels)):
            process.kill()
            process.wait()


def discard(connection):
    try:
        while connection.recv(1 << 16):
            pass
    except OSError:
        pass


# ---- The attacks. Each takes the server's address and a deadline, and gives what stays open until its end is awaited.


def idle_connections(count):
    def attack(address, _):
        host, port = address.rsplit(":", 1)
        connections = [socket.create_connection((host, int(port)), timeout=10) for _ in range(count)]
        time.sleep(10)  # handshakes take their time
        return connections

    return attack


class Sender:
    """A connection that sends what the server's windows let it, and no byte more, so that the server has no cause to end it."""

    def __init__(self, address):
        self.connection = Connection(address)
        self.lock = threading.Lock()
        self.windows, self.first = {0: 65_535}, 65_535  # by stream, 0: of the connection; of a stream when it is opened
        self.over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            while True:
                head = self.connection.socket.recv(9, socket.MSG_WAITALL)
                if len(head) < 9:
                    break
                payload = self.connection.socket.recv(int.from_bytes(head[:3], "big"), socket.MSG_WAITALL) if any(head[:3]) else b""
                stream = int.from_bytes(head[5:], "big")
                with self.lock:
                    if head[3] == WINDOW_UPDATE and stream in self.windows:
                        self.windows[stream] += int.from_bytes(payload, "big")
                    if head[3] == SETTINGS and not head[4] & ACK:
                        for at in range(0, len(payload), 6):
                            key, value = struct.unpack_from(">HI", payload, at)
                            if key == 4:
                                for each in self.windows.keys() - {0}:
                                    self.windows[each] += value - self.first
                                self.first = value
                    if head[3] == RST_STREAM or (head[3] == HEADERS and head[4] & END_STREAM):
                        self.windows.pop(stream, None)
        except OSError:
            pass
        self.over = True

    def open(self):
        with self.lock:
            self.windows[self.connection.next_stream] = self.first
        return self.connection.open_stream()

    def send(self, stream, most):
        """How many bytes of a message went."""
        with self.lock:
            size = max(0, min(most, 16_000, self.windows[0], self.windows.get(stream, 0)))
            if size:
                self.windows[0] -= size
                self.windows[stream] -= size
        if size:
            self.connection.send(frame(DATA, 0, stream, bytes(size)))
        return size


def half_messages(address, _):
    """400 messages of 4 MiB - 1 that lack a byte: of each as much as the server takes in 20 s."""
    senders = [Sender(address) for _ in range(4)]
    time.sleep(0.5)  # for the server's settings
    left = {}
    for sender in senders:
        for _ in range(STREAMS):
            stream = sender.open()
            sender.windows[stream] -= 5
            sender.windows[0] -= 5
            sender.connection.send(frame(DATA, 0, stream, b"\x00" + struct.pack(">I", 4 * MIB - 1)))
            left[sender, stream] = 4 * MIB - 2
    taken, deadline = 0, time.monotonic() + 20
    while time.monotonic() < deadline and not all(sender.over for sender in senders):
        went = 0
        for sender, stream in left:
            try:
                size = sender.send(stream, left[sender, stream])
            except OSError:
                sender.over, size = True, 0
            left[sender, stream] -= size
            went += size
        taken += went
        if not went:
            time.sleep(0.01)
    print(f"  {taken >> 20} MiB of messages were taken", flush=True)
    return [sender.connection for sender in senders]


def unread_results(address, _):
    """500 results of 8 MB, and a client whose window takes none of them."""
    connections = []
    for _ in range(5):
        connection = Connection(address, window=0)
        threading.Thread(target=discard, args=(connection.socket,), daemon=True).start()
        connections.append(connection)
        for _ in range(STREAMS):
            connection.send(frame(DATA, END_STREAM, connection.open_stream(), LOGITS))
            time.sleep(0.01)
    time.sleep(5)
    return connections


def cancels(address, _):
    """2,000 requests that are reset at every point of their way."""
    rng = random.Random(1)
    connections = []
    for _ in range(20):
        connection = Connection(address)
        threading.Thread(target=discard, args=(connection.socket,), daemon=True).start()
        connections.append(connection)
        for _ in range(100):
            count = rng.randrange(1, 20_000)
            body = header_message(count) + tokens_message([1] * count)
            whole = rng.random() < 0.5
            stream = connection.open_stream()
            try:
                connection.send(frame(DATA, 0, stream, body[:16_000]))
                if whole and len(body) <= 16_000:
                    connection.send(frame(DATA, END_STREAM, stream))
                time.sleep(rng.random() * 0.01)
                connection.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
            except OSError:
                break
    return connections


def gzip_bombs(address, _):
    """A gigabyte of zeros in a message of a megabyte, 20 times."""
    bomb = gzip.compress(bytes(1 << 30), 9)
    bomb = b"\x01" + struct.pack(">I", len(bomb)) + bomb
    connections = []
    for _ in range(20):
        connection = Connection(address)
        threading.Thread(target=discard, args=(connection.socket,), daemon=True).start()
        stream = connection.open_stream(**{"grpc-encoding": "gzip"})
        try:
            for at in range(0, len(bomb), 16_000):
                connection.send(frame(DATA, 0, stream, bomb[at : at + 16_000]))
        except OSError:
            pass
        connections.append(connection)
    return connections


def hpack_bombs(address, deadline):
    """A field of 4,000 bytes in the table, named 10,000 times in each block."""
    field = b"\x40" + text("bomb") + b"\x7f" + varint(4_000 - 127) + bytes(4_000)
    while time.monotonic() < deadline:
        try:
            connection = Connection(address)
            threading.Thread(target=discard, args=(connection.socket,), daemon=True).start()
            for number in range(1, 200, 2):
                connection.send(frame(HEADERS, END_HEADERS, number, (field if number == 1 else b"") + b"\xbe" * 10_000))
            connection.close()
        except OSError:
            pass
    return []


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


def flood(frames, connections):
    """Over one connection after the other, as fast as it goes."""

    def send(address, deadline):
        while time.monotonic() < deadline:
            try:
                connection = Connection(address)
                threading.Thread(target=discard, args=(connection.socket,), daemon=True).start()
                for data in frames():
                    connection.send(data)
                    if time.monotonic() > deadline:
                        break
                connection.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                time.sleep(0.01)  # the server has ended it

    def attack(address, deadline):
        threads = [threading.Thread(target=send, args=(address, deadline)) for _ in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return []

    return attack


@dataclasses.dataclass
class Attack:
    name: str
    run: object
    descriptors: int = 20_000
    most_mib: float = 1.05 * CHANNEL_MIB  # that the server may grow by


def attacks(connections):
    yield Attack("4,000 idle connections", idle_connections(4000))
    yield Attack("1,100 connections, 1,024 descriptors", idle_connections(1100), descriptors=1024)
    yield Attack("400 messages that are not complete", half_messages)
    yield Attack("500 results of 8 MB that nobody reads", unread_results, most_mib=1.05 * (UNREAD_MIB + (2 + ARENAS) * RESULT_MIB))
    yield Attack("2,000 cancels", cancels)
    yield Attack("gzip bombs", gzip_bombs)
    yield Attack("HPACK bombs", hpack_bombs)
    yield Attack("flood of CONTINUATION", flood(continuations, connections))
    yield Attack("flood of resets of Prefill", flood(lambda: resets(PREFILL), connections))
    yield Attack("flood of resets of GetPool", flood(lambda: resets(GET_POOL), connections))


def survives(server, attack, seconds):
    """Whether all holds of the server; prints what came."""
    for _ in range(3):
        server.call_seconds()
        server.prefill()
    before = most = server.resident_mib()
    over, slowest = threading.Event(), 0.0

    def watch():
        nonlocal most
        while not over.wait(0.02):
            most = max(most, server.resident_mib())

    def ask():
        nonlocal slowest
        while not over.wait(0.1):
            slowest = max(slowest, server.call_seconds())

    watchers = [threading.Thread(target=each) for each in (watch, ask)]
    for watcher in watchers:
        watcher.start()
    held = attack.run(server.attacked, time.monotonic() + seconds)
    over.set()
    for watcher in watchers:
        watcher.join()
    for connection in held:
        connection.close()
    deadline = time.monotonic() + SETTLE_SECONDS
    enough = 1.2 * before
    while (after := server.resident_mib()) > enough and time.monotonic() < deadline:
        time.sleep(0.2)
    served = server.call_seconds() < 10
    bounded = most - before <= attack.most_mib
    print(f"{attack.name:38} {before:5.0f} MiB, at most {most:5.0f} ({'+' if bounded else 'ABOVE +'}{attack.most_mib:.0f} allowed), "
          f"{after:5.0f} afterwards{'' if after <= enough else ', NOT GIVEN BACK'}; slowest call {slowest:5.2f} s; "
          f"{'served' if served else 'NOT SERVED'} afterwards", flush=True)
    return served and bounded and after <= enough


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--seconds", type=float, default=60, help="of each flood")
    parser.add_argument("--connections", type=int, default=3, help="that flood at once")
    parser.add_argument("--tls", action="store_true", help="all connections in TLS")
    parser.add_argument("--only", default="", help="those whose name has this")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    settings = [f"limits.channel_memory_bytes={CHANNEL_MIB}MiB", f"limits.unread_bytes={UNREAD_MIB}MiB"]
    if options.tls:
        settings += tls_settings("leader")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model"
        if options.program != "grpcio":
            subprocess.run([options.program, "make-model", "--arch", "llama", "--out", model, "--layers", "1", "--hidden", "64", "--heads",
                            "1", "--kv-heads", "1", "--vocab", str(VOCAB)], check=True, stdout=subprocess.DEVNULL)
        for attack in attacks(options.connections):
            if options.only not in attack.name:
                continue
            server = Attacked(options.program, model, settings, attack.descriptors, options.tls)
            try:
                failed += not survives(server, attack, options.seconds)
            finally:
                server.end()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
