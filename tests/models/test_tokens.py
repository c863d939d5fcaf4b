"""Token ids of texts: what precedes them, by families of tokenizers that are saved and loaded."""

import pytest
from tokenizers import processors
from transformers import LlamaTokenizer

from components.config import BackboneConfig, PolicyConfig
from components.data.templates import load
from components.models import policy
from components.models.backbone import load_tokenizer
from components.models.selector import Comparison, encode_comparison, find_choice_tokens
from components.models.tokens import decode_cut, decode_unfinished, encode_beginning, leading_ids
from tests.support.tokenizers import WITH_BOS, WITHOUT_BOS, load_family

SELECTOR = load("summarization/selector_short", "selector")


@pytest.fixture
def tokenizer(request, tmp_path):
    return load_family(request.param, tmp_path)


families = pytest.mark.parametrize("tokenizer", [*WITH_BOS, *WITHOUT_BOS], indirect=True)


@pytest.mark.parametrize("tokenizer", ["llama-2", "gpt2"], indirect=True)
def test_a_cut_text_keeps_all_whole_characters_also_where_a_decoder_drops_a_run_of_bytes(tokenizer):
    text = "hello " + "語" * 20
    ids = tokenizer.encode(text, add_special_tokens=False)
    for end in range(1, 7):
        kept = decode_cut(tokenizer, ids[:-end], text)
        assert "\ufffd" not in kept and kept.count("語") == 20 - -(-end // 3)
        assert decode_unfinished(tokenizer, ids[:-end]) == kept
    assert decode_cut(tokenizer, ids[-10:], text).count("語") == 3
    assert decode_unfinished(tokenizer, []) == ""


def encode_film(tokenizer, max_length=500, completion="was great"):
    comparison = Comparison("the film", completion, "no")
    return encode_comparison(tokenizer, SELECTOR, comparison, max_length, None)


@pytest.mark.parametrize(
    ("tokenizer", "count"),
    [*((family, 1) for family in WITH_BOS), *((family, 0) for family in WITHOUT_BOS)],
    indirect=["tokenizer"],
)
def test_a_selectors_input_begins_with_the_bos_that_the_tokenizer_adds(tokenizer, count):
    """Which is one of its max_length tokens."""
    complete = encode_film(tokenizer, completion="xyz" * 20)
    truncated = encode_film(tokenizer, len(complete) - 20, completion="xyz" * 20)
    assert len(truncated) == len(complete) - 20
    assert tokenizer.bos_token_id is not None
    for ids in (complete, truncated):
        assert ids.count(tokenizer.bos_token_id) == count
        assert (ids[0] == tokenizer.bos_token_id) is (count == 1)


@families
def test_inputs_of_selectors_and_policies_begin_alike_and_as_the_tokenizer_begins_a_text(
    tokenizer, monkeypatch
):
    assert encode_beginning(tokenizer, "the film was great") == tokenizer.encode("the film was great")
    monkeypatch.setattr(policy, "load_tokenizer", lambda backbone: tokenizer)
    leading = leading_ids(tokenizer)
    prompt = policy.PolicyTexts(PolicyConfig(template="qa/policy", max_prompt_tokens=500)).encode("the film")
    begins_with_bos = prompt[0] == tokenizer.bos_token_id
    assert leading == ([tokenizer.bos_token_id] if begins_with_bos else [])
    assert encode_film(tokenizer)[: len(leading)] == leading


@families
def test_a_selector_finds_its_answer_tokens(tokenizer):
    assert len(set(find_choice_tokens(tokenizer))) == 2


@pytest.mark.parametrize("tokenizer", ["llama-2"], indirect=True)
def test_the_parts_of_a_comparison_are_joined_without_the_spaces_that_the_tokenizer_adds(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(encode_film(tokenizer))
    template = SELECTOR.render(prompt="the film", response_a="was great", response_b="no")
    text = "".join("\n" if token == "<0x0A>" else token for token in tokens)
    assert text == f"<s>▁{template}".replace(" ", "▁")


@pytest.mark.parametrize("name", ["embedded", "tiny-random"])
def test_the_projects_own_backbones_have_no_leading_tokens(name):
    assert leading_ids(load_tokenizer(BackboneConfig(name=name))) == []


def test_a_tokenizer_that_ends_texts_too_does_not_end_a_prompt(tmp_path):
    tokenizer = load_family("llama", tmp_path / "bos")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save_pretrained(tmp_path / "both")
    both = load_tokenizer(BackboneConfig(name=str(tmp_path / "both")))
    assert isinstance(both, LlamaTokenizer)
    assert both.encode("the film")[-1] == both.eos_token_id
    assert encode_beginning(both, "the film") == both.encode("the film")[:-1]
    assert both.eos_token_id not in encode_film(both)
