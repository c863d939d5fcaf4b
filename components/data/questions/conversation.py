"""Question set `chitchat`: the reply in a conversation (PyPI package chitchat-dataset, MIT).

It is no set of DRIFT, but an embedded one: one question for each of the 7,168 human conversations
that has a reply of suitable length. The last turns are the context, the right option is the
person's next reply, and the others are replies in other conversations. A local file has the columns
id, context, options and answer (the right option's letter), as these rows do. Short or general
replies suit many conversations, so that no reader can answer all questions.
"""

from __future__ import annotations

from components.data.questions.question_set import LETTERS, Question, QuestionRow, QuestionSet, Texts
from components.data.raw import BareText
from components.data.rows import Row
from components.data.sources.chitchat import ChitchatReply, read_replies
from components.seeding import generator

OPTIONS = 4
TURNS = 2
WORDS = (5, 20)
"""Minimum and maximum length of a reply that makes a question (words)."""


def conversations() -> list[Row]:
    """Make a row for each conversation with a suitable reply.

    The other options are replies in other conversations, drawn by the id of this one.
    """
    first: dict[str, ChitchatReply] = {}
    for reply in read_replies(TURNS, *WORDS):
        first.setdefault(reply.conversation, reply)
    names = sorted(first)
    rows: list[Row] = []
    for place, name in enumerate(names):
        draw = generator(0, "chitchat question", name)
        options = [first[name].text]
        while len(options) < OPTIONS:
            other = first[names[(place + 1 + int(draw.integers(len(names) - 1))) % len(names)]].text
            if other not in options:
                options.append(other)
        order = [int(i) for i in draw.permutation(OPTIONS)]
        rows.append(
            {
                "id": name,
                "context": first[name].prompt,
                "options": [options[i] for i in order],
                "answer": LETTERS[order.index(0)],
            }
        )
    return rows


class ChitchatRow(QuestionRow):
    """A row of `conversations`, or of a file with its columns."""

    id: BareText
    context: BareText
    options: Texts
    answer: BareText

    def ask(self) -> Question:
        question = "What does YOU say next?"
        return self.answered(question, self.options, self.answer, own_id=self.id, context=self.context)


CHITCHAT = QuestionSet("chitchat", ChitchatRow, ("chitchat",), embedded=conversations)
