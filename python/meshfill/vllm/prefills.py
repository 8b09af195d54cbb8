"""Scheduler side: prompts on their way through Meshfill. Nothing here waits for the network but threads of its own.

    UPLOADING ──Accepted──► READY ──loading()──► LOADING ──loaded()──► LOADED: the prefill ends by itself
        │                     │                     │
        │                     │        load_failed()┤
        ├──── refused, away, too late, died ────────┼──► FAILED: one warning; vLLM computes the prompt
        └──── vLLM's request ended ─────────────────┴──► ENDED: the prefill is cancelled

`matched` begins a prefill and tells how it stands; vLLM's scheduler asks again at its next step. A request goes to
Meshfill once: whatever happened, afterwards vLLM computes. The thread of a request sends its prompt, reads the events,
then renews the lease until the request ends, and releases it.
"""

import enum
import logging
import threading
import time
import uuid
from typing import Dict, List, Optional, Sequence

import grpc

from ..client import Client, PrefillCall
from ..errors import MeshfillError, NotFoundError
from ..results import Accepted, PrefillResult
from .settings import Settings

_RELEASE_TIMEOUT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0


class State(enum.Enum):
    UPLOADING = enum.auto()
    READY = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()
    FAILED = enum.auto()
    ENDED = enum.auto()


class _Prefill:
    """One request. Its fields are guarded by Prefills._mutex, but for the constant ones."""

    def __init__(self, request_id: str, accept_deadline: float):
        self.request_id = request_id
        # Not vLLM's alone: a request may come again under its id while the server still ends the first.
        self.meshfill_id = f"vllm-{request_id[:90]}-{uuid.uuid4().hex[:8]}"
        self.accept_deadline = accept_deadline  # time.monotonic()
        self.ended = threading.Event()
        self.thread: Optional[threading.Thread] = None
        self.state = State.UPLOADING
        self.lease = ""
        self.call: Optional[PrefillCall] = None


