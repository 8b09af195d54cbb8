"""The client for asyncio: the methods of meshfill.Client, as coroutines and asynchronous iterators.

One differs: instead of start_prefill there is prefill_events, whose events are read with `async for`. Prefills are those of a
blocking client within, each read by a thread (loop_events.py); all other calls are grpc.aio's.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, AsyncIterator, Callable, Iterable, List, Optional, Tuple, Union

import grpc
import grpc.aio

from . import client as blocking
from .arguments import text, whole
from .channel import UNARY_TIMEOUT_SECONDS
from .channels import Channels
from .cursor import FetchCursor
from .deadlines import deadline_in, first_timeout, seconds_left
from .errors import CancelledError, DeadlineExceededError, InternalError, MeshfillError, NotFoundError, from_rpc_error
from .holders import HolderShare, holder_shares, rest_of
from .kv import KvArrays, KvPart, KvRange, KvShape, make_range
from .leases import Renewals, lease_name, renewal_seconds, shape_of
from .loop_events import events_of
from .messages import Prompt, Tile, plan_request
from .results import Accepted, KvLease, KvManifest, Plan, Pool, PrefillResult, Progress
from .stubs import pb
from .text import TextTokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .messages import PrefillOptions, RangeOptions

__all__ = ["Client", "Lease"]

_log = logging.getLogger(__name__)

LeaseLike = Union["Lease", KvManifest, str]


class Client:
    """As meshfill.Client; made and used within one event loop. Cancelling a coroutine cancels its call.

    Its close ends calls under way with asyncio.CancelledError, as grpc.aio does.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: bool = False,
        root_certificates=None,
        client_certificate=None,
        client_key=None,
        server_name: Optional[str] = None,
        token: Optional[str] = None,
        metadata: Iterable[Tuple[str, str]] = (),
        timeout: Optional[float] = None,
        model: str = "",
        tenant: str = "",
        tokenizer=None,
    ):
        """The arguments are those of meshfill.Client."""
        self.address = address
        self._blocking = blocking.Client(
            address,
            tls=tls,
            root_certificates=root_certificates,
            client_certificate=client_certificate,
            client_key=client_key,
            server_name=server_name,
            token=token,
            metadata=metadata,
            timeout=timeout,
            model=model,
            tenant=tenant,
            tokenizer=tokenizer,
        )
        self._connection = self._blocking._connection
        self._book = self._blocking._book
        self._timeout, self._model, self._tenant = timeout, model, tenant
        self._channels = Channels(self._connection, address, grpc.aio)

    @property
    def tokenizer(self) -> Optional[TextTokenizer]:
        return self._blocking.tokenizer

    async def close(self) -> None:
        self._blocking.close()
        await _close_all(self._channels.close())

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def _unary(self, name: str, request, timeout: Optional[float], tenant: Optional[str] = None):
        seconds = first_timeout(timeout, self._timeout, UNARY_TIMEOUT_SECONDS)
        metadata = self._connection.call_metadata(self._tenant if tenant is None else tenant)
        method = getattr(self._channels.calls(), name)
        try:
            return await method(request, timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error

    async def prefill_events(
        self, prompt: Prompt, **options: "Unpack[PrefillOptions]"
    ) -> AsyncIterator[Union[Accepted, Progress, PrefillResult]]:
        """Accepted, Progress… and the result; options as in meshfill.Client.start_prefill."""
        self._channels.check_open(self.address)
        events = events_of(lambda: self._blocking.start_prefill(prompt, **options))
        try:
            async for event in events:
                yield event
        except CancelledError as error:
            if not self._channels.closed.is_set():
                raise
            raise asyncio.CancelledError(str(error)) from error
        finally:
            await events.aclose()

    async def prefill(
        self,
        prompt: Prompt,
        *,
        on_accepted: Optional[Callable[[Accepted], None]] = None,
        on_progress: Optional[Callable[[Progress], None]] = None,
        **options: "Unpack[PrefillOptions]",
    ) -> PrefillResult:
        """The result of one prompt. The callbacks are plain functions."""
        result = None
        async for event in self.prefill_events(prompt, **options):
            if isinstance(event, Accepted) and on_accepted is not None:
                on_accepted(event)
            elif isinstance(event, Progress) and on_progress is not None:
                on_progress(event)
            elif isinstance(event, PrefillResult):
                result = event
        if result is None:
            raise InternalError(f"server {self.address} ended the call without a result; see its log")
        return result

    async def cancel(self, request_id: str, *, timeout: Optional[float] = None) -> None:
        request = pb.CancelRequest(request_id=text("request_id", request_id))
        await self._unary("Cancel", request, timeout, self._book.tenant_of_request(request_id))

    async def plan(
        self,
        token_count: int,
        *,
        tile: Tile = None,
        heads: int = 0,
        layout: Optional[str] = None,
        stripe: int = 0,
        timeout: Optional[float] = None,
    ) -> Plan:
        request = plan_request(token_count, self._model, tile, heads, layout, stripe)
        return Plan.from_proto(await self._unary("Plan", request, timeout))

    async def pool(self, *, timeout: Optional[float] = None) -> Pool:
        return Pool.from_proto(await self._unary("GetPool", pb.GetPoolRequest(), timeout))

    async def renew_kv(self, lease: LeaseLike, seconds: int = 0, *, timeout: Optional[float] = None) -> KvLease:
        name = lease_name(lease)
        request = pb.RenewKvRequest(lease=name, seconds=whole("seconds", seconds))
        reply = await self._unary("RenewKv", request, timeout, self._book.tenant_of(name))
        return KvLease(reply.lease, reply.expires_in_seconds)

    async def release_kv(self, lease: LeaseLike, *, timeout: Optional[float] = None) -> None:
        name = lease_name(lease)
        await self._unary("ReleaseKv", pb.ReleaseKvRequest(lease=name), timeout, self._book.tenant_of(name))

    def lease(self, lease: Union[KvManifest, str], *, seconds: int = 0, shape: Optional[KvShape] = None) -> "Lease":
        """For `async with`."""
        return Lease(self, lease, renewal_seconds(lease, seconds, self._book), shape)

    def fetch_kv(
        self,
        lease: LeaseLike,
        *,
        shape: Optional[KvShape] = None,
        attempts: int = 4,
        timeout: Optional[float] = None,
        **what: "Unpack[RangeOptions]",
    ) -> AsyncIterator[KvPart]:
        """As meshfill.Client.fetch_kv; an asynchronous iterator. Closing it ends the call."""
        fetched = make_range(shape_of(lease, shape, self._book), **what)
        cursor = FetchCursor(lease_name(lease), fetched, attempts=attempts)
        return self._fetch(self.address, cursor, deadline_in(first_timeout(timeout, self._timeout)))

    async def fetch_kv_arrays(
        self,
        lease: LeaseLike,
        *,
        from_holders: bool = True,
        shape: Optional[KvShape] = None,
        attempts: int = 4,
        timeout: Optional[float] = None,
        **what: "Unpack[RangeOptions]",
    ) -> KvArrays:
        """As meshfill.Client.fetch_kv_arrays."""
        fetched = make_range(shape_of(lease, shape, self._book), **what)
        arrays = KvArrays.empty(fetched)
        deadline = deadline_in(first_timeout(timeout, self._timeout))
        manifest = lease.manifest if isinstance(lease, Lease) else lease
        shares = holder_shares(manifest, fetched) if from_holders and isinstance(manifest, KvManifest) else []
        name = lease_name(lease)
        rest: Optional[KvRange] = fetched
        if shares:
            cursors = [FetchCursor(name, share.range, attempts=2, runs=list(share.runs)) for share in shares]
            await self._fetch_shares(shares, cursors, arrays, deadline)
            rest = rest_of(fetched, cursors)
        if rest is not None:
            async for part in self._fetch(self.address, FetchCursor(name, rest, attempts=attempts), deadline):
                arrays.store(part)
        return arrays

    async def _fetch_shares(
        self, shares: List[HolderShare], cursors: List[FetchCursor], arrays: KvArrays, deadline: Optional[float]
    ) -> None:
        """As fetch.fetch_shares."""

        async def fetch_share(share: HolderShare, cursor: FetchCursor) -> None:
            self._channels.hold(share.address)
            try:
                async for part in self._fetch(share.address, cursor, deadline):
                    arrays.store(part, share.range.first_head)
            finally:
                await _close_all(self._channels.release(share.address))

        tasks = [asyncio.ensure_future(fetch_share(*pair)) for pair in zip(shares, cursors)]
        try:
            await asyncio.gather(*tasks)
        except DeadlineExceededError:
            raise
        except MeshfillError as error:
            if self._channels.closed.is_set():
                raise
            _log.warning("%s; the front-end gives the rest of the KV", error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, address: str, cursor: FetchCursor, deadline: Optional[float]) -> AsyncIterator[KvPart]:
        metadata = self._connection.call_metadata(self._book.tenant_of(cursor.lease))
        while not cursor.done:
            left = seconds_left(deadline)
            call = self._channels.streams(address).FetchKv(cursor.next_request(), timeout=left, metadata=metadata)
            try:
                async for message in call:
                    yield cursor.accept(message)
                cursor.end_of_call()
                continue
            except grpc.RpcError as error:
                failure = from_rpc_error(error, address)
            except MeshfillError as error:
                failure = error
            finally:
                call.cancel()
            delay, left = cursor.retry_delay(failure), seconds_left(deadline)
            if left is not None and left <= delay:
                raise failure
            await asyncio.sleep(delay)


class Lease:
    """As meshfill.Lease, for `async with`."""

    def __init__(self, client: Client, lease: Union[KvManifest, str], seconds: int, shape: Optional[KvShape]):
        self.manifest = lease if isinstance(lease, KvManifest) else None
        self.name = lease_name(lease)
        self.shape = shape or (KvShape.of(lease) if isinstance(lease, KvManifest) else None)
        self.lost: Optional[MeshfillError] = None
        self._client = client
        self._seconds = seconds
        self._renewer: Optional[asyncio.Task] = None

    async def __aenter__(self) -> "Lease":
        self._renewer = asyncio.ensure_future(self._renew())
        return self

    async def __aexit__(self, *_) -> None:
        self._renewer.cancel()  # and the call in flight
        try:
            await self._client.release_kv(self.name, timeout=5)
        except MeshfillError as error:  # It lapses by itself.
            _log.info("%s; the lease %s lapses by itself", error, self.name)

    async def renew(self) -> KvLease:
        return await self._client.renew_kv(self.name, self._seconds)

    async def _renew(self) -> None:
        renewals = Renewals(self._seconds)
        while True:
            await asyncio.sleep(renewals.wait)
            try:
                renewed = await self._client.renew_kv(self.name, self._seconds, timeout=renewals.timeout)
                renewals.renewed(renewed.expires_in_seconds)
            except NotFoundError as error:
                self.lost = error
                return
            except MeshfillError as error:
                _log.info("%s; the lease %s is renewed again soon", error, self.name)
                renewals.failed()


async def _close_all(channels: List[grpc.aio.Channel]) -> None:
    for channel in channels:
        await channel.close()
