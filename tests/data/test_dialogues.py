"""Dialogues in HH-RLHF's form and their turns."""

import pytest

from components.data.dialogues import dialogue_turns, is_unread_dialogue, turn_marker


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_turns_alternate_as_the_markers_do_and_those_of_one_speaker_in_a_row_are_joined():
    text = "Human: Hello?\n\nAssistant: Hi.\nHow are you?\n\nHuman: Well."
    assert dialogue_turns(text) == [user("Hello?"), assistant("Hi.\nHow are you?"), user("Well.")]
    text = "Human: One.\n\nHuman: Two.\n\nAssistant:\n\nHuman: Three."
    assert dialogue_turns(text) == [user("One.\n\nTwo.\n\nThree.")]


def test_a_marker_within_a_line_is_text_and_a_lost_start_of_a_turn_does_not_lose_its_end():
    text = "Human: Print 'Assistant: hi'\nHuman: is a word.\n\nIt is."
    assert dialogue_turns(text) == [user("Print 'Assistant: hi'\nHuman: is a word.\n\nIt is.")]
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


LONG = "Human: Where is order 1002?\n\nAssistant: It is late.\nSorry.\n\nHuman: How do I send it back?"
LONG_TURNS = [
    user("Where is order 1002?"),
    assistant("It is late.\nSorry."),
    user("How do I send it back?"),
]


@pytest.mark.parametrize("between", ["\n\n", "\n", "\n \n", "\n\t\n \n", "\n\n\n"])
@pytest.mark.parametrize("end", ["", "Assistant:"])
def test_turns_are_found_whatever_lies_between_them(between, end):
    text = LONG + (f"\n\n{end}" if end else "")
    assert dialogue_turns(text.replace("\n\n", between)) == LONG_TURNS


@pytest.mark.parametrize(
    "quotation",
    [
        "Human: Continue this.\nAssistant: I am\nhere.",
        "Human: Print 'Assistant: hi'.",
        "Human: Which is right?\nHuman: one\nAssistant: two\nor this?",
        "What is meant here?\nAssistant: hi\nHuman: ho",
    ],
)
def test_a_quoted_marker_begins_no_turn(quotation):
    assert dialogue_turns(quotation) == [user(quotation.removeprefix("Human: "))]
    continued = f"{quotation}\n\nAssistant: So.\n\nHuman: And?"
    assert dialogue_turns(continued)[0] == user(quotation.removeprefix("Human: "))
    assert dialogue_turns(continued)[1:] == [assistant("So."), user("And?")]


def test_turns_with_and_without_an_empty_line_between_them_are_found():
    assert dialogue_turns("Human: One.\nAssistant: Two.\n\nHuman: Three.") == [
        user("One."),
        assistant("Two."),
        user("Three."),
    ]


def test_the_end_of_a_dialogue_is_read_by_the_markers_of_the_whole():
    whole = "Human: a\nAssistant: b\nHuman: c\nAssistant: d\nHuman: e"
    assert dialogue_turns(whole[9:], turn_marker(whole)) == [user("c"), assistant("d"), user("e")]
    quoted = "Human: a\n\nAssistant: b\n\nHuman: What is\nAssistant: c\nHuman: d"
    assert dialogue_turns(quoted[23:], turn_marker(quoted)) == [
        user("Human: What is\nAssistant: c\nHuman: d"[7:])
    ]


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        (LONG, False),
        (LONG.replace("\n\n", "\n"), False),
        (LONG.replace("\n\n", " "), True),
        (LONG.replace("\n\n", "\u2028"), True),
        ("Why? Assistant: So.", True),
        ("Human: Why?", False),
        ("Why?", False),
        ("A superHuman: one.", False),
    ],
)
def test_a_text_of_one_turn_with_a_marker_in_it_is_an_unread_dialogue(text, unread):
    assert is_unread_dialogue(text) is unread
