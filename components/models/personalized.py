"""Personal modules of a client in a resident backbone (FedPDPO sections 3.2.2, 3.2.3 and D.2).

    backbone + LoRA -> z' -> bottleneck adapter -> z -+-> language-model head
                             (eq. 9)                  +-> reward head (eq. 3)

The language-model head is an untied copy of the backbone's. The modules replace the backbone's last
norm and its head, so code that works on the backbone (log-probabilities, generation) also works on
the personalized model; `as_reference` restores the backbone's own modules. Personal modules are
fp32 for any dtype of the backbone. `PersonalSlot` copies a client's values in and out, as an
adapter slot does; nothing is rebuilt for a client.

Eq. 9 ends with a LayerNorm, and most backbones end with a norm too. With `norm: backbone`, z' is
the output of the last layer, and the norm of eq. 9 is the client's copy of the backbone's last
norm: a LayerNorm for GPT-2, which matches eq. 9 literally, and an RMSNorm for Llama. The weights of
the last projection of the bottleneck start at 0, so an untrained personalized model equals the
reference and the margins of DPO start at 0. With `norm: layer`, z' is normalized already, and a
LayerNorm with gain 1 and bias 0 follows, as in a literal reading of eq. 9. It rescales the input of
the head, so the policy differs from its reference before training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from components.config import PersonalModules
from components.config.modules import BottleneckConfig, RewardHeadConfig
from components.models.adapters import AdapterSlot
from components.models.backbone import BackboneError
from components.models.head import output_embeddings
from components.seeding import derive

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from components.models.store import Adapter


class Bottleneck(torch.nn.Module):
    """z = Norm(z' + Decode(Dropout(GELU(Encode(z'))))) (eq. 9), in place of the last norm."""

    def __init__(self, backbone_norm: torch.nn.Module, hidden_size: int, config: BottleneckConfig) -> None:
        super().__init__()
        self.enabled = True  # else the backbone's norm is computed
        self.copies_norm = config.norm == "backbone"
        self.backbone_norm = backbone_norm
        copied = copy.deepcopy(backbone_norm).float()
        self.norm = copied if self.copies_norm else torch.nn.LayerNorm(hidden_size, dtype=torch.float32)
        self.encode = torch.nn.Linear(hidden_size, config.width, dtype=torch.float32)
        self.decode = torch.nn.Linear(config.width, hidden_size, dtype=torch.float32)
        self.activation = torch.nn.GELU()
        self.dropout = torch.nn.Dropout(config.dropout)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]; fp32 if the bottleneck is enabled."""
        if self.copies_norm and not self.enabled:
            # The reference is computed in fp32 as well, so that the two differ by training alone and
            # not by rounding.
            weights = {name: value.float() for name, value in self.backbone_norm.named_parameters()}
            call = torch.func.functional_call
            return cast(torch.Tensor, call(self.backbone_norm, weights, (states.float(),)))
        normalized: torch.Tensor = states if self.copies_norm else self.backbone_norm(states)
        if not self.enabled:
            return normalized
        inputs = normalized.float()
        residual = self.decode(self.dropout(self.activation(self.encode(inputs))))
        return cast(torch.Tensor, self.norm(inputs + residual))


class PersonalHead(torch.nn.Module):
    """The client's language-model head in place of the backbone's, and its reward head.

    Both heads read the same features. Both language-model heads are computed in fp32. In bf16,
    rounding would separate a personalized model from its reference.
    """

    def __init__(self, backbone_head: torch.nn.Linear, modules: PersonalModules) -> None:
        super().__init__()
        in_features = backbone_head.in_features
        bias = backbone_head.bias is not None
        self.enabled = True  # else the backbone's head is used
        self.backbone_head = backbone_head
        self.head = torch.nn.Linear(in_features, backbone_head.out_features, bias, dtype=torch.float32)
        self.reward = RewardHead(in_features, modules.reward) if modules.reward else None

    @property
    def active_head(self) -> torch.nn.Linear:
        return self.head if self.enabled else self.backbone_head

    @property
    def weight(self) -> torch.Tensor:
        return self.active_head.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.active_head.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., H] to logits [..., V], fp32."""
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(states.float(), self.weight.float(), bias)


class RewardHead(torch.nn.Module):
    """h(x, y) = W2 tanh(Dropout(W1 z + b1)) + b2 (eq. 3, D.2.4).

    z is the mean of the features over the tokens of the response, or of prompt and response.
    """

    def __init__(self, hidden_size: int, config: RewardHeadConfig) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.hidden = torch.nn.Linear(hidden_size, config.width, dtype=torch.float32)
        self.dropout = torch.nn.Dropout(config.dropout)
        self.score = torch.nn.Linear(config.width, 1, dtype=torch.float32)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Mean features of responses [..., H] to rewards [...]."""
        rewards: torch.Tensor = self.score(self.dropout(self.hidden(features.float())).tanh())
        return rewards[..., 0]


