"""Prompt and completion are tokenized as the joined text is, up to tokens that span both."""

import pytest
import torch

from components.config import BackboneConfig, LoraConfig, PolicyConfig
from components.data.records import Pair
from components.learning.pair_scores import pair_logprobs
from components.models.backbone import load_tokenizer
from components.models.chat_template import ChatTemplate
from components.models.resident import ResidentPolicy
from components.models.tokens import encode_beginning, encode_continuation
from tests.support.full_logits import completion_logprob
from tests.support.tokenizers import WITH_BOS, WITHOUT_BOS, load_family, write_backbone

REVIEW = Pair(
    prompt="I saw it twice: the film",
    chosen=" was great, and lovely.",
    rejected=" was a bore.\n\nNever again",
)
"""As the source imdb prepares a row: the continuations keep their space."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


@pytest.fixture(scope="module", params=[*WITH_BOS, *WITHOUT_BOS, "embedded"])
def resident(request, tmp_path_factory):
    """A policy whose prompt is the prompt alone, with a tokenizer of a family without a chat template."""
    if request.param == "embedded":
        tokenizer = load_tokenizer(BackboneConfig(name="embedded"))
        tokenizer.chat_template = None
    else:
        tokenizer = load_family(request.param, tmp_path_factory.mktemp("tokenizer"))
    config = PolicyConfig(
        backbone=write_backbone(tokenizer, tmp_path_factory.mktemp("backbone")),
        lora=LoraConfig(r=2, dropout=0.0, target_modules=["c_attn"]),
        template="thoughts/policy",
        max_prompt_tokens=200,
        max_new_tokens=200,
    )
    resident = ResidentPolicy(config, "cpu")
    resident.slot.load(resident.slot.initial_adapter(0))
    return resident


def with_template(resident, template, tmp_path):
    """The same policy with the text of another template."""
    path = tmp_path / "template.txt"
    path.write_text(template)
    config = resident.policy.config.model_copy(update={"template": str(path)})
    return ResidentPolicy(config, "cpu")


def joined_ids(resident, text):
    tokenizer = resident.policy.tokenizer
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


@pytest.mark.parametrize("continuation", [REVIEW.chosen, REVIEW.rejected], ids=["chosen", "rejected"])
def test_the_ids_of_prompt_and_continuation_are_those_of_the_joined_text(resident, continuation):
    prompt, completion = resident.encode(REVIEW.prompt, continuation)
    assert prompt == resident.policy.encode(REVIEW.prompt)
    assert [*prompt, *completion] == joined_ids(resident, REVIEW.prompt + continuation)


def test_the_log_likelihood_of_a_continuation_is_that_of_the_joined_text(resident):
    prompt = resident.policy.encode(REVIEW.prompt)
    expected = []
    with torch.no_grad():
        for continuation in (REVIEW.chosen, REVIEW.rejected):
            ids = joined_ids(resident, REVIEW.prompt + continuation)
            expected.append(float(completion_logprob(resident.model, prompt, ids[len(prompt) :])))
    assert pair_logprobs(resident, [REVIEW], 1)[0] == pytest.approx(expected, abs=1e-3)
    assert pair_logprobs(resident, [REVIEW], 1, reference=True)[0] == pytest.approx(expected, abs=1e-3)


def test_white_space_of_a_prompt_precedes_the_continuation_and_after_that_it_is_left_out(resident):
    moved = resident.encode(REVIEW.prompt + " ", "was great, and lovely. \n")
    assert moved == resident.encode(REVIEW.prompt, REVIEW.chosen)


def test_a_token_that_spans_the_boundary_leaves_the_prompts_tokens_as_they_are(resident):
    tokenizer = resident.policy.tokenizer
    prompt, completion = resident.encode("the film was lov", "ely")
    assert prompt == resident.policy.encode("the film was lov")
    assert [*prompt, *completion] != joined_ids(resident, "the film was lovely")
    assert completion[-1] == tokenizer.eos_token_id
    assert tokenizer.decode([*prompt, *completion[:-1]], skip_special_tokens=True).endswith("was lovely")


@pytest.mark.parametrize("ending", ["### Response:", "### Response:\n", "### Response:\n\n "])
def test_an_answer_follows_the_last_character_of_the_template(resident, ending, tmp_path):
    policy = with_template(resident, f"Write.\n\n{{prompt}}\n\n{ending}", tmp_path)
    prompt, completion = policy.encode("the film", "great, it was")
    text = "Write.\n\nthe film\n\n### Response:great, it was"
    assert [*prompt, *completion] == joined_ids(resident, text)


def test_the_space_at_the_end_of_a_prompt_does_not_precede_an_answer(resident, tmp_path):
    policy = with_template(resident, "{prompt}\nAnswer:", tmp_path)
    assert policy.encode("the film \n", "great") == policy.encode("the film", "great")


def test_with_a_chat_template_a_completion_is_a_message_without_white_space_around_it(resident, monkeypatch):
    policy = resident.policy
    monkeypatch.setattr(policy.tokenizer, "chat_template", CHAT_TEMPLATE)
    monkeypatch.setattr(policy, "chat", ChatTemplate(policy.tokenizer, {}, None))
    prompt, completion = resident.encode("the film", " great, it was\n")
    assert (prompt, completion) == resident.encode("the film ", "great, it was")
    tokenizer = resident.policy.tokenizer
    text = "user:\nthe film\nassistant:\ngreat, it was"
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert [*prompt, *completion] == [*expected, tokenizer.eos_token_id]


def test_generated_tokens_are_read_again_as_the_joined_text_with_their_space(resident):
    """A sampled completion is trained on by its ids; its text with its space has the same ones."""
    policy = resident.policy
    prompt, completion = resident.encode(REVIEW.prompt, REVIEW.chosen)
    text = policy.tokenizer.decode([*prompt, *completion], skip_special_tokens=True)
    _, again = policy.encode_texts(REVIEW.prompt, text.partition(REVIEW.prompt)[2])
    assert again == completion


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_no_space_is_put_before_a_continuation_that_begins_within_a_word(family, tmp_path):
    tokenizer = load_family(family, tmp_path)
    text, continuation = "the film was lov", "ely great"
    ids = encode_continuation(tokenizer, text, continuation)
    joined = [*encode_beginning(tokenizer, text), *ids]
    assert tokenizer.decode(joined, skip_special_tokens=True) == text + continuation


def test_a_prompt_that_fits_is_read_as_it_is(resident):
    """It is not decoded from its ids, which may change its spaces."""
    text = "a film , 'tis said , do n't  miss it"
    assert resident.policy.encode(text) == encode_beginning(resident.policy.tokenizer, text)
