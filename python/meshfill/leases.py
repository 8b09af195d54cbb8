"""What a client knows of the leases and requests that it began: whose they are, what shape their K and V have, and for how
long they were wanted.

A server finds a lease or a request under its tenant alone. A call that has no more than a name learns the rest here:

    prefill(tenant="a") ──► Accepted: request, lease ──► a
                            PrefillResult: lease ──────► a, shape, seconds
    fetch_kv, renew_kv, release_kv, cancel (name) ─────► meshfill-tenant: a
"""

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Optional

from .arguments import whole
from .kv import DTYPES, KvShape
from .results import Accepted, KvManifest, PrefillResult

BOUND = 1024
_LONGEST_SECONDS = 2**32 - 1  # of a RenewKvRequest
_LONGEST_RENEWAL_SECONDS = 10.0


@dataclass(frozen=True)
class Known:
    tenant: str
    shape: Optional[KvShape] = None  # of a lease whose prefill has ended, if this client knows its dtype
    seconds: int = 0  # of such a lease, from its result on


class _Recent:
    """What was used last, by name: at most `bound` entries. Any number of threads."""

    def __init__(self, bound: int):
        self._bound = bound
        self._mutex = threading.Lock()
        self._entries: "OrderedDict[str, Known]" = OrderedDict()  # guarded by _mutex; the one used last is at the end

    def get(self, name: str) -> Optional[Known]:
        with self._mutex:
            found = self._entries.get(name)
            if found is not None:
                self._entries.move_to_end(name)
            return found

    def put(self, name: str, known: Known) -> None:
        with self._mutex:
            self._entries[name] = known
            self._entries.move_to_end(name)
            if len(self._entries) > self._bound:
                self._entries.popitem(last=False)


class LeaseBook:
    """The leases and requests that a client used last, at most `bound` of each."""

    def __init__(self, tenant: str, bound: int = BOUND):
        """tenant: of names that are not here."""
        self._tenant = tenant
        self._leases = _Recent(bound)
        self._requests = _Recent(bound)

    def begin(self, request_id: str, tenant: str) -> None:
        """A prefill is sent. Nothing where the server is to choose its id."""
        if request_id:
            self._requests.put(request_id, Known(tenant))

    def note(self, event, tenant: str) -> None:
        """An event of a prefill: its request id and its lease are this tenant's."""
        if isinstance(event, Accepted):
            self.begin(event.request_id, tenant)
            if event.kv_lease:
                self._leases.put(event.kv_lease, Known(tenant))
        elif isinstance(event, PrefillResult) and event.kv is not None:
            # A newer server's dtype costs the shape, and not the result.
            shape = KvShape.of(event.kv) if event.kv.dtype in DTYPES else None
            self._leases.put(event.kv.lease, Known(tenant, shape, _seconds_of(event.kv)))

    def tenant_of_request(self, request_id: str) -> str:
        known = self._requests.get(request_id)
        return self._tenant if known is None else known.tenant

    def tenant_of(self, lease: str) -> str:
        known = self._leases.get(lease)
        return self._tenant if known is None else known.tenant

    def shape_of(self, lease: str) -> Optional[KvShape]:
        known = self._leases.get(lease)
        return None if known is None else known.shape

    def seconds_of(self, lease: str) -> int:
        known = self._leases.get(lease)
        return 0 if known is None else known.seconds


class Renewals:
    """When a lease is renewed: at a third of the time left; while the server is away, more often. No I/O."""

    def __init__(self, seconds: int, *, wait: float = 0.0):
        """seconds: that the lease has now; 0: not known. wait: until the first renewal."""
        self.wait = wait  # seconds until the next renewal
        self.timeout = _renewal_timeout(seconds)  # seconds that it may take

    def renewed(self, seconds: float) -> None:
        """It has so many seconds from now on."""
        self.wait = max(0.05, seconds / 3)
        self.timeout = _renewal_timeout(seconds)

    def failed(self) -> None:
        self.wait = min(max(self.wait / 4, 0.05), 1.0)


def _renewal_timeout(seconds: float) -> float:
    """Long enough for a server that is slow, and short enough for another try before the lease has lapsed."""
    return min(max(1.0, seconds / 3), _LONGEST_RENEWAL_SECONDS) if seconds else _LONGEST_RENEWAL_SECONDS


def _seconds_of(manifest: KvManifest) -> int:
    return min(math.ceil(max(0.0, manifest.expires_in_seconds)), _LONGEST_SECONDS)


def renewal_seconds(lease, seconds: int, book: LeaseBook) -> int:
    """Of each renewal: those that are asked for, but never fewer than the prefill gave the lease. 0: the server's default."""
    given = _seconds_of(lease) if isinstance(lease, KvManifest) else book.seconds_of(lease_name(lease))
    return max(given, whole("seconds", seconds))


def lease_name(lease) -> str:
    """Of a lease, a manifest, or a name. ValueError: none of these, as where the result has no KV."""
    name = getattr(lease, "name", None) or getattr(lease, "lease", None) or lease
    if not isinstance(name, str) or not name:
        raise ValueError("no lease; give prefill(keep_kv=True) and its result's kv")
    return name


def shape_of(lease, shape: Optional[KvShape], book: LeaseBook) -> KvShape:
    """ValueError: nothing tells the shape."""
    if shape is not None:
        return shape
    if isinstance(lease, KvManifest):
        return KvShape.of(lease)
    known = getattr(lease, "shape", None) or book.shape_of(lease_name(lease))
    if known is None:
        raise ValueError(
            "nothing tells the shape of this lease: its prefill has not ended, or was another client's; "
            "give shape=KvShape(tokens, layers, kv_heads, head_dim, dtype)"
        )
    return known
