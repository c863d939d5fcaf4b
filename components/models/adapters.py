"""LoRA adapters as PEFT folders, and in slots of a resident model, where they are swapped in place."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from components.config import BackboneConfig, LoraConfig, TemplateFile
from components.data.templates import with_text
from components.io import read_json
from components.models.backbone import first_line
from components.models.lora_targets import TargetError, check_targets, usable_targets
from components.models.offload import allocate_adapters
from components.models.store import AdapterError, check_adapter
from components.seeding import derive

if TYPE_CHECKING:
    import peft
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

    from components.models.store import Adapter

# Options of PEFT's LoraConfig that the recipe's LoraConfig has.
SUPPORTED_LORA_OPTIONS = {"r", "lora_alpha", "lora_dropout", "target_modules"}
# Options that restrict target_modules; the names of an adapter's tensors show the modules that are left.
LAYER_OPTIONS = {"layers_to_transform", "layers_pattern", "exclude_modules"}
# Options of PEFT's LoraConfig that do not change what the tensors of an adapter mean.
NEUTRAL_LORA_OPTIONS = {
    "init_lora_weights",  # whose values are checked
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "eva_config",  # of an initialization that leaves the weights of the backbone as they are
    "ensure_weight_tying",  # of embeddings and output layers, whose tensors are refused
    "fan_in_fan_out",  # PEFT sets it by the type of each layer, whose weight GPT-2 stores transposed
}
# Values of init_lora_weights with which PEFT leaves the weights of the backbone as they are.
PLAIN_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")
# Key under auto_mapping of an adapter_config.json: the first layers of the backbone, if not all.
BASE_LAYERS = "num_hidden_layers"
TEMPLATE_FILE = "prompt_template.txt"  # of the prompts, beside the weights of an exported adapter


def to_peft_config(
    config: LoraConfig, task: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM"
) -> peft.LoraConfig:
    """Convert the recipe's LoRA configuration to PEFT's.

    With the task 'SEQ_CLS' the output layer of the classifier is trained and saved with the adapter.
    """
    import peft

    return peft.LoraConfig(
        r=config.r,
        lora_alpha=cast(int, config.alpha),  # PEFT annotates an int, but computes with any number
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        task_type=task,
    )


def from_peft_options(options: Mapping[str, Any], names: Iterable[str]) -> LoraConfig:
    """Convert an adapter_config.json, and the names of the adapter's tensors, to the recipe's configuration.

    An option that a recipe does not have, such as rank-stabilized scaling, is an AdapterError.
    """
    used = check_peft_options(options)
    targets = options["target_modules"]
    if used & LAYER_OPTIONS:
        targets = {_module_name(name) for name in names}
    return LoraConfig(
        r=options["r"],
        alpha=float(options["lora_alpha"]),
        dropout=float(options.get("lora_dropout", 0.0)),
        target_modules="all-linear" if targets == "all-linear" else sorted(targets),
    )


def check_peft_options(options: Mapping[str, Any]) -> set[str]:
    """Refuse an adapter_config.json with an option that a recipe does not have; gives those in use."""
    used = {name for name, value in options.items() if _is_used(value)}
    unsupported = sorted(used - SUPPORTED_LORA_OPTIONS - LAYER_OPTIONS - NEUTRAL_LORA_OPTIONS)
    if options.get("init_lora_weights", True) not in PLAIN_INITIALIZATIONS:
        unsupported.append(f"init_lora_weights {options['init_lora_weights']!r}")
    targets = options.get("target_modules")
    if not targets or (isinstance(targets, str) and targets != "all-linear"):
        unsupported.append(f"target_modules {targets!r}")
    if unsupported:
        raise AdapterError(
            f"the adapter's LoRA uses {', '.join(unsupported)}, which is not supported: "
            "use an adapter that has only r, lora_alpha, lora_dropout and a list of target_modules"
        )
    return used


def _is_used(value: object) -> bool:
    """Whether an option of PEFT differs from all values that mean 'not used'; 0 is a layer's number."""
    is_empty = isinstance(value, Sized) and not value
    return not is_empty and value is not None and value is not False and value != "none"


def _module_name(tensor_name: str) -> str:
    """The module of a LoRA tensor in the backbone, e.g. 'model.layers.0.self_attn.q_proj'."""
    return tensor_name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0]


