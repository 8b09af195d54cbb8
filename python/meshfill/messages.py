"""Requests and events as messages: what both clients send and get."""

from typing import Iterable, Iterator, Optional, Sequence, Tuple, TypedDict, Union

import numpy as np

from .arguments import text, whole
from .results import LAYOUT_NUMBERS, Accepted, PrefillResult, Progress
from .stubs import pb

# Token ids, or text where the client has a tokenizer.
Prompt = Union[str, Iterable[int]]

Tile = Union[None, str, Tuple[int, int]]

# A varint has at most 5 bytes: a chunk stays below 64 KiB, the least that limits.max_message_bytes of a server may be.
CHUNK_TOKENS = 12288


class PrefillOptions(TypedDict, total=False):
    """What a prefill takes besides its prompt: see Client.start_prefill."""

    request_id: str
    top_k: int
    return_logits: bool
    tile: Tile
    heads: int
    layout: Optional[str]
    stripe: int
    priority: int
    tenant: Optional[str]
    keep_kv: bool
    lease_seconds: int
    ignore_cache: bool
    cache_salt: str
    timeout: Optional[float]


class RangeOptions(TypedDict, total=False):
    """Which part of K and V, and how it shall lie: see Client.fetch_kv."""

    first_token: int
    tokens: int
    first_layer: int
    layers: int
    first_head: int
    heads: int
    layout: str
    page_tokens: int


def token_array(ids: Union[Sequence[int], np.ndarray, Iterable[int]]) -> np.ndarray:
    """[tokens], uint32. ValueError: no ids, not whole numbers, or outside of 0 to 2³²−1."""
    if not hasattr(ids, "__len__") and not hasattr(ids, "__iter__"):
        raise ValueError(f"a prompt is a sequence of at least one token id, not {ids!r}")
    array = np.asarray(ids if hasattr(ids, "__len__") else list(ids))
    if array.ndim != 1 or array.size == 0:
        raise ValueError("a prompt is a sequence of at least one token id")
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are whole numbers, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 0xFFFFFFFF:
        raise ValueError(f"token ids are 0 to {0xFFFFFFFF}; {low if low < 0 else high} is not")
    return array.astype(np.uint32)


def plan_options(tile: Tile, heads: int, layout: Optional[str], stripe: int) -> Optional[pb.PlanOptions]:
    """None where nothing is overridden. tile: (a, b) or "AxB". ValueError: neither, an unknown layout, no whole numbers."""
    heads, stripe = whole("heads", heads), whole("stripe", stripe)
    if tile is None and not heads and layout is None and not stripe:
        return None
    options = pb.PlanOptions(heads=heads, stripe=stripe)
    if layout is not None:
        if not isinstance(layout, str) or layout not in LAYOUT_NUMBERS:
            raise ValueError(f"layout {layout!r} is none of {', '.join(LAYOUT_NUMBERS)}")
        options.layout = LAYOUT_NUMBERS[layout]
    if tile is not None:
        try:
            a, b = (int(side) for side in tile.split("x")) if isinstance(tile, str) else tile
            options.tile.a, options.tile.b = whole("tile", a), whole("tile", b)
        except (ValueError, TypeError):
            raise ValueError(f"tile {tile!r} is not AxB, as in 2x2") from None
    return options


def plan_request(
    token_count: int, model: str, tile: Tile, heads: int, layout: Optional[str], stripe: int
) -> pb.PlanRequest:
    """ValueError: bad arguments."""
    tokens = whole("token_count", token_count, 1, 2**63 - 1)
    return pb.PlanRequest(token_count=tokens, plan=plan_options(tile, heads, layout, stripe), model=model)


def prefill_header(
    token_count: int,
    *,
    request_id: str,
    model: str,
    priority: int,
    tenant: str,
    top_k: int,
    return_logits: bool,
    plan: Optional[pb.PlanOptions],
    keep_kv: bool,
    lease_seconds: int,
    ignore_cache: bool,
    cache_salt: str,
) -> pb.PrefillHeader:
    """ValueError: bad arguments."""
    header = pb.PrefillHeader(
        request_id=text("request_id", request_id),
        model=model,
        token_count=token_count,
        priority=whole("priority", priority, -(2**31), 2**31 - 1),
        tenant=text("tenant", tenant),
        top_k=whole("top_k", top_k),
        return_logits=bool(return_logits),
        cache_salt=text("cache_salt", cache_salt),
        plan=plan,
    )
    if whole("lease_seconds", lease_seconds) and not keep_kv:
        raise ValueError("lease_seconds is for the K and V that are kept; give keep_kv=True, too")
    if keep_kv or ignore_cache:
        header.kv.keep = bool(keep_kv)
        header.kv.lease_seconds = lease_seconds
        header.kv.ignore_cache = bool(ignore_cache)
    return header


def prefill_requests(header: pb.PrefillHeader, ids: np.ndarray) -> Iterator[pb.PrefillRequest]:
    """The header, then the ids in chunks."""
    yield pb.PrefillRequest(header=header)
    for at in range(0, len(ids), CHUNK_TOKENS):
        yield pb.PrefillRequest(tokens=pb.TokenChunk(ids=ids[at : at + CHUNK_TOKENS].tolist()))


def event_value(event) -> Union[None, Accepted, Progress, PrefillResult]:
    """The value of a PrefillEvent; None for kinds that this client does not know."""
    kind = event.WhichOneof("event")
    if kind == "accepted":
        return Accepted.from_proto(event.accepted)
    if kind == "progress":
        return Progress.from_proto(event.progress)
    return PrefillResult.from_proto(event.result) if kind == "result" else None
