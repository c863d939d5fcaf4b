"""Few-shot: the base policy with some of a client's own pairs in its prompt, and no training.

    examples_m     = k training pairs of client m, drawn once
    pi_m(y | x)    = pi_base(y | prompt_1, chosen_1, ..., prompt_k, chosen_k, x)

The examples are turns of the dialogue before the prompt; with chosen completions alone, because a
policy is to continue them. They stay at the client, which answers prompts and measures its pairs with
them. The reference of its margins and of its KL is the base policy without examples.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from components.config import DpoObjective, FederationConfig
from components.federation.local import Local
from components.federation.method import Joining
from components.federation.untrained import UntrainedMethod


class FewShot(UntrainedMethod):
    """Options of few-shot."""

    trainer: ClassVar[str] = "few-shot"

    shots: int = Field(4, ge=1)
    """Examples of each client (k), as far as it has training pairs."""
    max_example_tokens: int = Field(1024, ge=1)
    """Tokens that the examples may take beside policy.max_prompt_tokens; those that do not fit are left
    out."""
    objective: DpoObjective = Field(default_factory=DpoObjective)
    """Its beta scales the implicit reward that is reported; nothing is trained."""

    def local(self) -> Local:
        return Local(
            self.objective,
            trains=False,
            decays_rates=True,
            own="examples",
            example_tokens=self.max_example_tokens,
        )

    def joining(self, config: FederationConfig, pairs: int) -> Joining:
        return Joining(0, 0, f"the base policy with at most {min(self.shots, pairs)} own pairs as examples")
