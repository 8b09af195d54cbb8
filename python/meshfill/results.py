"""What the server answers, as immutable values. Names and units are those of proto/meshfill/v1/prefill.proto."""

from dataclasses import dataclass
from typing import Optional, Tuple

import numpy as np

from .stubs import pb

_LAYOUTS = {pb.LAYOUT_STRIPED: "striped", pb.LAYOUT_ZIGZAG: "zigzag", pb.LAYOUT_CONTIGUOUS: "contiguous"}
LAYOUT_NUMBERS = {name: number for number, name in _LAYOUTS.items()}


@dataclass(frozen=True)
class PlanSummary:
    """How a prompt is shared: ranks = heads · a · b."""

    ranks: int
    heads: int
    a: int
    b: int
    layout: str  # striped, zigzag, contiguous, or "" where the server chooses
    stripe: int  # tokens, striped layout
    partial_dtype: str
    placement: str
    pieces: int = 1  # runs of tokens, one after the other, that fit the memory
    piece_tokens: int = 0  # of each piece but the last; 0: the prompt is whole
    exchange_tokens: int = 0  # of each rank, that head groups exchange at a time; 0: all at once
    kv_inner: int = 0  # ranks of an inner ring, where KV goes round a double ring; 0: it goes round one

    @classmethod
    def from_proto(cls, message) -> "PlanSummary":
        return cls(
            ranks=message.ranks,
            heads=message.heads,
            a=message.a,
            b=message.b,
            layout=_LAYOUTS.get(message.layout, ""),
            stripe=message.stripe,
            partial_dtype=message.partial_dtype,
            placement=message.placement,
            pieces=max(1, message.pieces),
            piece_tokens=message.piece_tokens,
            exchange_tokens=message.exchange_tokens,
            kv_inner=message.kv_inner,
        )


@dataclass(frozen=True)
class Accepted:
    """The prompt is complete, valid and queued."""

    request_id: str
    queue_position: int
    predicted_seconds: float  # without the queue
    plan: PlanSummary
    kv_lease: str  # with keep_kv: fetch_kv may begin now; else ""
    predicted_queue_seconds: float = 0.0  # until its turn and of its pauses, if there is memory then

    @classmethod
    def from_proto(cls, message) -> "Accepted":
        return cls(
            request_id=message.request_id,
            queue_position=message.queue_position,
            predicted_seconds=message.predicted_seconds,
            plan=PlanSummary.from_proto(message.plan),
            kv_lease=message.kv_lease,
            predicted_queue_seconds=message.predicted_queue_seconds,
        )


@dataclass(frozen=True)
class Progress:
    layers_done: int  # by all ranks; begins anew where the run does
    layers: int
    seconds: float  # since the prefill began, without the time while it gave way to others

    @classmethod
    def from_proto(cls, message) -> "Progress":
        return cls(layers_done=message.layers_done, layers=message.layers, seconds=message.seconds)


@dataclass(frozen=True)
class Seconds:
    """Wall time of a prefill."""

    queue: float
    prefill: float
    attention: float
    comm_wait: float


@dataclass(frozen=True)
class CommBytes:
    """Bytes that one rank sent, over all layers."""

    q: int
    kv: int
    o: int
    all_to_all: int
    gather: int  # of weights that workers share

    @classmethod
    def from_proto(cls, message) -> "CommBytes":
        return cls(q=message.q, kv=message.kv, o=message.o, all_to_all=message.all_to_all, gather=message.gather)


@dataclass(frozen=True)
class KvHolder:
    """Who holds which part of K and V: of layers and heads, runs of tokens at equal distances."""

    address: str  # HOST:PORT; "" is the front-end
    first_layer: int
    layers: int
    first_head: int
    heads: int
    first_token: int
    run_tokens: int
    step_tokens: int  # 0: there is one run

    @classmethod
    def from_proto(cls, message) -> "KvHolder":
        return cls(
            address=message.address,
            first_layer=message.first_layer,
            layers=message.layers,
            first_head=message.first_head,
            heads=message.heads,
            first_token=message.first_token,
            run_tokens=message.run_tokens,
            step_tokens=message.step_tokens,
        )


