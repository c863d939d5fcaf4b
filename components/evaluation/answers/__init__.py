"""Answers to multiple-choice questions: the questions, the answers, their parsing, and the figures.

The figures are those of DRIFT section 7.1:

    accuracy        share of questions whose greedy answer is right
    success rate    share of questions for which at least one of N sampled answers is right

An answer that cannot be parsed is wrong. The paper compares the greedy answer with the key and the
N samples with the explanation of the question set, without stating how; here both are compared with
the key. Since a guess is sometimes right, and one of N guesses often, the expected figures of
guessing are reported beside them. Questions that trees of thoughts were grown for are refused,
whether or not the policy was trained on their pairs.
"""

from components.evaluation.answers.answer_parsing import parse_answer
from components.evaluation.answers.answered_questions import AnsweredQuestion, ParsedAnswer, QuestionPrompts
from components.evaluation.answers.evaluation_questions import load_evaluation_questions, tree_questions
from components.evaluation.answers.question_figures import answer_figures

__all__ = [
    "AnsweredQuestion",
    "ParsedAnswer",
    "QuestionPrompts",
    "answer_figures",
    "load_evaluation_questions",
    "parse_answer",
    "tree_questions",
]
