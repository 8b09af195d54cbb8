"""K and V as NumPy arrays: shapes, ranges, layouts and checksums.

Layouts of a part, D = head_dim; K lies beside V in pages:

    tokens      k, v   [tokens, heads, D]
    pages_hnd   pages  [pages, heads, page_tokens, 2·D]
    pages_nhd   pages  [pages, page_tokens, heads, 2·D]

The dtype is that of the manifest. f32 is numpy.float32. bf16 is ml_dtypes.bfloat16 where ml_dtypes is installed; else
uint16 with the same bits, whose values are (x.astype(numpy.uint32) << 16).view(numpy.float32).
"""

from dataclasses import dataclass
from typing import Optional, Tuple

import google_crc32c
import numpy as np

from .arguments import whole
from .errors import ChecksumError, DataLossError, FailedPreconditionError
from .results import KvManifest
from .stubs import pb

try:
    from ml_dtypes import bfloat16 as _bf16
except ImportError:  # The documented substitute: the same bits.
    _bf16 = np.uint16

LAYOUTS = {
    "tokens": pb.KV_LAYOUT_TOKENS,
    "pages_hnd": pb.KV_LAYOUT_PAGES_HND,
    "pages_nhd": pb.KV_LAYOUT_PAGES_NHD,
}
DTYPES = {"bf16": np.dtype(_bf16), "f32": np.dtype(np.float32)}


@dataclass(frozen=True)
class KvShape:
    """What a lease has. Known before the manifest by whoever knows the model and the prompt."""

    tokens: int  # of the prompt
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # bf16 or f32

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")

    @classmethod
    def of(cls, manifest: KvManifest) -> "KvShape":
        return cls(manifest.tokens, manifest.layers, manifest.kv_heads, manifest.head_dim, manifest.dtype)

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class KvRange:
    """Tokens, layers and heads of a fetch, and how they shall lie. No count is 0."""

    shape: KvShape
    first_token: int
    tokens: int
    first_layer: int
    layers: int
    first_head: int
    heads: int
    layout: str
    page_tokens: int  # 0 with the layout `tokens`

    @property
    def end_token(self) -> int:
        return self.first_token + self.tokens

    @property
    def end_layer(self) -> int:
        return self.first_layer + self.layers

    @property
    def end_head(self) -> int:
        return self.first_head + self.heads

    def array_shape(self, tokens: int) -> Tuple[int, ...]:
        """Shape of k and of v, or of pages, of so many tokens of one layer."""
        dim = self.shape.head_dim
        if self.layout == "tokens":
            return (tokens, self.heads, dim)
        pages = -(-tokens // self.page_tokens)
        if self.layout == "pages_hnd":
            return (pages, self.heads, self.page_tokens, 2 * dim)
        return (pages, self.page_tokens, self.heads, 2 * dim)


def make_range(
    shape: KvShape,
    *,
    first_token: int = 0,
    tokens: int = 0,
    first_layer: int = 0,
    layers: int = 0,
    first_head: int = 0,
    heads: int = 0,
    layout: str = "tokens",
    page_tokens: int = 0,
) -> KvRange:
    """Counts of 0 reach to the end. ValueError: no whole numbers, outside of the shape, empty, or not whole pages."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}")

    def span(what: str, first: int, number: int, end: int) -> Tuple[int, int]:
        first, number = whole(f"first_{what}", first), whole(f"{what}s", number) or end - first
        if number <= 0 or first + number > end:
            raise ValueError(f"{what}s {first} to {first + number} are not within the {end} of this lease")
        return first, number

    first_token, tokens = span("token", first_token, tokens, shape.tokens)
    first_layer, layers = span("layer", first_layer, layers, shape.layers)
    first_head, heads = span("head", first_head, heads, shape.kv_heads)
    page_tokens = whole("page_tokens", page_tokens)
    if layout == "tokens":
        if page_tokens:
            raise ValueError("page_tokens is for the layouts pages_hnd and pages_nhd")
    else:
        if not page_tokens:
            raise ValueError(f"layout {layout} needs page_tokens, the tokens of a page")
        to_end = first_token + tokens == shape.tokens
        if first_token % page_tokens or (tokens % page_tokens and not to_end):
            raise ValueError(f"tokens {first_token} to {first_token + tokens} are not whole pages of {page_tokens}")
    return KvRange(shape, first_token, tokens, first_layer, layers, first_head, heads, layout, page_tokens)


@dataclass(frozen=True, eq=False)
class KvPart:
    """K and V of consecutive tokens of one layer, verified. The arrays are views that cannot be written."""

    layer: int
    first_token: int
    tokens: int
    k: Optional[np.ndarray]  # with the layout `tokens`
    v: Optional[np.ndarray]
    pages: Optional[np.ndarray]  # with the other layouts


@dataclass(frozen=True, eq=False)
class KvArrays:
    """K and V of a whole range: those of KvPart, with the layers in front."""

    range: KvRange
    k: Optional[np.ndarray]  # [layers, tokens, heads, head_dim]
    v: Optional[np.ndarray]
    pages: Optional[np.ndarray]  # [layers, pages, …]

    @classmethod
    def empty(cls, fetched: KvRange) -> "KvArrays":
        shape = (fetched.layers,) + fetched.array_shape(fetched.tokens)
        dtype = fetched.shape.numpy_dtype
        if fetched.layout == "tokens":
            return cls(fetched, np.empty(shape, dtype), np.empty(shape, dtype), None)
        return cls(fetched, None, None, np.empty(shape, dtype))

    def store(self, part: KvPart, first_head: Optional[int] = None) -> None:
        """Copies a part of this range to its place. Parts may come in any order and from several threads.

        first_head: of a part with some of the heads, layout `tokens` alone. Not given: the part has all heads.
        """
        layer = part.layer - self.range.first_layer
        first = part.first_token - self.range.first_token
        if self.pages is None:
            head = 0 if first_head is None else first_head - self.range.first_head
            rows = (layer, slice(first, first + part.tokens), slice(head, head + part.k.shape[1]))
            self.k[rows] = part.k
            self.v[rows] = part.v
        else:
            page = first // self.range.page_tokens
            self.pages[layer, page : page + len(part.pages)] = part.pages


def read_part(message, fetched: KvRange) -> KvPart:
    """A message as arrays. ChecksumError: damaged. FailedPreconditionError: the lease is of another shape."""
    where = f"layer {message.layer}, tokens {message.first_token} to {message.first_token + message.tokens}"
    if not message.tokens:
        raise DataLossError(f"KV of {where}: an empty part")
    planes = (message.k, message.v) if fetched.layout == "tokens" else (message.pages,)
    crc = 0
    for plane in planes:
        crc = google_crc32c.extend(crc, plane)
    if crc != message.crc32c:
        raise ChecksumError(f"KV of {where}: its CRC32C is {crc:08x}, the server's was {message.crc32c:08x}")
    shape = fetched.array_shape(message.tokens)
    dtype = fetched.shape.numpy_dtype
    bytes_expected = int(np.prod(shape)) * dtype.itemsize
    for plane in planes:
        if len(plane) != bytes_expected:
            raise FailedPreconditionError(
                f"KV of {where}: {len(plane)} bytes, not the {bytes_expected} of {fetched.heads} heads of "
                f"{fetched.shape.head_dim} in {fetched.shape.dtype}; the server's model is another one"
            )
    arrays = [np.frombuffer(plane, dtype).reshape(shape) for plane in planes]
    k, v, pages = (arrays[0], arrays[1], None) if len(arrays) == 2 else (None, None, arrays[0])
    return KvPart(message.layer, message.first_token, message.tokens, k, v, pages)
