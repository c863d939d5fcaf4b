"""What a policy does not read as it is meant: dialogues that are one turn, turns that a template drops."""

from pathlib import Path

import pytest

from components.data.records import Pair
from components.evaluation.pair_warnings import reading_warnings
from components.recipes import load_recipe
from tests.support.chat_templates import write_chat_policy

DIALOGUE = "Human: My name is Ann.\n\nAssistant: Hello.\n\nHuman: What is my name?"
TURNS = "{% for m in MESSAGES %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}ANSWER"
ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\nTHOUGHT{% endif %}"
LAST = "(messages[-2:] if messages[-1].role == 'assistant' else messages[-1:])"


def pairs(*prompts):
    return [Pair(prompt, "On its way.", "No idea.") for prompt in prompts]


@pytest.fixture
def recipe(tmp_path):
    def make(template, *overrides):
        folder = Path(write_chat_policy("qwen2", tmp_path).backbone.name)
        (folder / "chat_template.jinja").write_text(template)
        own = ["policy.template=thoughts/policy", "policy.max_new_tokens=200", "federation.options={}"]
        return load_recipe(
            "debug", [f"policy.backbone.name={folder}", "federation.method=feddpo", *own, *overrides]
        )

    return make


def test_prompts_whose_turns_are_not_recognized_are_a_warning_with_their_number():
    own = pairs("Human: Hi. Assistant: Ho. Human: Hi.", "Where?")
    (warning,) = reading_warnings(
        load_recipe("debug", ["policy.chat=turns"]), own, ["Why? Assistant: So.", "So?"]
    )
    assert warning.startswith("2 of 4 prompts are read as one turn of the user")
    assert "Hi." not in warning
    assert "So." not in warning, "texts of owners stay out of logs"
    assert reading_warnings(load_recipe("debug"), own) == []


def test_turns_of_one_speaker_in_a_row_are_a_warning_with_their_number():
    quoted = "Human: Hi.\n\nAssistant: She said\n\nAssistant: is a word.\n\nHuman: Ok?"
    (warning,) = reading_warnings(load_recipe("debug", ["policy.chat=turns"]), pairs(quoted, "Where?"))
    assert warning.startswith("1 of 2 prompts have two turns of one speaker in a row")
    assert "is a word" not in warning


def test_dialogues_that_are_given_as_one_turn_are_a_warning():
    (warning,) = reading_warnings(load_recipe("debug"), pairs(DIALOGUE, "Where?"))
    assert warning.startswith("1 of 2 prompts are dialogues, and policy.chat 'auto' gives each as one turn")
    assert "Ann" not in warning
    for chat in ("turns", "none"):
        assert (
            reading_warnings(load_recipe("debug", [f"policy.chat={chat}"]), pairs(DIALOGUE, "Where?")) == []
        )


def test_turns_that_a_template_leaves_out_are_a_warning(recipe):
    whole = TURNS.replace("MESSAGES", "messages").replace("ANSWER", ANSWER.replace("THOUGHT", ""))
    no_system = whole.replace("in messages", "in messages if m.role != 'system'")
    last_turns = whole.replace("in messages", f"in {LAST}")
    french = "policy.system=Answer in French."
    (warning,) = reading_warnings(recipe(no_system, french), pairs("Where?"))
    assert "policy.system is not read" in warning
    (warning,) = reading_warnings(recipe(last_turns, "policy.chat=turns"), pairs(DIALOGUE))
    assert "leaves turns of a dialogue out" in warning
    assert reading_warnings(recipe(no_system), pairs("Where?")) == []
    assert reading_warnings(recipe(last_turns), pairs("Where?")) == []
    assert reading_warnings(recipe(whole, french, "policy.chat=turns"), pairs(DIALOGUE)) == []


def test_a_template_that_opens_a_thought_only_where_an_answer_is_sampled_is_a_warning(recipe):
    opening = TURNS.replace("MESSAGES", "messages").replace("ANSWER", ANSWER.replace("THOUGHT", "<think>\n"))
    (warning,) = reading_warnings(recipe(opening), pairs("Where?"))
    assert warning.startswith("1 of 1 preferred answers begin in another way")
    thinking = [Pair("Where?", "<think>\nhm\n</think>Here.", "There.")]
    assert reading_warnings(recipe(opening), thinking) == []
    assert reading_warnings(recipe(opening, "federation.method=fedbis"), pairs("Where?")) == []