class PersonalSlot(AdapterSlot):
    """The slot of a client's personal modules in a resident model.

    Tensor names begin with 'bottleneck.', 'head.' or 'reward.', as in `Bottleneck` and `PersonalHead`;
    LoRA tensors of layers that are not shared keep PEFT's names.
    """

    def __init__(self, model: PeftModel, modules: PersonalModules) -> None:
        """Insert personal modules into a model that has a LoRA adapter."""
        base: Any = model.get_base_model()
        device = next(base.parameters()).device
        self.lora = AdapterSlot(model)
        backbone_head = output_embeddings(base)
        bottleneck = None
        if modules.bottleneck:
            name, norm = find_final_norm(base)
            bottleneck = Bottleneck(norm, backbone_head.in_features, modules.bottleneck).to(device)
            base.set_submodule(name, bottleneck)
        self.head = PersonalHead(backbone_head, modules).to(device)
        base.set_output_embeddings(self.head)
        parameters = dict(self.head.named_parameters())
        if bottleneck is not None:
            parameters |= {f"bottleneck.{name}": p for name, p in bottleneck.named_parameters()}
        personal = {name: p for name, p in parameters.items() if "backbone_" not in name}
        # The backbone's own values, or those of a new LayerNorm.
        self._initial_norm = {
            name: p.detach().cpu().clone()
            for name, p in personal.items()
            if name.startswith("bottleneck.norm.")
        }
        for parameter in personal.values():
            parameter.requires_grad_(True)
        # The LoRA tensors that clients send to the server; the others are personal.
        self.shared = self.lora.subset(_shared_names(self.lora.names, modules.shared_layers, base))
        personal |= {name: p for name, p in self.lora.named.items() if name not in self.shared.names}
        self.named = dict(sorted(personal.items()))

    def initial_modules(self, seed: int) -> Adapter:
        """Initial tensors of a client: the backbone's head and last norm, and random tensors.

        Random tensors are functions of the seed and the tensor's name. The last projection of the
        bottleneck is 0, so the bottleneck changes nothing. Linear layers are initialized as in
        PyTorch (Kaiming-uniform with a = sqrt(5), bias uniform within 1 / sqrt(fan in)), LoRA as in
        `AdapterSlot.initial_adapter`.
        """
        lora = self.lora.initial_adapter(seed)
        return {name: lora[name] if name in lora else self._initial_tensor(name, seed) for name in self.names}

    def _initial_tensor(self, name: str, seed: int) -> torch.Tensor:
        shape = self.named[name].shape
        if name in self._initial_norm:
            return self._initial_norm[name].clone()
        if name.startswith("head."):
            copied = self.head.backbone_head.get_parameter(name.removeprefix("head."))
            return copied.detach().float().cpu().clone()
        if name.startswith("bottleneck.decode."):
            return torch.zeros(shape, dtype=torch.float32)
        fan_in = self.named[name.rsplit(".", 1)[0] + ".weight"].shape[1]
        bound = 1 / math.sqrt(fan_in)
        generator = torch.Generator().manual_seed(derive(seed, "personal", name))
        return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)


def _shared_names(lora_names: list[str], shared_layers: int | None, base: PreTrainedModel) -> list[str]:
    if shared_layers is None:
        return lora_names
    depth = base.config.num_hidden_layers
    if shared_layers >= depth:
        raise BackboneError(
            f"{shared_layers} layers are shared, but the backbone has {depth}, so no LoRA tensor would be "
            f"personal: share at most {depth - 1}."
        )
    return [name for name in lora_names if layer_index(name) < shared_layers]


def layer_index(name: str) -> int:
    """The layer of a LoRA tensor: the first number between dots of its name."""
    number = next((part for part in name.split(".") if part.isdigit()), None)
    if number is None:
        raise BackboneError(
            f"LoRA tensor '{name}' belongs to no layer, so it is neither shared nor personal: "
            "use other lora.target_modules."
        )
    return int(number)


def find_final_norm(model: PreTrainedModel) -> tuple[str, torch.nn.Module]:
    """Name and module whose output is the last hidden states of a backbone, by one forward pass."""
    outputs: list[tuple[str, Any]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: outputs.append((name, output)))
        for name, module in model.named_modules()
        if _is_norm_like(module)
    ]
    try:
        with torch.no_grad():
            input_ids = torch.arange(4, device=model.device)[None]
            last = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    for name, output in reversed(outputs):
        # Some backbones return a view of the output, so the storage is compared.
        if isinstance(output, torch.Tensor) and output.data_ptr() == last.data_ptr():
            return name, model.get_submodule(name)
    raise BackboneError(
        f"the backbone ({model.config.model_type}) does not end with a norm, in whose place a bottleneck "
        "adapter could be inserted: use a backbone of another family, or no bottleneck."
    )


def _is_norm_like(module: torch.nn.Module) -> bool:
    parameters = list(module.parameters())
    return not list(module.children()) and bool(parameters) and all(p.dim() == 1 for p in parameters)


@contextmanager
def as_reference(model: PeftModel) -> Iterator[None]:
    """Use the frozen backbone with its own norm and head: LoRA off, personal modules disabled.

    Afterwards the parameters require gradients as before; PEFT would let all LoRA tensors require
    them.
    """
    requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    personal = [module for module in model.modules() if isinstance(module, Bottleneck | PersonalHead)]
    try:
        for module in personal:
            module.enabled = False
        with model.disable_adapter():
            yield
    finally:
        for module in personal:
            module.enabled = True
        for parameter, required in requires_grad:
            parameter.requires_grad_(required)
