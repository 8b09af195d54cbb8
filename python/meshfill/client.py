"""The blocking client. One Client may be used from any number of threads."""

import logging
import threading
from typing import TYPE_CHECKING, Callable, Iterable, Optional, Tuple, Union

import grpc

from .arguments import text, whole
from .channel import UNARY_TIMEOUT_SECONDS, Connection
from .channels import Channels
from .cursor import FetchCursor
from .deadlines import deadline_in, first_timeout
from .errors import CancelledError, InternalError, MeshfillError, NotFoundError, from_rpc_error
from .fetch import FetchCalls, KvFetch, fetch_shares
from .holders import holder_shares, rest_of
from .kv import KvArrays, KvRange, KvShape, make_range
from .leases import LeaseBook, Renewals, lease_name, renewal_seconds, shape_of
from .messages import (
    Prompt,
    Tile,
    plan_options,
    plan_request,
    prefill_header,
    prefill_requests,
    token_array,
)
from .prefill_call import PrefillCall
from .results import Accepted, KvLease, KvManifest, Plan, Pool, PrefillResult, Progress
from .stubs import pb
from .text import TextTokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .messages import PrefillOptions, RangeOptions

_log = logging.getLogger(__name__)

LeaseLike = Union["Lease", KvManifest, str]


class Client:
    """A connection to a Meshfill server. Close it, or use it in a `with` block.

    It has one connection for prefills and fetches, and one for the other calls. A server takes limits.max_streams (128) on a
    connection: further prefills and fetches wait for those under way. Who wants more at once makes more clients.

    CancelledError: of calls that its close, in any thread, ends, and of those after it.
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
        """address: HOST:PORT. TLS options, token and metadata: channel.Connection.

        timeout: seconds of a whole call, where the call itself gives none; None: prefills and fetches take as long as they
        take, other calls 30 s. model: of every prefill. tenant: of every call; a prefill may name another one, which the
        calls about its lease and its request then name, too. tokenizer: a model folder, for prompts of text.
        ValueError: bad arguments. OSError: a PEM file cannot be read.
        """
        self.address = address
        self._connection = Connection(
            tls, root_certificates, client_certificate, client_key, server_name, token, tuple(metadata)
        )
        self._connection.call_metadata(tenant)  # ValueError here, and not at the first call
        self._timeout = first_timeout(timeout)
        self._model = text("model", model)
        self._tenant = tenant
        self._book = LeaseBook(tenant)
        self._tokenizer = TextTokenizer(tokenizer) if tokenizer is not None else None
        self._channels = Channels(self._connection, text("address", address), grpc)

    @property
    def tokenizer(self) -> Optional[TextTokenizer]:
        return self._tokenizer

    def close(self) -> None:
        for channel in self._channels.close():
            channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _unary(
        self,
        name: str,
        request,
        timeout: Optional[float],
        tenant: Optional[str] = None,
        begun: Optional[Callable[[grpc.Future], None]] = None,
    ):
        """begun: is given the call, which any thread may cancel."""
        seconds = first_timeout(timeout, self._timeout, UNARY_TIMEOUT_SECONDS)
        metadata = self._connection.call_metadata(self._tenant if tenant is None else tenant)
        method = getattr(self._channels.calls(), name)
        call = self._channels.begin(self.address, lambda: method.future(request, timeout=seconds, metadata=metadata))
        try:
            if begun is not None:
                begun(call)
            return call.result()
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from error
        except grpc.FutureCancelledError as error:
            raise CancelledError(f"server {self.address}: the call was cancelled") from error
        finally:
            call.cancel()  # where an exception ends the wait

    # Prefill

    def start_prefill(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        top_k: int = 1,
        return_logits: bool = False,
        tile: Tile = None,
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
    ) -> PrefillCall:
        """Sends a prompt and returns at once; the events are read from the call.

        prompt: ids, or text where the client has a tokenizer. tile (a, b), heads, layout and stripe override the planner.
        keep_kv keeps K and V under a lease of lease_seconds (0: the server's default). ValueError: bad arguments.
        Read the events as they come: a result that nobody reads for limits.result_timeout (30 s), or for whose bytes the
        server's limits.unread_bytes have no room, is dropped, and its reader gets a CancelledError.
        """
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
        seconds, metadata = first_timeout(timeout, self._timeout), self._connection.call_metadata(tenant)
        method = self._channels.streams(self.address).Prefill
        self._book.begin(request_id, tenant)
        requests = prefill_requests(header, ids)
        call = self._channels.begin(self.address, lambda: method(requests, timeout=seconds, metadata=metadata))
        return PrefillCall(call, self.address, lambda event: self._book.note(event, tenant))

    def prefill(
        self,
        prompt: Prompt,
        *,
        on_accepted: Optional[Callable[[Accepted], None]] = None,
        on_progress: Optional[Callable[[Progress], None]] = None,
        **options: "Unpack[PrefillOptions]",
    ) -> PrefillResult:
        """The result of one prompt; options as in start_prefill. Callbacks run in this thread.

        An exception that leaves this call, KeyboardInterrupt included, cancels the prefill.
        """
        call = self.start_prefill(prompt, **options)
        try:
            for event in call:
                if isinstance(event, Accepted) and on_accepted is not None:
                    on_accepted(event)
                elif isinstance(event, Progress) and on_progress is not None:
                    on_progress(event)
                elif isinstance(event, PrefillResult):
                    return event
        finally:
            call.cancel()
        raise InternalError(f"server {self.address} ended the call without a result; see its log")

    def cancel(self, request_id: str, *, timeout: Optional[float] = None) -> None:
        """Ends a prefill wherever it is. NotFoundError: no such request is live."""
        request = pb.CancelRequest(request_id=text("request_id", request_id))
        self._unary("Cancel", request, timeout, self._book.tenant_of_request(request_id))

    def plan(
        self,
        token_count: int,
        *,
        tile: Tile = None,
        heads: int = 0,
        layout: Optional[str] = None,
        stripe: int = 0,
        timeout: Optional[float] = None,
    ) -> Plan:
        """What a prompt of this length would run. Runs nothing."""
        request = plan_request(token_count, self._model, tile, heads, layout, stripe)
        return Plan.from_proto(self._unary("Plan", request, timeout))

    def pool(self, *, timeout: Optional[float] = None) -> Pool:
        """The ranks, the queue and what runs now."""
        return Pool.from_proto(self._unary("GetPool", pb.GetPoolRequest(), timeout))

    # K and V

    def renew_kv(self, lease: LeaseLike, seconds: int = 0, *, timeout: Optional[float] = None) -> KvLease:
        """Keeps a lease for so many seconds from now (0: the server's default). NotFoundError: unknown or lapsed."""
        return self._renew_kv(lease_name(lease), whole("seconds", seconds), timeout)

    def _renew_kv(self, name: str, seconds: int, timeout: Optional[float], begun=None) -> KvLease:
        request = pb.RenewKvRequest(lease=name, seconds=seconds)
        reply = self._unary("RenewKv", request, timeout, self._book.tenant_of(name), begun)
        return KvLease(reply.lease, reply.expires_in_seconds)

    def release_kv(self, lease: LeaseLike, *, timeout: Optional[float] = None) -> None:
        """Ends a lease. Twice is fine."""
        name = lease_name(lease)
        self._unary("ReleaseKv", pb.ReleaseKvRequest(lease=name), timeout, self._book.tenant_of(name))

    def lease(self, lease: Union[KvManifest, str], *, seconds: int = 0, shape: Optional[KvShape] = None) -> "Lease":
        """A lease that renews itself in the background and is released at the end of its `with` block.

        seconds: of each renewal. They are never fewer than the prefill's lease_seconds, where this client had its result.
        """
        return Lease(self, lease, renewal_seconds(lease, seconds, self._book), shape)

    def fetch_kv(
        self,
        lease: LeaseLike,
        *,
        first_token: int = 0,
        tokens: int = 0,
        first_layer: int = 0,
        layers: int = 0,
        first_head: int = 0,
        heads: int = 0,
        layout: str = "tokens",
        page_tokens: int = 0,
        shape: Optional[KvShape] = None,
        attempts: int = 4,
        timeout: Optional[float] = None,
    ) -> KvFetch:
        """K and V as verified parts, in order of layers, then of tokens, as the layers are done.

        The arrays of a part are NumPy's, and views of what came; fetch_kv_arrays gives all of a range in one array each.
        Counts of 0 reach to the end. Layouts: kv.py. shape: of a lease that is only a name, unless this client has had the
        result of its prefill; while the prefill runs, say it.
        A call that breaks off, or a damaged part, is asked for again; after `attempts` breaks in a row without a part
        between them, the last error is raised. timeout: seconds for all of it. ValueError: a range outside of the shape.
        """
        fetched = make_range(
            shape_of(lease, shape, self._book),
            first_token=first_token,
            tokens=tokens,
            first_layer=first_layer,
            layers=layers,
            first_head=first_head,
            heads=heads,
            layout=layout,
            page_tokens=page_tokens,
        )
        cursor = FetchCursor(lease_name(lease), fetched, attempts=attempts)
        return self._fetch(self.address, cursor, deadline_in(first_timeout(timeout, self._timeout)))

    def fetch_kv_arrays(
        self,
        lease: LeaseLike,
        *,
        from_holders: bool = True,
        shape: Optional[KvShape] = None,
        attempts: int = 4,
        timeout: Optional[float] = None,
        **what: "Unpack[RangeOptions]",
    ) -> KvArrays:
        """All of a range as one array each for K and V, or for the pages; options as in fetch_kv.

        from_holders: where the manifest has the addresses of all holders, each is read directly, all at once. Where one of
        them fails, the front-end gives the rest of all. An exception, KeyboardInterrupt included, ends all of it at once.
        """
        fetched = make_range(shape_of(lease, shape, self._book), **what)
        arrays = KvArrays.empty(fetched)
        deadline = deadline_in(first_timeout(timeout, self._timeout))
        manifest = lease.manifest if isinstance(lease, Lease) else lease
        shares = holder_shares(manifest, fetched) if from_holders and isinstance(manifest, KvManifest) else []
        name = lease_name(lease)
        rest: Optional[KvRange] = fetched
        if shares:
            cursors = [FetchCursor(name, share.range, attempts=2, runs=list(share.runs)) for share in shares]
            fetch_shares(shares, cursors, arrays, self._channels, lambda at, cursor: self._fetch(at, cursor, deadline))
            rest = rest_of(fetched, cursors)
        if rest is not None:
            fetch = self._fetch(self.address, FetchCursor(name, rest, attempts=attempts), deadline)
            try:
                for part in fetch:
                    arrays.store(part)
            finally:
                fetch.cancel()
        return arrays

    def _fetch(self, address: str, cursor: FetchCursor, deadline: Optional[float]) -> KvFetch:
        self._channels.check_open(address)
        metadata = self._connection.call_metadata(self._book.tenant_of(cursor.lease))
        return KvFetch(FetchCalls(self._channels, address, cursor, deadline, metadata))


class Lease:
    """K and V that stay readable: renewed in the background within a `with` block, released at its end.

    `lost` is the error that ended the renewals (NotFoundError: it lapsed), else None.
    """

    def __init__(self, client: Client, lease: Union[KvManifest, str], seconds: int, shape: Optional[KvShape]):
        self.manifest = lease if isinstance(lease, KvManifest) else None
        self.name = lease_name(lease)
        self.shape = shape or (KvShape.of(lease) if isinstance(lease, KvManifest) else None)
        self.lost: Optional[MeshfillError] = None
        self._client = client
        self._seconds = seconds
        self._stop = threading.Event()
        self._renewal: Optional[grpc.Future] = None  # the last one that was begun
        self._renewer = threading.Thread(target=self._renew, name="meshfill-lease", daemon=True)

    def __enter__(self) -> "Lease":
        self._renewer.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        renewal = self._renewal
        if renewal is not None:
            renewal.cancel()
        self._renewer.join()
        try:
            self._client.release_kv(self.name, timeout=5)
        except MeshfillError as error:  # It lapses by itself.
            _log.info("%s; the lease %s lapses by itself", error, self.name)

    def renew(self) -> KvLease:
        return self._client.renew_kv(self.name, self._seconds)

    def _begun(self, renewal: grpc.Future) -> None:
        self._renewal = renewal
        if self._stop.is_set():
            renewal.cancel()

    def _renew(self) -> None:
        renewals = Renewals(self._seconds)
        while not self._stop.wait(renewals.wait):
            try:
                renewed = self._client._renew_kv(self.name, self._seconds, renewals.timeout, self._begun)
                renewals.renewed(renewed.expires_in_seconds)
            except MeshfillError as error:
                if self._stop.is_set():
                    return
                if isinstance(error, NotFoundError):
                    self.lost = error
                    return
                _log.info("%s; the lease %s is renewed again soon", error, self.name)
                renewals.failed()