class Prefills:
    """Called by vLLM's scheduler, from one thread. No call but close() blocks."""

    def __init__(self, settings: Settings, client: Client, log: logging.Logger):
        self._settings = settings
        self._client = client
        self._log = log
        self._mutex = threading.Lock()
        self._prefills: Dict[str, _Prefill] = {}  # guarded by _mutex; by vLLM's request id
        self._stopped_loads: List[str] = []  # guarded by _mutex; LOADING ones that failed or ended
        self._paused_until = 0.0  # guarded by _mutex; time.monotonic()

    def matched(
        self, request_id: str, prompt: Sequence[int], computed_tokens: int, *, cache_salt: str = "", priority: int = 0
    ) -> Optional[int]:
        """Tokens after the computed ones that can be loaded; None: not known yet, ask again; 0: vLLM computes.

        All of a prompt but its last token is loaded: vLLM computes that one, for its logits.
        """
        loadable = len(prompt) - 1 - computed_tokens
        with self._mutex:
            prefill = self._prefills.get(request_id)
            if prefill is None:
                if len(prompt) - computed_tokens < self._settings.min_tokens or loadable <= 0:
                    return 0
                if time.monotonic() < self._paused_until:
                    return 0
                self._begin(request_id, list(prompt), cache_salt, priority)
                return None
            if prefill.state == State.UPLOADING:
                if time.monotonic() < prefill.accept_deadline:
                    return None
                seconds = self._settings.accept_timeout_seconds
                why = f"server {self._settings.server} did not accept the prompt within {seconds:g} s"
                self._fail(prefill, why, self._settings.retry_seconds)
                return 0
            if prefill.state == State.READY and loadable > 0:
                return loadable
        return 0

    def loading(self, request_id: str) -> str:
        """The workers are told to load what `matched` has promised; the lease. It may have failed since then."""
        with self._mutex:
            prefill = self._prefills[request_id]
            if prefill.state == State.READY:
                prefill.state = State.LOADING
            else:
                self._stopped_loads.append(request_id)
            return prefill.lease

    def load_failed(self, request_id: str, why: str) -> None:
        """A worker could not load. Nothing more is done where that follows from a failure that is known."""
        with self._mutex:
            prefill = self._prefills.get(request_id)
            if prefill is not None:
                self._fail(prefill, why)

    def loaded(self, request_id: str) -> None:
        """All workers have loaded, or given up: the lease is released, after the result.

        K and V are there before it: the last layer's attention is yet to come. A prefill that was cancelled then would leave
        nothing in the server's cache for the prompts to come.
        """
        with self._mutex:
            prefill = self._prefills.get(request_id)
            if prefill is not None and prefill.state == State.LOADING:
                prefill.state = State.LOADED
                prefill.ended.set()
            else:
                self._end(prefill)

    def forget(self, request_id: str) -> None:
        """vLLM's request has ended, cancelled ones too: so do its prefill and its lease."""
        with self._mutex:
            prefill = self._prefills.pop(request_id, None)
            if prefill is not None and prefill.state == State.LOADING:
                self._stopped_loads.append(request_id)
                prefill.state = State.ENDED
            self._end(prefill)

    def take_stopped_loads(self) -> List[str]:
        """Requests whose load the workers shall end, each once."""
        with self._mutex:
            stopped, self._stopped_loads = self._stopped_loads, []
        return stopped

    @property
    def waiting(self) -> bool:
        """Whether a request waits for Meshfill."""
        with self._mutex:
            return any(prefill.state in (State.UPLOADING, State.LOADING) for prefill in self._prefills.values())

    def close(self) -> None:
        """Ends all, and waits a little for their leases' release: the only call that may take time."""
        with self._mutex:
            ending, self._prefills = list(self._prefills.values()), {}
            for prefill in ending:
                self._end(prefill)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for prefill in ending:
            prefill.thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, request_id: str, prompt: List[int], cache_salt: str, priority: int) -> None:
        prefill = _Prefill(request_id, time.monotonic() + self._settings.accept_timeout_seconds)
        self._prefills[request_id] = prefill
        prefill.thread = threading.Thread(
            target=self._run,
            args=(prefill, prompt, cache_salt, priority),
            name=f"meshfill-{request_id[:40]}",
            daemon=True,
        )
        prefill.thread.start()

    def _end(self, prefill: Optional[_Prefill]) -> None:
        """With _mutex held. The request's thread does the rest."""
        if prefill is None:
            return
        prefill.ended.set()
        if prefill.call is not None and prefill.state != State.LOADED:
            prefill.call.cancel()

    def _fail(self, prefill: _Prefill, why: str, pause_seconds: float = 0.0) -> None:
        """With _mutex held. One warning for a request, and none where vLLM has ended it."""
        if prefill.state in (State.FAILED, State.LOADED, State.ENDED) or prefill.ended.is_set():
            return
        if prefill.state == State.LOADING:
            self._stopped_loads.append(prefill.request_id)
        prefill.state = State.FAILED
        self._log.warning("Meshfill: %s; vLLM computes request %s itself", why, prefill.request_id)
        self._paused_until = max(self._paused_until, time.monotonic() + min(pause_seconds, _LONGEST_PAUSE_SECONDS))
        self._end(prefill)

    def _pause_after(self, error: MeshfillError) -> float:
        """Seconds for which no prompt is sent. A full server says how long; one that is away is asked again later."""
        if error.retry_after is not None:
            return error.retry_after
        away = error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return self._settings.retry_seconds if away else 0.0

    def _run(self, prefill: _Prefill, prompt: List[int], cache_salt: str, priority: int) -> None:
        """The thread of a request."""
        try:
            if self._compute(prefill, prompt, cache_salt, priority):
                self._renew(prefill)
        except MeshfillError as error:
            with self._mutex:
                self._fail(prefill, str(error), self._pause_after(error))
        except Exception as error:  # A bug of ours costs the speed of one request, never its answer.
            with self._mutex:
                self._fail(prefill, f"{type(error).__name__}: {error}")
        self._release(prefill)

    def _compute(self, prefill: _Prefill, prompt: List[int], cache_salt: str, priority: int) -> bool:
        """Until the result. False: vLLM ended the request before. MeshfillError: no result."""
        call = self._client.start_prefill(
            prompt,
            request_id=prefill.meshfill_id,
            keep_kv=True,
            lease_seconds=self._settings.lease_seconds,
            cache_salt=cache_salt,
            priority=priority,
            timeout=self._settings.timeout_seconds,
        )
        with self._mutex:
            prefill.call = call
            if prefill.ended.is_set():
                call.cancel()
        result = None
        for event in call:
            if isinstance(event, Accepted):
                if not event.kv_lease:
                    raise MeshfillError(f"server {self._client.address} gave no lease; it is too old for this connector")
                with self._mutex:
                    prefill.lease = event.kv_lease
                    if prefill.state == State.UPLOADING:
                        prefill.state = State.READY
            elif isinstance(event, PrefillResult):
                result = event
        if result is None and not prefill.ended.is_set():
            raise MeshfillError(f"server {self._client.address} ended the call without a result; see its log")
        return result is not None

    def _renew(self, prefill: _Prefill) -> None:
        """Until the request ends. NotFoundError: the lease is gone."""
        wait = self._settings.lease_seconds / 3
        while not prefill.ended.wait(wait):
            try:
                wait = self._client.renew_kv(prefill.lease, self._settings.lease_seconds).expires_in_seconds / 3
            except NotFoundError:
                raise
            except MeshfillError as error:  # Whoever loads meets it, too; the lease may outlive it.
                self._log.debug("Meshfill: %s", error)
                wait = min(max(wait / 4, 0.1), 1.0)

    def _release(self, prefill: _Prefill) -> None:
        prefill.ended.wait()
        if not prefill.lease:
            return
        try:
            self._client.release_kv(prefill.lease, timeout=_RELEASE_TIMEOUT_SECONDS)
        except Exception as error:  # It lapses by itself; a closed client is no error here either.
            self._log.debug("Meshfill: lease %s lapses by itself: %s", prefill.lease, error)
