"""Errors of calls to a Meshfill server: one class for each gRPC status, all of them MeshfillError."""

from typing import Optional

import grpc
from google.rpc import error_details_pb2, status_pb2


class MeshfillError(Exception):
    """A call failed.

    code: the gRPC status (grpc.StatusCode).
    message: one line that says what is wrong, where, and what to do.
    retry_after: seconds after which another try may succeed, from google.rpc.RetryInfo; None where the server said nothing.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, code: Optional[grpc.StatusCode] = None, retry_after: Optional[float] = None):
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class InvalidArgumentError(MeshfillError):
    """Bad ids, counts or options, or a range of K and V that lies outside of what a lease has."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class OutOfRangeError(MeshfillError):
    """The prompt is longer than the model's context."""

    code = grpc.StatusCode.OUT_OF_RANGE


class FailedPreconditionError(MeshfillError):
    """The prompt fits the model, but not this pool's memory."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhaustedError(MeshfillError):
    """The queue is full, the deadline cannot be met, or there is no room for the KV; see retry_after.

    An accepted prompt may end so, too: where the queue is full, and its place goes to another tenant.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NotFoundError(MeshfillError):
    """Unknown model, unknown or lapsed lease, or a request id that is not live."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(MeshfillError):
    """The request id is live."""

    code = grpc.StatusCode.ALREADY_EXISTS


class UnavailableError(MeshfillError):
    """The server is away, loading or draining, or a holder of the KV died."""

    code = grpc.StatusCode.UNAVAILABLE


class UnimplementedError(MeshfillError):
    code = grpc.StatusCode.UNIMPLEMENTED


class InternalError(MeshfillError):
    code = grpc.StatusCode.INTERNAL


class DeadlineExceededError(MeshfillError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CancelledError(MeshfillError):
    """Ended by `cancel`, by the client's `close`, or by the server, as where nobody read; or called after `close`."""

    code = grpc.StatusCode.CANCELLED


class DataLossError(MeshfillError):
    """K and V came damaged or not whole."""

    code = grpc.StatusCode.DATA_LOSS


class ChecksumError(DataLossError):
    """The CRC32C of a part is not that of its bytes."""


class UnauthenticatedError(MeshfillError):
    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(MeshfillError):
    code = grpc.StatusCode.PERMISSION_DENIED


# What gRPC says where a server cancels a call. Meshfill's does so where nobody reads, and the reason stays in its log.
_STOOD_STILL = "Cancelled on the server side"
_STOOD_STILL_MEANS = (
    "it ended the call, whose events or parts were not read for longer than limits.result_timeout, or while others needed "
    "the memory of limits.unread_bytes; read them as they come, and ask again"
)

_BY_CODE = {
    cls.code: cls
    for cls in MeshfillError.__subclasses__()
}


def from_rpc_error(error: grpc.RpcError, address: str) -> MeshfillError:
    """The MeshfillError of a failed call to `address`. Works for errors of grpc and of grpc.aio."""
    code = error.code()
    details = error.details() or code.name
    if code == grpc.StatusCode.CANCELLED and details == _STOOD_STILL:
        details = _STOOD_STILL_MEANS
    message = " ".join(f"server {address}: {details}".split())
    if code == grpc.StatusCode.UNAVAILABLE:
        message += _advice(message.lower())
    return _BY_CODE.get(code, MeshfillError)(message, code, _retry_after(error))


def _advice(message: str) -> str:
    """What to do about a server that cannot be reached."""
    if "handshake" in message or "verification check failed" in message:
        return "; does it speak TLS, and do root_certificates, server_name and the client's certificate fit it?"
    return "; is `meshfill serve` listening there?" if "failed to connect" in message else ""


def _retry_after(error: grpc.RpcError) -> Optional[float]:
    """Seconds of the RetryInfo in the trailer grpc-status-details-bin; None where there is none."""
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        status = status_pb2.Status()
        try:
            status.ParseFromString(value)
        except Exception:  # A trailer of somebody else's: the status itself is what matters.
            return None
        for detail in status.details:
            info = error_details_pb2.RetryInfo()
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                return info.retry_delay.seconds + info.retry_delay.nanos * 1e-9
    return None


def is_retryable(error: MeshfillError) -> bool:
    """Whether the rest of a KV fetch may be asked for again after this error.

    UNAVAILABLE: the connection or a holder was lost. DATA_LOSS: a part was damaged. CANCELLED: the server ended a fetch
    whose reader stood still for limits.result_timeout, and its lease may live; the clients ask nothing of those that they
    cancel themselves. INTERNAL only where gRPC itself says that the stream was reset. Everything else would fail again.
    """
    if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.CANCELLED):
        return True
    return error.code == grpc.StatusCode.INTERNAL and "RST_STREAM" in error.message
