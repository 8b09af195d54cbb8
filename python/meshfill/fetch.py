"""A fetch of K and V by the blocking client: calls one after the other, until all parts are there."""

import threading
from typing import Iterator, List, Optional

import grpc

from .cursor import FetchCursor
from .deadlines import seconds_left
from .errors import CancelledError, MeshfillError, from_rpc_error
from .kv import KvPart


class KvFetch:
    """A fetch under way: an iterator of KvPart for one thread. Any thread may cancel it.

    One that is dropped before its end, as by a `break` from its loop, ends, too.
    """

    def __init__(self, calls: "FetchCalls"):
        self._calls = calls
        self._parts = calls.parts()

    def __iter__(self) -> Iterator[KvPart]:
        return self

    def __next__(self) -> KvPart:
        return next(self._parts)

    def cancel(self) -> None:
        """Ends the fetch: its reader gets a CancelledError."""
        self._calls.cancel()


class FetchCalls:
    """The calls of a fetch, one after the other. They do not refer to the KvFetch: nothing but its reader keeps it."""

    def __init__(
        self, stub, address: str, cursor: FetchCursor, deadline: Optional[float], metadata, closed: threading.Event
    ):
        """closed: of the client, whose end cancels all calls."""
        self._stub = stub
        self._address = address
        self._cursor = cursor
        self._deadline = deadline
        self._metadata = metadata
        self._cancelled = threading.Event()
        self._closed = closed
        self._call = None

    def cancel(self) -> None:
        self._cancelled.set()
        call = self._call
        if call is not None:
            call.cancel()

    def parts(self) -> Iterator[KvPart]:
        cursor = self._cursor
        while not cursor.done:
            self._call = call = self._begin(cursor.next_request())
            if self._cancelled.is_set():
                call.cancel()
            try:
                for message in call:
                    yield cursor.accept(message)
                cursor.end_of_call()
                continue
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self._address)
            except MeshfillError as error:
                failure = error
            finally:
                call.cancel()
            if isinstance(failure, CancelledError) and (self._cancelled.is_set() or self._closed.is_set()):
                raise failure  # by this side; the server cancels fetches that stand still
            delay, left = cursor.retry_delay(failure), seconds_left(self._deadline)
            if left is not None and left <= delay:
                raise failure
            if self._cancelled.wait(delay):
                raise CancelledError("the fetch was cancelled")

    def _begin(self, request):
        try:
            return self._stub.FetchKv(request, timeout=seconds_left(self._deadline), metadata=self._metadata)
        except ValueError:  # gRPC's, of a closed channel among others
            if not self._closed.is_set():
                raise
            raise CancelledError(f"server {self._address}: this client is closed") from None


class Fetches:
    """The fetches of one call, each in a thread of its own, which end together."""

    def __init__(self):
        self._mutex = threading.Lock()
        self._begun: List[KvFetch] = []  # guarded by _mutex
        self._cancelled = False  # guarded by _mutex

    @property
    def cancelled(self) -> bool:
        with self._mutex:
            return self._cancelled

    def begin(self, fetch: KvFetch) -> KvFetch:
        """The same fetch; cancelled where the others are."""
        with self._mutex:
            self._begun.append(fetch)
            cancelled = self._cancelled
        if cancelled:
            fetch.cancel()
        return fetch

    def cancel(self) -> None:
        with self._mutex:
            self._cancelled = True
            begun = list(self._begun)
        for fetch in begun:
            fetch.cancel()
