"""What a client of a personalised method keeps to itself, set into a resident backbone (FedPDPO sections 3.2.2, 3.2.3 and D.2).

    backbone + LoRA  -> z' -> bottleneck adapter -> z -+-> language-model head   (an untied copy of the backbone's)
                              (eq. 9)                  +-> reward head           (eq. 3)

The parts take the places of the backbone's last norm and of its head, so that whatever works on the backbone (log-probabilities,
generation) works on the personal model; `as_reference` puts the backbone's own back. They are fp32, whatever the backbone's
dtype is, and are swapped in and out by `PersonalSlot` as adapters are: nothing is rebuilt for a client.

Eq. 9 ends in a LayerNorm, and most backbones end in a norm of their own. With `norm: backbone` z' is what the last layer gives, and the
norm of eq. 9 is the client's own copy of the backbone's last one (GPT-2's is a LayerNorm, so this is eq. 9 to the letter; Llama's is an
RMSNorm). The bottleneck's last weights start at 0, so that an untrained personal model is the reference, and the margins of DPO start at 0.
With `norm: layer` z' is normed already, and a LayerNorm with gain 1 and bias 0 follows, as a literal reading has it: it scales
the head's input anew, so that the policy is away from its reference before anything is trained.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from components.models.adapters import AdapterSlot
from components.models.backbone import BackboneError
from components.models.parts import BottleneckConfig, PersonalParts, RewardHeadConfig
from components.seeding import derive

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from components.models.adapters import Adapter


class Bottleneck(torch.nn.Module):
    """z = Norm(z' + Decode(Dropout(GELU(Encode(z'))))), eq. 9, in the place of the backbone's last norm.

    Attributes:
        own: whether the personal model is computed, and not the backbone's.
    """

    def __init__(self, norm: torch.nn.Module, hidden: int, config: BottleneckConfig) -> None:
        super().__init__()
        self.kind, self.own = config.norm, True
        self.backbone_norm = norm
        self.norm = copy.deepcopy(norm).float() if self.kind == "backbone" else torch.nn.LayerNorm(hidden)
        self.encode, self.decode = torch.nn.Linear(hidden, config.width), torch.nn.Linear(config.width, hidden)
        self.activation, self.dropout = torch.nn.GELU(), torch.nn.Dropout(config.dropout)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]; fp32 where the personal model is computed."""
        if not self.own:
            return in_fp32(self.backbone_norm, states) if self.kind == "backbone" else self.backbone_norm(states)
        given = (states if self.kind == "backbone" else self.backbone_norm(states)).float()
        return self.norm(given + self.decode(self.dropout(self.activation(self.encode(given)))))


class PersonalHead(torch.nn.Module):
    """The client's language-model head in the place of the backbone's, and its reward head beside it, which reads the same features.

    Both heads are computed in fp32, the backbone's too: in bf16 its rounding would stand between a personal model and its reference.

    Attributes:
        own: whether the personal head is used, and not the backbone's.
    """

    def __init__(self, head: torch.nn.Linear, parts: PersonalParts) -> None:
        super().__init__()
        self.own, self.backbone_head = True, head
        self.head = torch.nn.Linear(head.in_features, head.out_features, bias=head.bias is not None) if parts.head else None
        self.reward = RewardHead(head.in_features, parts.reward) if parts.reward else None

    @property
    def _active(self) -> torch.nn.Linear:
        return self.head if self.own and self.head is not None else self.backbone_head

    @property
    def weight(self) -> torch.Tensor:
        """Of the head that is used, [V, H]."""
        return self._active.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Of the head that is used, [V]."""
        return self._active.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] to logits [..., V]."""
        active = self._active
        bias = None if active.bias is None else active.bias.float()
        return torch.nn.functional.linear(states.float(), active.weight.float(), bias)


class RewardHead(torch.nn.Module):
    """h(x, y) = W2 tanh(Dropout(W1 z + b1)) + b2, with z the mean over the response's tokens (eq. 3, D.2.4)."""

    def __init__(self, hidden: int, config: RewardHeadConfig) -> None:
        super().__init__()
        self.hidden, self.dropout, self.score = torch.nn.Linear(hidden, config.width), torch.nn.Dropout(config.dropout), torch.nn.Linear(config.width, 1)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """[..., H], the mean features of responses, to rewards [...]."""
        return self.score(self.dropout(self.hidden(pooled.float())).tanh())[..., 0]


