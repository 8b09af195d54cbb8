"""Client of the Meshfill prefill server.

    client = meshfill.Client("127.0.0.1:50051")
    result = client.prefill([1, 2, 3], keep_kv=True)
    for part in client.fetch_kv(result.kv): ...

`meshfill.aio` has the same for asyncio, `meshfill.vllm` the KV connector for vLLM. Every failed call raises a
MeshfillError; bad arguments raise ValueError before anything is sent.
"""

import importlib

from .client import Client, Lease
from .errors import (
    AlreadyExistsError,
    CancelledError,
    ChecksumError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    MeshfillError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from .kv import KvArrays, KvPart, KvShape
from .results import Accepted, KvHolder, KvLease, KvManifest, Plan, Pool, PrefillResult, Progress

__version__ = "0.1.0"
__all__ = [
    "Accepted",
    "AlreadyExistsError",
    "CancelledError",
    "ChecksumError",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "KvArrays",
    "KvHolder",
    "KvLease",
    "KvManifest",
    "KvPart",
    "KvShape",
    "Lease",
    "MeshfillError",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "Plan",
    "Pool",
    "PrefillResult",
    "Progress",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
]


def __getattr__(name: str):
    """`meshfill.aio` without an import of its own: who does not name it does not load it."""
    if name != "aio":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(".aio", __name__)
