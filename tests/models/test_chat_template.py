"""Chat templates: token ids equal those of TRL, answers end as a turn ends, and the day is the run's."""

from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from components.config import PolicyConfig, RecipeError, check_section
from components.models.chat_template import ChatTemplate, ChatTemplateError
from components.models.policy import Policy, PolicyError, check_prompts
from tests.support.chat_templates import (
    Family,
    build_chat_tokenizer,
    family,
    open_chat_policy,
    write_chat_policy,
)

FAMILIES = ("llama-3", "gemma", "qwen2-base", "qwen2", "qwen3", "mistral", "thinking-prompt")
PAIR = {
    "prompt": "Where is order 1002?",
    "chosen": "We will look into it.\n\nToday.",
    "rejected": "I was charged",
}


def encode_by_trl(tokenizer, row):
    """Token ids that TRL's DPOTrainer makes of a row; of the trainer it uses the tokenizer alone."""
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    arguments = DPOConfig(output_dir="unused", report_to="none", use_cpu=True, bf16=False)
    dataset = DPOTrainer._prepare_dataset(trainer, Dataset.from_list([row]), tokenizer, arguments, "train")
    return tuple(list(dataset[0][f"{name}_ids"]) for name in ("prompt", "chosen", "rejected"))


def conversation(pair, **more):
    sides = {side: [{"role": "assistant", "content": pair[side]}] for side in ("chosen", "rejected")}
    return {"prompt": [{"role": "user", "content": pair["prompt"]}], **sides, **more}


# --- training


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_of_a_pair_are_those_of_trl(tmp_path, name, arguments):
    resident = open_chat_policy(name, tmp_path, chat_template_kwargs=arguments)
    tokenizer = resident.policy.tokenizer
    row = conversation(PAIR, chat_template_kwargs=arguments)
    assert resident.encode(*PAIR.values()) == encode_by_trl(tokenizer, row)


def test_the_ids_without_a_chat_template_are_those_of_trl(tmp_path):
    resident = open_chat_policy("gemma", tmp_path, chat="none")
    policy = resident.policy
    pair = PAIR | {side: f" {PAIR[side]}" for side in ("chosen", "rejected")}
    row = pair | {"prompt": policy.template.render(prompt=PAIR["prompt"])}
    assert resident.encode(*pair.values()) == encode_by_trl(policy.tokenizer, row)


@pytest.mark.parametrize(
    ("arguments", "prompt_end", "before"),
    [
        ({}, "assistant\n", "<think>\n\n</think>\n\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n", ""),
    ],
)
def test_a_block_of_thoughts_is_of_the_prompt_or_of_the_answer_as_the_arguments_say(
    tmp_path, arguments, prompt_end, before
):
    resident = open_chat_policy("qwen3", tmp_path, chat_template_kwargs=arguments)
    prompt, chosen = resident.encode(PAIR["prompt"], PAIR["chosen"])
    assert resident.policy.tokenizer.decode(prompt).endswith(prompt_end)
    assert resident.policy.tokenizer.decode(chosen) == f"{before}{PAIR['chosen']}<|im_end|>\n"
    assert prompt == resident.policy.encode(PAIR["prompt"])


def encode_answers(chat, prompt, *answers):
    """The texts of encoded answers to a user's turn 'p'."""
    ids = chat.tokenizer.encode(prompt)
    _, *encoded = chat.encode_answers([{"role": "user", "content": "p"}], prompt, ids, answers)
    return [chat.tokenizer.decode(answer) for answer in encoded]


def test_a_template_that_writes_no_end_of_a_turn_gets_the_end_of_sequence_token():
    chat = chat_of("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert encode_answers(chat, "p\n", "an answer") == ["an answer</s>"]
    assert chat.end_of_turn() is None


def chat_of(template, *marks, date=None):
    """A chat template whose tokenizer ends texts with </s>, and has these marks besides."""
    return ChatTemplate(build_chat_tokenizer(Family(template, None, "</s>", marks, "</s>")), {}, date)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|answer_end|>{% endfor %}",
            "<|answer_end|>",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
            "{% if not add_generation_prompt %}no further answer{% endif %}",
            "<|end|>",
        ),
        ("{% for m in messages %}{{ m.role }}: {{ m.content | upper }}<|end|>{% endfor %}", "<|end|>"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n    ' }}{% endfor %}", None),
    ],
    ids=["a mark with the word answer", "a text after the end", "changed content", "an indent"],
)
def test_the_end_of_a_turn_is_found_whatever_the_template_says(template, end):
    chat = chat_of(template, "<|answer_end|>", "<|end|>", "    ")
    found = chat.end_of_turn()
    assert (None if found is None else chat.tokenizer.convert_ids_to_tokens(found)) == end


