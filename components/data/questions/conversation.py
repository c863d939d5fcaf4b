"""Question set `chitchat`: which of four replies was given in a conversation? (embedded, PyPI package chitchat-dataset, MIT)

chitchat   No set of DRIFT, but one that is there without the hub: one question for each of the 7,168 human conversations that has a reply
           of fitting length. The last turns are the context, the right option is what the person said next, and the others were said
           in other conversations. A local file has the columns id, context, options and answer (the right option's letter), as these
           rows do. Replies that are short or general fit many conversations: nobody gets all of them right.
"""

from __future__ import annotations

from components.data.chitchat import read_replies
from components.data.questions.registry import LETTERS, Question, answered, question_set, text_list, texts
from components.data.rows import Row
from components.seeding import generator

OPTIONS = 4
WORDS = (5, 20)
"""Words of a reply that makes a question."""


def conversations() -> list[Row]:
    """A row for each conversation with a fitting reply; the other options are replies of other conversations, drawn by this one's id.

    Raises:
        DataError: the package chitchat-dataset is not installed.
    """
    first: dict[str, Row] = {}
    for reply in read_replies(2, *WORDS):
        first.setdefault(reply["group"], reply)
    rows, names = [], sorted(first)
    for place, name in enumerate(names):
        draw, said = generator(0, "chitchat question", name), [first[name]["chosen"]]
        while len(said) < OPTIONS:
            other = first[names[(place + 1 + int(draw.integers(len(names) - 1))) % len(names)]]["chosen"]
            said += [other] if other not in said else []
        order = [int(i) for i in draw.permutation(OPTIONS)]
        rows.append({"id": name, "context": first[name]["prompt"], "options": [said[i] for i in order], "answer": LETTERS[order.index(0)]})
    return rows


@question_set("chitchat", files=("chitchat",), embedded=conversations)
def read_chitchat(row: Row, where: str) -> Question:
    """A row of `conversations`, or of a file with its columns."""
    own, context, answer = texts(row, ("id", "context", "answer"), where)
    return answered("chitchat", "What does YOU say next?", text_list(row, "options", where), answer, own_id=own, context=context)
