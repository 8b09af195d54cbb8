"""A prefill by the blocking client."""

from typing import Callable, Iterator, Union

import grpc

from .errors import from_rpc_error
from .messages import event_value
from .results import Accepted, PrefillResult, Progress


class PrefillCall:
    """A prefill under way: an iterator of Accepted, Progress… and PrefillResult. Any thread may cancel it."""

    def __init__(self, call, address: str, note: Callable[[object], None]):
        """note: is given each event before it is read."""
        self._call = call
        self._address = address
        self._note = note

    def __iter__(self) -> Iterator[Union[Accepted, Progress, PrefillResult]]:
        try:
            for event in self._call:
                value = event_value(event)
                if value is not None:
                    self._note(value)
                    yield value
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._address) from error

    def cancel(self) -> None:
        """Ends the prefill; nothing happens where it has ended."""
        self._call.cancel()
