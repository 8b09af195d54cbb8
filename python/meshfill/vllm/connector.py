"""MeshfillConnector: vLLM's KV connector interface (V1), onto prefills.py and transfer.py.

The life of a long prompt:

    scheduler                                    workers, each
    get_num_new_matched_tokens  → None             (prompt on its way to Meshfill; vLLM asks again each step)
    get_num_new_matched_tokens  → n, async         (Meshfill has computed a layer)
    update_state_after_alloc                       (vLLM has set pages aside)
    build_connector_meta        ── KvLoad ───────► start_load_kv: a thread fetches this rank's layers and heads,
                                                   layer by layer, while Meshfill computes the next ones
    update_connector_output     ◄── request id ─── get_transfer_results
      the lease is released     ◄── LoadErrors ─── build_connector_worker_meta, of loads that failed: one warning, and
                                                   vLLM computes the prompt itself
    request_finished                               (also of cancelled requests: prefill and load are ended)

A prompt below `min_tokens`, and any that Meshfill refuses before it has a lease, never gets past the first line: vLLM
computes it as without this connector. The scheduler never waits; workers wait in steps that have nothing to compute.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
import vllm
from vllm.logger import init_logger

from .pages import TorchPages, attention_layers, worker_part
from .prefills import Prefills
from .settings import TESTED_VLLM, Settings, check_version
from .transfer import KvLoad, KvLoader

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
except ImportError as error:
    tested = ", ".join(TESTED_VLLM)
    raise ImportError(
        f"MeshfillConnector was tested with vLLM {tested}, this is {vllm.__version__}; install a tested version: {error}"
    ) from None

logger = init_logger("vllm.meshfill")

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}
# Of a step without anything to compute, while prompts are on their way: vLLM polls, and would take a core for it.
_IDLE_SECONDS = 0.002


@dataclass
class StepLoads(KVConnectorMetadata):
    """What the scheduler tells every worker in a step."""

    loads: List[KvLoad] = field(default_factory=list)
    stopped: List[str] = field(default_factory=list)  # request ids
    idle: bool = False  # nothing is computed, and a prompt is on its way


@dataclass
class LoadErrors(KVConnectorWorkerMetadata):
    """What workers tell the scheduler in a step: why loads failed, by request id."""

    why: Dict[str, str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of two workers: the first one's reason stands."""
        return LoadErrors({**other.why, **self.why})


