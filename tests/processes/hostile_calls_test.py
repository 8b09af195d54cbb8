#!/usr/bin/env python3
"""Malformed and hostile calls by the hundred: each ends as it must, the next good request is served after
each, and health answers fast throughout.

HTTP/2 is written by hand (raw_http2.py), a connection for each call. What is broken below gRPC's own level ends with what
RFC 9113 asks for, a stream or a connection that the server ends; where gRPC says so by a status of its own, it is
UNAVAILABLE.

Usage: hostile_calls_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import collections
import os
import random
import socket
import struct
import sys
import threading
import time
import unittest

from cli_harness import VOCAB, CliTestCase, Server, crowding
from hostile_test import MIB, resident_bytes
from raw_http2 import (ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, PREFILL, PRIORITY, PUSH_PROMISE,
                       RST_STREAM, SETTINGS, WINDOW_UPDATE, PREFACE, Connection, frame, header_message, message, request_headers,
                       text, tokens_message, varint)

OK, UNKNOWN, INVALID, DEADLINE, NOT_FOUND, EXHAUSTED, OUT_OF_RANGE, UNIMPLEMENTED = 0, 2, 3, 4, 5, 8, 11, 12
ENDED = {"closed", "reset", 14}  # what is no HTTP/2
LEFT_OUT = {*ENDED, "ignored"}  # RFC 9113 wants an end; gRPC leaves out what does no harm
CONTEXT = 1 << 20
SERVICE = "/meshfill.v1.PrefillService/"
HEALTH = "/grpc.health.v1.Health/Check"
UNARY = ("Plan", "GetPool", "RenewKv", "ReleaseKv", "Cancel")
GOOD = header_message(3) + tokens_message([1, 2, 3])
HEALTH_P99_SECONDS = 0.05 * int(os.environ.get("MESHFILL_TIMEOUT_SCALE", "1"))
PADDED, WITH_PRIORITY = 0x8, 0x20
CALLS = 400  # at least

# What one call does, by name: (name, the ends that are right, connection → stream to wait for).
Attack = collections.namedtuple("Attack", "name ends send")


def p99(ascending):
    return ascending[int(0.99 * len(ascending))]


def number(field, value):
    return varint(field << 3) + varint(value)


def bytes_field(field, value):
    return varint(field << 3 | 2) + varint(len(value)) + value


def prefill(fields):
    """A header of raw fields, and the tokens."""
    return message(bytes_field(1, fields)) + tokens_message([1, 2, 3])


def call(name, ends, body, path=PREFILL, **headers):
    def send(connection):
        stream = connection.open_stream(path, **headers)
        connection.send(frame(DATA, END_STREAM, stream, body))
        return stream

    return Attack(name, ends if isinstance(ends, set) else {ends}, send)


def wire(name, ends, *frames, stream=1):
    ends = ends if isinstance(ends, set) else {ends}

    def send(connection):
        for each in frames:
            connection.send(each)
        if "ignored" in ends:
            connection.send(frame(PING, 0, 0, bytes(8)))
        return stream

    return Attack(name, ends, send)


def bad_prompts(rng):
    yield call("nothing", INVALID, b"")
    yield call("an empty message", INVALID, message(b""))
    yield call("tokens first", INVALID, tokens_message([1]))
    yield call("two headers", INVALID, header_message(3) + GOOD)
    yield call("a header between tokens", INVALID, header_message(3) + tokens_message([1]) + GOOD)
    yield call("a header after the tokens", INVALID, GOOD + header_message(3))
    yield call("tokens after the last", INVALID, GOOD + tokens_message([4]))
    yield call("half of a third message", OK, GOOD + b"\x00\x00")  # gRPC drops it: the prompt is whole
    for cut in range(1, len(GOOD)):
        yield call(f"cut after {cut} of {len(GOOD)} bytes", INVALID, GOOD[:cut])
    for count in (0, 1, 2, 4, 5, CONTEXT - 1, CONTEXT, *(rng.randrange(4, CONTEXT) for _ in range(15))):
        yield call(f"{count} tokens announced, 3 sent", INVALID, header_message(count) + tokens_message([1, 2, 3]))
    for count in (CONTEXT + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, *(rng.randrange(CONTEXT + 1, 2**64) for _ in range(15))):
        yield call(f"{count} tokens announced", OUT_OF_RANGE, header_message(count))
    for wrong in (VOCAB, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1, *(rng.randrange(VOCAB, 2**64) for _ in range(20))):
        ids = [1, 2, 3]
        ids[rng.randrange(3)] = wrong
        yield call(f"token id {wrong}", INVALID, header_message(3) + tokens_message(ids))
    three = number(3, 3)
    for size in (129, 200, 1000, 5000):
        for field, name in ((1, "request_id"), (5, "tenant"), (11, "cache_salt")):
            yield call(f"{name} of {size} characters", INVALID, prefill(bytes_field(field, b"x" * size) + three))
    for bad in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"ab\x80"):
        for field in (1, 2, 5, 11):
            yield call(f"field {field} is no UTF-8: {bad!r}", INVALID, prefill(bytes_field(field, bad) + three))
    for name in (b"other", b"model ", b"MODEL", b"../model", b"\x00", b"m" * 5000):
        yield call(f"model {name[:20]!r}", NOT_FOUND, prefill(bytes_field(2, name) + three))
    for top_k in (VOCAB + 1, 1025, 2**31, 2**32 - 1):
        yield call(f"top_k {top_k}", INVALID, prefill(three + number(6, top_k)))
    for a, b in ((0, 0), (0, 4), (4, 0), (3, 1), (2, 4), (2**31, 2), (2**32 - 1, 2**32 - 1), (65536, 65536)):
        yield call(f"tile {a}x{b}", INVALID, prefill(three + bytes_field(8, bytes_field(1, number(1, a) + number(2, b)))))
    for heads in (3, 5, 2**32 - 1):
        yield call(f"{heads} head groups", INVALID, prefill(three + bytes_field(8, number(2, heads))))
    for layout in (4, 17, 2**31 - 1):
        yield call(f"layout {layout}", INVALID, prefill(three + bytes_field(8, number(3, layout))))
    for _ in range(40):  # a tag of a wire type that does not exist
        garbage = bytes([rng.randrange(32) << 3 | rng.choice((6, 7))]) + rng.randbytes(rng.randrange(60))
        where = rng.choice(("first", "between", "last"))
        body = {"first": message(garbage), "between": header_message(3) + message(garbage), "last": GOOD + message(garbage)}[where]
        yield call(f"garbage {garbage.hex()} {where}", INVALID, body)


def bad_messages(rng):
    yield call("flag 1 and no encoding", OK, b"\x01" + GOOD[1:])  # gRPC takes it as it lies, and so it is whole
    for flag in (2, 128, 255):
        yield call(f"flag {flag}", INVALID, bytes([flag]) + GOOD[1:])
    for encoding in ("gzip", "deflate"):
        yield call(f"compressed with {encoding}", UNIMPLEMENTED, b"\x01" + message(rng.randbytes(30))[1:], **{"grpc-encoding": encoding})
    for announced in ((4 << 20) + 1, 1 << 30, 2**32 - 1):
        yield call(f"a message of {announced} bytes that does not come", INVALID, b"\x00" + struct.pack(">I", announced) + b"x")
    for method in UNARY:
        for _ in range(4):
            garbage = bytes([rng.randrange(32) << 3 | rng.choice((6, 7))]) + rng.randbytes(rng.randrange(40))
            yield call(f"{method} of garbage {garbage.hex()}", INVALID, message(garbage), SERVICE + method)
    yield call("FetchKv of garbage", INVALID, message(b"\x0f"), SERVICE + "FetchKv")
    for lease in (b"", b"none", b"x" * 10_000, b"../../etc/passwd", b"\xf0\x9f\x92\xa9"):
        for method in ("RenewKv", "FetchKv"):
            yield call(f"{method} of lease {lease[:20]!r}", NOT_FOUND, message(bytes_field(1, lease)), SERVICE + method)
        yield call(f"ReleaseKv of lease {lease[:20]!r}", OK, message(bytes_field(1, lease)), SERVICE + "ReleaseKv")
        yield call(f"Cancel of {lease[:20]!r}", NOT_FOUND, message(bytes_field(1, lease)), SERVICE + "Cancel")
    for count in (0, CONTEXT + 1, 2**64 - 1):
        yield call(f"Plan of {count} tokens", INVALID if count == 0 else OUT_OF_RANGE, message(number(1, count)), SERVICE + "Plan")


def bad_headers(rng):
    for timeout in ("0n", "0u", "0m", "0S", "0M", "0H"):
        yield call(f"timeout {timeout}", DEADLINE, GOOD, **{"grpc-timeout": timeout})
    for timeout in ("99999999H", "2562047H", "2070001H", "99999999M", "99999999S"):  # for ever
        yield call(f"timeout {timeout}", OK, GOOD, **{"grpc-timeout": timeout})
    for timeout in ("abc", "S", "-1S", "1X", "99999999999S", "1.5S"):  # none: gRPC drops what it cannot read
        yield call(f"timeout {timeout}", OK, GOOD, **{"grpc-timeout": timeout})
    names = ["/", "", "/x", "*", SERVICE, PREFILL + "/", PREFILL[1:], PREFILL.lower(), "/grpc.health.v1.Health/Nope", "//", "/../Prefill",
             *("/" + "".join(rng.choices("abcXYZ./%_-", k=rng.randrange(1, 90))) for _ in range(20))]
    for path in names:
        yield call(f"path {path!r}", UNIMPLEMENTED, GOOD, path)
    for headers in ({":method": "PUT"}, {":scheme": "ftp"}, {"te": "gzip"}):
        yield call(f"{headers}", UNKNOWN, GOOD, **headers)
    fields = {":method": "POST", ":scheme": "http", ":path": PREFILL, "content-type": "application/grpc", "te": "trailers"}
    for missing in (":method", ":scheme", ":path"):
        block = b"".join(b"\x00" + text(name) + text(value) for name, value in fields.items() if name != missing)
        yield wire(f"no {missing}", UNKNOWN, frame(HEADERS, END_HEADERS, 1, block), frame(DATA, END_STREAM, 1, GOOD))
    yield wire("no headers", UNKNOWN, frame(HEADERS, END_HEADERS | END_STREAM, 1))
    many = request_headers() + b"".join(b"\x00" + text(f"x-{index}") + text("y" * 100) for index in range(400))
    half = request_headers() + b"".join(b"\x00" + text(f"x-{index}") + text("y" * 70) for index in range(200))
    # gRPC 1.51 ends the stream late: it may have been answered by then. What memory that costs, hostile_memory.py measures.
    # Where it reads the acknowledgement of its SETTINGS before it has sent them, a frame of more than 16 KiB is an error of the
    # connection (RFC 9113, 4.2).
    yield wire("21 KiB of metadata in a frame", {OK, EXHAUSTED, "closed"}, frame(HEADERS, END_HEADERS, 1, half), frame(DATA, END_STREAM, 1, GOOD))
    first, *rest = [many[at : at + 16_000] for at in range(0, len(many), 16_000)]
    parts = [frame(HEADERS, 0, 1, first), *(frame(CONTINUATION, 0, 1, part) for part in rest), frame(CONTINUATION, END_HEADERS, 1)]
    yield wire("54 KiB of metadata in three", {OK, EXHAUSTED, "closed"}, *parts, frame(DATA, END_STREAM, 1, GOOD))


def broken_http2(rng):
    block = request_headers()
    opened = frame(HEADERS, END_HEADERS, 1, block)
    yield wire("even stream", LEFT_OUT, frame(HEADERS, END_HEADERS, 2, block), frame(DATA, END_STREAM, 2, GOOD), stream=2)
    yield wire("an older stream", LEFT_OUT, frame(HEADERS, END_HEADERS, 5, block), frame(HEADERS, END_HEADERS, 3, block), stream=3)
    yield wire("a stream twice", ENDED, opened, opened)
    yield wire("data of no stream", LEFT_OUT, frame(DATA, END_STREAM, 7, GOOD), stream=7)
    yield wire("RST_STREAM of no stream", LEFT_OUT, frame(RST_STREAM, 0, 9, struct.pack(">I", 0)))
    yield wire("RST_STREAM of two bytes", ENDED, opened, frame(RST_STREAM, 0, 1, b"ab"))
    for kind, payload in ((DATA, GOOD), (HEADERS, block), (RST_STREAM, bytes(4)), (CONTINUATION, block)):
        yield wire(f"frame {kind} on stream 0", LEFT_OUT, frame(kind, END_HEADERS if kind != DATA else 0, 0, payload))
    for kind, payload in ((SETTINGS, b""), (PING, bytes(8)), (GOAWAY, bytes(8))):
        yield wire(f"frame {kind} on stream 1", LEFT_OUT, opened, frame(kind, 0, 1, payload), frame(99, 0, 0), frame(DATA, 8, 1, b"\xff"))
    for kind, sizes in ((SETTINGS, (1, 5, 7)), (PING, (0, 7, 9)), (WINDOW_UPDATE, (0, 3, 5)), (PRIORITY, (0, 4, 6)), (GOAWAY, (0, 7))):
        for size in sizes:
            yield wire(f"frame {kind} of {size} bytes", LEFT_OUT, frame(kind, 0, 0 if kind != PRIORITY else 1, bytes(size)))
    yield wire("an acknowledgement with settings", ENDED, frame(SETTINGS, ACK, 0, bytes(6)))
    for setting, value in ((2, 2), (4, 2**31), (4, 2**32 - 1), (5, 1), (5, 16_383), (5, 2**24)):
        yield wire(f"setting {setting} = {value}", ENDED, frame(SETTINGS, 0, 0, struct.pack(">HI", setting, value)))
    yield wire("a window of 0 more", ENDED, frame(WINDOW_UPDATE, 0, 0, bytes(4)))
    yield wire("a stream's window of 0 more", ENDED, opened, frame(WINDOW_UPDATE, 0, 1, bytes(4)))
    most = struct.pack(">I", 2**31 - 1)
    yield wire("a window beyond 2^31", LEFT_OUT, frame(WINDOW_UPDATE, 0, 0, most), frame(WINDOW_UPDATE, 0, 0, most))
    yield wire("a promise", LEFT_OUT, frame(PUSH_PROMISE, END_HEADERS, 1, struct.pack(">I", 2) + block))
    yield wire("CONTINUATION of nothing", ENDED, frame(CONTINUATION, END_HEADERS, 1, block))
    yield wire("data within headers", ENDED, frame(HEADERS, 0, 1, block[:10]), frame(DATA, END_STREAM, 1, GOOD))
    yield wire("CONTINUATION of another", ENDED, frame(HEADERS, 0, 1, block[:10]), frame(CONTINUATION, END_HEADERS, 3, block[10:]))
    yield wire("padding beyond the frame", ENDED, opened, frame(DATA, PADDED | END_STREAM, 1, b"\xff" + GOOD))
    yield wire("a frame of 16 MiB", ENDED, struct.pack(">I", (1 << 24) - 1)[1:] + struct.pack(">BBI", DATA, 0, 1) + bytes(100_000))
    yield wire("more than the windows", {*ENDED, INVALID}, opened, *[frame(DATA, 0, 1, bytes(16_384))] * 600)
    for name, hpack in (("index 0", b"\x80"), ("index 4 billion", b"\xff\xff\xff\xff\x0f"), ("an endless number", b"\xff" * 20),
                        ("a cut string", block[:-3]), ("a table of 256 MiB", b"\x3f\xff\xff\xff\x7f" + block)):
        yield wire(f"HPACK: {name}", ENDED, frame(HEADERS, END_HEADERS, 1, hpack))
    for _ in range(30):  # an indexed field beyond both tables, behind whatever
        junk = b"".join(b"\x00" + text("x" + rng.randbytes(3).hex()) + text(rng.randbytes(9).hex()) for _ in range(rng.randrange(6)))
        yield wire("HPACK: beyond the table", ENDED, frame(HEADERS, END_HEADERS, 1, junk + b"\xff" + varint(rng.randrange(5000, 2**28))))
    # Odd, and allowed.
    yield wire("an unknown frame", OK, frame(77, 255, 1, b"hello"), opened, frame(DATA, END_STREAM, 1, GOOD))
    yield wire("headers in two", OK, frame(HEADERS, 0, 1, block[:10]), frame(CONTINUATION, END_HEADERS, 1, block[10:]),
               frame(DATA, END_STREAM, 1, GOOD))
    yield wire("headers with a priority", OK, frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, struct.pack(">IB", 0, 5) + block),
               frame(DATA, END_STREAM, 1, GOOD))
    yield wire("byte by byte", OK, opened, *(frame(DATA, 0, 1, GOOD[at : at + 1]) for at in range(len(GOOD))), frame(DATA, END_STREAM, 1))


def no_http2(rng):
    """What strangers send to a port, instead of HTTP/2."""
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"POST " + PREFILL.encode() + b" HTTP/1.1\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500)
    yield b"SSH-2.0-OpenSSH_9.2\r\n"
    yield PREFACE[:-1] + b"x"
    for _ in range(25):
        yield bytes([rng.randrange(ord("Q"), 256)]) + rng.randbytes(rng.randrange(40, 3000))


class HostileCallsTest(CliTestCase):
    def setUp(self):
        self.server = Server("--config", self.config)
        self.addCleanup(self.server.stop)
        self.expected = self.ask_well()

    def ask_well(self):
        """The first token of a good prompt."""
        connection = Connection(self.server.address)
        try:
            stream = connection.open_stream()
            connection.send(frame(DATA, END_STREAM, stream, GOOD))
            status, body = connection.answer(stream)
        finally:
            connection.close()
        self.assertEqual(status, OK)
        while body:
            size = int.from_bytes(body[1:5], "big")
            event, body = body[5 : 5 + size], body[5 + size :]
        self.assertEqual(event[0], 3 << 3 | 2, "the last event is no result")
        after_id = event[event.index(b"\x10\x03\x18") + 3 :]  # tokens: 3, then the first token
        return after_id[0] | (after_id[1] << 7 if after_id[0] & 0x80 else 0)

    def watch_health(self):
        """Asks on, and keeps the seconds of each answer."""
        seconds, failed, quit = [], [], threading.Event()

        def ask():
            while not quit.wait(0.005):
                begin = time.monotonic()
                try:
                    connection = Connection(self.server.address)
                    stream = connection.open_stream(HEALTH)
                    connection.send(frame(DATA, END_STREAM, stream, message(b"")))
                    if connection.answer(stream)[0] != OK:
                        failed.append("no answer")
                    connection.close()
                except OSError as error:
                    failed.append(str(error))
                seconds.append(time.monotonic() - begin)

        thread = threading.Thread(target=ask)
        thread.start()

        def end():
            quit.set()
            thread.join()
            self.assertEqual(failed, [])
            return sorted(seconds)

        return end

    def test_each_ends_as_it_must_and_the_next_good_one_is_served(self):
        rng = random.Random(self.seed)
        before = resident_bytes(self.server.process.pid)
        end = self.watch_health()
        time.sleep(2)
        calm_p99 = p99(end())
        end = self.watch_health()
        count = 0
        for attack in (*bad_prompts(rng), *bad_messages(rng), *bad_headers(rng), *broken_http2(rng)):
            connection = Connection(self.server.address)
            try:
                ended = connection.answer(attack.send(connection))[0]
            except OSError:
                ended = "closed"
            finally:
                connection.close()
            with self.subTest(attack.name):
                self.assertIn(ended, attack.ends)
                self.assertEqual(self.ask_well(), self.expected)
            count += 1
        host, port = self.server.address.rsplit(":", 1)
        for said in no_http2(rng):
            with self.subTest(f"no HTTP/2: {said[:20]!r}"), socket.create_connection((host, int(port)), timeout=10) as stranger:
                try:
                    stranger.sendall(said)
                    while stranger.recv(4096):
                        pass
                except ConnectionError:
                    pass
                self.assertEqual(self.ask_well(), self.expected)
            count += 1
        seconds = end()
        grown = resident_bytes(self.server.process.pid) - before
        print(f"{count} hostile calls, the next good request served after each; health of {len(seconds)}: "
              f"p50 {1e3 * seconds[len(seconds) // 2]:.1f} ms, p99 {1e3 * p99(seconds):.1f} ms, before {1e3 * calm_p99:.1f} ms; "
              f"memory {grown / MIB:+.0f} MiB", file=sys.stderr)
        self.assertGreaterEqual(count, CALLS)
        self.assertLess(p99(seconds), max(HEALTH_P99_SECONDS, 3 * calm_p99) * crowding())
        self.assertLess(grown, 64 * MIB)


if __name__ == "__main__":
    unittest.main()
