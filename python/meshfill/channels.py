"""The connections of one client, of grpc or of grpc.aio: which there are, and when one is closed.

    front-end   prefills and fetches    ┐ both stay; a call of the second never waits for a stream of the first
    front-end   all other calls         ┘
    holders     fetches, one each         those in use stay, and the 32 that were used last

A server takes limits.max_streams calls at once on a connection, 128 by default. gRPC lets further ones wait.
"""

import threading
from collections import Counter, OrderedDict
from typing import Callable, List, TypeVar

from .channel import Connection
from .errors import CancelledError
from .stubs import PrefillServiceStub

HOLDERS = 32

_Call = TypeVar("_Call")


class Channels:
    """Any number of threads. Channels that a method returns are the caller's to close: of grpc.aio it is a coroutine."""

    def __init__(self, connection: Connection, address: str, library):
        """address: of the front-end. OSError, ValueError: a PEM file cannot be read, or is empty."""
        self.closed = threading.Event()
        self._address = address
        self._open = lambda to: connection.open(to, library)
        self._streams, self._calls = self._open(address), self._open(address)
        self._mutex = threading.Lock()
        self._holders: "OrderedDict[str, object]" = OrderedDict()  # guarded by _mutex; the one used last is at the end
        self._users: "Counter[str]" = Counter()  # guarded by _mutex; of holders

    def check_open(self, address: str) -> None:
        """CancelledError: the client is closed."""
        if self.closed.is_set():
            raise CancelledError(f"server {address}: this client is closed")

    def calls(self) -> PrefillServiceStub:
        """Of calls of one message to the front-end. CancelledError: the client is closed."""
        self.check_open(self._address)
        return PrefillServiceStub(self._calls)

    def streams(self, address: str) -> PrefillServiceStub:
        """Of prefills and fetches. CancelledError: the client is closed. OSError, ValueError: as at the client's begin."""
        with self._mutex:
            self.check_open(address)
            if address == self._address:
                return PrefillServiceStub(self._streams)
            if address not in self._holders:
                self._holders[address] = self._open(address)
            self._holders.move_to_end(address)
            return PrefillServiceStub(self._holders[address])

    def begin(self, address: str, call: Callable[[], _Call]) -> _Call:
        """call(), which begins a call. CancelledError: another thread has closed the client meanwhile."""
        try:
            return call()
        except ValueError as error:  # gRPC's, of a closed channel among others
            if not self.closed.is_set():
                raise
            raise CancelledError(f"server {address}: this client is closed") from error

    def hold(self, address: str) -> None:
        """This holder's channel is in use until release."""
        with self._mutex:
            self._users[address] += 1

    def release(self, address: str) -> List:
        """Channels to close."""
        with self._mutex:
            self._users -= Counter([address])  # drops counts of 0
            idle = [other for other in self._holders if other not in self._users]
            surplus = idle[: max(0, len(self._holders) - HOLDERS)]
            return [self._holders.pop(other) for other in surplus]

    def close(self) -> List:
        """Channels to close. Nothing can be begun afterwards."""
        self.closed.set()
        with self._mutex:
            channels = [self._streams, self._calls, *self._holders.values()]
            self._holders.clear()
        return channels