class MeshfillConnector(KVConnectorBase_V1):
    """Long prompts are prefilled by Meshfill; see docs/vllm.md for the keys of kv_connector_extra_config."""

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        """RuntimeError, ValueError: this vLLM, its model or its configuration cannot be served; the message says why."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        check_version(vllm.__version__, self._settings.allow_untested_vllm)
        _check_model(vllm_config, kv_cache_config)
        self._least_tokens = _least_tokens(vllm_config.model_config)
        self._page_tokens = vllm_config.cache_config.block_size
        self._client = self._settings.connect()
        self._prefills: Optional[Prefills] = None
        self._loader: Optional[KvLoader] = None
        self._load_errors: Dict[str, str] = {}  # that the scheduler has not been told
        self._loads: List[KvLoad] = []
        if role == KVConnectorRole.SCHEDULER:
            # vLLM fails a request that could not be loaded, unless it is told to compute them. Its scheduler reads
            # this after it has made its connector.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            self._prefills = Prefills(self._settings, self._client, logger)

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Tuple[Optional[int], bool]:
        if not _is_plain_prompt(request) or len(request.prompt_token_ids) < self._least_tokens:
            return 0, False
        tokens = self._prefills.matched(
            request.request_id,
            request.prompt_token_ids,
            num_computed_tokens,
            cache_salt=request.cache_salt or "",
            priority=max(-(2**31), min(2**31 - 1, -request.priority)),  # vLLM's lowest is first, Meshfill's highest
        )
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens <= 0:
            return
        prompt_tokens = len(request.prompt_token_ids)
        first_token = prompt_tokens - 1 - num_external_tokens
        lease, seconds = self._prefills.loading(request.request_id)
        block_ids = tuple(blocks.get_block_ids()[0])
        pages = -(-(prompt_tokens - 1) // self._page_tokens)
        self._loads.append(
            KvLoad(request.request_id, lease, prompt_tokens, first_token, num_external_tokens, block_ids[:pages], seconds)
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        idle = scheduler_output.total_num_scheduled_tokens == 0 and self._prefills.waiting
        return StepLoads(loads, self._prefills.take_stopped_loads(), idle)

    def update_connector_output(self, connector_output: Any) -> None:
        errors = connector_output.kv_connector_worker_meta
        for request_id, why in errors.why.items() if errors is not None else ():
            self._prefills.load_failed(request_id, why)
        for request_id in connector_output.finished_recving or ():
            self._prefills.loaded(request_id)

    def request_finished(self, request: Any, block_ids: List[int]) -> Tuple[bool, Optional[dict]]:
        self._prefills.forget(request.request_id)
        return False, None

    # Worker side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        for load in step.loads:
            if self._loader is None:
                self._loader = self._make_loader(forward_context.no_compile_layers)
            self._loader.start(load)
        for request_id in step.stopped:
            if self._loader is not None:
                self._loader.stop(request_id)

    def get_transfer_results(self, finished_req_ids: Set[str]) -> KVConnectorTransferResults:
        """Of a load that failed, vLLM computes all that it has not cached itself."""
        if self._get_connector_metadata().idle:
            self._wait_idle()
        if self._loader is None:
            return KVConnectorTransferResults()
        finished, errors = self._loader.take_finished()
        self._load_errors.update(errors)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=set(errors))

    def build_connector_worker_meta(self) -> Optional[LoadErrors]:
        errors, self._load_errors = self._load_errors, {}
        return LoadErrors(errors) if errors else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is computed only when its load has ended, so nothing is waited for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    # Both

    def shutdown(self) -> None:
        if self._prefills is not None:
            self._prefills.close()
        if self._loader is not None:
            self._loader.close()
        self._client.close()

    def _wait_idle(self) -> None:
        if self._loader is not None:
            self._loader.wait(_IDLE_SECONDS)
        else:
            time.sleep(_IDLE_SECONDS)

    def _make_loader(self, layers: dict) -> KvLoader:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        model = self._vllm_config.model_config
        model_layers = model.get_total_num_hidden_layers()
        found = attention_layers(layers, model_layers)
        part = worker_part(
            found,
            model_layers=model_layers,
            model_kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
            dtype=_DTYPES[model.dtype],
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=self._vllm_config.parallel_config.tensor_parallel_size,
        )
        return KvLoader(
            self._client,
            part,
            TorchPages(found, self._page_tokens),
            loads=self._settings.loads,
            log=logger,
        )


def _is_plain_prompt(request: Any) -> bool:
    """Whether K and V of the prompt are those of its tokens under the base model, and vLLM may skip computing them."""
    return (
        request.prompt_token_ids is not None
        and getattr(request, "prompt_embeds", None) is None
        and request.lora_request is None
        and not request.mm_features
        and request.pooling_params is None
        and not getattr(request, "skip_reading_prefix_cache", False)
    )


def _least_tokens(model: Any) -> int:
    """Shorter prompts have other K and V here than there.

    Of a model with longrope, Meshfill takes the long factors for prompts beyond the original context, as transformers
    does; vLLM takes them for all prompts, if max_model_len is beyond it.
    """
    config = getattr(model, "hf_text_config", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return 0
    original = getattr(config, "original_max_position_embeddings", None) or rope["original_max_position_embeddings"]
    return original + 1 if model.max_model_len > original else 0


def _check_model(vllm_config: Any, kv_cache_config: Any) -> None:
    """RuntimeError: Meshfill's K and V do not fit this model or configuration."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.dtype not in _DTYPES:
        raise RuntimeError(f"Meshfill's K and V are bf16 or f32, this model's are {model.dtype}; give --dtype bfloat16")
    if model.use_mla:
        raise RuntimeError("MeshfillConnector does not serve models with MLA")
    if kv_cache_config is not None and len(kv_cache_config.kv_cache_groups) > 1:
        raise RuntimeError(
            f"MeshfillConnector needs one group of KV pages, this model has {len(kv_cache_config.kv_cache_groups)}; "
            "give --disable-hybrid-kv-cache-manager"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise RuntimeError(f"MeshfillConnector does not serve {name} {getattr(parallel, name)}")
