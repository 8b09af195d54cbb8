"""How a client connects: TLS, token and channel options, for grpc and grpc.aio alike."""

import os
from dataclasses import dataclass, field
from typing import Optional, Sequence, Tuple, Union

import grpc

from .arguments import header_pair, header_text

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
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own: else all channels of a process share one
)


@dataclass(frozen=True)
class Connection:
    """Who to trust, who one is. Used for the front-end and for the holders of K and V.

    tls: encrypt; also implied by any of the certificates.
    root_certificates, client_certificate, client_key: PEM, as a path or as bytes.
    server_name: the name in the server's certificate, where it is not the address's.
    token: sent as `authorization: Bearer TOKEN` with every call; space around it, as a file's last newline, is not.
    metadata: further headers of every call, e.g. (("traceparent", …),).
    ValueError: a token or headers that cannot be sent, or a certificate without its key.
    """

    tls: bool = False
    root_certificates: PemSource = None
    client_certificate: PemSource = None
    client_key: PemSource = field(default=None, repr=False)
    server_name: Optional[str] = None
    token: Optional[str] = field(default=None, repr=False)
    metadata: Tuple[Tuple[str, str], ...] = field(default=(), repr=False)

    def __post_init__(self):
        if (self.client_certificate is None) != (self.client_key is None):
            raise ValueError("client_certificate and client_key are given together")
        if self.token is not None:
            token = self.token.strip() if isinstance(self.token, str) else self.token
            object.__setattr__(self, "token", header_text("token", token))
        object.__setattr__(self, "metadata", tuple(header_pair("metadata", pair) for pair in self.metadata))

    def call_metadata(self, tenant: str) -> Optional[Sequence[Tuple[str, str]]]:
        """Headers of a call of this tenant. Messages that name a lease or a request have no field for it.

        ValueError: the tenant's name cannot be sent.
        """
        headers = self.metadata
        header_text("tenant", tenant)
        if tenant:
            headers = tuple(pair for pair in headers if pair[0] != _TENANT) + ((_TENANT, tenant),)
        if self.token:
            headers += (("authorization", f"Bearer {self.token}"),)
        return headers or None

    def open(self, address: str, library=grpc):
        """A channel of `library`, grpc or grpc.aio. OSError, ValueError: a PEM file cannot be read, or is empty."""
        options = list(_OPTIONS)
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        if not self.tls and self.root_certificates is None and self.client_certificate is None:
            return library.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_pem("root_certificates", self.root_certificates),
            private_key=_pem("client_key", self.client_key),
            certificate_chain=_pem("client_certificate", self.client_certificate),
        )
        return library.secure_channel(address, credentials, options=options)


def _pem(name: str, source: PemSource) -> Optional[bytes]:
    if source is None:
        return None
    pem = source
    if not isinstance(source, bytes):
        with open(source, "rb") as file:
            pem = file.read()
    if not pem.strip():
        raise ValueError(f"{name} is empty; give a file of PEM blocks, or its bytes")
    return pem
