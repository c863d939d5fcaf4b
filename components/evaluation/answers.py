"""Questions with a right answer: which are asked, how an answer is read, and the figures (DRIFT section 7.1).

    accuracy        share of the questions whose greedy answer is right; one that cannot be read is wrong, and is counted
    success rate    share of the questions for which at least one of N sampled answers is right

The paper compares the answer with the key for the first, and the N samples with the set's explanation for the second,
without saying how; here both are by the key. A guess is right now and then, and one of N guesses often, so what guessing
would give stands beside both. A question that a tree of thoughts was grown for is refused, whatever became of the tree.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.config import QuestionAnswersConfig, QuestionsConfig, Recipe
from components.data.questions import Question, load_section, pooled, render
from components.data.records import DataError
from components.data.templates import load as load_template
from components.data.trees import trees_at
from components.evaluation.winrate import bootstrap_interval
from components.models.policy import Completion, Policy, encode_prompt
from components.seeding import derive

Options = Sequence[tuple[str, str]]
"""(label, text) of each, see Question."""


# --- the questions

def grown_questions(recipe: Recipe, trees: Path) -> dict[str, str]:
    """The questions that the trees of a run were grown for, as they were shown, by their ids with their sets.

    Args:
        recipe: says whether there are trees, and where those are that were grown before (data.path, or data.trees beside another source).
        trees: folder of those that the run grew itself.
    """
    key = "path" if recipe.data.source == "thoughts" else "trees"
    named = getattr(recipe.data, key)
    if recipe.thoughts is None and named is None:
        return {}
    return {tree.id: tree.question for tree in trees_at(Path(named) if recipe.thoughts is None else trees, f"data.{key}")}


def load_asked(sections: Sequence[QuestionsConfig], seed: int, grown: Mapping[str, str]) -> dict[str, list[Question]]:
    """The questions to ask, by set.

    Args:
        sections: what a recipe asks for.
        seed: of the samples where a section has a count.
        grown: see grown_questions. A question is one of them by its id, in its own set or in another of its pool (csqa and
            cose, say), or by its text.

    Raises:
        DataError: the questions cannot be read, there are none, one is asked twice, or a tree is grown for one.
    """
    asked: dict[str, list[Question]] = {}
    known_as = {text: name for name, text in grown.items()} | {pooled(name): name for name in grown} | {name: name for name in grown}
    for n, section in enumerate(sections):
        questions, _ = load_section(section, seed, f"evaluation.questions.questions[{n}]")
        if not questions:
            raise DataError(f"evaluation.questions: part {section.part} of set {section.set} holds no question: ask a greater part")
        known = [(question, name) for question in questions if (name := _grown_for(question, known_as)) is not None]
        if known:
            question, name = known[0]
            other = name.partition("/")[0]
            another = "another part of this one, such as part: [1, 2] where the trees are of [0, 2]" if other == section.set else (
                f"give each of the sets {other} and {section.set}, which share questions, a part of its own, such as part: [0, 2] and [1, 2]")
            raise DataError(
                f"evaluation.questions: trees of thoughts are grown for {len(known)} of the {len(questions)} questions of set {section.set}, "
                f"e.g. {section.set}/{question.id} (tree {name}), so answers to them would say nothing of new questions: ask another file, or {another}")
        asked.setdefault(section.set, []).extend(questions)
    for name, questions in asked.items():
        if len({question.id for question in questions}) < len(questions):
            raise DataError(f"evaluation.questions: the parts of set {name} share questions; give each its own, such as part: [0, 2] and [1, 2]")
    return asked


def _grown_for(question: Question, known_as: Mapping[Any, str]) -> str | None:
    """The tree of a question: by its name (set/id), its pool and id, or its text."""
    name = f"{question.set}/{question.id}"
    return next((known_as[key] for key in (name, pooled(name), render(question)) if key in known_as), None)


# --- asking

def ask(policy: Policy, questions: Sequence[Question], config: QuestionAnswersConfig, seed: int) -> list[dict[str, Any]]:
    """Let a policy answer questions greedily and in samples, the question in its template being the prompt, as it is where thoughts are proposed.

    Args:
        policy: who answers.
        questions: as they are shown.
        config: template, temperature, number of samples, longest answer.
        seed: the samples are a function of it and of the questions.

    Returns:
        a row for each question, see answer_figures; with the question as shown, the texts, and whether they ended by themselves.
    """
    template = load_template(config.template, "answer")
    prompts = [template.render(question=render(question)) for question in questions]
    greedy = policy.generate(prompts, seed, max_new_tokens=config.max_new_tokens)
    sampled = policy.generate(prompts, seed, config.temperature, config.samples, config.max_new_tokens)

    def read(question: Question, completion: Completion) -> dict[str, Any]:
        return {"text": completion.text, "finished": completion.finished, "answer": parse_answer(completion.text, question.options)}

    return [{
        "set": question.set, "id": question.id, "question": render(question), "options": dict(question.options), "key": question.answer,
        "cut": len(encode_prompt(policy.tokenizer, policy.template, prompt, sys.maxsize, system=policy.config.system)) > policy.config.max_prompt_tokens,
        **read(question, first), "samples": [read(question, other) for other in others]}
        for question, prompt, (first,), others in zip(questions, prompts, greedy, sampled, strict=True)]


# --- reading an answer

_MARKUP = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)(?=\s*\{)|\\(?=[()\[\]])|(?<!\w)[*_`$]+|[*_`$]+(?!\w)")
_MARK = re.compile(
    r"(?<![^\W_])(?:answer|(?:correct|right|best)\s+(?:option|choice))(?:\s+to\s+th(?:e|is)\s+question)?"
    r"(?P<said>\s+(?:is|(?:would|must|should|will)\s+be)(?![^\W_]))?(?P<colon>\s*[:：=])?|(?P<boxed>\\boxed\s*\{)", re.IGNORECASE)
_LINE = re.compile(r"\s*(.*)")
_LABEL = re.compile(r"""[\s"'“‘{]*(?P<named>(?i:(?:the\s+)?(?:option|choice|letter)\s+))?(?P<open>[(\["'“‘]\s*)?(?P<label>[A-Z])(?![^\W_]|['’-]\w)(?P<close>\s*[)\]])?""")
_END = re.compile(r"""\s*(?:$|["'”’.,;:!?/|&+}(]|[-–—]\s|(?:because|since|as)\b)""")
_SECOND = re.compile(
    r"""[\s)\].,;:"'”’}]*(?:(?:\b(?:and/or|or|and|nor)\b|[/|&+])[\s(\["'“‘]*(?:(?i:option|choice|letter)\s+)?[(\["'“‘]?"""
    r"""|[,;]\s*\(?(?=[A-Z]\)?\s*(?:$|[^\w\s]|(?:or|and)\b)))[A-Z](?![^\W_]|['’-]\w)""")
_BETWEEN = re.compile(r"\s*(?:[.:]\s+)?(?:[-–—]\s+)?")
_NO_ONE = re.compile(r"\s*(?:not|neither|either|both|none|unclear|unknown)\b", re.IGNORECASE)


def parse_answer(text: str, options: Options) -> str | None:
    """The label of the option that an answer names, or None where it names none, or more than one.

    1. The last statement decides: "Answer: B", "**Answer:** (B)", "the correct answer is B)", "the best option would be B",
       "\\boxed{B}", or an option's text in the label's place. Its label is a capital letter, alone or followed by
       punctuation, a bracket, because, since, as, or its own option's text: "the answer is A dog", "B cells" and
       "C-reactive protein" name no label, unless an option reads so. Another letter, two labels ("A or B"), a label with
       another option's text, and, after a colon or in a box, anything else is a statement that names none. "The answer is"
       with other words is no statement ("this answer is supported by ..."), except with not, both, either and the like.
    2. Without a statement, a text of one line may be the label, alone or with its option's text: "B", "(B)", "B) a stand".
    3. Otherwise the last line may be the text of one option, if no line before it is an option's too, with or without
       its label: a list of the options is no answer.

    Case counts for labels only; markdown, quotes and closing punctuation never do. An option's text must be all there is,
    and be the text of that one only.

    Args:
        text: any text; it never raises.
        options: of the question.
    """
    text, options = _MARKUP.sub("", text), [(label, _MARKUP.sub("", option)) for label, option in options]
    for mark in reversed(list(_MARK.finditer(text))):
        explicit = mark["colon"] or mark["boxed"]
        if not explicit and not mark["said"]:
            continue
        line = _LINE.match(text, mark.end())[1]
        named = _named(line.split("}")[0].strip("{ ") if mark["boxed"] else line, options)
        if named is not None or explicit:
            return named or None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    labels, texts = [_labelled(line, options) for line in lines], [_by_text(line, options) for line in lines]
    if len(lines) == 1 and labels[0]:
        return labels[0]
    return texts[-1] if lines and not any(labels[:-1]) and not any(texts[:-1]) else None


def _named(value: str, options: Options) -> str | None:
    """What a statement names: a label, '' where it is none or several, None where the words are no statement."""
    texts, found = dict(options), _LABEL.match(value)
    if found and not _plain(value[found.end():]):
        return found["label"] if found["label"] in texts else ""
    if by_text := _by_text(value, options):
        return by_text
    if found is None:
        return "" if _NO_ONE.match(value) else None
    label, rest = found["label"], value[found.end():]
    after = _BETWEEN.sub("", rest, count=1)
    own = texts.get(label, "").strip().rstrip(".,;:!?")
    repeated = own != "" and after[: len(own)].casefold() == own.casefold() and (_END.match(after[len(own):]) or _SECOND.match(after[len(own):]))
    if _SECOND.match(after[len(own):] if repeated else rest):
        return ""
    if not (repeated or found["named"] or found["open"] or found["close"] or _END.match(rest)):
        return None
    return label if label in texts and _by_text(after, options) in (None, label) else ""


def _labelled(line: str, options: Options) -> str | None:
    """The label of a line that is a label, alone or with its own option's text."""
    found, texts = _LABEL.match(line), dict(options)
    if found is None or found["label"] not in texts:
        return None
    rest = _plain(_BETWEEN.sub("", line[found.end():], count=1))
    return found["label"] if rest in ("", _plain(texts[found["label"]])) else None


def _by_text(line: str, options: Options) -> str | None:
    """The label of the one option whose text a line is."""
    plain = _plain(line)
    labels = [label for label, text in options if plain and _plain(text) == plain]
    return labels[0] if len(labels) == 1 else None


def _plain(text: str) -> str:
    """A text without case, outer quotes and closing punctuation, and with single blanks."""
    return " ".join(text.casefold().split()).lstrip("\"'“‘ ").rstrip(".,;:!?\"'”’ ")


# --- figures

def answer_figures(rows: Sequence[Mapping[str, Any]], resamples: int, seed: int) -> dict[str, Any]:
    """Accuracy and success rate of a policy.

    Args:
        rows: a question each, with `set`, `options` {label: text}, `key`, the greedy answer's label `answer` (None where it
            could not be read), `cut` (whether its prompt was), and `samples`, each with its own `answer`; as many for all.
        resamples, seed: of the bootstrap intervals.

    Returns:
        `samples` (N); `sets` {name: figures}, `all` (over the questions) and `mean` (over the sets, each of which counts
        once, as far as figures are shares). Figures: questions, right, accuracy with the 95% interval low and high,
        unparsable (greedy answers) and unparsable_share, cut, chance (the accuracy of guessing); with N > 0 also
        succeeded, success with success_low and success_high, and success_chance (of N guesses).
    """
    sets = {name: [row for row in rows if row["set"] == name] for name in sorted({row["set"] for row in rows})}
    by_set = {name: _figures(own, resamples, derive(seed, name)) for name, own in sets.items()}
    shares = [name for name, value in next(iter(by_set.values())).items() if isinstance(value, float) and not name.endswith(("low", "high"))]
    return {"samples": len(rows[0]["samples"]), "sets": by_set, "all": _figures(rows, resamples, derive(seed, "")),
            "mean": {name: float(np.mean([figures[name] for figures in by_set.values()])) for name in shares}}


def _figures(rows: Sequence[Mapping[str, Any]], resamples: int, seed: int) -> dict[str, Any]:
    right, unread = [row["answer"] == row["key"] for row in rows], sum(row["answer"] is None for row in rows)
    guess, count = np.array([1 / len(row["options"]) for row in rows]), len(rows)
    low, high = bootstrap_interval(right, resamples, seed)
    figures = {"questions": count, "right": sum(right), "accuracy": sum(right) / count, "low": low, "high": high, "unparsable": unread, "unparsable_share": unread / count,
               "cut": sum(row["cut"] for row in rows), "chance": float(guess.mean())}
    if rows[0]["samples"]:
        found = [any(sample["answer"] == row["key"] for sample in row["samples"]) for row in rows]
        low, high = bootstrap_interval(found, resamples, derive(seed, "success"))
        figures |= {"succeeded": sum(found), "success": sum(found) / count, "success_low": low, "success_high": high,
                    "success_chance": float(np.mean(1 - (1 - guess) ** len(rows[0]["samples"])))}
    return figures
