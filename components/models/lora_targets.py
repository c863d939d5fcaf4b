"""Which modules of a model may have LoRA: the linear layers below its head.

LoRA on the embeddings or the head of a language model is refused. The head is applied to selected
positions and tokens (components/models/head.py), where PEFT's layer would not be called, and tied
embeddings cannot take an update of one of their two uses. A classifier that is trained as a reward
is merged as a whole, so its embeddings may have LoRA; its output layer is trained without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from components.config import LoraConfig, PolicyConfig, Section, SelectorConfig, UserError
from components.models.backbone import BackboneError, read_model_config
from components.models.memory import FAMILIES

if TYPE_CHECKING:
    import torch

# Names in transformers' decoders and classifiers.
EMBEDDINGS = ("embed_tokens", "embed_positions", "embed_in", "word_embeddings", "wte", "wpe")
HEADS = ("lm_head", "embed_out", "score", "classifier")


class TargetError(UserError, ValueError):
    """A module that cannot have LoRA. The message names it."""


def lora_sections(value: object, key: str = "") -> Iterator[tuple[str, Section, LoraConfig]]:
    """The LoRA of each model of a recipe: its key, the section of the model, and itself."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[str, object]] = value.items()
    else:
        items = iter(value) if isinstance(value, Section) else ()
    for name, item in items:
        inner = f"{key}.{name}" if key else name
        if isinstance(item, LoraConfig) and isinstance(value, Section):
            yield inner, value, item
        else:
            yield from lora_sections(item, inner)


def check_target_names(recipe: Section) -> None:
    """Refuse targets in a recipe that are embeddings or heads by their names; raises a TargetError."""
    for key, section, lora in lora_sections(recipe):
        for target in _listed(lora):
            if is_head_or_embedding(target, classifier=not _is_language_model(section)):
                raise TargetError(f"{key}.target_modules: {refusal(target)}")


def check_target_families(recipe: Section) -> None:
    """Refuse targets in a recipe that the backbone's family does not have.

    It covers the families whose layers are known, and backbones whose config.json is on this
    machine; `check_targets` covers all when the model is loaded.
    """
    for key, section, lora in lora_sections(recipe):
        backbone = getattr(section, "backbone", None)
        if backbone is None or not _listed(lora):
            continue
        try:
            family = read_model_config(backbone, local_only=True).get("model_type")
        except BackboneError:
            continue
        if family in FAMILIES:
            known = list(dict.fromkeys(FAMILIES[family].linears))
            allowed = known if _is_language_model(section) else [*known, *EMBEDDINGS]
            for target in _listed(lora):
                if target.rpartition(".")[2] not in allowed:
                    raise TargetError(
                        f"{key}.target_modules: {target} is no linear layer of '{backbone.name}' ({family}):"
                        f" use all-linear, or some of {', '.join(known)}."
                    )


def check_targets(model: torch.nn.Module, lora: LoraConfig, classifier: bool = False) -> None:
    """Require that each target is a linear layer of a model, and not its head, before LoRA is attached.

    PEFT itself chooses the layers of 'all-linear'. Embeddings are allowed in a classifier, see the
    module's docstring.
    """
    import torch

    untyped: Any = model
    head = untyped.get_output_embeddings()
    modules = dict(model.named_modules())
    linears = _linear_layers(model)
    remedy = f"use all-linear, or some of {', '.join(usable_targets(model))}."
    for target in _listed(lora):
        matched = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not matched:
            raise TargetError(
                f"lora.target_modules: {target} matches no module of the {type(model).__name__}: {remedy}"
            )
        for name in matched:
            module = modules[name]
            is_embedding = isinstance(module, torch.nn.Embedding)
            if module is head or is_head_or_embedding(name, classifier) or (is_embedding and not classifier):
                raise TargetError(f"lora.target_modules: {refusal(target)}")
            if not is_embedding and name not in linears:
                raise TargetError(
                    f"lora.target_modules: {target} matches {name}, a {type(module).__name__}, and LoRA needs"
                    f" a linear layer: {remedy}"
                )


def usable_targets(model: torch.nn.Module) -> list[str]:
    """The last parts of the names of a model's linear layers below its head, sorted.

    The experts of a mixture are parameters and no layers, so they are not among them.
    """
    untyped: Any = model
    head = untyped.get_output_embeddings()
    names = {name.rpartition(".")[2] for name, module in _linear_layers(model).items() if module is not head}
    return sorted(names - set(HEADS))


def _linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    import torch
    from transformers.pytorch_utils import Conv1D

    linear = torch.nn.Linear | Conv1D
    return {name: module for name, module in model.named_modules() if isinstance(module, linear)}


def _listed(lora: LoraConfig) -> list[str]:
    return [] if isinstance(lora.target_modules, str) else lora.target_modules


def _is_language_model(section: Section) -> bool:
    return isinstance(section, SelectorConfig | PolicyConfig)


def is_head_or_embedding(target: str, classifier: bool = False) -> bool:
    """Whether a module cannot have LoRA by its name; `classifier` as of `check_targets`."""
    name = target.rpartition(".")[2]
    return name in HEADS or (name in EMBEDDINGS and not classifier)


def refusal(target: str) -> str:
    """The sentence for a module that `is_head_or_embedding`."""
    return (
        f"{target} is an embedding or an output layer, on which LoRA is not supported: use all-linear, or"
        " names of linear layers such as q_proj."
    )