@dataclass(frozen=True)
class KvManifest:
    """What fetch_kv gives under a lease."""

    lease: str
    expires_in_seconds: float  # when the server wrote it
    tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # bf16 or f32
    bytes: int  # of K and V together
    block_tokens: int
    block_hashes: Tuple[bytes, ...]  # 32 bytes each: vLLM's sha256_cbor chain
    holders: Tuple[KvHolder, ...]

    @classmethod
    def from_proto(cls, message) -> "KvManifest":
        hashes = message.block_hashes
        return cls(
            lease=message.lease,
            expires_in_seconds=message.expires_in_seconds,
            tokens=message.tokens,
            layers=message.layers,
            kv_heads=message.kv_heads,
            head_dim=message.head_dim,
            dtype=message.dtype,
            bytes=message.bytes,
            block_tokens=message.block_tokens,
            block_hashes=tuple(hashes[at : at + 32] for at in range(0, len(hashes), 32)),
            holders=tuple(KvHolder.from_proto(holder) for holder in message.holders),
        )


@dataclass(frozen=True)
class KvLease:
    lease: str
    expires_in_seconds: float  # from the answer on


@dataclass(frozen=True, eq=False)
class PrefillResult:
    """The answer to one prompt."""

    request_id: str
    tokens: int
    first_token: int  # greedy
    top: Tuple[Tuple[int, float], ...]  # (token, logit), best first
    plan: PlanSummary
    seconds: Seconds
    comm_bytes: CommBytes
    mfu: float
    logits: Optional[np.ndarray]  # [vocab], f32, where return_logits
    kv: Optional[KvManifest]  # where keep_kv
    cached_tokens: int
    attempts: int
    pack_prompts: int = 0  # that shared its pass over the weights, it included; 0 or 1: none did

    @classmethod
    def from_proto(cls, message) -> "PrefillResult":
        seconds = message.seconds
        return cls(
            request_id=message.request_id,
            tokens=message.tokens,
            first_token=message.first_token,
            top=tuple((best.token, best.logit) for best in message.top),
            plan=PlanSummary.from_proto(message.plan),
            seconds=Seconds(seconds.queue, seconds.prefill, seconds.attention, seconds.comm_wait),
            comm_bytes=CommBytes.from_proto(message.comm_bytes),
            mfu=message.mfu,
            logits=np.array(message.logits, np.float32) if message.logits else None,
            kv=KvManifest.from_proto(message.kv) if message.HasField("kv") else None,
            cached_tokens=message.cached_tokens,
            attempts=message.attempts,
            pack_prompts=message.pack_prompts,
        )


@dataclass(frozen=True)
class Prediction:
    seconds: float
    compute_seconds: float
    comm_wait_seconds: float
    comm_bytes: CommBytes
    peak_bytes: int  # of all ranks: activations and weights
    weight_bytes: int  # of peak_bytes: weights
    weight_seconds: float  # of seconds: what weights that are streamed or sharded add

    @classmethod
    def from_proto(cls, message) -> "Prediction":
        return cls(
            seconds=message.seconds,
            compute_seconds=message.compute_seconds,
            comm_wait_seconds=message.comm_wait_seconds,
            comm_bytes=CommBytes.from_proto(message.comm_bytes),
            peak_bytes=message.peak_bytes,
            weight_bytes=message.weight_bytes,
            weight_seconds=message.weight_seconds,
        )


@dataclass(frozen=True)
class Step:
    """At most one communication, and the blocks (Q#u, KV#v) that are computed meanwhile."""

    comm: str  # q, kv, o or none
    blocks: Tuple[Tuple[int, int], ...]
    spans: int = 1  # steps until the communication has ended, this one included

    @classmethod
    def from_proto(cls, message) -> "Step":
        blocks = tuple((block.u, block.v) for block in message.blocks)
        return cls(comm=message.comm, blocks=blocks, spans=max(1, message.spans))


