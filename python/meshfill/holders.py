"""Which part of a range each holder of a manifest can give.

Four ranks with stripes of 64 tokens: holder 1 has the runs [64, 128), [320, 384) … of every layer (step 256).
A holder that is asked for a range answers with the tokens of it that it has, a part never crossing the end of a run.
"""

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Tuple

from .cursor import FetchCursor
from .errors import InvalidArgumentError
from .kv import KvRange, make_range
from .results import KvHolder, KvManifest


@dataclass(frozen=True)
class HolderShare:
    address: str
    range: KvRange  # its layers and heads, and all tokens that are wanted
    runs: Tuple[Tuple[int, int], ...]  # [begin, end) of the tokens that it has of them


def token_runs(holder: KvHolder, first: int, end: int, prompt_tokens: int) -> List[Tuple[int, int]]:
    """The holder's runs cut to [first, end), in order; empty ones left out. Adjacent ones are joined.

    A server's numbers are unsigned; those of a manifest that a caller has made need not be.
    """
    if holder.step_tokens < 0:
        raise InvalidArgumentError(f"the holder {holder.address} has runs at steps of {holder.step_tokens} tokens; give 0 or more")
    runs: List[Tuple[int, int]] = []
    begin = holder.first_token
    if holder.step_tokens and begin < first:
        begin += (first - begin) // holder.step_tokens * holder.step_tokens
    while begin < min(end, prompt_tokens) and holder.run_tokens:
        low, high = max(begin, first), min(begin + holder.run_tokens, end, prompt_tokens)
        if low < high:
            if runs and runs[-1][1] == low:
                runs[-1] = (runs[-1][0], high)
            else:
                runs.append((low, high))
        if not holder.step_tokens:
            break
        begin += holder.step_tokens
    return runs


def holder_shares(manifest: KvManifest, wanted: KvRange) -> List[HolderShare]:
    """Shares that together are the wanted range; [] where holders cannot be read directly.

    They cannot where an address is missing, where a page would lie on two holders, or where they do not have each token,
    layer and head exactly once.
    """
    # A process with several ranks has several entries, and answers with the tokens of all of them.
    processes: Dict[Tuple[str, int, int, int, int], List[Tuple[int, int]]] = {}
    for holder in manifest.holders:
        part = (holder.address, holder.first_layer, holder.layers, holder.first_head, holder.heads)
        runs = token_runs(holder, wanted.first_token, wanted.end_token, manifest.tokens)
        processes.setdefault(part, []).extend(runs)
    shares: List[HolderShare] = []
    for (address, first_layer, layer_count, first_head, head_count), found in processes.items():
        layers = _overlap(first_layer, layer_count, wanted.first_layer, wanted.layers)
        heads = _overlap(first_head, head_count, wanted.first_head, wanted.heads)
        runs = _joined(found)
        if not layers[1] or not heads[1] or not runs:
            continue
        if not address:
            return []
        if wanted.layout != "tokens":
            # A share of some of the heads is no run of bytes in a page.
            if heads[1] != wanted.heads:
                return []
            if any(low % wanted.page_tokens or (high % wanted.page_tokens and high != manifest.tokens) for low, high in runs):
                return []
        share = make_range(
            wanted.shape,
            first_token=wanted.first_token,
            tokens=wanted.tokens,
            first_layer=layers[0],
            layers=layers[1],
            first_head=heads[0],
            heads=heads[1],
            layout=wanted.layout,
            page_tokens=wanted.page_tokens,
        )
        shares.append(HolderShare(address, share, tuple(runs)))
    return shares if _covers(shares, wanted) else []


def _covers(shares: List[HolderShare], wanted: KvRange) -> bool:
    """Whether each token of each wanted layer and head is in exactly one share.

    That changes where a share begins or ends: it is asked at those layers and heads alone.
    """
    parts = [share.range for share in shares]
    layers = {wanted.first_layer, *(edge for part in parts for edge in (part.first_layer, part.end_layer))} - {wanted.end_layer}
    heads = {wanted.first_head, *(edge for part in parts for edge in (part.first_head, part.end_head))} - {wanted.end_head}

    def runs(layer: int, head: int) -> Iterable[Tuple[int, int]]:
        for share, part in zip(shares, parts):
            if part.first_layer <= layer < part.end_layer and part.first_head <= head < part.end_head:
                yield from share.runs

    whole = [(wanted.first_token, wanted.end_token)]
    return all(_joined(runs(layer, head)) == whole for layer in layers for head in heads)


def rest_of(wanted: KvRange, cursors: List[FetchCursor]) -> Optional[KvRange]:
    """From the first layer on that one of the shares lacks, with all tokens and heads; None: none lacks anything.

    Shares that broke off lack stripes, and one call gives a range without gaps: what others have of it comes again.
    """
    first_layer = min(wanted.end_layer if cursor.done else cursor.layer for cursor in cursors)
    if first_layer == wanted.end_layer:
        return None
    return make_range(
        wanted.shape,
        first_token=wanted.first_token,
        tokens=wanted.tokens,
        first_layer=first_layer,
        layers=wanted.end_layer - first_layer,
        first_head=wanted.first_head,
        heads=wanted.heads,
        layout=wanted.layout,
        page_tokens=wanted.page_tokens,
    )


def _joined(runs: Iterable[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """In order, adjacent ones as one. Where two have a token in common, they stay two."""
    joined: List[Tuple[int, int]] = []
    for low, high in sorted(runs):
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def _overlap(first: int, count: int, other_first: int, other_count: int) -> Tuple[int, int]:
    """(first, count) of what two ranges share; the count is 0 where they share nothing."""
    begin = max(first, other_first)
    return begin, max(0, min(first + count, other_first + other_count) - begin)
