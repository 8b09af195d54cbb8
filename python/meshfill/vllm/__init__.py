"""MeshfillConnector, a KV connector of vLLM: `"kv_connector_module_path": "meshfill.vllm"`. See docs/vllm.md.

vLLM is imported with the class, not with this package: what does not need it is in modules of its own.

    settings.py   the keys of kv_connector_extra_config
    prefills.py   scheduler side: prompts on their way through Meshfill
    transfer.py   worker side: K and V from Meshfill into pages
    pages.py      a worker's layers, heads and pages, through torch
    connector.py  vLLM's interface, onto these
"""


def __getattr__(name: str):
    if name != "MeshfillConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .connector import MeshfillConnector

    return MeshfillConnector
