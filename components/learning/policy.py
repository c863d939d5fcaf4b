"""Training a policy on one owner's pairs, and the implicit reward of a policy.

Two objectives: supervised on the chosen completion (FedBiscuit section 7.1, baseline FedAvg), and DPO with the frozen
backbone as the reference (eq. 2, baseline FedDPO). Only the positions of completions go through the language-model
head, in chunks; the two completions of a pair share one pass over their prompt; the reference's log-probabilities are
computed once for an owner's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from components.config import OptimizerConfig, PolicyConfig
from components.learning.local import TrainingCurve, minibatches, train
from components.learning.objectives import dpo_loss, sft_loss
from components.models.adapters import AdapterSlot, attach
from components.models.head import check_head, head_logits
from components.models.parts import PersonalParts
from components.models.policy import Policy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from components.models.adapters import Adapter

Pair = dict[str, Any]
Row = tuple[list[int], ...]
"""Token ids of a prompt, and of one or more completions of it; none of them empty."""
HEAD_CHUNK = 1024
"""Positions that go through the language-model head at once; 1024 x 50,000 fp32 logits take 200 MB."""


class ResidentPolicy:
    """A policy with an adapter slot, resident on a device, that is trained and scored.

    Attributes:
        policy: the language model, its tokenizer and its template.
        model: the PEFT-wrapped backbone.
        slot: the adapter slot; load an adapter before scoring.
        personal: the slot of a client's own parts; None where there are none.
    """

    def __init__(self, config: PolicyConfig, device: str, parts: PersonalParts | None = None) -> None:
        self.policy = Policy(config, device)
        check_head(self.policy.model, config.backbone.name)
        self.model = self.policy.model = attach(self.policy.model, config.lora)
        self.slot, self.personal = AdapterSlot(self.model), None
        if parts is not None:
            from components.models.personalized import PersonalSlot

            self.personal = PersonalSlot(self.model, parts)
            self.slot = self.personal.shared

    def encode(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Token ids of a prompt in its template, and of a completion with the end-of-sequence token.

        A completion longer than policy.max_new_tokens is cut there and does not end.
        """
        tokenizer, most = self.policy.tokenizer, self.policy.config.max_new_tokens
        ids = [*tokenizer.encode(completion.strip(), add_special_tokens=False), tokenizer.eos_token_id]
        return self.policy.encode(prompt), ids[:most]

    def encode_pair(self, pair: Pair) -> Row:
        """Token ids of a pair's prompt, of its chosen and of its rejected completion."""
        prompt, chosen = self.encode(pair["prompt"], pair["chosen"])
        return prompt, chosen, self.encode(pair["prompt"], pair["rejected"])[1]

    def logprobs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Summed log-probability of each completion given its prompt, for the adapter in the slot.

        Args:
            rows: N rows of C completions each.

        Returns:
            [N, C] fp32.
        """
        return completion_logprobs(self.model.get_base_model(), rows, self.policy.tokenizer.pad_token_id, self.policy.device)

    def logprobs_and_features(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """As `logprobs`, with the mean last hidden state of each completion's tokens, [N, C, H]."""
        return completion_features(self.model.get_base_model(), rows, self.policy.tokenizer.pad_token_id, self.policy.device)

    def tokens(self, rows: Sequence[Row], reference: bool = False, temperature: float = 1.0) -> Tokens:
        """Each token of each completion, for the adapter in the slot, or of the frozen backbone for the reference; see completion_tokens."""
        from components.models.personalized import as_reference

        with as_reference(self.model) if reference else nullcontext():
            return completion_tokens(self.model.get_base_model(), rows, self.policy.tokenizer.pad_token_id, self.policy.device, temperature)

    def score(self, rows: Sequence[Row], batch_size: int, reference: bool = False) -> np.ndarray:
        """As `logprobs` without gradients, in batches of rows of like length; of the frozen backbone for the reference. [N, C] float64."""
        from components.models.personalized import as_reference

        def values(asked: list[Row]) -> torch.Tensor:
            if not reference:
                return self.logprobs(asked)
            with as_reference(self.model):
                return self.logprobs(asked)

        return self.in_batches(rows, batch_size, values)

    def in_batches(self, rows: Sequence[Row], batch_size: int, values: Callable[[list[Row]], torch.Tensor]) -> np.ndarray:
        """What a function gives for each row, [n, ...] for n of them, asked without gradients in batches of rows of like length; [N, ...] float64 in the order of the rows."""
        import torch

        order = sorted(range(len(rows)), key=lambda i: (sum(map(len, rows[i])), i))
        self.model.eval()
        with torch.inference_mode():
            found = [values([rows[i] for i in order[start : start + batch_size]]).cpu() for start in range(0, len(order), batch_size)]
        return torch.cat(found).double().numpy()[np.argsort(order)]


