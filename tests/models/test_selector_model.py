"""The selector: its two answer tokens, what is cut when a text is too long, and logits that equal the whole head's."""

import pytest
import torch

from components.config import BackboneConfig
from components.data.templates import load
from components.models.backbone import backbone_root, load_backbone, load_tokenizer
from components.models.selector import Comparison, Selector, SelectorError, choice_logits, choice_tokens, encode_comparison, majority_vote

TEMPLATE = load("summarization/selector_short", "selector")
QUESTION = Comparison("the paper", "first summary", "second one")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BackboneConfig(name="tiny-random"))


def template_length(tokenizer) -> int:
    return sum(len(tokenizer.encode(piece, add_special_tokens=False)) for piece in TEMPLATE.pieces[::2])


def text_of(tokenizer, comparison, max_length, max_prompt_tokens=None) -> str:
    ids = encode_comparison(tokenizer, TEMPLATE, comparison, max_length, max_prompt_tokens)
    assert len(ids) <= max_length
    return tokenizer.decode(ids)


# --- the answer tokens

def test_the_answers_are_space_a_and_space_b_each_one_token(tokenizer):
    assert tokenizer.convert_ids_to_tokens(list(choice_tokens(tokenizer))) == ["ĠA", "ĠB"]
    assert choice_tokens(tokenizer) != (tokenizer.encode("A")[-1], tokenizer.encode("B")[-1])