def attach_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Wrap a frozen model with a LoRA adapter whose weights are fp32 for any dtype of the model.

    The result is in evaluation mode. Targets must be linear layers below the model's head.
    """
    import peft
    import torch

    from components.models.fused_lora import fuse_lora

    check_targets(model, config)
    names = ", ".join(usable_targets(model))
    # PEFT draws initial values from the global generator; initial_adapter() replaces them.
    with torch.random.fork_rng(devices=[]):
        try:
            wrapped = peft.get_peft_model(model, to_peft_config(config))
        except ValueError as error:
            raise TargetError(
                f"PEFT attaches no LoRA to the {type(model).__name__} ({first_line(error)}): set"
                f" lora.target_modules to some of {names}."
            ) from None
    if parameters := sorted(getattr(wrapped.peft_config["default"], "target_parameters", None) or []):
        raise TargetError(
            f"lora.target_modules: {config.target_modules} includes {parameters[0]}, which is no linear"
            f" layer but weights of all experts, whose LoRA is not saved: use some of {names}."
        )
    allocate_adapters(wrapped)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    fuse_lora(wrapped)
    wrapped.eval()
    return cast("PeftModel", wrapped)


class AdapterSlot:
    """The adapter 'default' of a resident model, into whose parameters adapters are copied."""

    def __init__(self, model: PeftModel) -> None:
        owned = {name: value for name, value in model.named_parameters() if "default" in name.split(".")}
        factors = ("lora_A.default.weight", "lora_B.default.weight")
        others = [name for name in owned if not name.endswith(factors)]
        if others:
            raise AdapterError(
                f"PEFT trains {others[0]}, which is no matrix A or B of a linear layer and is not saved:"
                " use target_modules that are linear layers"
            )
        named = {name.replace(".default.", "."): parameter for name, parameter in owned.items()}
        self.named = dict(sorted(named.items()))  # the model's parameters by PEFT's tensor names

    @property
    def names(self) -> list[str]:
        """PEFT's tensor names, sorted."""
        return list(self.named)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The model's parameters, in the order of `names`."""
        return list(self.named.values())

    def subset(self, names: Collection[str]) -> AdapterSlot:
        """The slot of some of the tensors, over the same parameters."""
        slot = copy.copy(self)
        slot.named = {name: parameter for name, parameter in self.named.items() if name in names}
        return slot

    def freeze(self, factor: str) -> None:
        """Exclude a LoRA factor, 'A' or 'B', from training: its tensors get no gradients."""
        frozen = [parameter for name, parameter in self.named.items() if f".lora_{factor}." in name]
        if not frozen:
            raise AdapterError(f"the adapter has no LoRA factor {factor} that could be frozen")
        for parameter in frozen:
            parameter.requires_grad_(False)

    def load(self, adapter: Mapping[str, torch.Tensor]) -> None:
        """Copy an adapter into the slot, whose values do not change if the adapter does not fit."""
        import torch

        check_adapter(adapter, self.named)
        with torch.no_grad():
            torch._foreach_copy_(
                [parameter.data for parameter in self.parameters],
                [adapter[name].to(parameter.device) for name, parameter in self.named.items()],
            )

    def read(self) -> Adapter:
        """Copy the adapter out of the slot, to fp32 on the CPU."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.named.items()}

    def initial_adapter(self, seed: int) -> Adapter:
        """Initial LoRA values as a function of the seed and the tensor's name.

        A is Kaiming-uniform and B is zero (PEFT's default), so the adapted model equals the frozen
        one.
        """
        import torch

        adapter = {
            name: torch.zeros(parameter.shape, dtype=torch.float32) for name, parameter in self.named.items()
        }
        for name, tensor in adapter.items():
            if ".lora_A." in name:
                generator = torch.Generator().manual_seed(derive(seed, "initial adapter", name))
                torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        return adapter


def export_adapter(
    adapter: Mapping[str, torch.Tensor],
    config: LoraConfig,
    backbone: BackboneConfig,
    folder: Path,
    template: TemplateFile | None = None,
) -> Path:
    """Write an adapter as a PEFT folder, which ``PeftModel.from_pretrained(base, folder)`` opens.

    The backbone's name, revision and layers are stored in the adapter's configuration. PEFT has no option
    for the layers, so they are under auto_mapping, which it ignores for a language model;
    `check_recorded_layers` reads them. The text of the template of the prompts stands beside the weights.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in adapter.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": backbone.location,
        "r": config.r,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,  # as PEFT declares it
        "lora_dropout": config.dropout,
        "target_modules": _named_targets(adapter, config),
        "bias": "none",
        "inference_mode": True,
    }
    if backbone.revision is not None:
        content["revision"] = backbone.revision
    if backbone.layers is not None:
        content["auto_mapping"] = {BASE_LAYERS: backbone.layers}
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(f"{with_text(template).text}\n", encoding="utf-8")
    return folder


def _named_targets(adapter: Mapping[str, torch.Tensor], config: LoraConfig) -> list[str]:
    """The target modules by their names; those of 'all-linear' as PEFT resolves it when it saves."""
    if isinstance(config.target_modules, str):
        return sorted({_module_name(name).rpartition(".")[2] for name in adapter})
    return config.target_modules


def read_adapter(folder: Path) -> tuple[Adapter, LoraConfig]:
    """Read the tensors and the configuration of a PEFT folder."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    return tensors, from_peft_options(read_json(folder / "adapter_config.json"), tensors)


def stack_adapters(
    lower: tuple[Adapter, LoraConfig], upper: tuple[Adapter, LoraConfig]
) -> tuple[Adapter, LoraConfig]:
    """Combine two adapters into one: s1 B1 A1 + s2 B2 A2 = [s1 B1, s2 B2] [A1; A2].

    A module may be in one of them only. The result has rank r1 + r2 and scale 1, and is exact up to
    rounding.
    """
    import torch

    layers = sorted({name.rsplit(".lora_", 1)[0] for name in lower[0].keys() | upper[0].keys()})
    stacked = {}
    for layer in layers:
        a = f"{layer}.lora_A.weight"
        b = f"{layer}.lora_B.weight"
        in_features, out_features = next(
            (tensors[a].shape[1], tensors[b].shape[0]) for tensors, _ in (lower, upper) if a in tensors
        )
        a_blocks = []
        b_blocks = []
        for tensors, config in (lower, upper):
            scale = config.alpha / config.r
            a_blocks.append(tensors.get(a, torch.zeros(config.r, in_features, dtype=torch.float32)))
            b_blocks.append(tensors.get(b, torch.zeros(out_features, config.r, dtype=torch.float32)) * scale)
        stacked[a] = torch.cat(a_blocks)
        stacked[b] = torch.cat(b_blocks, dim=1)
    rank = lower[1].r + upper[1].r
    targets = sorted({name for tensors, config in (lower, upper) for name in _named_targets(tensors, config)})
    return stacked, LoraConfig(r=rank, alpha=float(rank), dropout=upper[1].dropout, target_modules=targets)
