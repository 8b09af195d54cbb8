"""Requests and events as messages: what both clients send and get."""

from typing import Iterable, Iterator, Optional, Sequence, Tuple, Union

import numpy as np

from .results import LAYOUT_NUMBERS, Accepted, PrefillResult, Progress
from .stubs import pb

# Token ids, or text where the client has a tokenizer.
Prompt = Union[str, Iterable[int]]

# A varint has at most 5 bytes: a chunk stays far below gRPC's default limit of 4 MiB a message.
CHUNK_TOKENS = 65536


def token_array(ids: Union[Sequence[int], np.ndarray, Iterable[int]]) -> np.ndarray:
    """[tokens], uint32. ValueError: no ids, not whole numbers, or outside of 0 to 2³²−1."""
    array = np.asarray(ids if hasattr(ids, "__len__") else list(ids))
    if array.ndim != 1 or array.size == 0:
        raise ValueError("a prompt is a sequence of at least one token id")
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are whole numbers, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 0xFFFFFFFF:
        raise ValueError(f"token ids are 0 to {0xFFFFFFFF}; {low if low < 0 else high} is not")
    return array.astype(np.uint32)


def plan_options(
    tile: Union[None, str, Tuple[int, int]], heads: int, layout: Optional[str], stripe: int
) -> Optional[pb.PlanOptions]:
    """None where nothing is overridden. tile: (a, b) or "AxB". ValueError: neither, or an unknown layout."""
    if tile is None and not heads and layout is None and not stripe:
        return None
    options = pb.PlanOptions(heads=heads, stripe=stripe)
    if layout is not None:
        if layout not in LAYOUT_NUMBERS:
            raise ValueError(f"layout {layout!r} is none of {', '.join(LAYOUT_NUMBERS)}")
        options.layout = LAYOUT_NUMBERS[layout]
    if tile is not None:
        try:
            a, b = (int(side) for side in (tile.split("x") if isinstance(tile, str) else tile))
        except (ValueError, TypeError):
            raise ValueError(f"tile {tile!r} is not AxB, as in 2x2") from None
        options.tile.a, options.tile.b = a, b
    return options


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
    header = pb.PrefillHeader(
        request_id=request_id,
        model=model,
        token_count=token_count,
        priority=priority,
        tenant=tenant,
        top_k=top_k,
        return_logits=return_logits,
        cache_salt=cache_salt,
        plan=plan,
    )
    if keep_kv or ignore_cache:
        header.kv.keep = keep_kv
        header.kv.lease_seconds = lease_seconds
        header.kv.ignore_cache = ignore_cache
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
