"""As much of vLLM and torch as meshfill.vllm.connector imports, and a scheduler that calls it as vLLM 0.32 does.

install() must run before the connector is imported. Pages are NumPy arrays; "attention layers" note what is written.
"""

import dataclasses
import sys
import types
from typing import Dict, List, Optional

import numpy as np

VERSION = "0.32.0+cpu"
PAGE = 16
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def install() -> None:
    def module(name: str, **contents) -> types.ModuleType:
        made = sys.modules[name] = types.ModuleType(name)
        vars(made).update(contents)
        return made

    class Tensor:
        pass

    module("torch", bfloat16="torch.bfloat16", float16="torch.float16", float32="torch.float32", Tensor=Tensor)
    import logging

    class Role:
        SCHEDULER, WORKER = "scheduler", "worker"

    class Metadata:
        pass

    @dataclasses.dataclass
    class TransferResults:
        finished_sending: set = dataclasses.field(default_factory=set)
        finished_recving: set = dataclasses.field(default_factory=set)
        failed_recving: set = dataclasses.field(default_factory=set)

    class Base:
        def __init__(self, vllm_config, role, kv_cache_config):
            self._vllm_config, self._role = vllm_config, role
            self._kv_transfer_config = vllm_config.kv_transfer_config
            self._connector_metadata = None

        def bind_connector_metadata(self, metadata):
            self._connector_metadata = metadata

        def _get_connector_metadata(self):
            assert self._connector_metadata is not None
            return self._connector_metadata

        def clear_connector_metadata(self):
            self._connector_metadata = None

    module("vllm", __version__=VERSION)
    module("vllm.logger", init_logger=logging.getLogger)
    parts = BASE.split(".")
    for end in range(2, len(parts)):
        module(".".join(parts[:end]))
    module(
        BASE,
        KVConnectorBase_V1=Base,
        KVConnectorMetadata=Metadata,
        KVConnectorRole=Role,
        KVConnectorTransferResults=TransferResults,
        KVConnectorWorkerMetadata=Metadata,
    )
    module("vllm.distributed.parallel_state", get_tensor_model_parallel_rank=lambda: Scheduler.rank)


def base() -> types.ModuleType:
    return sys.modules[BASE]


class Namespace(types.SimpleNamespace):
    pass


def config(extra: dict, *, layers=4, kv_heads=4, head_dim=8, tp=1, dtype="torch.bfloat16", **model) -> Namespace:
    """A VllmConfig as far as the connector reads it."""
    options = dict({"dtype": dtype, "use_mla": False}, **model)
    return Namespace(
        kv_transfer_config=Namespace(kv_connector_extra_config=extra, kv_load_failure_policy="fail"),
        cache_config=Namespace(block_size=PAGE),
        parallel_config=Namespace(tensor_parallel_size=tp),
        model_config=Namespace(
            get_total_num_hidden_layers=lambda: layers,
            get_total_num_kv_heads=lambda: kv_heads,
            get_head_size=lambda: head_dim,
            **options,
        ),
    )


class Layer:
    """An attention layer: its pages are a dictionary of slots."""

    def __init__(self, kv_heads: int):
        self.num_kv_heads = kv_heads
        self.kv_cache = object()
        self.slots: Dict[int, tuple] = {}  # slot → (k, v), bits
        self.impl = Namespace(do_kv_cache_update=None)


class NumpyPages:
    """Takes the place of pages.TorchPages."""

    def __init__(self, layers, page_tokens):
        import contextlib

        self.page_tokens = page_tokens
        self._layers = layers
        self.begin = lambda fence: contextlib.nullcontext()

    def fence(self):
        return None

    def write(self, layer, slots, k, v):
        target = self._layers[layer].slots
        for row, slot in enumerate(slots.tolist()):
            target[slot] = (k[row].view(np.uint16), v[row].view(np.uint16))

    def flush(self):
        pass


