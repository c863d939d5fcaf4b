"""The models that propose and score thoughts: a policy, a causal language model, an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from components.alignment.thoughts.requests import Request, sample_keys
from components.alignment.thoughts.scores import Score, ThoughtsError, score_with_retries
from components.concurrency import concurrent_parts, run_concurrently
from components.config import BackboneConfig, PolicyConfig, TemplateFile, ThoughtsConfig
from components.config.thoughts import EvaluatorOptions
from components.environment import release_memory
from components.models.chat import ChatEndpoint, Reply
from components.models.policy import Policy


@dataclass(frozen=True)
class TreeModels:
    """The models that grow trees."""

    writer: PolicyWriter
    evaluator: Evaluator


class TreeModelsInTurn:
    """The models that grow trees, one at a time on the device: that which is used replaces the other."""

    def __init__(
        self, load_writer: Callable[[], PolicyWriter], load_evaluator: Callable[[], Evaluator]
    ) -> None:
        self._load_writer = load_writer
        self._load_evaluator = load_evaluator
        self._writer: PolicyWriter | None = None
        self._evaluator: Evaluator | None = None

    @property
    def writer(self) -> PolicyWriter:
        if self._writer is None:
            self._evaluator = None
            release_memory()
            self._writer = self._load_writer()
        return self._writer

    @property
    def evaluator(self) -> Evaluator:
        if self._evaluator is None:
            self._writer = None
            release_memory()
            self._evaluator = self._load_evaluator()
        return self._evaluator


class PolicyWriter:
    """Thoughts by the policy that is trained on them later; a prompt is the user's turn."""

    def __init__(self, config: PolicyConfig, thoughts: ThoughtsConfig, device: str) -> None:
        self.thoughts = thoughts
        self.policy = Policy(config, device)

    def write(self, requests: Sequence[Request]) -> list[str]:
        """Write a text for each request; its first line is the thought."""
        completions = self.policy.generate(
            [request.prompt for request in requests],
            sample_keys(requests),
            self.thoughts.temperature,
            max_new_tokens=self.thoughts.max_thought_tokens,
        )
        return [completion.text for (completion,) in completions]


