"""How a client connects: TLS, token and channel options, for grpc and grpc.aio alike."""

import os
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple, Union

import grpc

# Of calls that run nothing, where the caller gives none.
UNARY_TIMEOUT_SECONDS = 30.0

PemSource = Union[None, str, "os.PathLike[str]", bytes]

_TENANT = "meshfill-tenant"
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a result with all logits of a large vocabulary
    ("grpc.keepalive_time_ms", 60_000),  # a server that vanished is noticed; the server allows a ping every 10 s
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # gRPC stops after two pings without it
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),  # a server that comes back is noticed
)


@dataclass(frozen=True)
class Connection:
    """Who to trust, who one is. Used for the front-end and for the holders of K and V.

    tls: encrypt; also implied by any of the certificates.
    root_certificates, client_certificate, client_key: PEM, as a path or as bytes.
    server_name: the name in the server's certificate, where it is not the address's.
    token: sent as `authorization: Bearer TOKEN` with every call.
    metadata: further headers of every call, e.g. (("traceparent", …),).
    """

    tls: bool = False
    root_certificates: PemSource = None
    client_certificate: PemSource = None
    client_key: PemSource = None
    server_name: Optional[str] = None
    token: Optional[str] = None
    metadata: Tuple[Tuple[str, str], ...] = ()

    def __post_init__(self):
        if (self.client_certificate is None) != (self.client_key is None):
            raise ValueError("client_certificate and client_key are given together")

    def call_metadata(self, tenant: str) -> Optional[Sequence[Tuple[str, str]]]:
        """Headers of a call of this tenant. Messages that name a lease or a request have no field for it."""
        headers = self.metadata
        if tenant:
            headers = tuple(pair for pair in headers if pair[0] != _TENANT) + ((_TENANT, tenant),)
        if self.token:
            headers += (("authorization", f"Bearer {self.token}"),)
        return headers or None

    def open(self, address: str, library=grpc):
        """A channel of `library`, grpc or grpc.aio. OSError: a PEM file cannot be read."""
        options = list(_OPTIONS)
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        if not (self.tls or self.root_certificates or self.client_certificate):
            return library.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_pem(self.root_certificates),
            private_key=_pem(self.client_key),
            certificate_chain=_pem(self.client_certificate),
        )
        return library.secure_channel(address, credentials, options=options)


def _pem(source: PemSource) -> Optional[bytes]:
    if source is None or isinstance(source, bytes):
        return source
    with open(source, "rb") as file:
        return file.read()