def completion_logprobs(model: PreTrainedModel, rows: Sequence[Row], pad: int, device: str) -> torch.Tensor:
    """Summed log-probability of each completion; equal to the sum over its positions of the full log-softmax.

    Completions of one prompt lie behind it in one sequence: each begins at the position where the prompt ends, and sees
    the prompt and itself alone. So the prompt is computed once for all of them; a model whose attention takes no such
    mask (see `shares_prompts`) gets a sequence for each.

    Args:
        model: a causal language model of transformers.
        rows: N rows of C completions each.
        pad: id that rows are padded with on the right, where a causal model never looks.
        device: of the model.

    Returns:
        [N, C] fp32, with gradients where the model has them.
    """
    at = _states(model, rows, pad, device)
    return _sums(_chosen(model, at)[0], at.sizes).reshape(len(rows), -1)


def completion_features(model: PreTrainedModel, rows: Sequence[Row], pad: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As completion_logprobs, with the mean over each completion's tokens of the last hidden states, [N, C, H], which a reward head reads."""
    import torch

    at = _states(model, rows, pad, device)
    features = torch.stack([part.mean(0) for part in at.stands.float().split(at.sizes)])
    return _sums(_chosen(model, at)[0], at.sizes).reshape(len(rows), -1), features.reshape(len(rows), len(rows[0]) - 1, -1)


@dataclass(frozen=True)
class Tokens:
    """Each token of M completions, padded on the right to T.

    Attributes:
        logprobs: [M, T], log-probability given what stands before; 0 where no token is.
        entropies: [M, T], of the distribution that it was chosen from (nats).
        states: [M, T, H], last hidden state that it was chosen from, which a value head reads.
        mask: [M, T] bool, where a token is.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    states: torch.Tensor
    mask: torch.Tensor


def completion_tokens(model: PreTrainedModel, rows: Sequence[Row], pad: int, device: str, temperature: float = 1.0) -> Tokens:
    """The tokens of each completion, with gradients where the model has them.

    Args:
        model, rows, pad, device: as of completion_logprobs.
        temperature: the distributions are those of the logits divided by it, from which a sampler at this temperature draws.

    Returns:
        M = N C completions: those of the first row, of the second, ...
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    at = _states(model, rows, pad, device)
    logprobs, entropies = _chosen(model, at, entropy=True, temperature=temperature)

    def padded(values: torch.Tensor) -> torch.Tensor:
        return pad_sequence(list(values.split(at.sizes)), batch_first=True)

    return Tokens(padded(logprobs), padded(entropies), padded(at.before.float()), padded(torch.ones_like(logprobs, dtype=torch.bool)))


@dataclass(frozen=True)
class _States:
    """Last hidden states of S tokens of completions, one completion after the other: before each of them and where it stands, [S, H]; their ids, [S]; how many each completion has."""

    before: torch.Tensor
    stands: torch.Tensor
    targets: torch.Tensor
    sizes: list[int]


def _states(model: PreTrainedModel, rows: Sequence[Row], pad: int, device: str) -> _States:
    import torch

    lengths, branches = [[len(part) for part in row] for row in rows], len(rows[0]) - 1
    width = max(map(sum, lengths))
    if branches > 1 and not shares_prompts(model, width):
        return _states(model, [(row[0], completion) for row in rows for completion in row[1:]], pad, device)
    ids, positions, part = (torch.full((len(rows), width), value, dtype=torch.long) for value in (pad, 0, -1))
    at: list[tuple[int, int, int]] = []  # row, where a token is predicted, where it stands
    for i, (row, (start, *sizes)) in enumerate(zip(rows, lengths, strict=True)):
        total = sum(lengths[i])
        ids[i, :total] = torch.as_tensor([token for piece in row for token in piece])
        positions[i, :total] = torch.as_tensor([*range(start), *(start + k for size in sizes for k in range(size))])
        part[i, :total] = torch.as_tensor([0] * start + [n for n, size in enumerate(sizes, 1) for _ in range(size)])
        begin = start
        for size in sizes:
            at += [(i, begin + k - 1 if k else start - 1, begin + k) for k in range(size)]
            begin += size
    more = {}
    if branches > 1:
        sees = torch.ones(width, width, dtype=torch.bool).tril() & ((part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None]))
        more = {"attention_mask": sees[:, None].to(device), "position_ids": positions.to(device)}
    hidden = model.base_model(input_ids=ids.to(device), use_cache=False, **more).last_hidden_state
    row, before, stands = torch.tensor(at, device=device).T
    return _States(hidden[row, before], hidden[row, stands], ids.to(device)[row, stands], [size for _, *sizes in lengths for size in sizes])


