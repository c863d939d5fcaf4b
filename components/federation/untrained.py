"""Methods without rounds, whose clients use a model as it is: references of what training gains."""

from __future__ import annotations

from collections.abc import Sequence

from components.config import FederationConfig
from components.federation.method import Joining, Method
from components.federation.protocol import Job, Update
from components.federation.server import Server, State


class UntrainedMethod(Method):
    """A method that trains nothing: the state before the first round is the last one.

    Its `local` says so.
    """

    def joining(self, config: FederationConfig, pairs: int) -> Joining:
        return Joining(0, 0, f"the untrained {self.trained_model} as it is")

    def plan(self, state: State, server: Server) -> Sequence[Job]:
        return []

    def aggregate(self, state: State, updates: Sequence[Update], server: Server) -> State:
        raise TypeError(f"{type(self).__name__} has no rounds")
