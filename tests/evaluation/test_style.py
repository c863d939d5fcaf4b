"""Headings, list items and bold passages of answers."""

import pytest

from components.evaluation.length_control import count_style, style_differences

ANSWER = """# A heading

Some **bold** text and __more__ of it, *emphasis* is none.

## Another one

- one
- two with **bold**
  - a third within it

1. first
2. second
"""


def counts(headings=0, list_items=0, bold=0):
    return {"headings": headings, "list_items": list_items, "bold": bold}


def test_headings_items_and_bold_passages_are_counted():
    assert count_style(ANSWER) == counts(headings=2, list_items=5, bold=3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Plain text, 2 * 3 * 4 = 24, with a #tag and a minus - here.",
        "```python\n# no heading\n- no item\n**no bold**\n```",
        "~~~\n# no heading\n~~~",
        "```\n# a fence that does not end",
        "    # indented code\n    - too",
        "Code in a line: `**no bold**`",
    ],
)
def test_plain_text_and_code_have_none(text):
    assert count_style(text) == counts()


def test_what_follows_a_code_block_counts():
    assert count_style("```\n# no\n```\n# yes") == counts(headings=1)


def test_differences_are_ours_less_theirs_by_pair():
    assert style_differences([ANSWER, "text"], ["text", "**a**\n\n- b"]) == {
        "headings": [2, 0],
        "list_items": [5, -1],
        "bold": [3, -1],
    }
