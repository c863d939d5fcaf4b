"""Jobs about an owner's own data: prepare them and publish what they are, and forget a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from components.data.data_report import ClientCounts, ExpectationOutcome, RepeatCounts
from components.data.same_text import same_text
from components.federation.protocol import Job
from components.results import Result


class OwnerJob(Job):
    """A job that needs no model. Its key does not depend on the rounds."""

    round: int = 0
    adapters: tuple[str, ...] = ()

    @property
    def is_step(self) -> bool:
        return False

    @property
    def when(self) -> str:
        return "before the rounds"


class PublishJob(OwnerJob):
    """Prepare the owner's pairs for a run; the output is its Statement."""

    kind: Literal["publish"] = "publish"
    prompts: tuple[str, ...] = ()  # hashes of the server's prompts (prompt_hash)


class ForgetJob(OwnerJob):
    """Remove all that the owner keeps of a run; the output is a Receipt. The owner's file stays."""

    kind: Literal["forget"] = "forget"

    @property
    def when(self) -> str:
        return "after the run"


class Statement(Result):
    """What an owner publishes of its pairs: numbers, and no row.

    The expectations are those of data.validation. If one is not met, nothing was prepared.
    """

    counts: ClientCounts
    left_out: dict[str, int]  # pairs that are not used, by reason
    dropped: dict[str, int]  # raw rows that became no pair, by reason
    repeats: RepeatCounts | None  # None where verdicts are protected, of which they are counts
    control_tokens: int  # pairs that hold control tokens of a model's tokenizer
    expectations: tuple[ExpectationOutcome, ...]
    warnings: tuple[str, ...]  # sentences with numbers of pairs alone
    digest: str = Field(
        pattern="^([0-9a-f]{64})?$"
    )  # HMAC-SHA256 of the prepared pairs, by a salt that stays; '' without
    rounds_version: int  # versions.ROUNDS
    versions: Mapping[str, str]  # of fed-rlhf and libraries

    @property
    def unmet(self) -> list[ExpectationOutcome]:
        """The expectations that are not met, which end the preparation."""
        return [one for one in self.expectations if not one.success]


class Receipt(Result):
    """What an owner has removed."""

    files: int = Field(ge=0)
    bytes: int = Field(ge=0)


def prompt_hash(prompt: str) -> str:
    """Equal for prompts that are the same text (same_text.py)."""
    return hashlib.sha256(same_text(prompt).encode()).hexdigest()
