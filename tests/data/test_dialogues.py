"""Dialogues in HH-RLHF's form and their turns."""

import pytest

from components.data.dialogues import dialogue_turns


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_turns_alternate_as_the_markers_do():
    text = "Human: Hello?\n\nAssistant: Hi.\nHow are you?\n\nHuman: Well."
    assert dialogue_turns(text) == [user("Hello?"), assistant("Hi.\nHow are you?"), user("Well.")]


def test_turns_of_one_speaker_in_a_row_are_joined():
    text = "Human: One.\n\nHuman: Two.\n\nAssistant:\n\nHuman: Three."
    assert dialogue_turns(text) == [user("One.\n\nTwo.\n\nThree.")]


def test_a_marker_within_a_line_is_text():
    text = "Human: Print 'Assistant: hi'\nHuman: is a word.\n\nIt is."
    assert dialogue_turns(text) == [user("Print 'Assistant: hi'\nHuman: is a word.\n\nIt is.")]


def test_the_lost_start_of_the_users_turn_does_not_lose_its_end():
    assert dialogue_turns("the end?\n\nAssistant: Yes.\n\nHuman: Why?") == [
        user("the end?"),
        assistant("Yes."),
        user("Why?"),
    ]


@pytest.mark.parametrize("text", ["the end.\n\nHuman: Why?", "Assistant: The end.\n\nHuman: Why?"])
def test_turns_of_the_assistant_before_the_users_first_are_left_out(text):
    assert dialogue_turns(text) == [user("Why?")]


@pytest.mark.parametrize("text", ["Why?", " Why?\n", "Human: Why?", ""])
def test_a_text_of_one_turn_is_the_users(text):
    assert dialogue_turns(text) == [user("Why?" if text else "")]
