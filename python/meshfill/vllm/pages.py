"""A worker's layers and pages, written through vLLM's own `do_kv_cache_update`, which packs K and V as its kernel wants.

On a CUDA device the writes go to a stream of their own, after what vLLM's stream had queued when the load began.
"""

import contextlib
import warnings
from typing import Any, Dict, List, Optional

import numpy as np
import torch

from .transfer import WorkerPart

# Parts are views of messages; torch only reads them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def layer_index(name: str) -> Optional[int]:
    """The number in "model.layers.7.self_attn.attn"; None where there is none."""
    return next((int(word) for word in name.split(".") if word.isdigit()), None)


def attention_layers(layers: Dict[str, Any], model_layers: int) -> Dict[int, Any]:
    """By number, the attention layers that have pages. Those past the model's own (drafts) are left out."""
    found = {}
    for name, layer in layers.items():
        index = layer_index(name)
        pages = getattr(layer, "kv_cache", None)
        if index is None or index >= model_layers or pages is None or not hasattr(layer, "impl"):
            continue
        if index in found:
            raise RuntimeError(f"layer {index} has K and V twice, the second time as {name}; MeshfillConnector needs one")
        if not hasattr(layer.impl, "do_kv_cache_update"):
            raise RuntimeError(f"the attention backend of {name}, {type(layer.impl).__name__}, has no do_kv_cache_update")
        found[index] = layer
    return dict(sorted(found.items()))


def worker_part(
    layers: Dict[int, Any], *, model_layers: int, model_kv_heads: int, head_dim: int, dtype: str, tp_rank: int, tp_size: int
) -> WorkerPart:
    """Its layers are consecutive; with more ranks than heads, ranks share a head. RuntimeError: otherwise."""
    numbers: List[int] = list(layers)
    if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise RuntimeError(f"MeshfillConnector needs consecutive attention layers, this worker has {numbers}")
    heads = max(1, model_kv_heads // tp_size)
    for number, layer in layers.items():
        if layer.num_kv_heads != heads:
            raise RuntimeError(
                f"layer {number} has {layer.num_kv_heads} KV heads on each of {tp_size} ranks, and {heads} of the model's "
                f"{model_kv_heads} were expected; MeshfillConnector does not serve this model"
            )
    first_head = tp_rank * model_kv_heads // tp_size
    return WorkerPart(model_layers, numbers[0], len(numbers), model_kv_heads, first_head, heads, head_dim, dtype)


def _ask_for_amx() -> None:
    """Asks the kernel for AMX tiles, which a process may not use before.

    torch asks at its first matrix product of several rows. vLLM's attention takes for granted that one came before it; a
    prompt that was loaded but for its last token begins with one row, and would end the process with SIGILL.
    """
    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()


class TorchPages:
    """transfer.Pages over vLLM's attention layers."""

    def __init__(self, layers: Dict[int, Any], page_tokens: int):
        self.page_tokens = page_tokens
        self._layers = layers
        self._device = next(iter(layers.values())).kv_cache.device
        self._cuda = self._device.type == "cuda"
        if self._device.type == "cpu":
            _ask_for_amx()

    def fence(self) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @contextlib.contextmanager
    def begin(self, fence: Any):
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            if self._cuda:
                stack.enter_context(torch.cuda.device(self._device))
                stream = torch.cuda.Stream()
                stream.wait_event(fence)
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def write(self, layer: int, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        target = self._layers[layer]
        target.impl.do_kv_cache_update(
            target,
            self._tensor(k),
            self._tensor(v),
            target.kv_cache,
            torch.from_numpy(slots).to(self._device),
        )

    def flush(self) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        if array.dtype == np.float32:
            return torch.from_numpy(array).to(self._device)
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self._device)
