"""Rule: an untrained selector that chooses by a fixed rule; a reference for trained ones.

longer       the completion with more characters
first        the one that is shown first; as it is right on half of the pairs, its accuracy is 0.5
likelihood   the one with the larger mean log-likelihood of a token under the base policy
"""

from __future__ import annotations

from typing import ClassVar, Literal

from components.config.local_objectives import SelectorObjective
from components.federation.local import Local
from components.federation.untrained import UntrainedMethod


class Rule(UntrainedMethod):
    """Options of selectors by a rule."""

    trained_model: ClassVar[Literal["selector", "policy"]] = "selector"
    also_read: ClassVar[tuple[Literal["policy"], ...]] = ("policy",)
    trainer: ClassVar[str] = "selector"
    selector_model: ClassVar[str] = "components.federation.clients.rule_selector:RuleSelector"

    rule: Literal["longer", "first", "likelihood"] = "longer"
    """What the selector chooses by."""

    def local(self) -> Local:
        return Local(SelectorObjective(), trains=False)
