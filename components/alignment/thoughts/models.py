"""The models that propose and score thoughts: a policy, a causal language model, an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from components.alignment.thoughts.scores import Score, ThoughtsError, score_with_retries
from components.config import BackboneConfig, EvaluatorOptions, PolicyConfig, ThoughtsConfig
from components.models.chat import ChatEndpoint, Reply
from components.models.generation import Completion, GenerationSettings, generate_completions
from components.models.policy import Policy
from components.seeding import derive

if TYPE_CHECKING:
    import torch


class Writer(Protocol):
    """Proposes thoughts."""

    def write(self, prompts: Sequence[str], seed: int) -> list[str]:
        """Write a text for each prompt; its first line is the thought."""


class Evaluator(Protocol):
    """Scores thoughts."""

    def score(self, prompts: Sequence[str], seed: int) -> list[Score]:
        """Score the thought of each prompt."""


@dataclass(frozen=True)
class TreeModels:
    """The models that grow trees."""

    writer: Writer
    evaluator: Evaluator


class PolicyWriter:
    """Thoughts by the policy that is trained on them later; a prompt is the user's turn."""

    def __init__(self, config: PolicyConfig, thoughts: ThoughtsConfig, device: str) -> None:
        self.thoughts = thoughts
        self.policy = Policy(config, device)

    def write(self, prompts: Sequence[str], seed: int) -> list[str]:
        """Sample a continuation of each prompt."""
        completions = self.policy.generate(
            prompts, seed, self.thoughts.temperature, max_new_tokens=self.thoughts.max_thought_tokens
        )
        return [completion.text for (completion,) in completions]


class ModelEvaluator:
    """Scores by a causal language model on this machine.

    With `read: text` the score is the number that the model writes; with `read: expected` it is the
    mean of 1 to 10 under the probabilities of the next token.
    """

    def __init__(self, options: EvaluatorOptions, device: str) -> None:
        """Load the model.

        Raises:
            ThoughtsError: the tokenizer does not allow to read the probabilities of 1 to 10, see
                number_tokens.
        """
        config = PolicyConfig(
            backbone=BackboneConfig(name=options.model, revision=options.revision),
            template="thoughts/policy",
            max_prompt_tokens=options.max_prompt_tokens,
            max_new_tokens=options.max_new_tokens,
            generation_batch_size=options.batch_size,
        )
        self.options = options
        self.policy = Policy(config, device)
        if options.read == "expected":
            self._numbers = number_tokens(self.policy)

    def score(self, prompts: Sequence[str], seed: int) -> list[Score]:
        """Score the thought of each prompt."""
        import torch

        if self.options.read == "expected":
            with torch.inference_mode():
                return [Score(self._expected_score(prompt), 1) for prompt in prompts]
        return score_with_retries(
            lambda texts, attempt: self._write(texts, seed, attempt), prompts, self.options.retries_unread
        )

    def _write(self, prompts: Sequence[str], seed: int, attempt: int) -> list[Reply]:
        encoded = [self.policy.encode(prompt) for prompt in prompts]
        settings = GenerationSettings(
            self.options.batch_size, self.options.max_new_tokens, temperature=1.0 if attempt else 0.0
        )
        completions = generate_completions(
            self.policy.model,
            self.policy.tokenizer,
            encoded,
            settings,
            derive(seed, "attempt", attempt),
        )
        return [self._reply(completion) for (completion,) in completions]

    def _reply(self, completion: Completion) -> Reply:
        text = self.policy.tokenizer.decode(list(completion.ids), skip_special_tokens=True)
        return Reply(cast("str", text), completion.finished)

    def _expected_score(self, prompt: str) -> float:
        ids = self.policy.encode(prompt)
        probabilities = self._next_token_probabilities(ids)
        *digits, ten = self._numbers
        shares = [float(probabilities[number[0]]) for number in digits]
        if len(ten) == 1:
            shares.append(float(probabilities[ten[0]]))
        else:
            # "10" is a "1" and then a "0": the part of the "1" that continues with "0" is a ten.
            continued = float(self._next_token_probabilities([*ids, ten[0]])[ten[1]])
            shares = [shares[0] * (1 - continued), *shares[1:], shares[0] * continued]
        return sum(number * share for number, share in enumerate(shares, 1)) / sum(shares)

    def _next_token_probabilities(self, ids: Sequence[int]) -> torch.Tensor:
        """Probabilities [V] of the token after a sequence."""
        import torch

        input_ids = torch.tensor([[*ids]], device=self.policy.device)
        output = self.policy.model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits.double().softmax(-1)


def number_tokens(policy: Policy) -> list[list[int]]:
    """Tokens of the numbers 1 to 10 at the beginning of an answer.

    Raises:
        ThoughtsError: their probabilities cannot be read: 1 to 9 are not one token each, or 10 is
            neither one token nor a 1 and a 0.
    """
    ids = [policy.tokenizer.encode(str(number), add_special_tokens=False) for number in range(1, 11)]
    *digits, ten = ids
    ten_is_readable = len(ten) == 1 or (len(ten) == 2 and ten[0] == digits[0][0])
    if not ten_is_readable or any(len(number) != 1 for number in digits):
        raise ThoughtsError(
            f"the tokenizer of '{policy.tokenizer.name_or_path}' splits the numbers 1 to 10 so that"
            " thoughts.evaluator.read 'expected' cannot read their probabilities: set read to 'text', or use"
            " another model."
        )
    return ids


class EndpointEvaluator:
    """Scores by an OpenAI-compatible endpoint."""

    def __init__(self, options: EvaluatorOptions) -> None:
        self.options = options
        self._chat = ChatEndpoint(
            options, options.model, options.max_new_tokens, "the evaluator's endpoint", ThoughtsError
        )

    def score(self, prompts: Sequence[str], seed: int) -> list[Score]:
        """Score the thought of each prompt; the endpoint ignores the seed.

        Raises:
            ThoughtsError: a request failed.
        """
        return score_with_retries(
            lambda texts, attempt: self._chat.generate(texts, temperature=1.0 if attempt else 0.0),
            prompts,
            self.options.retries_unread,
        )


def build_models(policy: PolicyConfig, config: ThoughtsConfig, device: str) -> TreeModels:
    """Build the writer, and the evaluator that the options name.

    Raises:
        ThoughtsError: see ModelEvaluator and EndpointEvaluator.
    """
    evaluator: Evaluator = (
        EndpointEvaluator(config.evaluator)
        if config.evaluator.base_url
        else ModelEvaluator(config.evaluator, device)
    )
    return TreeModels(PolicyWriter(policy, config, device), evaluator)
