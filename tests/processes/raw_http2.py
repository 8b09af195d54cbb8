"""HTTP/2 by hand, for what no gRPC library would send: frames, and requests that are half of one."""
import re
import socket
import struct

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PREFILL = "/meshfill.v1.PrefillService/Prefill"


def frame(kind, flags=0, stream=0, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def text(value):
    """A string of HPACK, of less than 127 bytes."""
    return bytes([len(value)]) + value.encode()


def request_headers(path=PREFILL, **more):
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test", "content-type": "application/grpc",
              "te": "trailers", **more}
    return b"".join(b"\x00" + text(name) + text(value) for name, value in fields.items())


def varint(number):
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def message(payload):
    """A gRPC message, uncompressed."""
    return b"\x00" + struct.pack(">I", len(payload)) + payload


def header_message(token_count, request_id=""):
    name = request_id.encode()
    fields = b"\x0a" + varint(len(name)) + name if name else b""
    fields += b"\x18" + varint(token_count)
    return message(b"\x0a" + varint(len(fields)) + fields)


def tokens_message(ids):
    packed = b"".join(map(varint, ids))
    chunk = b"\x0a" + varint(len(packed)) + packed
    return message(b"\x12" + varint(len(chunk)) + chunk)


class Connection:
    """A connection that has sent its preface. What comes back is read by `wait_for_ends` alone."""

    def __init__(self, address, window=65535, wrap=lambda plain: plain):
        host, port = address.rsplit(":", 1)
        self.socket = wrap(socket.create_connection((host, int(port)), timeout=10))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.next_stream = 1
        self.send(PREFACE + frame(SETTINGS, payload=struct.pack(">HI", 4, window)) + frame(SETTINGS, ACK))

    def send(self, data):
        self.socket.sendall(data)

    def open_stream(self, path=PREFILL, **headers):
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        self.send(frame(HEADERS, END_HEADERS, stream, request_headers(path, **headers)))
        return stream

    def _read(self, size):
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the server has closed the connection")
            data += part
        return data

    def wait_for_ends(self, count):
        """Reads until so many streams have ended; the header block of the last one's trailers."""
        while count > 0:
            head = self._read(9)
            payload = self._read(int.from_bytes(head[:3], "big"))
            count -= head[3] == RST_STREAM or (head[3] == HEADERS and head[4] & END_STREAM != 0)
        return payload

    def answer(self, stream):
        """What a stream ends with: its gRPC status, "reset", or "closed" where the connection ends first; and its messages.
        "ignored": the server has answered a PING that was sent behind it.

        A status is found where the connection's HPACK table has none yet: ask once for each connection.
        """
        body = b""
        try:
            while True:
                head = self._read(9)
                payload = self._read(int.from_bytes(head[:3], "big"))
                kind, flags, of = head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF
                if kind == GOAWAY:
                    return "closed", body
                if kind == PING and flags & ACK:
                    return "ignored", body
                if of != stream:
                    continue
                if kind == RST_STREAM:
                    return "reset", body
                if kind == DATA:
                    body += payload
                if kind == HEADERS and flags & END_STREAM:
                    found = re.search(rb"grpc-status(?:\x01(\d)|\x02(\d\d))", payload)
                    http = re.search(rb"\x07:status\x03(\d{3})", payload)
                    if found:
                        return int(found[1] or found[2]), body
                    return f"http {http[1].decode()}" if http else f"trailers {payload!r}", body
        except TimeoutError:
            return "nothing", body
        except OSError:
            return "closed", body

    def close(self):
        self.socket.close()