def _chosen(model: PreTrainedModel, at: _States, entropy: bool = False, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of the tokens, [S], and entropies of the distributions that they were chosen from, [S]; in chunks, whose logits are made again in the backward pass."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def chosen(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head_logits(model, part)
        logits = logits if temperature == 1 else logits / temperature
        norm = logits.logsumexp(1)
        return logits.gather(1, wanted[:, None])[:, 0] - norm, norm - (logits.softmax(1) * logits).sum(1) if entropy else norm[:0]

    parts = []
    for start in range(0, len(at.targets), HEAD_CHUNK):
        piece = at.before[start : start + HEAD_CHUNK], at.targets[start : start + HEAD_CHUNK]
        whole = len(at.targets) <= HEAD_CHUNK or not torch.is_grad_enabled()
        parts.append(chosen(*piece) if whole else checkpoint(chosen, *piece, use_reentrant=False))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]) if entropy else None


def _sums(values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Sums of consecutive values, so many at a time, in a fixed order (index_add has none on CUDA)."""
    import torch

    return torch.stack([part.sum() for part in values.split(list(sizes))])


def shares_prompts(model: PreTrainedModel, width: int) -> bool:
    """Whether sequences of this width can hold several completions of one prompt: the attention takes a mask for each pair of positions,
    every layer is attention, and none looks at a window that is narrower."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds or not hasattr(config, "layer_types") else None
    alone = getattr(model, "_is_stateful", False) or getattr(config, "alibi", False)  # a recurrence, or distances counted along the sequence
    return not alone and config._attn_implementation == "sdpa" and kinds <= {"full_attention", "sliding_attention"} and (window is None or width <= window)


def train_sft(
    resident: ResidentPolicy, pairs: Sequence[Pair], adapter: Adapter, steps: int, batch_size: int, optimizer: OptimizerConfig, seed: int,
    progress: Callable[[int, float], None] | None = None, proximal: float = 0.0,
) -> tuple[Adapter, TrainingCurve]:
    """Train an adapter on the chosen completions of one owner's pairs.

    Args:
        resident: the model; its slot is overwritten.
        pairs: rows with prompt, chosen.
        adapter: where training starts; not changed.
        steps, batch_size, optimizer: of the local loop; a row is a pair.
        seed: the order of the rows and dropout are functions of it.
        progress: as in `train`.
        proximal: weight mu of mu / 2 |adapter - received adapter|^2, which is added to the loss (Li et al. 2020, FedProx).

    Returns:
        the trained adapter (fp32, CPU) and the curve.
    """
    import torch

    encoded = [resident.encode(pair["prompt"], pair["chosen"]) for pair in pairs]
    resident.slot.load(adapter)

    def loss(indices: np.ndarray) -> tuple[torch.Tensor, int]:
        rows = [encoded[i] for i in indices]
        summed = resident.logprobs(rows)[:, 0]
        return sft_loss(summed, torch.tensor([len(completion) for _, completion in rows], device=summed.device)), sum(len(p) + len(c) for p, c in rows)

    return _fit(resident, len(pairs), loss, steps, batch_size, optimizer, seed, progress, proximal)


def train_dpo(
    resident: ResidentPolicy, pairs: Sequence[Pair], adapter: Adapter, reference: np.ndarray, beta: float, steps: int, batch_size: int,
    optimizer: OptimizerConfig, seed: int, progress: Callable[[int, float], None] | None = None, proximal: float = 0.0,
) -> tuple[Adapter, TrainingCurve]:
    """Train an adapter by DPO on one owner's pairs.

    Args:
        resident: the model; its slot is overwritten.
        pairs: rows with prompt, chosen, rejected.
        adapter: where training starts; not changed.
        reference: [N, 2], the reference's summed log-probabilities of chosen and rejected, see pair_logprobs.
        beta: inverse temperature of the implicit reward.
        steps, batch_size, optimizer, seed, progress, proximal: as in train_sft.

    Returns:
        the trained adapter (fp32, CPU) and the curve.
    """
    resident.slot.load(adapter)
    return _fit(resident, len(pairs), dpo_rows(resident, pairs, reference, beta), steps, batch_size, optimizer, seed, progress, proximal)


def dpo_rows(resident: ResidentPolicy, pairs: Sequence[Pair], reference: np.ndarray, beta: float) -> Callable[[np.ndarray], tuple[torch.Tensor, int]]:
    """The loss of DPO as a function of the pairs' indices, and the tokens that go through the model; arguments as in train_dpo."""
    import torch

    encoded = [resident.encode_pair(pair) for pair in pairs]

    def loss(indices: np.ndarray) -> tuple[torch.Tensor, int]:
        rows = [encoded[i] for i in indices]
        now = resident.logprobs(rows)
        known = torch.as_tensor(reference[indices], dtype=torch.float32, device=now.device)
        return dpo_loss(now[:, 0], now[:, 1], known[:, 0], known[:, 1], beta), sum(2 * len(p) + len(c) + len(r) for p, c, r in rows)

    return loss


def _fit(
    resident: ResidentPolicy, rows: int, loss: Callable, steps: int, batch_size: int, optimizer: OptimizerConfig, seed: int, progress: Callable | None, proximal: float,
):
    parameters = resident.slot.parameters
    curve = train(resident.model, parameters, minibatches(rows, batch_size, steps * optimizer.accumulation, seed), held_near(loss, parameters, proximal), optimizer, seed, progress)
    return resident.slot.read(), curve


def held_near(loss: Callable, parameters: Sequence[torch.nn.Parameter], proximal: float) -> Callable:
    """A loss of rows with proximal / 2 |parameters - parameters as they are now|^2 added to each; the loss itself where proximal is 0."""
    if not proximal:
        return loss
    start = [parameter.detach().clone() for parameter in parameters]

    def held(indices: np.ndarray) -> tuple[torch.Tensor, int]:
        values, tokens = loss(indices)
        return values + proximal / 2 * sum((now - then).square().sum() for now, then in zip(parameters, start, strict=True)), tokens

    return held


def pair_logprobs(resident: ResidentPolicy, pairs: Sequence[Pair], batch_size: int, reference: bool = False) -> np.ndarray:
    """Summed log-probabilities of chosen and rejected, [N, 2], for the adapter in the slot, or for the frozen backbone as the reference.

    batch_size counts pairs.
    """
    return resident.score([resident.encode_pair(pair) for pair in pairs], batch_size, reference) if pairs else np.zeros((0, 2))


def implicit_margins(policy: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Difference of the implicit rewards of chosen and rejected, over beta (Rafailov et al. 2023, section 4).

    Args:
        policy, reference: [N, 2], summed log-probabilities of chosen and rejected.

    Returns:
        [N], log pi(chosen) / pi_ref(chosen) - log pi(rejected) / pi_ref(rejected); the implicit reward is right where it is above 0.
    """
    ratios = policy - reference
    return ratios[:, 0] - ratios[:, 1]
