"""The blocking client. One Client may be used from any number of threads."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Callable, Dict, Iterable, Iterator, Optional, Tuple, Union

import grpc

from . import holders
from .channel import UNARY_TIMEOUT_SECONDS, Connection
from .cursor import FetchCursor
from .deadlines import deadline_in
from .errors import CancelledError, DeadlineExceededError, InternalError, MeshfillError, NotFoundError, from_rpc_error
from .fetch import FetchCalls, Fetches, KvFetch
from .kv import KvArrays, KvShape, make_range
from .leases import LeaseBook, lease_name, shape_of
from .messages import Prompt, event_value, plan_options, prefill_header, prefill_requests, token_array
from .results import Accepted, KvLease, KvManifest, Plan, Pool, PrefillResult, Progress
from .stubs import PrefillServiceStub, pb
from .text import TextTokenizer

_log = logging.getLogger(__name__)

_HOLDER_CALLS = 16

LeaseLike = Union["Lease", KvManifest, str]


class Client:
    """A connection to a Meshfill server. Close it, or use it in a `with` block.

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
        """
        self.address = address
        self._connection = Connection(
            tls, root_certificates, client_certificate, client_key, server_name, token, tuple(metadata)
        )
        self._timeout = timeout
        self._model = model
        self._tenant = tenant
        self._book = LeaseBook(tenant)
        self._tokenizer = TextTokenizer(tokenizer) if tokenizer is not None else None
        self._mutex = threading.Lock()
        self._channels: Dict[str, grpc.Channel] = {}  # guarded by _mutex; by address
        self._closed = threading.Event()
        self._stub_of(address)  # A PEM file that cannot be read is told here.

    @property
    def tokenizer(self) -> Optional[TextTokenizer]:
        return self._tokenizer

    def close(self) -> None:
        self._closed.set()
        with self._mutex:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def _stub(self) -> PrefillServiceStub:
        return self._stub_of(self.address)

    def _stub_of(self, address: str) -> PrefillServiceStub:
        """CancelledError: the client is closed."""
        with self._mutex:
            if self._closed.is_set():
                raise CancelledError(f"server {address}: this client is closed")
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = self._connection.open(address)
        return PrefillServiceStub(channel)

    def _unary(self, method, request, timeout: Optional[float], tenant: Optional[str] = None):
        seconds = next((t for t in (timeout, self._timeout) if t is not None), UNARY_TIMEOUT_SECONDS)
        try:
            metadata = self._connection.call_metadata(self._tenant if tenant is None else tenant)
            return method(request, timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None

    # Prefill

    def start_prefill(
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
    ) -> "PrefillCall":
        """Sends a prompt and returns at once; the events are read from the call.

        prompt: ids, or text where the client has a tokenizer. tile (a, b), heads, layout and stripe override the planner.
        keep_kv keeps K and V under a lease of lease_seconds (0: the server's default). ValueError: bad arguments.
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
        self._book.begin(request_id, tenant)
        call = self._stub.Prefill(
            prefill_requests(header, ids),
            timeout=self._timeout if timeout is None else timeout,
            metadata=self._connection.call_metadata(tenant),
        )
        return PrefillCall(call, self.address, lambda event: self._book.note(event, tenant))

    def prefill(
        self,
        prompt: Prompt,
        *,
        on_accepted: Optional[Callable[[Accepted], None]] = None,
        on_progress: Optional[Callable[[Progress], None]] = None,
        **options,
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
        tenant = self._book.tenant_of_request(request_id)
        self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id), timeout, tenant)

    def plan(
        self,
        token_count: int,
        *,
        tile=None,
        heads: int = 0,
        layout: Optional[str] = None,
        stripe: int = 0,
        timeout: Optional[float] = None,
    ) -> Plan:
        """What a prompt of this length would run. Runs nothing."""
        options = plan_options(tile, heads, layout, stripe)
        request = pb.PlanRequest(token_count=token_count, plan=options, model=self._model)
        return Plan.from_proto(self._unary(self._stub.Plan, request, timeout))

    def pool(self, *, timeout: Optional[float] = None) -> Pool:
        """The ranks, the queue and what runs now."""
        return Pool.from_proto(self._unary(self._stub.GetPool, pb.GetPoolRequest(), timeout))

    # K and V

    def renew_kv(self, lease: LeaseLike, seconds: int = 0, *, timeout: Optional[float] = None) -> KvLease:
        """Keeps a lease for so many seconds from now (0: the server's default). NotFoundError: unknown or lapsed."""
        name = lease_name(lease)
        request = pb.RenewKvRequest(lease=name, seconds=seconds)
        reply = self._unary(self._stub.RenewKv, request, timeout, self._book.tenant_of(name))
        return KvLease(reply.lease, reply.expires_in_seconds)

    def release_kv(self, lease: LeaseLike, *, timeout: Optional[float] = None) -> None:
        """Ends a lease. Twice is fine."""
        name = lease_name(lease)
        self._unary(self._stub.ReleaseKv, pb.ReleaseKvRequest(lease=name), timeout, self._book.tenant_of(name))

    def lease(self, lease: Union[KvManifest, str], *, seconds: int = 0, shape: Optional[KvShape] = None) -> "Lease":
        """A lease that renews itself in the background and is released at the end of its `with` block."""
        return Lease(self, lease, seconds, shape)

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
        return self._fetch(self.address, cursor, deadline_in(self._timeout if timeout is None else timeout))

    def fetch_kv_arrays(
        self,
        lease: LeaseLike,
        *,
        from_holders: bool = True,
        shape: Optional[KvShape] = None,
        attempts: int = 4,
        timeout: Optional[float] = None,
        **what,
    ) -> KvArrays:
        """All of a range as one array each for K and V, or for the pages; options as in fetch_kv.

        from_holders: where the manifest has the addresses of all holders, each is read directly, all at once. What a
        holder fails to give comes from the front-end. An exception, KeyboardInterrupt included, ends all of it at once.
        """
        fetched = make_range(shape_of(lease, shape, self._book), **what)
        arrays = KvArrays.empty(fetched)
        deadline = deadline_in(self._timeout if timeout is None else timeout)
        manifest = lease.manifest if isinstance(lease, Lease) else lease
        shares = holders.holder_shares(manifest, fetched) if from_holders and isinstance(manifest, KvManifest) else []
        name = lease_name(lease)
        if not shares:
            fetch = self._fetch(self.address, FetchCursor(name, fetched, attempts=attempts), deadline)
            try:
                for part in fetch:
                    arrays.store(part)
            finally:
                fetch.cancel()
            return arrays

        fetches = Fetches()

        def fetch_share(share: holders.HolderShare) -> None:
            cursor = FetchCursor(name, share.range, attempts=2, runs=list(share.runs))
            try:
                for part in fetches.begin(self._fetch(share.address, cursor, deadline)):
                    arrays.store(part, share.range.first_head)
                return
            except DeadlineExceededError:
                raise
            except MeshfillError as error:
                if fetches.cancelled or self._closed.is_set():
                    raise
                _log.warning("%s; the front-end gives the rest of this holder's KV", error)
            if cursor.done:
                return
            rest = cursor.rest()
            last = FetchCursor(name, rest, attempts=attempts)
            for part in fetches.begin(self._fetch(self.address, last, deadline)):
                arrays.store(part, rest.first_head)

        threads = ThreadPoolExecutor(min(len(shares), _HOLDER_CALLS))
        try:
            for done in as_completed([threads.submit(fetch_share, share) for share in shares]):
                done.result()
        except BaseException:
            fetches.cancel()
            raise
        finally:
            threads.shutdown(cancel_futures=True)
        return arrays

    def _fetch(self, address: str, cursor: FetchCursor, deadline: Optional[float]) -> KvFetch:
        metadata = self._connection.call_metadata(self._book.tenant_of(cursor.lease))
        return KvFetch(FetchCalls(self._stub_of(address), address, cursor, deadline, metadata, self._closed))


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
            raise from_rpc_error(error, self._address) from None

    def cancel(self) -> None:
        """Ends the prefill; nothing happens where it has ended."""
        self._call.cancel()


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
        self._renewer = threading.Thread(target=self._renew, name="meshfill-lease", daemon=True)

    def __enter__(self) -> "Lease":
        self._renewer.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._renewer.join()
        try:
            self._client.release_kv(self.name, timeout=5)
        except MeshfillError as error:  # It lapses by itself.
            _log.info("%s; the lease %s lapses by itself", error, self.name)

    def renew(self) -> KvLease:
        return self._client.renew_kv(self.name, self._seconds)

    def _renew(self) -> None:
        """Renews at a third of the time left; while the server is away, more often."""
        wait = 0.0
        while not self._stop.wait(wait):
            try:
                wait = max(0.05, self.renew().expires_in_seconds / 3)
            except NotFoundError as error:
                self.lost = error
                return
            except MeshfillError as error:
                _log.info("%s; the lease %s is renewed again soon", error, self.name)
                wait = min(max(wait / 4, 0.05), 1.0)
