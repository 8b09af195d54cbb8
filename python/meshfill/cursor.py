"""Where a fetch of K and V stands, and what to ask for when its call broke off. No I/O: Client and aio.Client drive it.

A holder has, of each layer, runs of tokens; the front-end has one run, which is the whole range. Parts come in order of
layers, then of tokens:

    layer 0   [run 0   ][run 1   ]
    layer 1   [run 0 ··│                the call broke off at │
              asked for next: the rest of layer 1, then layers 2 and on

A damaged part counts as a break before it. `attempts` bounds the breaks in a row between which no part came.
"""

import random
from typing import List, Optional, Tuple

from .errors import DataLossError, FailedPreconditionError, MeshfillError, is_retryable
from .kv import LAYOUTS, KvPart, KvRange, read_part
from .stubs import pb

_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 2.0
_LONGEST_ASKED_SECONDS = 60.0  # of a RetryInfo


class FetchCursor:
    """The state of one fetch: requests → parts, errors → seconds to wait."""

    def __init__(
        self, lease: str, fetched: KvRange, *, attempts: int = 4, runs: Optional[List[Tuple[int, int]]] = None
    ):
        """runs: [begin, end) of the tokens that the asked one has of `fetched`, in order. Not given: all."""
        self.lease = lease
        self._range = fetched
        self._runs = runs or [(fetched.first_token, fetched.end_token)]
        self._attempts = attempts
        self._breaks = 0
        self._layer = fetched.first_layer
        self._run = 0
        self._token = self._runs[0][0]
        self._asked_layers = 0

    @property
    def done(self) -> bool:
        return self._layer == self._range.end_layer

    @property
    def layer(self) -> int:
        """The first one that is not whole yet."""
        return self._layer

    def next_request(self):
        """Asks for the rest, or for the rest of a layer that was begun. Counts of 0 are sent where the rest reaches the
        lease's end, so that a server with more layers, heads or tokens than expected is noticed."""
        want = self._range
        begun = self._token != self._runs[0][0]
        first_token = self._token if begun else want.first_token
        self._asked_layers = 1 if begun else want.end_layer - self._layer
        to_last_layer = self._layer + self._asked_layers == want.shape.layers
        return pb.FetchKvRequest(
            lease=self.lease,
            first_token=first_token,
            tokens=0 if want.end_token == want.shape.tokens else want.end_token - first_token,
            first_layer=self._layer,
            layers=0 if to_last_layer else self._asked_layers,
            first_head=want.first_head,
            heads=0 if want.first_head + want.heads == want.shape.kv_heads else want.heads,
            layout=LAYOUTS[want.layout],
            page_tokens=want.page_tokens,
        )

    def accept(self, message) -> KvPart:
        """The next part, verified. MeshfillError: damaged, out of order, or of another model."""
        if self.done:
            raise FailedPreconditionError(f"KV of layer {message.layer} came after the last one asked for; wrong model")
        end = self._runs[self._run][1]
        if (message.layer, message.first_token) != (self._layer, self._token) or self._token + message.tokens > end:
            raise DataLossError(
                f"KV of layer {message.layer}, tokens {message.first_token} to {message.first_token + message.tokens}, "
                f"came where layer {self._layer}, tokens {self._token} to {end}, were next"
            )
        part = read_part(message, self._range)
        self._advance(message.tokens)
        self._breaks = 0
        return part

    def _advance(self, tokens: int) -> None:
        self._token += tokens
        if self._token < self._runs[self._run][1]:
            return
        self._run += 1
        if self._run == len(self._runs):
            self._run = 0
            self._layer += 1
            self._asked_layers -= 1
        self._token = self._runs[self._run][0]

    def end_of_call(self) -> None:
        """The call ended well. DataLossError: before all came that it was asked for."""
        if self._asked_layers > 0:
            raise DataLossError(f"the server ended KV at layer {self._layer}, token {self._token}, before its end")

    def retry_delay(self, error: MeshfillError) -> float:
        """Seconds until next_request may be sent. Raises the error where the rest is not worth asking for.

        Those that broke off together do not come again together: up to a quarter is added by chance.
        """
        self._breaks += 1
        if not is_retryable(error) or self._breaks >= self._attempts:
            raise error
        delay = min(_FIRST_DELAY_SECONDS * 2 ** (self._breaks - 1), _LONGEST_DELAY_SECONDS)
        if error.retry_after is not None:
            delay = min(error.retry_after, _LONGEST_ASKED_SECONDS)
        return delay * random.uniform(1.0, 1.25)