@dataclass(frozen=True)
class Candidate:
    a: int
    b: int
    heads: int
    ranks: int
    layout: str
    partial_dtype: str
    placement: str
    predicted: Prediction


@dataclass(frozen=True)
class Plan:
    """What a prefill would run."""

    plan: PlanSummary
    steps: Tuple[Step, ...]
    predicted: Prediction
    candidates: Tuple[Candidate, ...]  # best first
    weights: str = ""  # where they are: resident, streamed or sharded

    @classmethod
    def from_proto(cls, message) -> "Plan":
        return cls(
            plan=PlanSummary.from_proto(message.plan),
            steps=tuple(Step.from_proto(step) for step in message.steps),
            predicted=Prediction.from_proto(message.predicted),
            candidates=tuple(
                Candidate(
                    a=other.a,
                    b=other.b,
                    heads=other.heads,
                    ranks=other.ranks,
                    layout=_LAYOUTS.get(other.layout, ""),
                    partial_dtype=other.partial_dtype,
                    placement=other.placement,
                    predicted=Prediction.from_proto(other.predicted),
                )
                for other in message.candidates
            ),
            weights=message.weights,
        )


@dataclass(frozen=True)
class Worker:
    name: str
    host: str
    backend: str
    state: str
    ranks: int
    first_rank: int  # -1: none


@dataclass(frozen=True)
class Link:
    where: str
    bytes_per_second: float
    latency_seconds: float
    source: str


@dataclass(frozen=True)
class PoolRequest:
    """A prefill that was accepted, or whose prompt is being uploaded."""

    id: str
    phase: str  # running, paused (it gave way to another), waiting, uploading
    tokens: int
    elapsed_seconds: float
    predicted_rest_seconds: float  # until its prefill ends
    layers_done: int
    layers: int  # 0: it has not begun
    tenant: str = ""  # whose it is; empty: nobody's


def _state_name(state: int) -> str:
    if state not in pb.PoolStatus.State.values():
        return str(state)
    return pb.PoolStatus.State.Name(state)[len("STATE_") :].lower()


@dataclass(frozen=True)
class Pool:
    """The ranks, the queue and what runs now."""

    state: str  # loading, ready, draining, failed; a number where a newer server has another one
    model: str
    backend: str
    ranks: int
    peak_flops: float
    context_tokens: int
    vocab: int
    queued_requests: int
    queued_tokens: int
    running_request_id: str  # "": idle
    running_layers_done: int
    running_layers: int
    build: str
    workers: Tuple[Worker, ...]
    links: Tuple[Link, ...]
    requests: Tuple[PoolRequest, ...]  # of the caller's tenant, or all

    @classmethod
    def from_proto(cls, message) -> "Pool":
        return cls(
            state=_state_name(message.state),
            model=message.model,
            backend=message.backend,
            ranks=message.ranks,
            peak_flops=message.peak_flops,
            context_tokens=message.context_tokens,
            vocab=message.vocab,
            queued_requests=message.queued_requests,
            queued_tokens=message.queued_tokens,
            running_request_id=message.running_request_id,
            running_layers_done=message.running_layers_done,
            running_layers=message.running_layers,
            build=message.build,
            workers=tuple(
                Worker(other.name, other.host, other.backend, other.state, other.ranks, other.first_rank)
                for other in message.workers
            ),
            links=tuple(
                Link(link.where, link.bytes_per_second, link.latency_seconds, link.source) for link in message.links
            ),
            requests=tuple(
                PoolRequest(
                    id=request.id,
                    phase=request.phase,
                    tokens=request.tokens,
                    elapsed_seconds=request.elapsed_seconds,
                    predicted_rest_seconds=request.predicted_rest_seconds,
                    layers_done=request.layers_done,
                    layers=request.layers,
                    tenant=request.tenant,
                )
                for request in message.requests
            ),
        )