def test_an_answer_that_ends_in_an_added_token_gets_its_end_like_all_others():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    chat = chat_of(template, "<tool_call>", "</tool_call>")
    answers = ["<tool_call>f()</tool_call>", "yes"]
    assert encode_answers(chat, "user: p\n", *answers) == [f"assistant: {text}</s>" for text in answers]


# --- generation


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_stops_at_the_end_of_a_turn_and_at_the_end_of_the_sequence(tmp_path, name):
    policy = Policy(write_chat_policy(name, tmp_path), "cpu")
    ends = {policy.tokenizer.convert_tokens_to_ids(family(name).end_of_turn), policy.tokenizer.eos_token_id}
    assert set(policy.model.generation_config.eos_token_id) == ends


def test_without_the_chat_template_generation_stops_at_the_end_of_the_sequence_alone(tmp_path):
    policy = Policy(write_chat_policy("gemma", tmp_path, chat="none"), "cpu")
    assert policy.model.generation_config.eos_token_id == [policy.tokenizer.eos_token_id]


# --- the day


MESSAGES = [{"role": "user", "content": "p"}]


def render_on(tokenizer, day):
    return ChatTemplate(tokenizer, {}, day).render(MESSAGES, True)


@pytest.mark.parametrize("name", ["llama-3.2", "dated"])
def test_a_template_prints_the_day_that_is_set_where_it_would_print_the_present_one(name):
    tokenizer = build_chat_tokenizer(family(name))
    today = date.today()
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert render_on(tokenizer, today.isoformat()) == expected
    text = render_on(tokenizer, "2026-03-01")
    assert text == expected.replace(today.strftime("%d %b %Y"), "01 Mar 2026")


def test_a_template_gets_the_day_of_the_run_and_is_refused_if_it_prints_the_present_one():
    template = "{{ date_string }}: {{ messages[0].content }}"
    assert chat_of(template, date="2026-03-01").render(MESSAGES, True) == "01 Mar 2026: p"
    assert chat_of(template).render(MESSAGES, True) == ": p"
    with pytest.raises(ChatTemplateError, match="prints the present day, and no day is set"):
        render_on(build_chat_tokenizer(family("llama-3.2")), None)


@pytest.mark.parametrize(
    "template", ["{% set f = '%d' %}{{ strftime_now(f) }}", '{{ strftime_now("%d" ~ "%b") }}']
)
def test_a_clock_that_is_read_in_an_unknown_format_is_refused(template):
    with pytest.raises(ChatTemplateError, match="so that its day cannot be set"):
        chat_of(template, date="2026-03-01").render(MESSAGES, True)


@pytest.mark.parametrize("arguments", ['("%d %b %Y", )', "( format = '%d %b %Y' )", " (\n'%d %b %Y'\n,\n)"])
def test_a_clock_is_found_however_its_format_is_written(arguments):
    chat = chat_of("{{ strftime_now" + arguments + " }}", date="2026-03-01")
    assert chat.render(MESSAGES, False) == "01 Mar 2026"


def test_several_chat_templates_without_a_default_are_refused():
    chat = chat_of("unused")
    chat.tokenizer.chat_template = {"rag": "{{ messages }}", "tool_use": "{{ messages }}"}
    with pytest.raises(ChatTemplateError, match=r"\(rag, tool_use\), and none of them is named 'default'"):
        chat.end_of_turn()


# --- the recipe


@pytest.mark.parametrize("day", ["2026-03-01", date(2026, 3, 1)])
def test_a_day_of_a_recipe_is_a_date_in_yaml_or_a_text(day):
    assert check_section(PolicyConfig, {"chat_date": day}, "here").chat_date == "2026-03-01"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"chat_date": "1 March"}, "key 'chat_date' is '1 March'"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            "'add_generation_prompt' is not an argument of a chat template",
        ),
    ],
)
def test_a_text_that_is_no_day_and_an_option_of_rendering_are_refused(values, words):
    with pytest.raises(RecipeError, match=words):
        check_section(PolicyConfig, values, "here")


def test_arguments_are_refused_where_no_chat_template_is_used(tmp_path: Path):
    config = write_chat_policy(
        "qwen3", tmp_path, chat="none", chat_template_kwargs={"enable_thinking": False}
    )
    with pytest.raises(PolicyError, match="no chat template of .* is used"):
        check_prompts(config)


def test_a_template_that_does_not_show_answers_is_refused_before_a_model_is_loaded(tmp_path):
    config = write_chat_policy("mistral", tmp_path)
    path = Path(config.backbone.name) / "chat_template.jinja"
    path.write_text("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="does not show the content of an assistant's turn"):
        check_prompts(config)
