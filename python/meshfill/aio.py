"""The client for asyncio: the methods of meshfill.Client, as coroutines and asynchronous iterators.

One differs: instead of start_prefill there is prefill_events, whose events are read with `async for`.
"""

import asyncio
import logging
from typing import AsyncIterator, Callable, Dict, Iterable, Optional, Tuple, Union

import grpc
import grpc.aio

from . import holders
from .channel import UNARY_TIMEOUT_SECONDS, Connection
from .cursor import FetchCursor
from .deadlines import deadline_in, seconds_left
from .errors import CancelledError, DeadlineExceededError, InternalError, MeshfillError, NotFoundError, from_rpc_error
from .kv import KvArrays, KvPart, KvShape, make_range
from .leases import LeaseBook, lease_name, shape_of
from .messages import Prompt, event_value, plan_options, prefill_header, prefill_requests, token_array
from .results import Accepted, KvLease, KvManifest, Plan, Pool, PrefillResult, Progress
from .stubs import PrefillServiceStub, pb
from .text import TextTokenizer

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
        self._connection = Connection(
            tls, root_certificates, client_certificate, client_key, server_name, token, tuple(metadata)
        )
        self._timeout = timeout
        self._model = model
        self._tenant = tenant
        self._book = LeaseBook(tenant)
        self._tokenizer = TextTokenizer(tokenizer) if tokenizer is not None else None
        self._channels: Dict[str, grpc.aio.Channel] = {}
        self._closed = False
        self._stub_of(address)  # A PEM file that cannot be read is told here.

    @property
    def tokenizer(self) -> Optional[TextTokenizer]:
        return self._tokenizer

    async def close(self) -> None:
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    @property
    def _stub(self) -> PrefillServiceStub:
        return self._stub_of(self.address)

    def _stub_of(self, address: str) -> PrefillServiceStub:
        """CancelledError: the client is closed."""
        if self._closed:
            raise CancelledError(f"server {address}: this client is closed")
        if address not in self._channels:
            self._channels[address] = self._connection.open(address, grpc.aio)
        return PrefillServiceStub(self._channels[address])

    async def _unary(self, method, request, timeout: Optional[float], tenant: Optional[str] = None):
        seconds = next((t for t in (timeout, self._timeout) if t is not None), UNARY_TIMEOUT_SECONDS)
        try:
            metadata = self._connection.call_metadata(self._tenant if tenant is None else tenant)
            return await method(request, timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None

    async def prefill_events(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        top_k: int = 1,
        return_logits: bool = False,
        tile=None,
        heads: int = 0,
        layout: Optional[str] = None,
        stripe: int = 0,
        priority: int = 0,
        tenant: Optional[str] = None,
        keep_kv: bool = False,
        lease_seconds: int = 0,
        ignore_cache: bool = False,
        cache_salt: str = "",
        timeout: Optional[float] = None,
    ) -> AsyncIterator[Union[Accepted, Progress, PrefillResult]]:
        """Accepted, Progress… and the result; options as in meshfill.Client.start_prefill."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("a prompt of text needs Client(tokenizer=MODEL_FOLDER)")
            prompt = self._tokenizer.encode(prompt)
        ids = token_array(prompt)
        tenant = self._tenant if tenant is None else tenant
        header = prefill_header(
            len(ids),
            request_id=request_id,
            model=self._model,
            priority=priority,
            tenant=tenant,
            top_k=top_k,
            return_logits=return_logits,
            plan=plan_options(tile, heads, layout, stripe),
            keep_kv=keep_kv,
            lease_seconds=lease_seconds,
            ignore_cache=ignore_cache,
            cache_salt=cache_salt,
        )
        self._book.begin(request_id, tenant)
        call = self._stub.Prefill(
            prefill_requests(header, ids),
            timeout=self._timeout if timeout is None else timeout,
            metadata=self._connection.call_metadata(tenant),
        )
        try:
            async for event in call:
                value = event_value(event)
                if value is not None:
                    self._book.note(value, tenant)
                    yield value
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None
        finally:
            call.cancel()

    async def prefill(
        self,
        prompt: Prompt,
        *,
        on_accepted: Optional[Callable[[Accepted], None]] = None,
        on_progress: Optional[Callable[[Progress], None]] = None,
        **options,
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
        tenant = self._book.tenant_of_request(request_id)
        await self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id), timeout, tenant)

    async def plan(
        self,
        token_count: int,
        *,
        tile=None,
        heads: int = 0,
        layout: Optional[str] = None,
        stripe: int = 0,
        timeout: Optional[float] = None,
    ) -> Plan:
        options = plan_options(tile, heads, layout, stripe)
        request = pb.PlanRequest(token_count=token_count, plan=options, model=self._model)
        return Plan.from_proto(await self._unary(self._stub.Plan, request, timeout))

    async def pool(self, *, timeout: Optional[float] = None) -> Pool:
        return Pool.from_proto(await self._unary(self._stub.GetPool, pb.GetPoolRequest(), timeout))

    async def renew_kv(self, lease: LeaseLike, seconds: int = 0, *, timeout: Optional[float] = None) -> KvLease:
        name = lease_name(lease)
        request = pb.RenewKvRequest(lease=name, seconds=seconds)
        reply = await self._unary(self._stub.RenewKv, request, timeout, self._book.tenant_of(name))
        return KvLease(reply.lease, reply.expires_in_seconds)

    async def release_kv(self, lease: LeaseLike, *, timeout: Optional[float] = None) -> None:
        name = lease_name(lease)
        await self._unary(self._stub.ReleaseKv, pb.ReleaseKvRequest(lease=name), timeout, self._book.tenant_of(name))

    def lease(self, lease: Union[KvManifest, str], *, seconds: int = 0, shape: Optional[KvShape] = None) -> "Lease":
        """For `async with`."""
        return Lease(self, lease, seconds, shape)

    def fetch_kv(
        self,
        lease: LeaseLike,
        *,
        shape: Optional[KvShape] = None,
        attempts: int = 4,
        timeout: Optional[float] = None,
        **what,
    ) -> AsyncIterator[KvPart]:
        """As meshfill.Client.fetch_kv; an asynchronous iterator. Closing it ends the call."""
        fetched = make_range(shape_of(lease, shape, self._book), **what)
        cursor = FetchCursor(lease_name(lease), fetched, attempts=attempts)
        return self._fetch(self.address, cursor, deadline_in(self._timeout if timeout is None else timeout))

    async def fetch_kv_arrays(
        self,
        lease: LeaseLike,
        *,
        from_holders: bool = True,
        shape: Optional[KvShape] = None,
        attempts: int = 4,
        timeout: Optional[float] = None,
        **what,
    ) -> KvArrays:
        """As meshfill.Client.fetch_kv_arrays."""
        fetched = make_range(shape_of(lease, shape, self._book), **what)
        arrays = KvArrays.empty(fetched)
        deadline = deadline_in(self._timeout if timeout is None else timeout)
        manifest = lease.manifest if isinstance(lease, Lease) else lease
        shares = holders.holder_shares(manifest, fetched) if from_holders and isinstance(manifest, KvManifest) else []
        name = lease_name(lease)
        if not shares:
            async for part in self._fetch(self.address, FetchCursor(name, fetched, attempts=attempts), deadline):
                arrays.store(part)
            return arrays

        async def fetch_share(share: holders.HolderShare) -> None:
            cursor = FetchCursor(name, share.range, attempts=2, runs=list(share.runs))
            try:
                async for part in self._fetch(share.address, cursor, deadline):
                    arrays.store(part, share.range.first_head)
                return
            except DeadlineExceededError:
                raise
            except MeshfillError as error:
                if self._closed:
                    raise
                _log.warning("%s; the front-end gives the rest of this holder's KV", error)
            if cursor.done:
                return
            rest = cursor.rest()
            async for part in self._fetch(self.address, FetchCursor(name, rest, attempts=attempts), deadline):
                arrays.store(part, rest.first_head)

        tasks = [asyncio.ensure_future(fetch_share(share)) for share in shares]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return arrays

    async def _fetch(self, address: str, cursor: FetchCursor, deadline: Optional[float]) -> AsyncIterator[KvPart]:
        metadata = self._connection.call_metadata(self._book.tenant_of(cursor.lease))
        while not cursor.done:
            left = seconds_left(deadline)
            call = self._stub_of(address).FetchKv(cursor.next_request(), timeout=left, metadata=metadata)
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
        self._renewer.cancel()
        try:
            await self._client.release_kv(self.name, timeout=5)
        except MeshfillError as error:  # It lapses by itself.
            _log.info("%s; the lease %s lapses by itself", error, self.name)

    async def renew(self) -> KvLease:
        return await self._client.renew_kv(self.name, self._seconds)

    async def _renew(self) -> None:
        wait = 0.0
        while True:
            await asyncio.sleep(wait)
            try:
                wait = max(0.05, (await self.renew()).expires_in_seconds / 3)
            except NotFoundError as error:
                self.lost = error
                return
            except MeshfillError as error:
                _log.info("%s; the lease %s is renewed again soon", error, self.name)
                wait = min(max(wait / 4, 0.05), 1.0)
