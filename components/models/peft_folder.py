"""PEFT folders that a recipe names, checked without torch before anything trains."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import BackboneConfig, LoraConfig
from components.io import read_json
from components.models.adapters import BASE_LAYERS, check_peft_options, from_peft_options
from components.models.backbone import BackboneError, read_model_config
from components.models.lora_targets import check_targets, is_head_or_embedding, refusal
from components.models.memory import ModelShape, ShapeError
from components.models.store import AdapterError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by their names
PEFT_PREFIX = "base_model.model."  # what PEFT puts before the name of a module of the backbone
_MATRIX = re.compile(r"base_model\.model\..+\.lora_[AB]\.weight")


def check_adapter_folder(folder: Path, key: str, backbone: BackboneConfig) -> Shapes:
    """Require that a folder has a LoRA adapter that recipes can use, and give its tensors' shapes.

    Only the configuration and the header of the tensors' file are read. Whether the tensors fit the
    backbone is checked as far as its config.json is on this machine and its family is known;
    `check_adapter_fits` checks it when the model is loaded. Errors name the recipe's key and the folder.
    """
    try:
        options = read_options(folder)
        check_peft_options(options)
        shapes = read_shapes(folder / "adapter_model.safetensors")
        lora = from_peft_options(options, shapes)
        _check_tensors(shapes, lora)
        _check_backbone(options, shapes, backbone)
    except AdapterError as error:
        raise AdapterError(f"{key} {folder}: {error}") from None
    return shapes


def read_options(folder: Path) -> dict[str, Any]:
    """The adapter_config.json of a PEFT folder, which must be one of LoRA."""
    try:
        options = read_json(folder / "adapter_config.json")
    except FileNotFoundError:
        raise AdapterError(
            "this is not a PEFT adapter folder, adapter_config.json is missing there: give the folder that"
            " PEFT's save_pretrained has written"
        ) from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"adapter_config.json cannot be read ({error}): save the adapter again") from None
    kind = options.get("peft_type") if isinstance(options, dict) else None
    if kind != "LORA" or not isinstance(options.get("r"), int):
        raise AdapterError(f"adapter_config.json has peft_type {kind!r}: use an adapter of LoRA")
    return dict(options)


def read_shapes(path: Path) -> Shapes:
    """The shapes in the header of a safetensors file."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError:
        raise AdapterError(f"{path.name} is missing there: save the adapter as safetensors") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError, OverflowError):
        raise AdapterError(f"{path.name} is damaged: save the adapter again") from None


def _check_tensors(shapes: Shapes, lora: LoraConfig) -> None:
    """Require the matrices A [r, in] and B [out, r] of each module, and nothing else."""
    others = sorted(name for name in shapes if not _MATRIX.fullmatch(name))
    if others:
        raise AdapterError(
            f"the tensor {others[0]} is no matrix A or B of a linear layer: save the adapter without"
            " embeddings and other modules (save_embedding_layers=False)"
        )
    if not shapes:
        raise AdapterError("the adapter has no tensors: save it again")
    for name, shape in shapes.items():
        module, _, factor = name.rpartition(".lora_")
        if is_head_or_embedding(module):
            raise AdapterError(refusal(name))
        is_a = factor == "A.weight"
        other = f"{module}.lora_{'B' if is_a else 'A'}.weight"
        if other not in shapes:
            raise AdapterError(f"the tensor {other} is missing: save the adapter again")
        if len(shape) != 2 or shape[0 if is_a else 1] != lora.r:
            raise AdapterError(f"the tensor {name} has shape {shape}, which is not of rank r = {lora.r}")


def module_sizes(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each module of an adapter, by its name in the backbone."""
    sizes = {}
    for name in sorted(shapes):
        module, _, factor = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        if factor == "A.weight":
            sizes[module] = (shapes[name][1], shapes[f"{PEFT_PREFIX}{module}.lora_B.weight"][0])
    return sizes


def check_recorded_layers(options: Mapping[str, Any], layers: int) -> None:
    """Require that an adapter was trained on as many of the backbone's layers as are used.

    The options are those of its adapter_config.json; without a record it is one of all layers.
    """
    recorded = (options.get("auto_mapping") or {}).get(BASE_LAYERS)
    if recorded not in (None, layers):
        raise AdapterError(
            f"the adapter was trained on the first {recorded} layers of its backbone, and {layers} are used:"
            f" set backbone.layers to {recorded}"
        )


def _check_backbone(options: Mapping[str, Any], shapes: Shapes, backbone: BackboneConfig) -> None:
    """Compare an adapter with a backbone, as far as its config.json shows it."""
    try:
        shape = ModelShape.from_config(read_model_config(backbone, local_only=True), backbone)
    except (BackboneError, ShapeError):
        return
    check_recorded_layers(options, shape.layers)
    for name, sizes in module_sizes(shapes).items():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), shape.layers)
        if layer >= shape.layers or (name.rpartition(".")[2], *sizes) not in shape.linears:
            raise _misfit(name, sizes, backbone.name)


def check_adapter_fits(folder: Path, shapes: Shapes, model: PreTrainedModel) -> None:
    """Require that each module of an adapter is one of a model, with as many inputs and outputs."""
    check_recorded_layers(read_options(folder), model.config.num_hidden_layers)
    for module, sizes in module_sizes(shapes).items():
        check_targets(model, LoraConfig(target_modules=[module]))
        if sorted(model.get_parameter(f"{module}.weight").shape) != sorted(sizes):
            raise _misfit(module, sizes, model.config.model_type)


def _misfit(module: str, sizes: tuple[int, int], name: str) -> AdapterError:
    return AdapterError(
        f"the adapter has {module} with {sizes[0]} inputs and {sizes[1]} outputs, and the backbone '{name}'"
        " has no such layer: use an adapter that was trained on this backbone and as many of its layers"
    )
