"""The selector: its answer tokens, truncated texts, and logits equal to those of the whole head."""

import threading

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from components.config import BackboneConfig, UserError
from components.data.templates import load
from components.models import selector_model
from components.models.backbone import backbone_root, load_backbone, load_tokenizer
from components.models.selector import Comparison, encode_comparison, find_choice_tokens, majority_vote
from components.models.selector_model import BatchShare, Selector, choice_logits
from tests.support.adapters import random_tensors
from tests.support.recording import record_calls

TEMPLATE = load("summarization/selector_short", "selector")
COMPARISON = Comparison("the paper", "first summary", "second one")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BackboneConfig(name="tiny-random"))


def template_length(tokenizer) -> int:
    return sum(len(tokenizer.encode(piece, add_special_tokens=False)) for piece in TEMPLATE.pieces[::2])


def encode_text(tokenizer, comparison, max_length, max_prompt_tokens=None) -> str:
    ids = encode_comparison(tokenizer, TEMPLATE, comparison, max_length, max_prompt_tokens)
    assert len(ids) <= max_length
    return tokenizer.decode(ids)


def split_fields(text: str) -> list[str]:
    """The fields of a filled template, whose literal pieces must all be present."""
    fields = []
    rest = text
    for literal, following in zip(TEMPLATE.pieces[:-1:2], TEMPLATE.pieces[2::2], strict=True):
        assert rest.startswith(literal)
        field, rest = rest[len(literal) :].split(following, 1)
        fields.append(field)
        rest = following + rest
    assert rest == TEMPLATE.pieces[-1]
    return fields


def test_a_forum_post_is_encoded_with_the_headings_of_its_template(tokenizer):
    post = Comparison("SUBREDDIT: r/a\nTITLE: b\nPOST: c", "first", "second")
    ids = encode_comparison(tokenizer, load("summarization/selector_post", "selector"), post, 1000, None)
    fields = "### SUBREDDIT: r/a\n### TITLE: b\n### POST: c\n### SUMMARY A: first\n### SUMMARY B: second\n"
    assert fields in tokenizer.decode(ids)


# --- the answer tokens


def test_the_answers_are_a_and_b_with_a_space_each_a_single_token(tokenizer):
    assert tokenizer.convert_ids_to_tokens(list(find_choice_tokens(tokenizer))) == ["ĠA", "ĠB"]
    assert find_choice_tokens(tokenizer) != (tokenizer.encode("A")[-1], tokenizer.encode("B")[-1])