def test_a_tokenizer_that_splits_an_answer_is_refused_clearly():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({token: i for i, token in enumerate([*letters, "ĠA"])}, [("Ġ", "A")]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(SelectorError, match=r"splits ' B' into 2 tokens .*: a selector needs one"):
        choice_tokens(PreTrainedTokenizerFast(tokenizer_object=plain))


def test_training_scoring_and_the_judge_read_the_same_two_tokens(tiny_selector, monkeypatch):
    """The reference took them with the space in training and without it in evaluation."""
    from components.models import selector

    seen = []
    monkeypatch.setattr(selector, "choice_logits", lambda model, ids, last, choices: (seen.append(choices), torch.zeros(len(last), 2, requires_grad=True))[1])
    tiny_selector.margins([QUESTION])
    tiny_selector.choice_logits(*tiny_selector.batch([[1, 2]]))
    assert set(seen) == {choice_tokens(tiny_selector.tokenizer)}


# --- what is cut

def test_a_short_comparison_is_the_filled_template_and_ends_at_the_answer_slot(tokenizer):
    assert text_of(tokenizer, QUESTION, 500) == TEMPLATE.render(prompt="the paper", response_a="first summary", response_b="second one")
    assert text_of(tokenizer, QUESTION, 500).endswith("BETTER SUMMARY:")


@pytest.mark.parametrize("room", [16, 17, 30, 41, 60, 200, 1000])
@pytest.mark.parametrize("lengths", [(500, 10, 10), (500, 60, 5), (0, 400, 400), (500, 5, 400), (500, 401, 400)])
def test_what_is_too_long_loses_its_end_and_the_template_the_heads_and_the_slot_stay(tokenizer, room, lengths):
    """A right truncation of the whole lost the answer slot, and the loss became NaN."""
    prompt, first, second = ("".join(letter + str(i % 10) for i in range(n))[:n] for letter, n in zip("pab", lengths, strict=True))
    text = text_of(tokenizer, Comparison(prompt, first, second), template_length(tokenizer) + room)
    rest = text
    kept = []
    for literal, following in zip(TEMPLATE.pieces[::2], TEMPLATE.pieces[2::2], strict=False):
        assert rest.startswith(literal)
        field, rest = rest[len(literal):].split(following, 1)
        kept.append(field)
        rest = following + rest
    assert rest == TEMPLATE.pieces[-1]
    assert prompt.startswith(kept[0]) and first.startswith(kept[1]) and second.startswith(kept[2])
    assert len(kept[1]) >= min(len(first), room // 2) and len(kept[2]) >= min(len(second), room // 2)
    if len(first) + len(second) <= room:
        assert kept[1:] == [first, second] and len(kept[0]) == min(len(prompt), room - len(first) - len(second))
    else:
        assert len(kept[0]) <= 1, "completions are cut only when the prompt has nothing left to give (but an odd token)"
        assert sum(map(len, kept)) >= min(room, len(first) + len(second)) - 1, "no room is given away"


def test_the_prompt_can_be_cut_shorter_than_there_is_room(tokenizer):
    assert text_of(tokenizer, Comparison("p" * 50, "x", "y"), 500, 7) == TEMPLATE.render(prompt="p" * 7, response_a="x", response_b="y")


def test_a_template_that_leaves_no_room_is_refused(tokenizer):
    size = template_length(tokenizer)
    with pytest.raises(SelectorError, match=rf"takes {size} of max_length {size + 15} tokens: raise selector.max_length"):
        encode_comparison(tokenizer, TEMPLATE, QUESTION, size + 15, None)


@pytest.mark.parametrize("room", [16, 31, 40, 100, 1000])
def test_a_swap_exchanges_the_completions_tokens_and_changes_nothing_else(tokenizer, room):
    size = template_length(tokenizer) + room
    prompt, first, second = "p" * 90, "a" * 21, "b " * 40
    given = text_of(tokenizer, Comparison(prompt, first, second), size)
    swapped = text_of(tokenizer, Comparison(prompt, second, first), size)

    def fields(text):
        head, rest = text.split("\nSUMMARY A: ")
        one, rest = rest.split("\nSUMMARY B: ")
        two, end = rest.split("\nBETTER SUMMARY:")
        return head, one, two, end

    head, one, two, end = fields(given)
    assert fields(swapped) == (head, two, one, end)
    ids = [encode_comparison(tokenizer, TEMPLATE, c, size, None) for c in (Comparison(prompt, first, second), Comparison(prompt, second, first))]
    assert sorted(ids[0]) == sorted(ids[1])


# --- logits

def full_logits(selector: Selector, row: list[int]) -> torch.Tensor:
    """The two answers' logits after a row of ids, by the whole model and its whole head."""
    with torch.no_grad():
        return selector.model(input_ids=torch.tensor([row])).logits[0, -1, list(selector.choices)]


ROWS = [list(range(10, 10 + n)) for n in (5, 40, 17, 90)]


def test_two_rows_of_the_head_at_one_position_equal_the_whole_heads_logits(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(0, scale=0.5))
    found = tiny_selector.choice_logits(*tiny_selector.batch(ROWS))
    expected = torch.stack([full_logits(tiny_selector, row) for row in ROWS])
    assert found.shape == (4, 2) and found.dtype == torch.float32
    assert torch.allclose(found, expected, atol=1e-5) and expected.std() > 0.01


def test_their_gradient_is_that_of_the_whole_head(tiny_selector, random_adapter):
    slot = tiny_selector.slot
    slot.load(random_adapter(0))

    def gradient(logits: torch.Tensor) -> list[torch.Tensor]:
        return torch.autograd.grad((logits[:, 0] - logits[:, 1]).sum(), slot.parameters)

    ids, last = tiny_selector.batch(ROWS)
    whole = tiny_selector.model(input_ids=ids).logits[torch.arange(len(last)), last][:, list(tiny_selector.choices)]
    for found, expected in zip(gradient(tiny_selector.choice_logits(ids, last)), gradient(whole), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_padding_to_a_longer_batch_changes_nothing(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(0))
    alone = torch.cat([tiny_selector.choice_logits(*tiny_selector.batch([row])) for row in ROWS])
    together = tiny_selector.choice_logits(*tiny_selector.batch([*ROWS, list(range(5, 205))]))[:4]
    assert torch.allclose(alone, together, atol=1e-5)


def test_a_cap_on_the_final_logits_is_applied_as_the_model_does(tiny_selector, random_adapter):
    """Gemma 2 caps its logits."""
    tiny_selector.slot.load(random_adapter(0))
    ids, last = tiny_selector.batch(ROWS)
    model = tiny_selector.model.get_base_model()
    plain = choice_logits(model, ids, last, tiny_selector.choices)
    model.config.final_logit_softcapping = 0.05
    try:
        assert torch.allclose(choice_logits(model, ids, last, tiny_selector.choices), 0.05 * torch.tanh(plain / 0.05))
    finally:
        del model.config.final_logit_softcapping


COMPARISONS = [Comparison("p" * (7 * i % 30), "a" * (5 * i % 23 + 1), "b" * (3 * i % 17 + 1)) for i in range(45)]


def test_logits_come_back_in_the_order_of_the_questions(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(0))
    together = tiny_selector.logits(COMPARISONS)
    alone = torch.stack([full_logits(tiny_selector, tiny_selector.encode(c)) for c in COMPARISONS]).numpy()
    assert together == pytest.approx(alone, abs=1e-5) and len({round(float(x), 4) for x in together[:, 0]}) > 20


def test_with_both_orders_a_margin_changes_its_sign_with_the_order_and_nothing_else(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(0))
    exchanged = [Comparison(c.prompt, c.second, c.first) for c in COMPARISONS]
    given, other = tiny_selector.margins(COMPARISONS), tiny_selector.margins(exchanged)
    assert given == pytest.approx(-other, abs=1e-6) and abs(given).max() > 1e-3
    one, two = tiny_selector.logits(COMPARISONS), tiny_selector.logits(exchanged)
    assert given == pytest.approx(((one[:, 0] - one[:, 1]) - (two[:, 0] - two[:, 1])) / 2, abs=1e-6)


def test_with_a_single_order_the_margin_is_the_given_orders_alone(tiny_selector, random_adapter, monkeypatch):
    tiny_selector.slot.load(random_adapter(0))
    logits = tiny_selector.logits(COMPARISONS)
    monkeypatch.setattr(tiny_selector, "config", tiny_selector.config.model_copy(update={"orders": "single"}))
    assert tiny_selector.margins(COMPARISONS) == pytest.approx(logits[:, 0] - logits[:, 1], abs=1e-6)
    assert tiny_selector.margins_by_order(COMPARISONS)[1] is None


def test_no_question_has_no_margin(tiny_selector):
    assert tiny_selector.margins([]).shape == (0,)


def test_scoring_takes_place_without_dropout(debug, random_adapter):
    selector = Selector(debug.selector.model_copy(update={"lora": debug.selector.lora.model_copy(update={"dropout": 0.5})}), "cpu")
    selector.slot.load(random_adapter(0))
    selector.model.train()
    assert (selector.margins(COMPARISONS) == selector.margins(COMPARISONS)).all()


# --- the vote

def test_the_majority_of_an_odd_number_of_selectors_decides():
    assert majority_vote([[0, 1, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]).tolist() == [0, 1, 0, 0]
    assert majority_vote([[1, 0]]).tolist() == [1, 0]


@pytest.mark.parametrize("choices", [[[0, 1], [1, 0]], [0, 1, 1], [[0, 2, 1]], [[0.5]]])
def test_an_even_ensemble_and_what_is_no_choice_are_refused(choices):
    with pytest.raises(ValueError, match="odd number U|must be 0"):
        majority_vote(choices)


# --- the embedded backbone

def test_the_embedded_backbones_two_rows_equal_its_whole_head(debug):
    if not (backbone_root() / "smollm2-135m-instruct" / "config.json").is_file():
        pytest.skip(f"the embedded backbone is not at {backbone_root()} (make install gets it)")
    backbone = BackboneConfig(name="embedded", layers=4)
    selector = Selector(debug.selector.model_copy(update={"backbone": backbone, "template": "summarization/selector"}), "cpu")
    assert selector.choices == (330, 389)
    slot, numbers = selector.slot, torch.Generator().manual_seed(0)
    slot.load({n: 0.02 * torch.randn(p.shape, generator=numbers) for n, p in zip(slot.names, slot.parameters, strict=True)})
    rows = [selector.encode(c) for c in (QUESTION, Comparison("word " * 90, "A " * 30, "other " * 8))]
    assert all(selector.tokenizer.decode(row).endswith("### YOUR CHOICE:") for row in rows)
    selector.model.eval()
    found = selector.choice_logits(*selector.batch(rows))
    assert torch.allclose(found, torch.stack([full_logits(selector, row) for row in rows]), atol=1e-3)


def test_a_backbone_in_bf16_gives_fp32_logits(random_adapter):
    model = load_backbone(BackboneConfig(name="tiny-random", dtype="bfloat16"), "cpu")
    assert choice_logits(model, torch.tensor([[5, 6]]), torch.tensor([1]), (259, 260)).dtype == torch.float32


# --- several adapters at once

def test_several_adapters_in_one_batch_give_the_logits_of_each_by_itself(tiny_selector, random_adapter):
    questions = [Comparison("the paper " * i, "first summary", "second one, longer " * (3 - i)) for i in range(3)]
    adapters = [random_adapter(seed, 1.0) for seed in (1, 2, 3)]
    alone = []
    for adapter in adapters:
        tiny_selector.slot.load(adapter)
        alone.append(tiny_selector.logits(questions))
    tiny_selector.slot.load(random_adapter(9))
    together = tiny_selector.ensemble_logits(questions, adapters)
    assert together.shape == (3, 3, 2) and abs(together - alone).max() < 1e-4
    assert abs(together[0] - together[1]).max() > 1e-2, "the adapters do differ"
    assert abs(tiny_selector.ensemble_logits(questions, adapters[1:]) - alone[1:]).max() < 1e-4, "and fewer of them afterwards"
    assert all(torch.equal(t, random_adapter(9)[n]) for n, t in tiny_selector.slot.read().items()), "the trained slot is left as it is"


def test_scoring_several_adapters_changes_nothing_in_later_training(debug, random_adapter):
    from components.config import OptimizerConfig
    from components.learning.selector import train_selector

    pairs = [{"prompt": f"p {i}", "chosen": "yes", "rejected": f"no {i}"} for i in range(4)]
    fresh, scored = Selector(debug.selector, "cpu"), Selector(debug.selector, "cpu")
    scored.ensemble_logits([QUESTION], [random_adapter(seed) for seed in (1, 2, 3)])
    results = [train_selector(s, pairs, s.slot.initial_adapter(0), 2, 4, OptimizerConfig(lr=1e-2), seed=5)[0] for s in (fresh, scored)]
    assert {name for name, p in scored.model.named_parameters() if p.requires_grad} == {name for name, p in fresh.model.named_parameters() if p.requires_grad}
    assert set(results[0]) == set(results[1]) and all(torch.equal(results[0][n], results[1][n]) for n in results[0])
