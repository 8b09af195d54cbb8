"""A fetch of K and V by the blocking client: calls one after the other, until all parts are there."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Callable, Iterator, List, Optional

import grpc

from .channels import Channels
from .cursor import FetchCursor
from .deadlines import seconds_left
from .errors import CancelledError, DeadlineExceededError, MeshfillError, from_rpc_error
from .holders import HolderShare
from .kv import KvArrays, KvPart

_log = logging.getLogger(__name__)

_HOLDER_CALLS = 16


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

    def __init__(self, channels: Channels, address: str, cursor: FetchCursor, deadline: Optional[float], metadata):
        """channels: of the client, whose end cancels all calls."""
        self._channels = channels
        self._address = address
        self._cursor = cursor
        self._deadline = deadline
        self._metadata = metadata
        self._cancelled = threading.Event()
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
            if isinstance(failure, CancelledError) and (self._cancelled.is_set() or self._channels.closed.is_set()):
                raise failure  # by this side; the server cancels fetches that stand still
            delay, left = cursor.retry_delay(failure), seconds_left(self._deadline)
            if left is not None and left <= delay:
                raise failure
            if self._cancelled.wait(delay):
                raise CancelledError("the fetch was cancelled")

    def _begin(self, request):
        method = self._channels.streams(self._address).FetchKv
        left = seconds_left(self._deadline)
        return self._channels.begin(self._address, lambda: method(request, timeout=left, metadata=self._metadata))


class Fetches:
    """The fetches of one call, each in a thread of its own, which end together."""

    def __init__(self):
        self._mutex = threading.Lock()
        self._begun: List[KvFetch] = []  # guarded by _mutex
        self._cancelled = False  # guarded by _mutex

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


def fetch_shares(
    shares: List[HolderShare],
    cursors: List[FetchCursor],
    arrays: KvArrays,
    channels: Channels,
    fetch: Callable[[str, FetchCursor], KvFetch],
) -> None:
    """All shares at once, each by its cursor. The first that fails ends the others: the cursors tell what is missing then.

    MeshfillError: the deadline has passed, or the client was closed.
    """
    fetches = Fetches()

    def fetch_share(share: HolderShare, cursor: FetchCursor) -> None:
        channels.hold(share.address)
        try:
            for part in fetches.begin(fetch(share.address, cursor)):
                arrays.store(part, share.range.first_head)
        finally:
            for channel in channels.release(share.address):
                channel.close()

    threads = ThreadPoolExecutor(min(len(shares), _HOLDER_CALLS))
    try:
        for done in as_completed([threads.submit(fetch_share, *pair) for pair in zip(shares, cursors)]):
            done.result()
    except DeadlineExceededError:
        raise
    except MeshfillError as error:
        if channels.closed.is_set():
            raise
        _log.warning("%s; the front-end gives the rest of the KV", error)
    finally:
        fetches.cancel()
        threads.shutdown(cancel_futures=True)
