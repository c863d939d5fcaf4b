"""Few-shot selectors: an untrained selector that is shown some of a client's own pairs with their answers.

Each client's examples are k of its training pairs, in turn with the chosen completion first and second, each
followed by its answer. They stay at the client and are used where it measures its pairs. The server has no
examples, so that pairs are labeled by the selector without any.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from components.config import FederationConfig
from components.config.local_objectives import SelectorObjective
from components.federation.local import Local
from components.federation.method import Joining
from components.federation.untrained import UntrainedMethod


class FewShotSelector(UntrainedMethod):
    """Options of few-shot selectors."""

    trained_model: ClassVar[Literal["selector", "policy"]] = "selector"
    trainer: ClassVar[str] = "few-shot-selector"

    shots: int = Field(4, ge=1)
    """Examples of each client (k), as far as it has training pairs."""

    max_example_tokens: int = Field(1024, ge=1)
    """Tokens that the examples may take beside selector.max_length; those that do not fit are left out."""

    def local(self) -> Local:
        return Local(SelectorObjective(), trains=False, example_tokens=self.max_example_tokens)

    def joining(self, config: FederationConfig, pairs: int) -> Joining:
        note = f"the untrained selector with at most {min(self.shots, pairs)} own pairs as examples"
        return Joining(0, 0, note)
