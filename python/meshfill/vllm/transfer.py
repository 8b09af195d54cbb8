"""Worker side: K and V from Meshfill into pages, in threads of its own, layer by layer as Meshfill computes them.

    start(load) ─► a thread: fetch ─► verify ─► Pages.write(layer, slots, k, v) … ─► Pages.flush()
    stop(id)    ─► the thread ends early; the load counts as failed
    take_finished() ─► requests whose load ended since the last call, and why some of them failed

Every load that was started is reported by take_finished exactly once, whatever happens to it. Nothing here warns: several
workers may fail for one reason, and the scheduler's side knows which request it concerns.
"""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Dict, Optional, Protocol, Set, Tuple

import numpy as np

from ..client import Client
from ..deadlines import deadline_in, seconds_left
from ..errors import MeshfillError
from ..fetch import KvFetch
from ..kv import KvShape


@dataclass(frozen=True)
class KvLoad:
    """A request's K and V that workers shall load. Sent by the scheduler to every worker."""

    request_id: str
    lease: str
    prompt_tokens: int
    first_token: int  # a multiple of the page
    tokens: int
    block_ids: Tuple[int, ...]  # vLLM's pages of the prompt, from its token 0 on
    timeout_seconds: float  # what is left for the load, when the workers are told


@dataclass(frozen=True)
class WorkerPart:
    """What a worker has of the model: a range of layers, and a range of KV heads."""

    model_layers: int
    first_layer: int
    layers: int
    model_kv_heads: int
    first_head: int
    heads: int
    head_dim: int
    dtype: str  # bf16 or f32

    def shape(self, prompt_tokens: int) -> KvShape:
        return KvShape(prompt_tokens, self.model_layers, self.model_kv_heads, self.head_dim, self.dtype)


class Pages(Protocol):
    """A worker's pages. write and flush are called by loading threads, several at once."""

    page_tokens: int

    def fence(self) -> Any:
        """Called by vLLM's thread when a load begins: a mark that writes have to come after."""

    def begin(self, fence: Any) -> Any:
        """Once a load, in its thread; a context in which it writes."""

    def write(self, layer: int, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """slots: [tokens], int64, page · page_tokens + offset. k, v: [tokens, heads, head_dim], bits of bf16, or f32."""

    def flush(self) -> None:
        """Returns when all writes of this thread are done."""


def page_slots(load: KvLoad, page_tokens: int, first_token: int, tokens: int) -> np.ndarray:
    """[tokens], int64: where the tokens from first_token on lie."""
    at = np.arange(first_token, first_token + tokens, dtype=np.int64)
    return np.asarray(load.block_ids, np.int64)[at // page_tokens] * page_tokens + at % page_tokens


class KvLoader:
    """Loads of one worker. Called by vLLM's thread; no call but wait() blocks."""

    def __init__(self, client: Client, part: WorkerPart, pages: Pages, *, loads: int, log: logging.Logger):
        self._client = client
        self._part = part
        self._pages = pages
        self._log = log
        self._threads = ThreadPoolExecutor(max(1, loads), thread_name_prefix="meshfill-load")
        self._changed = threading.Condition()
        self._active: Dict[str, Optional[KvFetch]] = {}  # guarded by _changed; None: not begun
        self._stopped: Set[str] = set()  # guarded by _changed; a subset of _active
        self._finished: Set[str] = set()  # guarded by _changed
        self._failed: Dict[str, str] = {}  # guarded by _changed; why, of some of _finished

    def start(self, load: KvLoad) -> None:
        with self._changed:
            self._active[load.request_id] = None
        self._threads.submit(self._run, load, self._pages.fence(), deadline_in(load.timeout_seconds))

    def stop(self, request_id: str) -> None:
        """Nothing happens where the load has ended."""
        with self._changed:
            if request_id not in self._active:
                return
            self._stopped.add(request_id)
            fetch = self._active[request_id]
        if fetch is not None:
            fetch.cancel()

    def take_finished(self) -> Tuple[Set[str], Dict[str, str]]:
        """(request ids, why some of them failed) since the last call."""
        with self._changed:
            taken = self._finished, self._failed
            self._finished, self._failed = set(), {}
        return taken

    def wait(self, seconds: float) -> None:
        """Until a load has finished, at most so long."""
        with self._changed:
            if not self._finished:
                self._changed.wait(seconds)

    def close(self) -> None:
        """Ends all loads, and waits for their threads: afterwards nothing is written."""
        with self._changed:
            active = list(self._active)
        for request_id in active:
            self.stop(request_id)
        self._threads.shutdown(wait=True)

    def _run(self, load: KvLoad, fence: Any, deadline: Optional[float]) -> None:
        why = ""
        try:
            with self._pages.begin(fence):
                if not self._load(load, deadline):
                    why = "the load was stopped"
        except MeshfillError as error:
            why = str(error)
        except Exception as error:  # A bug of ours costs the speed of one request, never its answer.
            why = f"{type(error).__name__}: {error}"
        if why:
            self._log.info("Meshfill: %s; this worker has not loaded request %s", why, load.request_id)
        with self._changed:
            if why:
                self._failed[load.request_id] = why
            self._finished.add(load.request_id)
            self._active.pop(load.request_id, None)
            self._stopped.discard(load.request_id)
            self._changed.notify_all()

    def _load(self, load: KvLoad, deadline: Optional[float]) -> bool:
        """False: stopped before it began. MeshfillError: K and V are not whole."""
        part = self._part
        fetch = self._client.fetch_kv(
            load.lease,
            shape=part.shape(load.prompt_tokens),
            first_token=load.first_token,
            tokens=load.tokens,
            first_layer=part.first_layer,
            layers=part.layers,
            first_head=part.first_head,
            heads=part.heads,
            timeout=seconds_left(deadline),
        )
        with self._changed:
            if load.request_id in self._stopped:
                return False
            self._active[load.request_id] = fetch
        try:
            for piece in fetch:
                slots = page_slots(load, self._pages.page_tokens, piece.first_token, piece.tokens)
                self._pages.write(piece.layer, slots, piece.k, piece.v)
        finally:
            fetch.cancel()
            self._pages.flush()
        return True
