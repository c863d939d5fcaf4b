"""Multiple-choice questions for chains of thoughts: DRIFT's eight sets (section 4, table 7).

A set is a client.

    aqua, mathqa              algebra (mathematics.py)
    csqa, cose, piqa          common sense (commonsense.py)
    medmcqa, medqa, pubmedqa  medicine (medicine.py)
    chitchat                  the reply in a conversation; embedded, for demonstrations
                              (conversation.py)

From the hub the training split is read unless a recipe names another: its answers are public in all
eight sets. No remote code is run. The hub's schemas are those
of the sets' pages and former loading scripts; they were not verified on the hub.
"""

from components.data.questions.base import Question
from components.data.questions.loading import (
    in_part,
    load_questions,
    load_section,
    names,
    parts_meet,
    pool,
    pooled,
    read_questions,
    render,
    shared_questions,
    split_of,
)

__all__ = [
    "Question",
    "in_part",
    "load_questions",
    "load_section",
    "names",
    "parts_meet",
    "pool",
    "pooled",
    "read_questions",
    "render",
    "shared_questions",
    "split_of",
]
