"""The keys of vLLM's kv_connector_extra_config that MeshfillConnector reads."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Optional

from ..client import Client

TESTED_VLLM = ("0.32.0",)


@dataclass(frozen=True)
class Settings:
    server: str  # HOST:PORT of the front-end
    min_tokens: int = 8192  # prompt tokens that vLLM has not cached, from which on a prompt goes to Meshfill
    prefills: int = 32  # prompts on their way through Meshfill at once; others are held, and not for longer than to accept
    timeout_seconds: float = 600.0  # of a prefill with its transfer; then vLLM computes
    accept_timeout_seconds: float = 10.0  # from the first byte to Accepted; then vLLM computes
    retry_seconds: float = 10.0  # after a server that was away: no prompt goes there
    lease_seconds: int = 60  # renewed while K and V are loaded
    loads: int = 4  # prompts that a worker loads at once
    model: str = ""  # served name; "": whatever the server has loaded
    tenant: str = ""
    tls: bool = False
    root_certificates: Optional[str] = None  # path of a PEM file, as are the next two
    client_certificate: Optional[str] = None
    client_key: Optional[str] = None
    server_name: Optional[str] = None
    token_file: Optional[str] = None  # a bearer token
    allow_untested_vllm: bool = False  # start with versions of vLLM that TESTED_VLLM does not have

    @classmethod
    def parse(cls, extra_config: Dict[str, Any]) -> "Settings":
        """ValueError: a key is missing, unknown, or of the wrong type or sign."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(extra_config) - set(fields))
        if unknown:
            raise ValueError(f"kv_connector_extra_config has no key {unknown[0]!r}; it has {', '.join(fields)}")
        if not isinstance(extra_config.get("server"), str) or ":" not in extra_config["server"]:
            raise ValueError('kv_connector_extra_config needs "server": "HOST:PORT", a Meshfill front-end')
        for name, value in extra_config.items():
            expected = fields[name].type
            types = {"int": (int,), "float": (int, float), "bool": (bool,)}.get(getattr(expected, "__name__", expected), (str,))
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise ValueError(f"kv_connector_extra_config: {name} is {value!r}, not of type {types[-1].__name__}")
            if types[0] is int and value < 0:
                raise ValueError(f"kv_connector_extra_config: {name} is {value!r}, below 0")
        return cls(**extra_config)

    def connect(self) -> Client:
        """OSError: the token's file cannot be read."""
        token = None
        if self.token_file is not None:
            with open(self.token_file, encoding="utf-8") as file:
                token = file.read().strip()
        return Client(
            self.server,
            tls=self.tls,
            root_certificates=self.root_certificates,
            client_certificate=self.client_certificate,
            client_key=self.client_key,
            server_name=self.server_name,
            token=token,
            model=self.model,
            tenant=self.tenant,
        )


def check_version(version: str, allow_untested: bool) -> None:
    """RuntimeError: this version of vLLM was not tested. A local part (+cpu) does not count."""
    if version.split("+")[0] in TESTED_VLLM or allow_untested:
        return
    raise RuntimeError(
        f"MeshfillConnector was tested with vLLM {', '.join(TESTED_VLLM)}, this is {version}; install a tested version, or "
        'set "allow_untested_vllm": true in kv_connector_extra_config to try'
    )
