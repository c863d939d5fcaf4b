"""The resident policy: encoding of completions, and scores in batches."""

import numpy as np
import pytest
import torch

from components.config import UserError
from components.learning.pair_scores import pair_logprobs
from components.models.backbone import load_backbone
from components.models.logprobs import completion_logprobs
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS


@pytest.fixture
def resident(resident_policy):
    resident_policy.slot.load(random_tensors(resident_policy.slot, seed=1, scale=0.2))
    return resident_policy


def test_scores_do_not_depend_on_the_batches_and_no_pairs_have_none(resident):
    assert np.allclose(pair_logprobs(resident, PAIRS, 2), pair_logprobs(resident, PAIRS, 100), atol=1e-4)
    assert pair_logprobs(resident, [], 4).shape == (0, 2)


def test_scores_that_are_no_numbers_are_refused(resident, monkeypatch):
    rows = [resident.encode(*pair.texts) for pair in PAIRS]
    monkeypatch.setattr(resident, "logprobs", lambda batch: torch.full((len(batch), 2), float("nan")))
    with pytest.raises(UserError, match=rf"^the policy on .* {2 * len(PAIRS)} of {2 * len(PAIRS)} are NaN"):
        resident.score(rows, 4)


def test_the_reference_is_the_backbone_without_the_adapter(resident):
    backbone = load_backbone(resident.policy.config.backbone, "cpu")
    rows = [resident.encode(pair.prompt, pair.rejected) for pair in PAIRS]
    with torch.no_grad():
        expected = completion_logprobs(backbone, rows, resident.policy.tokenizer.pad_token_id)[:, 0]
    reference = pair_logprobs(resident, PAIRS, 4, reference=True)
    assert np.allclose(reference[:, 1], expected, atol=1e-4)
    assert not np.allclose(reference, pair_logprobs(resident, PAIRS, 4), atol=1e-2)


def test_a_completion_ends_with_the_end_of_sequence_token_unless_it_is_truncated(resident):
    eos = resident.policy.tokenizer.eos_token_id
    _, completion = resident.encode("paper", "yes")
    assert completion[-1] == eos
    assert eos not in completion[:-1]
    _, completion = resident.encode("paper", "yes and no " * 40)
    assert len(completion) == resident.policy.config.max_new_tokens
    assert resident.policy.tokenizer.eos_token_id not in completion
