"""A Meshfill server that computes nothing: the whole API over K and V from a source, with faults on request.

    server = FakeServer(faults=Faults(break_after_parts=[3]))
    client = meshfill.Client(server.address)

SyntheticKv makes K and V from a formula; a test computes the same values for itself. MeshfillKv has a real binary compute
them. As a program: python fake_server.py --listen 127.0.0.1:50051 [--binary MESHFILL --config FILE]
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
import threading
import time
from concurrent import futures
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

import google_crc32c
import grpc
import numpy as np
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from meshfill.v1 import prefill_pb2 as pb
from meshfill.v1 import prefill_pb2_grpc


def synthetic_bits(layer: int, tokens: np.ndarray, heads: np.ndarray, head_dim: int, is_v: bool) -> np.ndarray:
    """[tokens, heads, head_dim], uint16: the bits of K or V. Any two elements that a mistake could swap differ."""
    t = tokens.astype(np.uint64)[:, None, None]
    h = heads.astype(np.uint64)[None, :, None]
    d = np.arange(head_dim, dtype=np.uint64)[None, None, :]
    mixed = (t * np.uint64(2654435761) + h * np.uint64(40503) + d * np.uint64(65599)) ^ np.uint64(layer * 7919 + is_v * 104729)
    return ((mixed * np.uint64(11400714819323198485)) >> np.uint64(48)).astype(np.uint16)


class SyntheticKv:
    """K and V by formula, bf16."""

    def __init__(self, layers: int = 4, kv_heads: int = 4, head_dim: int = 8):
        self.layers, self.kv_heads, self.head_dim, self.dtype = layers, kv_heads, head_dim, "bf16"

    def compute(self, ids: List[int]) -> Callable[[int], Tuple[np.ndarray, np.ndarray]]:
        """layer → k, v of all tokens and heads."""
        tokens, heads = np.arange(len(ids)), np.arange(self.kv_heads)
        return lambda layer: tuple(synthetic_bits(layer, tokens, heads, self.head_dim, is_v) for is_v in (False, True))

    def first_token(self, ids: List[int]) -> int:
        return sum(ids) % 1000


class MeshfillKv:
    """K and V that `meshfill prefill --kv-out` computed: [tokens, kv_heads, head_dim] of each layer, bf16 or f32."""

    def __init__(self, binary: str, config: str, model: str):
        shape = json.loads((pathlib.Path(model) / "config.json").read_text())
        self.layers, self.kv_heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
        self.head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        self.dtype = "bf16"
        self._command = [binary, "prefill", "--config", config, "--model", model, "--dtype", "bf16", "--json"]
        self._first_token = 0

    def compute(self, ids: List[int]) -> Callable[[int], Tuple[np.ndarray, np.ndarray]]:
        with tempfile.TemporaryDirectory() as folder:
            prompt, kv = pathlib.Path(folder) / "ids", pathlib.Path(folder) / "kv"
            np.asarray(ids, np.uint32).tofile(prompt)
            files = ["--tokens", str(prompt), "--format", "u32le", "--kv-out", str(kv)]
            done = subprocess.run(self._command + files, check=True, capture_output=True, text=True)
            self._first_token = json.loads(done.stdout)["first_token"]
            data = kv.read_bytes()
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])

        def plane(name: str) -> np.ndarray:
            begin, end = header[name]["data_offsets"]
            dtype = np.uint16 if header[name]["dtype"] == "BF16" else np.float32
            return np.frombuffer(data[8 + header_bytes + begin : 8 + header_bytes + end], dtype).reshape(header[name]["shape"])

        return lambda layer: (plane(f"layers.{layer}.k"), plane(f"layers.{layer}.v"))

    def first_token(self, ids: List[int]) -> int:
        return self._first_token


def tenant_of(context) -> str:
    """As the real server: of calls whose message has no field for it."""
    return dict(context.invocation_metadata()).get("meshfill-tenant", "")


@dataclass
class Faults:
    """What goes wrong. Lists are used up from the front, one entry a call; -1: this call goes well."""

    refuse: Optional[Tuple[grpc.StatusCode, str]] = None  # every prefill, at its header
    refuse_after: Optional[threading.Event] = None  # with refuse: once it is set
    retry_seconds: Optional[float] = None  # with refuse: a RetryInfo
    accept_seconds: float = 0.0  # before Accepted
    layer_seconds: float = 0.0  # each layer takes so long
    pieces: int = 1  # a prompt runs in so many; K and V are there with the last
    result_seconds: float = 0.0  # between the last layer's K and V and the result
    die_after_layers: Optional[int] = None  # the prefill then ends UNAVAILABLE, its lease is lost
    break_after_parts: List[int] = field(default_factory=list)  # a fetch ends UNAVAILABLE after so many parts
    cancel_after_parts: List[int] = field(default_factory=list)  # a fetch ends CANCELLED, as one whose reader stood still
    end_after_parts: List[int] = field(default_factory=list)  # a fetch ends well, too early
    corrupt_part: List[int] = field(default_factory=list)  # a bit of this part of a fetch is flipped
    always_corrupt: bool = False  # every part
    part_seconds: float = 0.0  # before each part of a fetch
    renew_seconds: float = 0.0  # before each answer of RenewKv
    refuse_fetches: bool = False  # NOT_FOUND
    no_lease: bool = False  # as a server without KV


class _Lease:
    def __init__(self, name: str, tenant: str, tokens: int, source):
        self.name, self.tenant, self.tokens, self.source = name, tenant, tokens, source
        self.held = True  # until its prefill ends: it cannot lapse before
        self.expires = 0.0  # time.monotonic()
        self.layers_done = 0
        self.lost = False
        self.read: Optional[Callable] = None


class FakeServer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(
        self,
        *,
        source=None,
        faults: Optional[Faults] = None,
        listen: str = "127.0.0.1:0",
        part_tokens: int = 100,
        token: Optional[str] = None,
        holder_runs: Optional[Tuple[int, int, int]] = None,
        leader: Optional["FakeServer"] = None,
        credentials: Optional[grpc.ServerCredentials] = None,
        lease_grace_seconds: float = 0.0,
        max_streams: Optional[int] = None,
    ):
        """holder_runs (first token, run, step) with leader: a holder, which gives the leader's KV of these runs.

        lease_grace_seconds: a lease lives so much longer than it says, for tests whose process may stand still.
        max_streams: calls at once on a connection, as limits.max_streams.
        """
        self.source = source or SyntheticKv()
        self.faults = faults or Faults()
        self.calls: List[Tuple[str, object]] = []  # (method, request or header)
        self.cancelled: List[str] = []  # request ids whose call ended before their result
        self.holders: List[pb.KvHolder] = []  # put into manifests
        self.manifest_dtype = ""  # of manifests, where it is another than the source's
        self.state: int = pb.PoolStatus.STATE_READY
        self.fetching = 0  # guarded by changed; calls of FetchKv that have not ended
        self.fetched_bytes = 0  # of K and V that FetchKv gave
        self._part_tokens = part_tokens
        self._token = token
        self._runs = holder_runs
        self._lease_grace_seconds = lease_grace_seconds
        self.changed = leader.changed if leader else threading.Condition()
        self.leases: Dict[str, _Lease] = leader.leases if leader else {}  # guarded by changed
        self._live: Dict[str, threading.Event] = {}  # guarded by changed; set: cancelled
        self._tenants: Dict[str, str] = {}  # guarded by changed; of live requests
        options = [] if max_streams is None else [("grpc.max_concurrent_streams", max_streams)]
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=options)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self._server)
        if credentials is None:
            port = self._server.add_insecure_port(listen)
        else:
            port = self._server.add_secure_port(listen, credentials)
        self.address = f"{listen.rsplit(':', 1)[0]}:{port}"
        self._server.start()

    def stop(self) -> None:
        """As if killed: every call ends at once."""
        with self.changed:
            for event in self._live.values():
                event.set()
            self.changed.notify_all()
        self._server.stop(0).wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def live(self) -> List[str]:
        """Request ids of prefills that are complete and have not ended."""
        with self.changed:
            return list(self._live)

    def count(self, method: str) -> int:
        return sum(1 for name, _ in self.calls if name == method)

    def _check(self, context, method: str, request) -> None:
        self.calls.append((method, request))
        if self._token and dict(context.invocation_metadata()).get("authorization") != f"Bearer {self._token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token, or a wrong one")

    def Prefill(self, requests, context):
        header, faults = next(requests).header, self.faults
        self._check(context, "Prefill", header)
        if faults.refuse:
            if faults.refuse_after is not None:
                faults.refuse_after.wait(10)
            self._refuse(context)
        ids: List[int] = []
        for request in requests:
            ids.extend(request.tokens.ids)
        if len(ids) != header.token_count:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(ids)} tokens came, the header says {header.token_count}")
        request_id = header.request_id or f"r{len(self.calls)}"
        stop = threading.Event()
        with self.changed:
            if request_id in self._live:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, f"request {request_id} is live")
            self._live[request_id] = stop
            self._tenants[request_id] = header.tenant
            lease = _Lease(f"lease-{request_id}", header.tenant, len(ids), self.source)
            keep = header.kv.keep and not faults.no_lease
            if keep:
                self.leases[lease.name] = lease
        if not context.add_callback(stop.set):
            stop.set()
        done = False
        try:
            stop.wait(faults.accept_seconds)
            if stop.is_set():
                context.abort(grpc.StatusCode.CANCELLED, "cancelled")
            pieces, layers = faults.pieces, self.source.layers
            accepted = pb.Accepted(request_id=request_id, predicted_seconds=0.5, kv_lease=lease.name if keep else "")
            accepted.plan.pieces = pieces
            yield pb.PrefillEvent(accepted=accepted)
            lease.read = self.source.compute(ids)
            for computed in range(1, pieces * layers + 1):
                if faults.die_after_layers == computed - 1:
                    lease.lost = True
                    context.abort(grpc.StatusCode.UNAVAILABLE, "worker w1 died")
                if stop.wait(faults.layer_seconds):
                    context.abort(grpc.StatusCode.CANCELLED, "cancelled")
                with self.changed:
                    lease.layers_done = computed - (pieces - 1) * layers
                    self.changed.notify_all()
                yield pb.PrefillEvent(progress=pb.Progress(layers_done=computed, layers=pieces * layers, seconds=0.1))
            if stop.wait(faults.result_seconds):
                context.abort(grpc.StatusCode.CANCELLED, "cancelled")
            done = True
            with self.changed:
                lease.held = False
                lease.expires = max(lease.expires, self._lapse(header.kv.lease_seconds or 30))
            yield pb.PrefillEvent(result=self._result(request_id, ids, lease if keep else None, header))
        finally:
            with self.changed:
                del self._live[request_id], self._tenants[request_id]
                if not done:
                    self.cancelled.append(request_id)
                    self.leases.pop(lease.name, None)
                self.changed.notify_all()

    def _refuse(self, context) -> None:
        code, message = self.faults.refuse
        if self.faults.retry_seconds is not None:
            info = error_details_pb2.RetryInfo()
            info.retry_delay.FromNanoseconds(int(self.faults.retry_seconds * 1e9))
            detail = any_pb2.Any()
            detail.Pack(info)
            status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(code, message)

    def _result(self, request_id, ids, lease, header) -> pb.PrefillResult:
        source = self.source
        result = pb.PrefillResult(request_id=request_id, tokens=len(ids), first_token=source.first_token(ids), attempts=1)
        result.top.add(token=result.first_token, logit=1.5)
        result.seconds.prefill = 0.25
        if header.return_logits:
            result.logits.extend([0.5, -1.0, 2.0])
        if lease is not None:
            size = 4 if source.dtype == "f32" else 2
            result.kv.CopyFrom(
                pb.KvManifest(
                    lease=lease.name,
                    expires_in_seconds=header.kv.lease_seconds or 30,
                    tokens=len(ids),
                    layers=source.layers,
                    kv_heads=source.kv_heads,
                    head_dim=source.head_dim,
                    dtype=self.manifest_dtype or source.dtype,
                    bytes=2 * len(ids) * source.layers * source.kv_heads * source.head_dim * size,
                    block_tokens=16,
                    block_hashes=bytes(range(32)) * (len(ids) // 16),
                    holders=self.holders,
                )
            )
        return result

    def FetchKv(self, request, context):
        self._check(context, "FetchKv", request)
        self._count_fetch(1)
        if not context.add_callback(lambda: self._count_fetch(-1)):
            self._count_fetch(-1)
        if self.faults.refuse_fetches:
            context.abort(grpc.StatusCode.NOT_FOUND, f"lease {request.lease} is unknown or has lapsed")
        with self.changed:
            lease = self._lease(context, request.lease)
        source = lease.source
        tokens = request.tokens or lease.tokens - request.first_token
        layers = request.layers or source.layers - request.first_layer
        heads = request.heads or source.kv_heads - request.first_head
        for what, first, count, end in (
            ("token", request.first_token, tokens, lease.tokens),
            ("layer", request.first_layer, layers, source.layers),
            ("head", request.first_head, heads, source.kv_heads),
        ):
            if count <= 0 or first + count > end:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{what}s {first} to {first + count} of {end}")
        paged = request.layout != pb.KV_LAYOUT_TOKENS
        to_end = request.first_token + tokens == lease.tokens
        if paged and (
            not request.page_tokens
            or request.first_token % request.page_tokens
            or (tokens % request.page_tokens and not to_end)
        ):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not whole pages")
        faults = self.faults
        break_after = faults.break_after_parts.pop(0) if faults.break_after_parts else -1
        cancel_after = faults.cancel_after_parts.pop(0) if faults.cancel_after_parts else -1
        end_after = faults.end_after_parts.pop(0) if faults.end_after_parts else -1
        corrupt = faults.corrupt_part.pop(0) if faults.corrupt_part else -1
        step = self._part_tokens
        if paged:
            step = max(1, step // request.page_tokens) * request.page_tokens
        sent = 0
        for layer in range(request.first_layer, request.first_layer + layers):
            k, v = self._wait_layer(context, lease, layer)
            for first, end in self._parts(request.first_token, request.first_token + tokens, step):
                if sent == break_after:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "holder h2 died")
                if sent == cancel_after:
                    context.abort(grpc.StatusCode.CANCELLED, "Cancelled on the server side")  # as gRPC's C++ server says it
                if sent == end_after:
                    return
                time.sleep(faults.part_seconds)
                part = self._part(request, layer, first, end, heads, k, v)
                if sent == corrupt or faults.always_corrupt:
                    part.crc32c ^= 1
                yield part
                sent += 1
                self.fetched_bytes += len(part.k) + len(part.v) + len(part.pages)

    def _count_fetch(self, change: int) -> None:
        with self.changed:
            self.fetching += change

    def _parts(self, first: int, end: int, step: int):
        """[first, end) of each part: of a holder, within its runs."""
        begin, run, distance = self._runs or (0, 1 << 60, 1 << 60)
        while begin < end:
            low, high = max(begin, first), min(begin + run, end)
            for at in range(low, high, step):
                yield at, min(at + step, high)
            begin += distance

    def _part(self, request, layer, first, end, heads, k, v) -> pb.KvPart:
        part = pb.KvPart(layer=layer, first_token=first, tokens=end - first)
        chosen = slice(request.first_head, request.first_head + heads)
        k, v = k[first:end, chosen], v[first:end, chosen]
        if request.layout == pb.KV_LAYOUT_TOKENS:
            part.k, part.v = k.tobytes(), v.tobytes()
            part.crc32c = google_crc32c.value(part.k + part.v)
            return part
        size = request.page_tokens
        pages = -(-(end - first) // size)
        both = np.zeros((pages * size, heads, 2 * k.shape[2]), k.dtype)
        both[: end - first] = np.concatenate([k, v], axis=2)
        both = both.reshape(pages, size, heads, -1)
        if request.layout == pb.KV_LAYOUT_PAGES_HND:
            both = both.transpose(0, 2, 1, 3)
        part.pages = both.tobytes()
        part.crc32c = google_crc32c.value(part.pages)
        return part

    def _lease(self, context, name: str) -> _Lease:
        """With `changed` held. Aborts where the lease is unknown, another tenant's, lapsed or lost."""
        lease = self.leases.get(name)
        if lease is None or lease.tenant != tenant_of(context) or not (lease.held or time.monotonic() < lease.expires):
            context.abort(grpc.StatusCode.NOT_FOUND, f"lease {name} is unknown or has lapsed")
        if lease.lost:
            context.abort(grpc.StatusCode.UNAVAILABLE, "worker w1 died, and layers 1 to 3 with it")
        return lease

    def _wait_layer(self, context, lease, layer):
        with self.changed:
            while lease.layers_done <= layer:
                if not context.is_active():
                    context.abort(grpc.StatusCode.CANCELLED, "cancelled")
                self._lease(context, lease.name)
                self.changed.wait(0.1)
        return lease.read(layer)

    def _lapse(self, seconds: float) -> float:
        """When a lease of so many seconds from now is over."""
        return time.monotonic() + seconds + self._lease_grace_seconds

    def RenewKv(self, request, context):
        self._check(context, "RenewKv", request)
        end = time.monotonic() + self.faults.renew_seconds
        while context.is_active() and time.monotonic() < end:
            time.sleep(0.02)
        with self.changed:
            lease = self._lease(context, request.lease)
            seconds = request.seconds or 30
            lease.expires = self._lapse(seconds)  # from now on: sooner than before, where that was longer
        return pb.KvLease(lease=request.lease, expires_in_seconds=seconds)

    def ReleaseKv(self, request, context):
        self._check(context, "ReleaseKv", request)
        with self.changed:
            lease = self.leases.get(request.lease)
            if lease is not None and lease.tenant == tenant_of(context):
                del self.leases[request.lease]
        return pb.ReleaseKvReply()

    def Cancel(self, request, context):
        self._check(context, "Cancel", request)
        with self.changed:
            event = self._live.get(request.request_id)
            tenant = self._tenants.get(request.request_id)
        if event is None or tenant != tenant_of(context):
            context.abort(grpc.StatusCode.NOT_FOUND, f"request {request.request_id} is not live")
        event.set()
        return pb.CancelReply()

    def Plan(self, request, context):
        self._check(context, "Plan", request)
        if not request.token_count:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "token_count is 0; a prompt needs at least one token")
        reply = pb.PlanReply(plan=pb.PlanSummary(ranks=4, heads=1, a=2, b=2, layout=pb.LAYOUT_STRIPED, stripe=64))
        reply.steps.add(comm="kv").blocks.add(u=0, v=1)
        reply.steps.add(comm="q", spans=2).blocks.add(u=1, v=1)
        reply.predicted.seconds = request.token_count / 1e4
        reply.candidates.add(a=2, b=2, heads=1, ranks=4, layout=pb.LAYOUT_ZIGZAG)
        return reply

    def GetPool(self, request, context):
        self._check(context, "GetPool", request)
        status = pb.PoolStatus(state=self.state, model="fake", ranks=4, context_tokens=1 << 20, vocab=1000)
        status.running_request_id = next(iter(self.live), "")
        status.workers.add(name="w1", state="ready", ranks=4, first_rank=-1)
        status.requests.add(id="long", phase="paused", tokens=65536, predicted_rest_seconds=2.5, layers_done=3, layers=4, tenant="team")
        return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:50051")
    parser.add_argument("--binary", help="a meshfill that computes K and V")
    parser.add_argument("--config", help="of this binary")
    parser.add_argument("--model", help="model folder")
    arguments = parser.parse_args()
    source = MeshfillKv(arguments.binary, arguments.config, arguments.model) if arguments.binary else SyntheticKv()
    server = FakeServer(source=source, listen=arguments.listen, part_tokens=4096)
    print(f"listening on {server.address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
