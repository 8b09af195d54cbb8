"""Scheduler side: prompts on their way through Meshfill. Nothing here waits for the network but threads of its own.

    HELD ──room──► UPLOADING ──Accepted──► QUEUED ──a layer is done──► READY ──loading()──► LOADING ──loaded()──► LOADED:
      │               │                       │                          │                     │     the prefill ends by itself
      │               │                       │                          │        load_failed()┤
      ├───────────────┴─ refused, away, too late, died ──────────────────┴─────────────────────┼──► FAILED: one warning;
      │                                                                                        │     vLLM computes the prompt
      └─ vLLM's request ended ─────────────────────────────────────────────────────────────────┴──► ENDED: it is cancelled

`matched` begins a prefill and tells how it stands; vLLM's scheduler asks again at its next step. A request goes to
Meshfill once: whatever happened, afterwards vLLM computes. The thread of a request sends its prompt, reads the events,
then renews the lease until the request ends, and releases it. There are at most `prefills` of them; beyond that, requests
are held. A load begins with the first layer: before, it would take a worker's thread, and pages, from prompts that run.
"""

import enum
import logging
import threading
import time
import uuid
from typing import Dict, List, Optional, Sequence, Tuple

import grpc

from ..client import Client
from ..errors import MeshfillError, NotFoundError
from ..leases import Renewals
from ..prefill_call import PrefillCall
from ..results import Accepted, PrefillResult, Progress
from .pauses import Pauses
from .settings import Settings

_RELEASE_TIMEOUT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0


class State(enum.Enum):
    HELD = enum.auto()
    UPLOADING = enum.auto()
    QUEUED = enum.auto()
    READY = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()
    FAILED = enum.auto()
    ENDED = enum.auto()


_WAITING = (State.HELD, State.UPLOADING, State.QUEUED, State.LOADING)