class ModelEvaluator:
    """Scores by a causal language model on this machine.

    With `read: text` the score is the number that the model writes; with `read: expected` it is the
    mean of 1 to 10 under the probabilities of the next token.
    """

    def __init__(self, options: EvaluatorOptions, device: str) -> None:
        config = PolicyConfig(
            backbone=BackboneConfig(name=options.location, revision=options.revision),
            template=TemplateFile("thoughts/policy"),
            chat_date=options.chat_date,
            max_prompt_tokens=options.max_prompt_tokens,
            max_new_tokens=options.max_new_tokens,
            generation_batch_size=options.batch_size,
        )
        self.options = options
        self.policy = Policy(config, device)
        if options.read == "expected":
            self._numbers = number_tokens(self.policy)

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Score the thought of each request."""
        if self.options.read == "expected":
            return [Score(score, 1) for score in self._expected_scores(requests)]
        return score_with_retries(self._write, requests, self.options.retries_unread)

    def _write(self, requests: Sequence[Request], attempt: int) -> list[Reply]:
        completions = self.policy.generate(
            [request.prompt for request in requests],
            sample_keys(requests, "attempt", attempt),
            temperature=1.0 if attempt else 0.0,
        )
        replies = []
        for (completion,) in completions:
            ids = list(completion.ids[:-1] if completion.finished else completion.ids)
            text = self.policy.tokenizer.decode(ids, skip_special_tokens=True)
            replies.append(Reply(cast("str", text), completion.finished))
        return replies

    def _expected_scores(self, requests: Sequence[Request]) -> list[float]:
        """Expected scores; equal prompts have equal ones.

        The distinct rows of token ids are sorted by their length, so that little of a batch is padding,
        and then by their content. The batches, and with them the last bits of a score, thus do not
        depend on the order of the requests.
        """
        rows = [tuple(self.policy.encode(request.prompt)) for request in requests]
        distinct = sorted(set(rows), key=lambda row: (len(row), row))
        parts = concurrent_parts(self.policy.model.device)
        size = max(1, self.options.batch_size // parts)
        batches = [distinct[start : start + size] for start in range(0, len(distinct), size)]
        calls = [partial(self._score_batch, batch) for batch in batches]
        scores: dict[tuple[int, ...], float] = {}
        for batch, values in zip(batches, run_concurrently(calls, at_once=parts), strict=True):
            scores |= dict(zip(batch, values, strict=True))
        return [scores[row] for row in rows]

    def _score_batch(self, rows: Sequence[tuple[int, ...]]) -> list[float]:
        """Expected scores of N rows of token ids in one pass.

        Where "10" is a "1" and then a "0", the part of the "1" that continues with "0" is a ten. Each
        row then ends with the "1", after which the "0" is read.
        """
        *digits, ten = self._numbers
        continued = list(ten[:-1])
        probabilities = self._probabilities([[*row, *continued] for row in rows], 1 + len(continued))
        scores = []
        for after_row, *after_one in probabilities:
            shares = [float(after_row[number[0]]) for number in digits]
            if after_one:
                zero = float(after_one[0][ten[-1]])
                shares = [shares[0] * (1 - zero), *shares[1:], shares[0] * zero]
            else:
                shares.append(float(after_row[ten[0]]))
            scores.append(sum(number * share for number, share in enumerate(shares, 1)) / sum(shares))
        return scores

    def _probabilities(self, rows: Sequence[Sequence[int]], count: int) -> list[list[torch.Tensor]]:
        """Probabilities [V] of the next token at the last `count` positions of each row.

        The rows are padded on the right. A causal model never attends to what follows a token, so no
        mask is needed. The head is computed only at positions that are read in one of the rows.
        """
        pad = cast("int", self.policy.tokenizer.pad_token_id)
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)
        positions = sorted({len(row) - back for row in rows for back in range(1, count + 1)})
        device = self.policy.model.device
        kept = torch.tensor(positions, device=device)
        with torch.inference_mode():
            output: Any = self.policy.model(input_ids=ids.to(device), use_cache=False, logits_to_keep=kept)
            probabilities = []
            for row, logits in zip(rows, output.logits, strict=True):
                columns = [positions.index(len(row) - back) for back in range(count, 0, -1)]
                probabilities.append([logits[column].double().softmax(-1) for column in columns])
        return probabilities


def number_tokens(policy: Policy) -> list[list[int]]:
    """Tokens of the numbers 1 to 10 at the beginning of an answer.

    Their probabilities can only be read where 1 to 9 are one token each, and 10 is one token or a 1
    and a 0.
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
    """Scores by an OpenAI-compatible endpoint, which ignores the seeds."""

    def __init__(self, options: EvaluatorOptions) -> None:
        self.options = options
        self._chat = ChatEndpoint(
            options, options.model, options.max_new_tokens, "the evaluator's endpoint", ThoughtsError
        )

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Score the thought of each request."""
        return score_with_retries(self._write, requests, self.options.retries_unread)

    def _write(self, requests: Sequence[Request], attempt: int) -> list[Reply]:
        prompts = [request.prompt for request in requests]
        return self._chat.generate(prompts, temperature=1.0 if attempt else 0.0)


Evaluator = ModelEvaluator | EndpointEvaluator


def build_models(policy: PolicyConfig, config: ThoughtsConfig, device: str) -> TreeModels | TreeModelsInTurn:
    """Build the writer, and the evaluator that the options name."""
    options = config.evaluator

    def load_writer() -> PolicyWriter:
        return PolicyWriter(policy, config, device)

    def load_evaluator() -> Evaluator:
        return EndpointEvaluator(options) if options.base_url else ModelEvaluator(options, device)

    if config.loading == "in_turn":
        return TreeModelsInTurn(load_writer, load_evaluator)
    evaluator = load_evaluator()
    return TreeModels(load_writer(), evaluator)
