"""Source `tickets`: answers to support tickets, and which of them each support agent prefers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fed_rlhf import DataConfig, Pair, PairSource, SourceData, assign_splits, generator, hold_out

POLITE = "Sorry about that. We have looked into order {n} and will write to you today."
SHORT = "We will look into order {n}."


class Tickets(PairSource):
    """Options of the source tickets."""

    is_local: ClassVar[bool] = True  # nothing is downloaded, so `fed-rlhf check` reads the data

    agents: int = Field(12, ge=1, description="Number of support agents, who own the pairs.")

    def load(self, data: DataConfig, seed: int) -> SourceData:
        """Pairs with splits; a share of them is reserved for the judge and the server."""
        pairs = [self.make_pair(n, seed) for n in range(1000, 1240)]
        splits = assign_splits((pair.split_group for pair in pairs), data.validation, data.test, seed)
        pairs = [replace(pair, split=split) for pair, split in zip(pairs, splits, strict=True)]
        return hold_out(pairs, "tickets", self.shares, seed, dropped={})

    def make_pair(self, order: int, seed: int) -> Pair:
        """The pair of an order: agents with odd numbers prefer the polite answer."""
        agent = int(generator(seed, "tickets", order).integers(self.agents))
        answers = [POLITE.format(n=order), SHORT.format(n=order)]
        chosen, rejected = answers if agent % 2 else answers[::-1]
        return Pair(
            prompt=f"Where is order {order}?",
            chosen=chosen,
            rejected=rejected,
            client_id=f"agent-{agent:02d}",
        )