class _Prefill:
    """One request. Its fields are guarded by Prefills._mutex, but for the constant ones."""

    def __init__(self, request_id: str, tokens: int, accept_deadline: float):
        self.request_id = request_id
        self.tokens = tokens
        # Not vLLM's alone: a request may come again under its id while the server still ends the first.
        self.meshfill_id = f"vllm-{request_id[:90]}-{uuid.uuid4().hex[:8]}"
        self.accept_deadline = accept_deadline  # time.monotonic()
        self.deadline = 0.0  # of the prefill with its transfer, time.monotonic(); set when it begins
        self.ended = threading.Event()
        self.thread: Optional[threading.Thread] = None
        self.state = State.HELD
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
        self._threads = 0  # guarded by _mutex; of requests, also of those that vLLM has ended
        self._pauses = Pauses()  # guarded by _mutex

    def matched(
        self, request_id: str, prompt: Sequence[int], computed_tokens: int, *, cache_salt: str = "", priority: int = 0
    ) -> Optional[int]:
        """Tokens after the computed ones that can be loaded; None: not known yet, ask again; 0: vLLM computes.

        All of a prompt but its last token is loaded: vLLM computes that one, for its logits.
        """
        loadable = len(prompt) - 1 - computed_tokens
        with self._mutex:
            prefill = self._prefills.get(request_id)
            now = time.monotonic()
            if prefill is None:
                if len(prompt) - computed_tokens < self._settings.min_tokens or loadable <= 0:
                    return 0
                if self._pauses.holds(len(prompt), now):
                    return 0
                accept_deadline = now + self._settings.accept_timeout_seconds
                prefill = self._prefills[request_id] = _Prefill(request_id, len(prompt), accept_deadline)
            if prefill.state == State.HELD:
                if self._pauses.holds(prefill.tokens, now):
                    prefill.state = State.FAILED  # the warning was of the prompt that was refused
                    return 0
                if self._threads < max(1, self._settings.prefills):
                    self._begin(prefill, list(prompt), cache_salt, priority)
                    return None
            if prefill.state in (State.HELD, State.UPLOADING):
                if now < prefill.accept_deadline:
                    return None
                self._fail_unaccepted(prefill)
                return 0
            if prefill.state == State.QUEUED:
                return None
            if prefill.state == State.READY and loadable > 0:
                return loadable
        return 0

    def loading(self, request_id: str) -> Tuple[str, float]:
        """The workers are told to load what `matched` has promised. It may have failed since then.

        (its lease, seconds that are left for the load)
        """
        with self._mutex:
            prefill = self._prefills[request_id]
            if prefill.state == State.READY:
                prefill.state = State.LOADING
            else:
                self._stopped_loads.append(request_id)
            return prefill.lease, max(0.0, prefill.deadline - time.monotonic())

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
            return any(prefill.state in _WAITING for prefill in self._prefills.values())

    def close(self) -> None:
        """Ends all, and waits a little for their leases' release: the only call that may take time."""
        with self._mutex:
            ending, self._prefills = list(self._prefills.values()), {}
            for prefill in ending:
                self._end(prefill)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for prefill in ending:
            if prefill.thread is not None:
                prefill.thread.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, prefill: _Prefill, prompt: List[int], cache_salt: str, priority: int) -> None:
        """With _mutex held."""
        now = time.monotonic()
        prefill.state = State.UPLOADING
        prefill.accept_deadline = now + self._settings.accept_timeout_seconds
        prefill.deadline = now + self._settings.timeout_seconds
        prefill.thread = threading.Thread(
            target=self._run,
            args=(prefill, prompt, cache_salt, priority),
            name=f"meshfill-{prefill.request_id[:40]}",
            daemon=True,
        )
        self._threads += 1
        prefill.thread.start()

    def _fail_unaccepted(self, prefill: _Prefill) -> None:
        """With _mutex held."""
        seconds = self._settings.accept_timeout_seconds
        if prefill.state == State.HELD:
            others = max(1, self._settings.prefills)
            self._fail(prefill, f"{others} prompts (prefills) were on their way to the server for {seconds:g} s")
            return
        why = f"server {self._settings.server} did not accept the prompt within {seconds:g} s"
        self._fail(prefill, why, self._settings.retry_seconds)

    def _end(self, prefill: Optional[_Prefill]) -> None:
        """With _mutex held. The request's thread does the rest."""
        if prefill is None:
            return
        prefill.ended.set()
        if prefill.call is not None and prefill.state != State.LOADED:
            prefill.call.cancel()

    def _fail(self, prefill: _Prefill, why: str, pause_seconds: float = 0.0, least_tokens: int = 0) -> None:
        """With _mutex held. One warning for a request, and none where vLLM has ended it.

        For pause_seconds no prompt of least_tokens or more is sent.
        """
        if prefill.state in (State.FAILED, State.LOADED, State.ENDED) or prefill.ended.is_set():
            return
        if prefill.state == State.LOADING:
            self._stopped_loads.append(prefill.request_id)
        prefill.state = State.FAILED
        self._log.warning("Meshfill: %s; vLLM computes request %s itself", why, prefill.request_id)
        self._pauses.add(pause_seconds, least_tokens, time.monotonic())
        self._end(prefill)

    def _fail_with(self, prefill: _Prefill, error: MeshfillError) -> None:
        """A full server says for how long; shorter prompts may find room. One that is away is asked again later."""
        with self._mutex:
            if error.retry_after is not None:
                self._fail(prefill, str(error), error.retry_after, prefill.tokens)
                return
            away = error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            self._fail(prefill, str(error), self._settings.retry_seconds if away else 0.0)

    def _run(self, prefill: _Prefill, prompt: List[int], cache_salt: str, priority: int) -> None:
        """The thread of a request."""
        try:
            if self._compute(prefill, prompt, cache_salt, priority):
                self._renew(prefill)
        except MeshfillError as error:
            self._fail_with(prefill, error)
        except Exception as error:  # A bug of ours costs the speed of one request, never its answer.
            with self._mutex:
                self._fail(prefill, f"{type(error).__name__}: {error}")
        self._release(prefill)
        with self._mutex:
            self._threads -= 1

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
        result, pieces = None, 1
        for event in call:
            if isinstance(event, Accepted):
                if not event.kv_lease:
                    raise MeshfillError(f"server {self._client.address} gave no lease; it is too old for this connector")
                pieces = event.plan.pieces
                with self._mutex:
                    prefill.lease = event.kv_lease
                    self._advance(prefill, State.UPLOADING, State.QUEUED)
            elif isinstance(event, Progress):
                # Of a prompt in pieces nothing is whole before the last one runs.
                if event.layers_done * pieces > event.layers * (pieces - 1):
                    with self._mutex:
                        self._advance(prefill, State.QUEUED, State.READY)
            elif isinstance(event, PrefillResult):
                result = event
                with self._mutex:
                    self._advance(prefill, State.QUEUED, State.READY)
        if result is None and not prefill.ended.is_set():
            raise MeshfillError(f"server {self._client.address} ended the call without a result; see its log")
        return result is not None

    @staticmethod
    def _advance(prefill: _Prefill, before: State, after: State) -> None:
        """With _mutex held. Nothing where it has failed or ended."""
        if prefill.state == before:
            prefill.state = after

    def _renew(self, prefill: _Prefill) -> None:
        """Until the request ends. NotFoundError: the lease is gone."""
        seconds = self._settings.lease_seconds
        renewals = Renewals(seconds, wait=seconds / 3)
        while not prefill.ended.wait(renewals.wait):
            try:
                renewed = self._client.renew_kv(prefill.lease, seconds, timeout=renewals.timeout)
                renewals.renewed(renewed.expires_in_seconds)
            except NotFoundError:
                raise
            except MeshfillError as error:  # Whoever loads meets it, too; the lease may outlive it.
                self._log.debug("Meshfill: %s", error)
                renewals.failed()

    def _release(self, prefill: _Prefill) -> None:
        prefill.ended.wait()
        if not prefill.lease:
            return
        try:
            self._client.release_kv(prefill.lease, timeout=_RELEASE_TIMEOUT_SECONDS)
        except Exception as error:  # It lapses by itself; a closed client is no error here either.
            self._log.debug("Meshfill: lease %s lapses by itself: %s", prefill.lease, error)
