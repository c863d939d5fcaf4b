"""Losses around a client's loss, by which methods change its local steps.

A method names one in `Local.wrap`. It sees each minibatch, changes the losses of rows or the gradient
of a step, and may keep tensors at the client and send some beside the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from components.learning.loop import Loss, Parameters, RowLosses, Rows, Trained
from components.models.store import Adapter


@dataclass(frozen=True)
class LocalTraining:
    """A job's steps on the shared adapter, for a loss around the client's."""

    parameters: Mapping[str, torch.nn.Parameter]  # of the adapter, fp32, with the received values
    lr: float  # of these parameters, without warm-up and schedule
    attached: Mapping[str, Adapter] = field(default_factory=dict)  # what TrainJob.attached names
    kept: Adapter = field(default_factory=dict)  # `Loss.tensors` after the client's last accepted job


class WrappedLoss(Loss):
    """A loss around another one, which changes nothing."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.dropout, self.concurrent = loss.dropout, loss.concurrent
        self.accumulates, self.parameter_groups = loss.accumulates, loss.parameter_groups

    def __call__(self, rows: Rows) -> RowLosses:
        return self.loss(rows)

    def begin_minibatch(self, micro_batches: Sequence[Rows]) -> None:
        self.loss.begin_minibatch(micro_batches)

    def before_step(self) -> None:
        self.loss.before_step()

    def stops(self) -> bool:
        return self.loss.stops()

    def metrics(self, trained: Trained) -> dict[str, float]:
        return self.loss.metrics(trained)

    def numbers(self) -> dict[str, float]:
        return self.loss.numbers()

    def tensors(self) -> Adapter:
        return self.loss.tensors()

    def sent(self, adapter: Adapter) -> Adapter:
        return self.loss.sent(adapter)


class ProximalLoss(WrappedLoss):
    """Adds (mu / 2) |phi - phi_0|^2 to the loss of each row (Li et al. 2020, FedProx, eq. 2).

    phi_0 are the values of the parameters when this is built, and mu is the weight.
    """

    def __init__(self, loss: Loss, parameters: Parameters, weight: float) -> None:
        super().__init__(loss)
        self._parameters = parameters
        self._initial = [parameter.detach().clone() for parameter in parameters]
        self._weight = weight

    def __call__(self, rows: Rows) -> RowLosses:
        losses = self.loss(rows)
        squares = ((p - p0).square().sum() for p, p0 in zip(self._parameters, self._initial, strict=True))
        zero = torch.zeros((), dtype=torch.float32, device=self._initial[0].device)
        distance = self._weight / 2 * sum(squares, start=zero)
        return losses._replace(values=losses.values + distance)


class CountedSteps(WrappedLoss):
    """Counts the steps, and knows where they began; it is built at the received values."""

    def __init__(self, loss: Loss, local: LocalTraining) -> None:
        super().__init__(loss)
        self.parameters = local.parameters
        self.start = {name: parameter.detach().clone() for name, parameter in local.parameters.items()}
        self.steps = 0

    def before_step(self) -> None:
        super().before_step()
        self.steps += 1

    def stops(self) -> bool:
        stopped = super().stops()
        self.steps -= stopped  # that step is not taken
        return stopped


class NormalizedMovement(CountedSteps):
    """Sends (phi_m - phi_r) / tau_m in place of phi_m, and tau_m (Wang et al. 2020, FedNova, eq. 8).

    phi_r are the values that the client received, and tau_m is the number of its steps.
    """

    def __init__(self, loss: Loss, local: LocalTraining, prefix: str, count: str) -> None:
        """The loss; it sends the movement of each tensor under `prefix` and its name, and [1] as `count`."""
        super().__init__(loss, local)
        self._prefix = prefix
        self._count = count

    def sent(self, adapter: Adapter) -> Adapter:
        movement = {
            f"{self._prefix}{name}": ((self.parameters[name].detach() - start) / self.steps).cpu()
            for name, start in self.start.items()
        }
        return movement | {self._count: torch.tensor([self.steps], dtype=torch.float32)}


class ControlVariates(CountedSteps):
    """Corrects each gradient, and computes the client's new control variate.

    It is option II of algorithm 1 of SCAFFOLD (Karimireddy et al. 2020). phi_m, c_m, c, K and eta_l are
    those of components/federation/methods/scaffold.py. It is built at phi_r.
    """

    def __init__(self, loss: Loss, local: LocalTraining, control: str) -> None:
        """The loss.

        Args:
            loss: the client's.
            local: its steps.
            control: name of c among what the client is sent. The tensors of c_m+ - c_m in its update, and
                those of c_m in its private store, have the name `<control>/<name of the tensor>`.
        """
        super().__init__(loss, local)
        self._prefix = f"{control}/"
        self._lr = local.lr
        zeros = {name: start.new_zeros(start.shape, device="cpu") for name, start in self.start.items()}
        self._server = local.attached.get(control, zeros)  # c
        self._own = {
            name: local.kept.get(f"{self._prefix}{name}", zero) for name, zero in zeros.items()
        }  # c_m
        self._corrections = {
            name: (self._server[name] - self._own[name]).to(start.device)
            for name, start in self.start.items()
        }

    def before_step(self) -> None:
        """Replace each gradient g by g - c_m + c."""
        super().before_step()
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                parameter.grad += self._corrections[name]

    def sent(self, adapter: Adapter) -> Adapter:
        """Also c_m+ - c_m."""
        changes = {f"{self._prefix}{name}": change for name, change in self._changes().items()}
        return super().sent(adapter) | changes

    def tensors(self) -> Adapter:
        """Also c_m+."""
        own = {f"{self._prefix}{name}": self._own[name] + change for name, change in self._changes().items()}
        return super().tensors() | own

    def _changes(self) -> Adapter:
        changes: Adapter = {}
        for name, parameter in self.parameters.items():
            movement = (self.start[name] - parameter.detach()).cpu()
            changes[name] = movement / (self.steps * self._lr) - self._server[name]
        return changes
