"""What a method changes in the local steps of its clients: the base class of plug-ins, which changes nothing.

A method names its plug-in as the class attribute `local_step`, and declares the tensors that clients
send beside the adapter in `update_template`. The trainer 'policy' builds the plug-in for each job. A
module with a plug-in is imported with its method, so it does not import torch at its top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from components.models.store import Adapter


class LocalTensors(NamedTuple):
    """Tensors of a client after its local steps, fp32 on the CPU."""

    sent: Adapter  # beside the adapter, under names that the adapter does not have
    kept: Adapter  # in the client's private store, for its next job


@dataclass
class LocalStep:
    """The local steps of a job on the shared adapter, which is loaded when this is built."""

    method: Any  # with its options
    attached: Mapping[str, Adapter]  # what the client is sent by TrainJob.attached
    kept: Adapter  # what the plug-in kept after the client's last accepted job; empty before the first
    parameters: Mapping[str, torch.nn.Parameter]  # of the shared adapter, fp32
    # Of these parameters, without warm-up and schedule. The trainer reads it here: a plug-in can change it.
    lr: float

    def __post_init__(self) -> None:
        """Called when the fields are set; only if it stands here does the generated `__init__` call it."""

    def before_step(self) -> None:
        """Called once for each step that is taken, with its complete gradient, before clipping."""

    def finish(self) -> LocalTensors:
        """Called once after the last step."""
        return LocalTensors({}, {})
