"""The models that write and score thoughts: policies, or an endpoint."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from components.alignment.thoughts.scores import Score, parse_score
from components.concurrency import concurrent_parts, run_concurrently
from components.config import PolicyConfig, ThoughtsConfig, UserError
from components.environment import release_memory
from components.models.chat import ChatEndpoint
from components.models.policy import Policy
from components.models.samples import SampleKey
from components.models.tokens import sort_distinct
from components.progress import Work, report_work
from components.seeding import derive

log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A prompt of a question.

    The seed is that of the requests of the same question and level. Samples are a function of it
    and of the request's position among those with this seed, so that they do not depend on the
    questions that share the batch.
    """

    prompt: str
    seed: int


def sample_keys(requests: Sequence[Request], *purpose: str | int) -> list[SampleKey]:
    """Keys of N samples: the requests' seeds, derived for the purpose, and positions among their seed's.

    A purpose is needed where a seed serves more than one.
    """
    counts: Counter[int] = Counter()
    keys = []
    for request in requests:
        seed = derive(request.seed, *purpose) if purpose else request.seed
        keys.append(SampleKey(seed, counts[request.seed]))
        counts[request.seed] += 1
    return keys


class TreeModels:
    """The models that grow trees: the policy that is trained on them later, and the evaluator.

    Each is loaded when it is used. With thoughts.loading 'in_turn' it then replaces the other one.
    """

    def __init__(self, policy: PolicyConfig, config: ThoughtsConfig, device: str) -> None:
        self.policy = policy.model_copy(update={"max_new_tokens": config.max_thought_tokens})
        self.config = config
        self.device = device
        if config.loading == "together":
            _ = self.evaluator  # what is wrong with it is said before a thought is written

    @cached_property
    def writer(self) -> Policy:
        self._release("evaluator")
        return Policy(self.policy, self.device)

    @cached_property
    def evaluator(self) -> WrittenScores | ExpectedScores:
        self._release("writer")
        options = self.config.evaluator
        if options.base_url is not None:
            name = "the evaluator's endpoint"
            endpoint = ChatEndpoint(options, options.model, options.max_new_tokens, name)
            return WrittenScores(endpoint, options.retries_unread)
        model = Policy(options.local, self.device)
        if options.read == "expected":
            return ExpectedScores(model)
        return WrittenScores(model, options.retries_unread)

    def _release(self, other: str) -> None:
        if self.config.loading == "in_turn" and self.__dict__.pop(other, None) is not None:
            release_memory()

    def write(self, requests: Sequence[Request]) -> list[str]:
        """Write a text for each request; its first line is the thought."""
        prompts = [request.prompt for request in requests]
        replies = self.writer.write(prompts, sample_keys(requests), self.config.temperature)
        return [reply.text for reply in replies]

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Score the thought of each request."""
        return self.evaluator.score(requests)


class WrittenScores:
    """Scores that a model writes as numbers."""

    def __init__(self, model: Policy | ChatEndpoint, retries: int) -> None:
        self.model = model
        self.retries = retries

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Parse a score from each answer, and request the missing ones again, at most `retries` times.

        The first answers are greedy; further ones are sampled at temperature 1.
        """
        scores = [Score(None, 0)] * len(requests)
        for attempt in range(self.retries + 1):
            missing = [n for n, score in enumerate(scores) if score.value is None]
            if not missing:
                break
            asked = [requests[n] for n in missing]
            replies = self.model.write(
                [request.prompt for request in asked],
                sample_keys(asked, "attempt", attempt),
                temperature=1.0 if attempt else 0.0,
                progress=lambda done, total: report_work(log, Work("answers of the evaluator", done, total)),
            )
            for n, reply in zip(missing, replies, strict=True):
                scores[n] = Score(parse_score(reply.text, reply.finished), attempt + 1)
        return scores


class ExpectedScores:
    """Means of the numbers 1 to 10 under a model's probabilities of the next token."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        # Tokens of the numbers 1 to 10 at the beginning of an answer, whose probabilities can only be read
        # where 1 to 9 are one token each, and 10 is one token or a 1 and a 0.
        ids = [policy.tokenizer.encode(str(number), add_special_tokens=False) for number in range(1, 11)]
        *digits, ten = ids
        ten_is_readable = len(ten) == 1 or (len(ten) == 2 and ten[0] == digits[0][0])
        if not ten_is_readable or any(len(number) != 1 for number in digits):
            raise UserError(
                f"the tokenizer of '{policy.tokenizer.name_or_path}' splits the numbers 1 to 10 so that"
                " thoughts.evaluator.read 'expected' cannot read their probabilities: set read to 'text', or"
                " use another model."
            )
        self._numbers = ids

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Expected scores; equal prompts have equal ones.

        The batches, and with them the last bits of a score, do not depend on the order of the requests,
        see `sort_distinct`.
        """
        rows = [tuple(self.policy.encode(request.prompt)) for request in requests]
        distinct, positions = sort_distinct(rows, len)
        parts = concurrent_parts(self.policy.model.device)
        size = max(1, self.policy.config.generation_batch_size // parts)
        batches = [distinct[start : start + size] for start in range(0, len(distinct), size)]
        calls = [partial(self._score_batch, batch) for batch in batches]
        scores = list(chain(*run_concurrently(calls, at_once=parts)))
        return [Score(scores[position], 1) for position in positions]

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