class Request(Namespace):
    def __init__(self, request_id: str, ids: List[int], **other):
        values = dict(lora_request=None, mm_features=[], pooling_params=None, prompt_embeds=None, cache_salt=None, priority=0)
        super().__init__(request_id=request_id, prompt_token_ids=ids, **dict(values, **other))
        self.cached = 0  # tokens that vLLM has
        self.external: Optional[int] = None  # tokens that the connector promised
        self.block_ids: List[int] = []
        self.state = "waiting"  # waiting, loading, computed (by vLLM from `computed_from` on), aborted
        self.computed_from: Optional[int] = None


class Scheduler:
    """One scheduler-side connector and `tp` worker-side ones, stepped as vLLM's engine core does."""

    rank = 0

    def __init__(self, connector_class, role, extra: dict, tp: int = 1, kv_heads: int = 4, layers: int = 4, **model):
        vllm_config = config(extra, tp=tp, kv_heads=kv_heads, layers=layers, **model)
        self.config = vllm_config
        self.connector = connector_class(vllm_config, role.SCHEDULER, None)
        self.workers = [connector_class(vllm_config, role.WORKER, None) for _ in range(tp)]
        local = max(1, kv_heads // tp)
        names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
        self.layers = [{name: Layer(local) for name in names} for _ in range(tp)]
        self.requests: Dict[str, Request] = {}
        self.finished_by: Dict[str, set] = {}
        self.failed: set = set()
        self.next_block = 3
        self.computing = False  # as if other requests were being computed

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        return request

    def step(self) -> None:
        for request in list(self.requests.values()):
            if request.state != "waiting":
                continue
            tokens, is_async = self.connector.get_num_new_matched_tokens(request, request.cached)
            if tokens is None:
                continue
            assert is_async == (tokens > 0)
            if tokens:
                pages = -(-(request.cached + tokens) // PAGE)
                request.block_ids = list(range(self.next_block, self.next_block + 2 * pages, 2))
                self.next_block += 2 * pages
                request.external, request.state = tokens, "loading"
            else:
                request.state, request.computed_from = "computed", request.cached
            blocks = Namespace(get_block_ids=lambda: (list(request.block_ids),))
            self.connector.update_state_after_alloc(request, blocks, tokens)
        output = Namespace(total_num_scheduled_tokens=int(self.computing))
        metadata = self.connector.build_connector_meta(output)
        finished, told = set(), None
        for rank, worker in enumerate(self.workers):
            Scheduler.rank = rank
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(Namespace(no_compile_layers=self.layers[rank]))
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            tells = worker.build_connector_worker_meta()
            if tells is not None:
                told = tells if told is None else told.aggregate(tells)
            worker.clear_connector_metadata()
            self.failed |= results.failed_recving
            for request_id in results.finished_recving:
                ranks = self.finished_by.setdefault(request_id, set())
                assert rank not in ranks, "reported twice"
                ranks.add(rank)
                if len(ranks) == len(self.workers):
                    finished.add(self.finished_by.pop(request_id) and request_id)
        output = Namespace(finished_recving=finished or None, kv_connector_worker_meta=told)
        self.connector.update_connector_output(output)
        for request_id in finished:
            request, failed = self.requests[request_id], request_id in self.failed
            self.failed.discard(request_id)
            if request.state == "aborted":
                del self.requests[request_id]
                continue
            request.state = "computed"
            request.computed_from = request.cached + request.external
            if failed:  # vLLM frees its pages, finds what it has cached again, and asks again.
                request.computed_from = request.cached
                assert self.connector.get_num_new_matched_tokens(request, request.cached) == (0, False)

    def finish(self, request: Request) -> None:
        """Ends a request, whatever its state: an abort where it is not computed."""
        loading = request.state == "loading"
        assert self.connector.request_finished(request, request.block_ids) == (False, None)
        request.state = "aborted"
        if not loading:
            del self.requests[request.request_id]

    def run(self, request: Request, seconds: float = 20.0) -> Request:
        """Steps until the request is computed."""
        import time

        deadline = time.monotonic() + seconds
        while request.state != "computed":
            assert time.monotonic() < deadline, f"request {request.request_id} is still {request.state}"
            self.step()
        return request

    def close(self) -> None:
        self.connector.shutdown()
        for worker in self.workers:
            worker.shutdown()