class PersonalSlot(AdapterSlot):
    """The slot of a client's own tensors in a resident model: copied in and out in place, as an adapter is.

    Names begin with 'bottleneck.', 'head.' or 'reward.'; LoRA tensors that do not travel keep PEFT's names.

    Attributes:
        names, parameters: in a fixed order.
        head: the module that has taken the place of the backbone's head.
        shared: the slot of the LoRA tensors that travel.
        lora: the slot of all LoRA tensors.
    """

    def __init__(self, model: PeftModel, parts: PersonalParts) -> None:
        """Set the parts into a model that has a LoRA adapter already.

        Raises:
            BackboneError: the backbone's last norm is not to be found, or it has fewer layers than are shared.
        """
        base = model.get_base_model()
        self.lora = AdapterSlot(model)
        device = next(base.parameters()).device
        modules: dict[str, torch.nn.Module] = {}
        if parts.bottleneck:
            place, last = final_norm(base)
            bottleneck = Bottleneck(last, base.get_output_embeddings().in_features, parts.bottleneck).to(device)
            base.set_submodule(place, bottleneck)
            modules |= {"bottleneck.norm": bottleneck.norm, "bottleneck.encode": bottleneck.encode, "bottleneck.decode": bottleneck.decode}
        self.head = PersonalHead(base.get_output_embeddings(), parts).to(device)
        base.set_output_embeddings(self.head)
        modules |= {"head": self.head.head} if parts.head else {}
        modules |= {"reward": self.head.reward} if parts.reward else {}
        own = {f"{place}.{name}": parameter.requires_grad_(True) for place, module in modules.items() for name, parameter in module.named_parameters()}
        shared = set(self.lora.names) if parts.shared_layers is None else {name for name in self.lora.names if layer_of(name) < parts.shared_layers}
        if parts.shared_layers is not None and parts.shared_layers >= (depth := base.config.num_hidden_layers):
            raise BackboneError(f"{parts.shared_layers} layers are shared, but the backbone has {depth}, so that no LoRA would be the clients' own: share fewer.")
        own |= {name: parameter for name, parameter in zip(self.lora.names, self.lora.parameters, strict=True) if name not in shared}
        self.names = sorted(own)
        self.parameters = [own[name] for name in self.names]
        self.shared = copy.copy(self.lora)
        self.shared.names = [name for name in self.lora.names if name in shared]
        self.shared.parameters = [parameter for name, parameter in zip(self.lora.names, self.lora.parameters, strict=True) if name in shared]
        self._backbone_tensors = {"head.weight": self.head.backbone_head.weight, "head.bias": self.head.backbone_head.bias}
        if parts.bottleneck and parts.bottleneck.norm == "backbone":
            self._backbone_tensors |= {f"bottleneck.norm.{name}": value for name, value in bottleneck.backbone_norm.named_parameters()}

    def initial(self, seed: int) -> Adapter:
        """A client's first tensors: the backbone's own head and last norm; the rest as a function of the seed and the tensor's name.

        Decode starts at 0, so that the bottleneck changes nothing; linear layers as PyTorch's (Kaiming-uniform with a = sqrt(5), bias uniform within
        1 / sqrt(fan in)), and LoRA as in AdapterSlot.initial_adapter.
        """
        lora, tensors = self.lora.initial_adapter(seed), {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if self._backbone_tensors.get(name) is not None:
                tensors[name] = self._backbone_tensors[name].detach().float().cpu().clone()
            elif name in lora:
                tensors[name] = lora[name]
            elif name.startswith("bottleneck.decode."):
                tensors[name] = torch.zeros(parameter.shape)
            elif name.startswith("bottleneck.norm."):
                tensors[name] = torch.ones(parameter.shape) if name.endswith("weight") else torch.zeros(parameter.shape)
            else:
                within = 1 / math.sqrt(self._fan_in(name))
                tensors[name] = torch.empty(parameter.shape).uniform_(-within, within, generator=torch.Generator().manual_seed(derive(seed, "personal", name)))
        return tensors

    def _fan_in(self, name: str) -> int:
        return self.parameters[self.names.index(name.rsplit(".", 1)[0] + ".weight")].shape[1]


def layer_of(name: str) -> int:
    """The layer that a LoRA tensor belongs to, by its name: the first number between dots.

    Raises:
        BackboneError: it has none.
    """
    number = next((part for part in name.split(".") if part.isdigit()), None)
    if number is None:
        raise BackboneError(f"LoRA tensor '{name}' belongs to no layer, so it is not known whether it is shared: take other lora.target_modules.")
    return int(number)


def final_norm(model: PreTrainedModel) -> tuple[str, torch.nn.Module]:
    """The last module of a backbone, whose output are its last hidden states, and its name in the model. Takes one forward pass.

    Raises:
        BackboneError: no module whose weights are vectors, as a norm's are, gives them.
    """
    given: list[tuple[str, torch.Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: given.append((name, output)))
        for name, module in model.named_modules() if not list(module.children()) and list(module.parameters()) and all(p.dim() == 1 for p in module.parameters())]
    try:
        with torch.no_grad():
            last = model.base_model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    found = next((name for name, output in reversed(given) if isinstance(output, torch.Tensor) and output.data_ptr() == last.data_ptr()), None)  # some give a view of it
    if found is None:
        raise BackboneError(f"the backbone ({model.config.model_type}) does not end in a norm of its own, before which a bottleneck adapter could stand: use a backbone of another family, or no bottleneck.")
    return found, model.get_submodule(found)


def in_fp32(module: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """What a module gives with its weights and its input in fp32; the module stays as it is."""
    return torch.func.functional_call(module, {name: value.float() for name, value in module.named_parameters()}, (states.float(),))


@contextmanager
def as_reference(model: PeftModel) -> Iterator[None]:
    """The frozen backbone with its own norm and head: LoRA off, personal parts out. What takes gradients afterwards is what did before (PEFT would let all LoRA)."""
    took = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    personal = [module for module in model.modules() if isinstance(module, Bottleneck | PersonalHead)]
    try:
        for module in personal:
            module.own = False
        with model.disable_adapter():
            yield
    finally:
        for module in personal:
            module.own = True
        for parameter, gradient in took:
            parameter.requires_grad_(gradient)
