"""The moments of an optimizer as named tensors, which a client's private store keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def read_moments(optimizer: torch.optim.Optimizer, name: str) -> dict[str, torch.Tensor]:
    """Copies of an optimizer's state on the CPU; empty before its first step.

    Args:
        optimizer: whose state consists of tensors, as that of torch's optimizers does.
        name: of the optimizer, the beginning of the tensors' names.

    Returns:
        by `name/parameter/key`, e.g. policy/0/exp_avg, where the parameter is its position.
    """
    tensors = {}
    for position, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"{name}/{position}/{key}"] = value.detach().cpu().clone()
    return tensors


def load_moments(optimizer: torch.optim.Optimizer, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Continue an optimizer from the tensors of `read_moments`; its settings stay.

    Args:
        optimizer: over parameters of the same shapes.
        name: of the optimizer.
        tensors: those of other optimizers are left out; if there are none, the state begins at 0.
    """
    states: dict[int, dict[str, Any]] = {}
    for path, tensor in tensors.items():
        owner, position, key = path.split("/")
        if owner == name:
            states.setdefault(int(position), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
