"""Clients that show a model some of their own pairs, and train nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from components.config import Recipe, UserError
from components.data.records import Pair
from components.federation.clients.context import ClientContext
from components.federation.clients.policy_client import PolicyClient
from components.federation.clients.selector_trainer import SelectorTrainer
from components.federation.methods.few_shot import FewShot
from components.federation.methods.few_shot_selector import FewShotSelector
from components.federation.protocol import ClientResult, GenerateJob, Generation, Job
from components.learning.kl import kl_to_plain_prompts
from components.learning.pair_scores import PreferenceScores, pair_logprobs, policy_scores
from components.models.selector import Comparison
from components.models.tokens import encode_part, leading_ids
from components.seeding import generator

if TYPE_CHECKING:
    from components.models.store import Adapter


def draw_examples(context: ClientContext, shots: int, seed: int) -> list[Pair]:
    """A client's examples: some of its training pairs, the same ones each time."""
    rows = context.rows("train")
    chosen = generator(seed, "examples", context.client).permutation(len(rows))[:shots]
    return [rows[n] for n in chosen]


class FewShotClient(PolicyClient):
    """Measures and answers with a client's examples before each prompt."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        options = recipe.federation.options
        if not isinstance(options, FewShot):
            raise TypeError("the trainer 'few-shot' needs the options of the method few_shot")
        super().__init__(recipe, device)
        self._score_batch_size = recipe.evaluation.score_batch_size  # nothing is trained
        self._options = options

    @contextmanager
    def _examples(self, context: ClientContext) -> Iterator[None]:
        """The client's examples before each prompt."""
        policy = self.resident.policy
        rows = draw_examples(context, self._options.shots, self._seed)
        policy.examples = tuple((row.prompt, row.chosen) for row in rows)
        policy.max_example_tokens = self._options.max_example_tokens
        try:
            yield
        finally:
            policy.examples = ()

    def score_pairs(
        self, pairs: Sequence[Pair], adapter: Adapter, context: ClientContext, batch_size: int | None = None
    ) -> PreferenceScores:
        """Scores with examples; the reference has none."""
        size = batch_size or self._score_batch_size
        self.load_client(adapter, context)
        reference = self._reference_logprobs(pairs, size)
        with self._examples(context):
            logprobs = pair_logprobs(self.resident, pairs, size)
        return policy_scores(self.resident, pairs, logprobs[None], reference)

    def measure_kl(self, generation: Generation) -> float:
        """KL of the policy with the examples to the one without them, on the one prompt."""
        (prompt,) = generation.prompts
        return kl_to_plain_prompts(self.resident.policy, prompt, generation.seed, generation.temperature)

    def _generate(self, job: GenerateJob, context: ClientContext) -> ClientResult:
        with self._examples(context):
            return super()._generate(job, context)


class FewShotSelectorClient(SelectorTrainer):
    """Measures pairs by a selector that reads the client's examples first."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        super().__init__(recipe, device)
        self._options = cast("FewShotSelector", recipe.federation.options)
        self._seed = recipe.seed

    def run(self, job: Job, context: ClientContext) -> ClientResult:
        self.selector.prefix = self._encode_examples(draw_examples(context, self._options.shots, self._seed))
        try:
            return super().run(job, context)
        finally:
            self.selector.prefix = ()

    def _encode_examples(self, rows: Sequence[Pair]) -> tuple[int, ...]:
        """Token ids of the examples with their answers; every other one has the chosen completion second."""
        selector = self.selector
        skipped = len(leading_ids(selector.tokenizer))
        between = encode_part(selector.tokenizer, "\n\n")
        ids: list[int] = []
        for number, row in enumerate(rows):
            comparison = Comparison(*row.texts)
            shown = comparison.swapped() if number % 2 else comparison
            own = [*selector.encode(shown)[skipped:], selector.choices[number % 2], *between]
            if len(ids) + len(own) <= self._options.max_example_tokens:
                ids += own
        if rows and not ids:
            raise UserError(
                "no example fits into federation.options.max_example_tokens"
                f" {self._options.max_example_tokens}: raise it."
            )
        return tuple(ids)
