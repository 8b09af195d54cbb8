"""A relay between a worker and its leader that reads what passes: for faults at named steps of the control stream.

It speaks no gRPC: it cuts the bytes into HTTP/2 frames (RFC 9113, 4.1), puts the messages of DATA frames together and
shows each to a watcher before it passes. Plain text only.
"""
import contextlib
import socket
import threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER, MESSAGE_HEADER, DATA = 9, 5, 0

# The bodies of WorkerMessage and LeaderMessage by their field (proto/meshfill/v1/control.proto).
FROM_WORKER = {2: "Join", 3: "Prepared", 4: "Progress", 5: "RankDone", 6: "Stopped", 7: "Leave"}
FROM_LEADER = {2: "Welcome", 3: "Refused", 4: "Prepare", 5: "Shard", 6: "Run", 7: "Finish", 8: "Cancel", 9: "Abort",
               10: "Heartbeat", 11: "Goodbye", 15: "Pause", 16: "Resume"}


def fields_of(data):
    """Each field of a protobuf message: its number and its value, an int or bytes."""
    position = 0

    def varint():
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            yield number, varint()
            continue
        size = {1: 8, 2: None, 5: 4}[wire_type]
        if size is None:
            size = varint()
        yield number, data[position : position + size]
        position += size


class Message:
    def __init__(self, kinds, data):
        self.data = data
        self.kind, self.body = None, b""
        for number, value in fields_of(data):
            if number in kinds:
                self.kind, self.body = kinds[number], value

    def all_of(self, number):
        return [value for field, value in fields_of(self.body) if field == number]

    def run(self):
        """The number of the run that it is about; 0: of none."""
        return next((value for value in self.all_of(1) if isinstance(value, int)), 0)

    def layers_done(self):
        """Of a Progress: the layers that its slowest rank is past; None outside of a run."""
        ranks = [dict(fields_of(rank)) for rank in self.all_of(2)]
        return min((rank.get(2, 0) for rank in ranks), default=None)


class ControlRelay:
    """Listens at `address`; each connection there goes on to `target`, HOST:PORT.

    `watch(message)` is called for every message, on its way and in its direction's thread: while it does not return,
    the direction stands still. What it returns, of the same length, goes on in place of the message; None: as it was.
    """

    def __init__(self, target, watch):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.watch = watch
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        for each in [self.listener, *self.open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self):
        while True:
            try:
                worker, _ = self.listener.accept()
            except OSError:
                return
            try:
                leader = socket.create_connection(self.target)
            except OSError:
                worker.close()
                continue
            for each in (worker, leader):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.open += [worker, leader]
            for source, sink, kinds in ((worker, leader, FROM_WORKER), (leader, worker, FROM_LEADER)):
                threading.Thread(target=self._pass_on, args=(source, sink, kinds), daemon=True).start()

    def _pass_on(self, source, sink, kinds):
        reader = source.makefile("rb")
        started = b""  # of a message that goes on in the next frame
        try:
            if kinds is FROM_WORKER:
                sink.sendall(reader.read(len(PREFACE)))
            while len(header := reader.read(FRAME_HEADER)) == FRAME_HEADER:
                payload = bytearray(reader.read(int.from_bytes(header[:3], "big")))
                if header[3] == DATA:
                    started = self._look(kinds, started, payload)
                sink.sendall(header + payload)
        except (OSError, ValueError):
            pass  # one side is gone
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _look(self, kinds, started, payload):
        """Shows the messages that end in this frame; returns the beginning of the one that does not."""
        data = started + bytes(payload)
        position = 0
        while len(data) - position >= MESSAGE_HEADER:
            begin = position + MESSAGE_HEADER
            end = begin + int.from_bytes(data[position + 1 : begin], "big")
            if end > len(data):
                break
            changed = self.watch(Message(kinds, data[begin:end]))
            if changed is not None:
                assert len(changed) == end - begin and begin >= len(started), "only a message within one frame changes"
                payload[begin - len(started) : end - len(started)] = changed
            position = end
        return data[position:]
