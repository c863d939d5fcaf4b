"""Log-probabilities of completions equal those of the full logits of each sequence."""

from types import SimpleNamespace

import pytest
import torch

from components.models import logprobs
from components.models.logprobs import completion_tokens, supports_shared_prompts
from tests.support.adapters import random_tensors
from tests.support.full_logits import completion_logprob
from tests.support.pairs import PAIRS


@pytest.fixture
def resident(resident_policy):
    """The tiny policy with a random adapter in its slot."""
    resident_policy.slot.load(random_tensors(resident_policy.slot, seed=1, scale=0.2))
    return resident_policy


@pytest.fixture
def rows(resident):
    """Rows with one completion each."""
    encoded = []
    for pair in PAIRS:
        encoded += [resident.encode(pair.prompt, text) for text in (pair.chosen, pair.rejected)]
    return encoded


def compute_gradients(resident, values):
    return torch.autograd.grad(values.sum(), resident.slot.parameters)


def assert_close(tensors, expected, atol):
    for tensor, target in zip(tensors, expected, strict=True):
        assert torch.allclose(tensor, target, atol=atol)


@pytest.mark.parametrize("chunk", [7, 1024])
def test_log_probabilities_and_their_gradients_are_those_of_the_full_logits_for_any_chunks(
    resident, rows, chunk, monkeypatch
):
    expected = torch.stack([completion_logprob(resident.model, *row) for row in rows])[:, None]
    monkeypatch.setattr(logprobs, "HEAD_CHUNK", chunk)
    chunked = resident.logprobs(rows)
    assert torch.allclose(chunked, expected, atol=1e-4)
    assert_close(compute_gradients(resident, chunked), compute_gradients(resident, expected), atol=1e-3)


@pytest.fixture
def input_shapes(resident):
    """Shapes of the batches that go through the backbone."""
    shapes = []
    hook = resident.model.get_base_model().base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    hook.remove()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_completions_of_one_prompt_share_its_pass_and_have_the_values_of_separate_rows(
    resident, attention, input_shapes, monkeypatch
):
    monkeypatch.setattr(resident.model.get_base_model().config, "_attn_implementation", attention)
    shared = []
    separate = []
    for pair in PAIRS:
        prompt, *completions = (
            *resident.encode(*pair.texts),
            resident.encode(pair.prompt, "a third one")[1],
        )
        shared.append((prompt, *completions))
        separate += [(prompt, completion) for completion in completions]
    together = resident.logprobs(shared)
    alone = resident.logprobs(separate).reshape(len(PAIRS), 3)
    assert torch.allclose(together, alone, atol=1e-4)
    assert len({round(value, 3) for value in together.flatten().tolist()}) > 12
    gradients = compute_gradients(resident, together)
    assert_close(compute_gradients(resident, alone), gradients, atol=1e-3)
    assert all(gradient.any() for gradient in gradients)
    assert input_shapes[0][0] == (len(PAIRS) if attention == "sdpa" else 3 * len(PAIRS))
    assert input_shapes[1][0] == 3 * len(PAIRS)
    if attention == "sdpa":
        assert input_shapes[0][1] == max(sum(map(len, row)) for row in shared)


def test_the_tiny_backbone_supports_shared_prompts(resident):
    assert supports_shared_prompts(resident.model.get_base_model(), 10_000)


@pytest.mark.parametrize(
    ("width", "config", "is_shared"),
    [
        (9, {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}, True),
        (10, {"layer_types": ["full_attention"], "sliding_window": 9}, True),
        (10, {"sliding_window": None}, True),
        (10, {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}, False),
        (10, {"sliding_window": 9}, False),
        (4, {"alibi": True}, False),
        (4, {"layer_types": ["full_attention", "linear_attention"]}, False),
        (4, {"_attn_implementation": "flash_attention_2"}, False),
    ],
)
def test_a_prompt_is_shared_if_every_layer_attends_to_the_whole_sequence(width, config, is_shared):
    model = SimpleNamespace(config=SimpleNamespace(**{"_attn_implementation": "sdpa"} | config))
    assert supports_shared_prompts(model, width) is is_shared


def test_a_prompt_is_not_shared_by_a_recurrent_model():
    config = SimpleNamespace(_attn_implementation="sdpa")
    assert not supports_shared_prompts(SimpleNamespace(_is_stateful=True, config=config), 4)


def test_tokens_have_the_values_of_the_full_logits_in_the_order_of_the_rows(resident, rows):
    base = resident.model.get_base_model()
    encoded = [resident.encode(*pair.texts) for pair in PAIRS]
    tokens = completion_tokens(base, encoded, resident.policy.tokenizer.pad_token_id)
    sums = (tokens.logprobs * tokens.mask).sum(1).reshape(len(PAIRS), 2)
    assert torch.allclose(sums, resident.logprobs(encoded), atol=1e-4)
    assert tokens.mask.sum(1).tolist() == [len(completion) for _, completion in rows]
    assert not tokens.logprobs[~tokens.mask].any()
    for m, (prompt, completion) in enumerate(rows):
        with torch.no_grad():
            output = base(input_ids=torch.tensor([[*prompt, *completion]]), output_hidden_states=True)
        positions = slice(len(prompt) - 1, -1)
        logprobs = output.logits[0, positions].log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        size = len(completion)
        chosen = logprobs[torch.arange(size), torch.tensor(completion)]
        assert torch.allclose(tokens.logprobs[m, :size], chosen, atol=1e-4)
        assert torch.allclose(tokens.entropies[m, :size], entropies, atol=1e-4)
        assert torch.allclose(tokens.states[m, :size], output.hidden_states[-1][0, positions], atol=1e-4)
