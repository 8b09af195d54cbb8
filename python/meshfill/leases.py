"""What a client knows of the leases and requests that it began: whose they are, and what shape their K and V have.

A server finds a lease or a request under its tenant alone. A call that has no more than a name learns the rest here:

    prefill(tenant="a") ──► Accepted: request, lease ──► a
                            PrefillResult: lease ──────► a, shape
    fetch_kv, renew_kv, release_kv, cancel (name) ─────► meshfill-tenant: a
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Optional

from .kv import KvShape
from .results import Accepted, KvManifest, PrefillResult

BOUND = 1024


@dataclass(frozen=True)
class Known:
    tenant: str
    shape: Optional[KvShape] = None  # of a lease whose prefill has ended


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
            self._leases.put(event.kv.lease, Known(tenant, KvShape.of(event.kv)))

    def tenant_of_request(self, request_id: str) -> str:
        known = self._requests.get(request_id)
        return self._tenant if known is None else known.tenant

    def tenant_of(self, lease: str) -> str:
        known = self._leases.get(lease)
        return self._tenant if known is None else known.tenant

    def shape_of(self, lease: str) -> Optional[KvShape]:
        known = self._leases.get(lease)
        return None if known is None else known.shape


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