def test_a_tokenizer_that_splits_an_answer_is_refused():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "ĠA"])}
    plain = Tokenizer(models.BPE(vocabulary, [("Ġ", "A")]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(UserError, match=r"splits ' B' into 2 tokens .*: use another backbone"):
        find_choice_tokens(PreTrainedTokenizerFast(tokenizer_object=plain))


def test_training_scoring_and_the_judge_use_the_same_answer_tokens(tiny_selector, monkeypatch):
    """The reference code used them with the space in training and without it in evaluation."""
    used = []

    def record(model, input_ids, last, choices, one_position):
        used.append(choices)
        return torch.zeros(len(last), 2, requires_grad=True)

    monkeypatch.setattr(selector_model, "choice_logits", record)
    tiny_selector.margins([COMPARISON])
    tiny_selector.choice_logits(*tiny_selector.collate([[1, 2]]))
    assert len(used) == 2
    assert set(used) == {find_choice_tokens(tiny_selector.tokenizer)}


# --- truncation


def test_a_short_comparison_is_the_filled_template_and_ends_at_the_answer_slot(tokenizer):
    text = encode_text(tokenizer, COMPARISON, 500)
    assert text == TEMPLATE.render(prompt="the paper", response_a="first summary", response_b="second one")
    assert text.endswith("BETTER SUMMARY:")


def make_text(letter, length):
    return "".join(letter + str(i % 10) for i in range(length))[:length]


@pytest.mark.parametrize("room", [16, 17, 30, 41, 60, 200, 1000])
@pytest.mark.parametrize(
    "lengths", [(500, 10, 10), (500, 60, 5), (0, 400, 400), (500, 5, 400), (500, 401, 400)]
)
def test_the_prompt_is_truncated_before_the_completions_and_the_template_stays(tokenizer, room, lengths):
    """Truncating the whole sequence on the right lost the answer slot, and the loss became NaN."""
    prompt, first, second = (make_text(letter, n) for letter, n in zip("pab", lengths, strict=True))
    text = encode_text(tokenizer, Comparison(prompt, first, second), template_length(tokenizer) + room)
    prompt_part, first_part, second_part = split_fields(text)
    assert prompt.startswith(prompt_part)
    assert first.startswith(first_part)
    assert second.startswith(second_part)
    if len(first) + len(second) <= room:
        assert first_part == first
        assert second_part == second
        assert len(prompt_part) == min(len(prompt), room - len(first) - len(second))
    else:
        assert len(first_part) >= min(len(first), room // 2)
        assert len(second_part) >= min(len(second), room // 2)
        assert len(prompt_part) <= 1, "at most the token that is left over by the two halves"
        assert len(prompt_part + first_part + second_part) >= room - 1


def test_the_prompt_has_a_limit_of_its_own_and_a_template_must_leave_room_for_it(tokenizer):
    text = encode_text(tokenizer, Comparison("p" * 50, "x", "y"), 500, max_prompt_tokens=7)
    assert text == TEMPLATE.render(prompt="p" * 7, response_a="x", response_b="y")
    size = template_length(tokenizer)
    with pytest.raises(UserError, match=rf"needs {size} tokens .*is {size + 15}: raise selector.max"):
        encode_comparison(tokenizer, TEMPLATE, COMPARISON, size + 15, None)


@pytest.mark.parametrize("room", [16, 31, 40, 100, 1000])
def test_swapping_the_completions_swaps_their_tokens_and_nothing_else(tokenizer, room):
    size = template_length(tokenizer) + room
    comparison = Comparison("p" * 90, "a" * 21, "b " * 40)
    swapped = Comparison(comparison.prompt, comparison.second, comparison.first)
    prompt, first, second = split_fields(encode_text(tokenizer, comparison, size))
    assert split_fields(encode_text(tokenizer, swapped, size)) == [prompt, second, first]
    ids = encode_comparison(tokenizer, TEMPLATE, comparison, size, None)
    assert sorted(ids) == sorted(encode_comparison(tokenizer, TEMPLATE, swapped, size, None))


# --- logits


def full_logits(selector: Selector, row: list[int]) -> torch.Tensor:
    """The logits of the two answers after a row of ids, from the model's forward pass."""
    with torch.no_grad():
        return selector.model(input_ids=torch.tensor([row])).logits[0, -1, list(selector.choices)]


ROWS = [list(range(10, 10 + n)) for n in (5, 40, 17, 90)]


def test_the_choice_logits_and_their_gradient_are_those_of_the_whole_head(tiny_selector, random_adapter):
    slot = tiny_selector.slot
    slot.load(random_adapter(0, scale=0.5))
    ids, last = tiny_selector.collate(ROWS)
    logits = tiny_selector.choice_logits(ids, last)
    expected = torch.stack([full_logits(tiny_selector, row) for row in ROWS])
    assert logits.shape == (4, 2)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, expected, atol=1e-5)
    assert expected.std() > 0.01
    whole = tiny_selector.model(input_ids=ids).logits[torch.arange(4), last][:, list(tiny_selector.choices)]
    gradients, targets = (
        torch.autograd.grad((each[:, 0] - each[:, 1]).sum(), slot.parameters) for each in (logits, whole)
    )
    for gradient, target in zip(gradients, targets, strict=True):
        assert torch.allclose(gradient, target, atol=1e-5)


def test_a_backbone_in_bf16_gives_fp32_logits():
    model = load_backbone(BackboneConfig(name="tiny-random", dtype="bfloat16"), "cpu")
    assert choice_logits(model, torch.tensor([[5, 6]]), torch.tensor([1]), (259, 260)).dtype == torch.float32


# --- margins


COMPARISONS = [
    Comparison("p" * (7 * i % 30), "a" * (5 * i % 23 + 1), "b" * (3 * i % 17 + 1)) for i in range(45)
]


def test_logits_are_in_the_order_of_the_comparisons(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(0))
    together = tiny_selector.logits(COMPARISONS)
    alone = [full_logits(tiny_selector, tiny_selector.encode(comparison)) for comparison in COMPARISONS]
    assert together == pytest.approx(torch.stack(alone).numpy(), abs=1e-5)
    assert len({round(float(logit), 4) for logit in together[:, 0]}) > 20


def test_two_half_batches_at_a_time_have_the_logits_of_one_batch(
    tiny_selector, random_adapter, two_threads, monkeypatch
):
    tiny_selector.slot.load(random_adapter(3))
    comparisons = [Comparison(f"paper {n}", "a " * (n % 4), f"b {n}") for n in range(40)]
    batches = record_calls(
        monkeypatch, tiny_selector, "choice_logits", lambda ids, last: (threading.get_ident(), len(ids))
    )
    logits = tiny_selector.logits(comparisons)
    assert sorted(rows for _, rows in batches) == [8, 16, 16]
    assert threading.get_ident() not in {thread for thread, _ in batches}
    batches.clear()
    torch.set_num_threads(1)
    assert np.allclose(tiny_selector.logits(comparisons), logits, atol=1e-5)
    assert batches == [(threading.get_ident(), 32), (threading.get_ident(), 8)]
    assert len(np.unique(logits)) > len(comparisons)


def test_a_margin_over_both_orders_is_their_mean_and_changes_its_sign_with_them(
    tiny_selector, random_adapter
):
    tiny_selector.slot.load(random_adapter(0))
    swapped = [Comparison(c.prompt, c.second, c.first) for c in COMPARISONS]
    margins = tiny_selector.margins(COMPARISONS)
    shown_as_a = tiny_selector.logits(COMPARISONS)
    shown_as_b = tiny_selector.logits(swapped)
    odds = shown_as_a[:, 0] - shown_as_a[:, 1] + shown_as_b[:, 1] - shown_as_b[:, 0]
    assert margins == pytest.approx(odds / 2, abs=1e-6)
    assert np.array_equal(margins, -tiny_selector.margins(swapped))
    assert abs(margins).max() > 1e-3


def test_equal_comparisons_are_computed_once_in_batches_that_do_not_depend_on_their_order(
    tiny_selector, random_adapter, monkeypatch
):
    comparisons = [Comparison(f"paper {n % 40 // 4}", "a" * (n % 4), "b") for n in range(50)]
    order = np.random.default_rng(0).permutation(50)
    tiny_selector.slot.load(random_adapter(0))
    recorded = record_calls(monkeypatch, tiny_selector, "choice_logits", lambda ids, last: ids.tolist())
    logits = tiny_selector.logits(comparisons)
    batches = list(recorded)
    recorded.clear()
    assert np.array_equal(tiny_selector.logits([comparisons[i] for i in order]), logits[order])
    assert recorded == batches
    assert [len(batch) for batch in batches] == [32, 8]
    assert np.array_equal(logits[40:], logits[:10])
    assert len(np.unique(logits[:40], axis=0)) == 40


@pytest.mark.parametrize("orders", ["single", "both"])
@pytest.mark.parametrize("workers", [2, 3, 9])
def test_the_margins_of_all_shares_have_the_sum_of_the_whole(tiny_selector, monkeypatch, orders, workers):
    config = tiny_selector.config.model_copy(update={"orders": orders, "score_batch_size": 1})
    monkeypatch.setattr(tiny_selector, "config", config)
    comparisons = [Comparison(f"p{n}", "a" * n, "b" * (7 - n)) for n in range(8)]
    whole = tiny_selector.margins(comparisons)
    shares = [tiny_selector.margins(comparisons, BatchShare(n, workers)) for n in range(workers)]
    assert np.array_equal(np.sum(shares, axis=0), whole)
    assert not np.array_equal(shares[0], whole)


def test_margins_that_are_no_numbers_are_refused(tiny_selector, monkeypatch):
    monkeypatch.setattr(
        tiny_selector, "choice_logits", lambda ids, last: torch.full((len(ids), 2), torch.nan)
    )
    with pytest.raises(UserError, match=r"^the selector on .* 4 of 4 are NaN or infinite"):
        tiny_selector.margins([COMPARISON])


def test_no_comparisons_have_no_logits_and_no_margins(tiny_selector):
    assert tiny_selector.logits([]).shape == (0, 2)
    assert tiny_selector.margins([]).shape == (0,)


def test_a_single_order_changes_the_margins_but_not_those_by_order(
    tiny_selector, random_adapter, monkeypatch
):
    tiny_selector.slot.load(random_adapter(0))
    logits = tiny_selector.logits(COMPARISONS)
    by_order = tiny_selector.margins_by_order(COMPARISONS)
    monkeypatch.setattr(tiny_selector, "config", tiny_selector.config.model_copy(update={"orders": "single"}))
    assert tiny_selector.margins(COMPARISONS) == pytest.approx(logits[:, 0] - logits[:, 1], abs=1e-6)
    assert np.array_equal(tiny_selector.margins_by_order(COMPARISONS), by_order)
    assert not np.allclose(by_order[0], by_order[1])


def test_scoring_disables_dropout(debug, random_adapter):
    lora = debug.selector.lora.model_copy(update={"dropout": 0.5})
    selector = Selector(debug.selector.model_copy(update={"lora": lora}), "cpu")
    selector.slot.load(random_adapter(0))
    selector.model.train()
    assert (selector.margins(COMPARISONS) == selector.margins(COMPARISONS)).all()


# --- the vote


def test_the_majority_of_an_odd_number_of_selectors_decides():
    assert majority_vote([[0, 1, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]).tolist() == [0, 1, 0, 0]
    assert majority_vote([[1, 0]]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([[0, 1], [1, 0]], "odd number U"),
        ([0, 1, 1], "odd number U"),
        ([[0, 2, 1]], "must be 0"),
        ([[0.5]], "must be 0"),
    ],
)
def test_an_even_number_of_selectors_and_choices_other_than_0_and_1_are_refused(choices, words):
    with pytest.raises(ValueError, match=words):
        majority_vote(choices)


# --- the embedded backbone


@pytest.mark.skipif(
    not (backbone_root() / "smollm2-135m-instruct" / "config.json").is_file(),
    reason="the embedded backbone is not on this machine (make install downloads it)",
)
def test_the_choice_logits_of_the_embedded_backbone_are_those_of_its_whole_head(debug):
    backbone = BackboneConfig(name="embedded", layers=4)
    config = debug.selector.model_copy(update={"backbone": backbone, "template": "summarization/selector"})
    selector = Selector(config, "cpu")
    assert selector.choices == (330, 389)
    selector.slot.load(random_tensors(selector.slot, seed=0, scale=0.02))
    long = Comparison("word " * 90, "A " * 30, "other " * 8)
    rows = [selector.encode(comparison) for comparison in (COMPARISON, long)]
    for row in rows:
        assert selector.tokenizer.decode(row).endswith("### YOUR CHOICE:")
    selector.model.eval()
    logits = selector.choice_logits(*selector.collate(rows))
    expected = torch.stack([full_logits(selector, row) for row in rows])
    assert torch.allclose(logits, expected, atol=1e-3)


def test_a_swapped_comparison_has_the_same_completions_in_the_other_order():
    assert Comparison("p", "a", "b").swapped() == Comparison("p", "b", "a")
