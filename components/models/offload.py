"""Backbones larger than a device: frozen layers that stay in main memory or on disk until they are computed.

Hooks of `accelerate` load a module's weights before its forward pass and release them afterwards. Layers
alone are offloaded, so the embeddings, the last norm and the head, which other code reads, stay on the
device. Autograd keeps the weights of a layer until its backward pass, unless the layer is checkpointed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from components.config import BackboneConfig, UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

SHARE = 0.9  # of the free memory that weights may take, unless max_memory says otherwise


def place_modules(
    backbone: BackboneConfig, config: PreTrainedConfig, dtype: torch.dtype, device: str
) -> dict[str, str]:
    """The device_map of transformers: the device, 'cpu' or 'disk' by the name of a module."""
    import torch
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_model.from_config(config, dtype=dtype)
    kinds = set(model._no_split_modules or ())
    layers = {name: _bytes(part) for name, part in model.named_modules() if type(part).__name__ in kinds}
    if isinstance(backbone.device_map, dict):
        unknown = [name for name in backbone.device_map if name not in layers]
        if unknown:
            raise UserError(
                f"backbone.device_map names '{unknown[0]}', which is no layer of '{backbone.name}': give"
                f" whole layers ({', '.join(list(layers)[:2])}, ...); everything else stays on the device."
            )
        places = {name: backbone.device_map.get(name, device) for name in layers}
    else:
        places = _fill(backbone, layers, _bytes(model) - sum(layers.values()), device)
    return dict.fromkeys(_other_modules(model, places), device) | places


def _bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _other_modules(module: torch.nn.Module, layers: dict[str, str], prefix: str = "") -> Iterator[str]:
    """The largest modules that contain no layer."""
    for name, child in module.named_children():
        path = prefix + name
        if any(layer.startswith(f"{path}.") for layer in layers):
            yield from _other_modules(child, layers, f"{path}.")
        elif path not in layers:
            yield path


def _fill(backbone: BackboneConfig, layers: dict[str, int], others: int, device: str) -> dict[str, str]:
    """The layers on the device as far as they fit, then in main memory, then on disk."""
    import torch
    from accelerate.utils import convert_file_size_to_int, get_max_memory

    names = {"device": device} if device == "cpu" else {"device": device, "cpu": "cpu"}
    room: dict[str, int] = {}  # bytes that weights may take in a place
    for name, place in names.items():
        if name in backbone.max_memory:
            room[name] = int(convert_file_size_to_int(backbone.max_memory[name]))
        else:
            free = get_max_memory()["cpu"] if place == "cpu" else torch.cuda.mem_get_info(place)[0]
            room[name] = int(SHARE * free)
    needed = others + max(layers.values(), default=0)  # a layer that is computed is on the device
    if needed > room["device"]:
        raise UserError(
            f"backbone.device_map is 'auto', and the embeddings, the head and one layer of '{backbone.name}'"
            f" need {needed:,} bytes of {device}, of which weights may take {room['device']:,}: raise"
            " backbone.max_memory.device, or use a device with more memory."
        )
    all_fit = sum(layers.values()) + others <= room["device"]
    room["device"] -= others if all_fit else needed
    places = {}
    for layer, size in layers.items():
        name = next((name for name in room if room[name] >= size), "disk")
        places[layer] = names.get(name, "disk")
        if name in room:
            room[name] -= size
    return places


def prepare_offloaded(model: torch.nn.Module) -> None:
    """Let threads share the modules of a model whose layers are offloaded."""
    for module in model.modules():
        if is_offloaded(module):
            untyped: Any = module
            untyped.offload_lock = threading.RLock()
            untyped.forward = partial(_locked, untyped.offload_lock, untyped.forward)
    # PEFT would place all modules again where a model has this.
    model.__dict__.pop("hf_device_map", None)


def _locked(lock: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with lock:
        return forward(*args, **kwargs)


def is_offloaded(module: torch.nn.Module) -> bool:
    """Whether a module's own weights are loaded for its forward pass alone."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


@contextmanager
def loaded(module: torch.nn.Module) -> Iterator[None]:
    """Load a module's own weights where they are offloaded, for code that reads them itself."""
    if not is_offloaded(module):
        yield
        return
    from accelerate.utils import align_module_device

    untyped: Any = module
    with untyped.offload_lock, align_module_device(module):
        yield


def allocate_adapters(model: torch.nn.Module) -> None:
    """Give memory to new adapters of offloaded layers, which PEFT leaves without values."""
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer) and is_offloaded(layer.get_base_layer()):
            hook: Any = layer.get_base_layer()._hf_hook
            for factors in (layer.lora_A, layer.lora_B):
                for factor in factors.values():
                    if factor.weight.is_meta:
                        factor.to_empty(device=hook.execution_device)
