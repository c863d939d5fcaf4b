"""Growing trees of thoughts (DRIFT section 2.2, appendices B and D.1; Yao et al. 2023).

For each question a writer proposes `children` thoughts after each prefix, an evaluator scores each of them from 1 to 10,
the `beam` best prefixes are carried on, down to `depth`. A score that cannot be read is asked for again, then the thought
is left out, with what would have grown from it. What becomes of a tree is in components/data/trees.py.

Each tree is a function of the question and the stage's settings alone, whichever others were grown before, and is written
when it is whole; so a stage that was stopped goes on with the questions that are left.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from components.config import BackboneConfig, EvaluatorOptions, Explained, PolicyConfig, ThoughtsConfig
from components.data.questions import Question, render
from components.data.templates import Template
from components.data.templates import load as load_template
from components.data.trees import Node, Tree, append_tree, best_path, numbered, read_trees, thought_template
from components.models.chat import ChatEndpoint, Reply
from components.models.policy import Policy, complete
from components.seeding import derive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


VERSIONS = {"text": 3, "expected": 2}
"""By thoughts.evaluator.read: raised by a change of this file, or of how completions are sampled (components/models/policy.py), after which the same settings grow other trees, so that those that are kept are not taken for them."""


class ThoughtsError(Explained, RuntimeError):
    """A tree that cannot be grown."""


class Writer(Protocol):
    """Proposes thoughts."""

    def write(self, prompts: Sequence[str], seed: int) -> list[str]: ...


class Evaluator(Protocol):
    """Scores thoughts."""

    def score(self, prompts: Sequence[str], seed: int) -> list[tuple[float | None, int]]: ...


# --- growing

def grow(question: Question, writer: Writer, evaluator: Evaluator, config: ThoughtsConfig, templates: tuple[Template, Template], key: str, seed: int) -> Tree:
    """Grow a question's tree.

    Args:
        question: what is asked.
        writer, evaluator: who proposes and who scores.
        config: depth, children, beam.
        templates: of the next thought, and of its value.
        key: of the settings, kept with the tree.
        seed: with the question's set and id it decides what is sampled.
    """
    shown, name = render(question), f"{question.set}/{question.id}"
    nodes: list[Node] = []
    frontier: list[tuple[tuple[Node, ...], float]] = [((), 0.0)]
    for depth in range(1, config.depth + 1):
        prompts = [templates[0].render(question=shown, thoughts=numbered([n.thought for n in prefix])) for prefix, _ in frontier for _ in range(config.children)]
        thoughts = [one_line(text) for text in writer.write(prompts, derive(seed, "thoughts", name, depth))]
        asked = [n for n, thought in enumerate(thoughts) if thought]
        scored = evaluator.score([templates[1].render(question=shown, thought=thoughts[n]) for n in asked], derive(seed, "scores", name, depth))
        scores: dict[int, tuple[float | None, int]] = dict(zip(asked, scored, strict=True))
        grown = []
        for n, thought in enumerate(thoughts):
            prefix, total = frontier[n // config.children]
            score, times = scores.get(n, (None, 0))
            node = Node(len(nodes), prefix[-1].number if prefix else -1, depth, thought, score, times)
            nodes.append(node)
            if score is not None:
                grown.append(((*prefix, node), total + score))
        frontier = sorted(grown, key=lambda entry: (-entry[1], entry[0][-1].number))[: config.beam]
        if not frontier:
            break
    return Tree(name, question.set, key, shown, tuple(nodes), best_path(nodes))


def shorten(question: Question, tokenizer: PreTrainedTokenizerBase, most: int) -> Question:
    """The question with as much of the beginning of its context as fits; the question itself and its options always stay.

    Args:
        question: what is asked.
        tokenizer: of the policy.
        most: tokens of the whole, see ThoughtsConfig.max_question_tokens.
    """
    surplus = len(tokenizer.encode(render(question), add_special_tokens=False)) - most
    context = tokenizer.encode(question.context, add_special_tokens=False)
    if surplus <= 0 or not context:
        return question
    return replace(question, context=tokenizer.decode(context[: max(0, len(context) - surplus)]).strip())


def one_line(text: str) -> str:
    """The first line with something in it, without the number that a model may put before it."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return re.sub(r"^\d{1,2}[.)]\s+", "", line)


_MARKUP = re.compile(r"\\boxed(?![^\W_])|[*_`$#{}\\]")
_SCALE = r"(?:(?:on\s+a\s+scale\s+)?(?:from\s+|of\s+)?1\s*(?:[-–—]|to)\s*10|out\s+of\s+10)(?!\d)"
_LABEL = rf"""(?P<label>(?:(?:the|my|final|overall)\s+){{0,2}}(?:score|rating)\b\s*(?:\(\s*{_SCALE}\s*\)|\[\s*{_SCALE}\s*\]|{_SCALE})?\s*(?:[:=]|is\b:?|[-–—](?=\s))?\s*)?"""
_SCORE = re.compile(
    rf"""[\s"'“‘(\[]*{_LABEL}["'“‘(\[]?\s*(?P<score>10|[1-9])(?!\d|[.,]\d)(?P<scale>\s*(?:(?:/|(?:out\s+)?of\b)\s*10(?!\d)|\(\s*(?:{_SCALE}|/\s*10)\s*\)))?[)\]"'”’]*""", re.IGNORECASE)
_ALONE = re.compile(r"""\s*[.!]?[\s)\]"'”’]*$""")
_REASON = re.compile(r"""\s*(?:[,;]\s|(?:because|since|as)\b|\([^()]*\)[.!]?\s*$)""", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!:]\s|\s+[-–—]\s")
_NUMBER = re.compile(r"\d+")
_OPEN, _CLOSE = "<think>", "</think>"


def parse_score(text: str, finished: bool = True) -> int | None:
    """The score of an evaluator's answer, a whole number from 1 to 10.

    What stands up to the last </think> has no say, and thoughts that are not closed are no answer.

    1. Of an answer that ended by itself the last line with something in it is read. It begins with the number, or with
       "Score", "The rating is", "Final score (1-10):" and the like before it. Behind it may stand "/10" or "out of 10", and then
       the line ends, or a reason follows: after a comma or a semicolon, because, since, as, or in brackets; where such a
       label or scale makes plain that the number counts nothing else, also after a full stop, a colon or a dash.
    2. An answer that was cut off has no known end, so nothing that a model reasons aloud is read. It is the first line that
       is read, where the score stands there by itself, as that of a model which writes "8" and then runs on to its limit;
       not a bare 1 at which the answer was cut, since it may be a 10, and not where a later line is another score by itself.

    "8", "Score: 8", "**8/10**", "Score (1-10): 8" and "8 out of 10 because ..." are 8. None are numbers elsewhere, with a sign,
    decimals or another scale; ranges, and any second number in the line that is not the same ("7 or 8", "8-9"); numbers of
    a list ("2. Next, ..."); and words. Takes time in proportion to the text.

    Args:
        text: any text; it never raises.
        finished: whether it ended by itself, and not at a limit.
    """
    answer = _MARKUP.sub(" ", text[text.rfind(_CLOSE) + len(_CLOSE):] if _CLOSE in text else text)
    lines = [line for line in answer.splitlines() if line.strip()]
    if not lines or _OPEN in answer:
        return None
    if finished:
        return _score(lines[-1])
    score = _score(lines[0], alone=True)
    if any(_score(line, alone=True) not in (None, score) for line in lines[1:]):
        return None
    return None if score == 1 and len(lines) == 1 and answer.rstrip(" ").endswith("1") else score


def _score(line: str, alone: bool = False) -> int | None:
    """The score that a line without markup gives, by itself or with a reason; None where it gives none."""
    line = " ".join(line.split())       # with single blanks the expressions take time in proportion to the line
    found = _SCORE.match(line)
    if found is None or any(number != found["score"] for number in _NUMBER.findall(line, found.end())):
        return None
    named = found["label"] or found["scale"]
    ends = (_ALONE,) if alone else (_ALONE, _REASON, _SENTENCE) if named else (_ALONE, _REASON)
    return int(found["score"]) if any(end.match(line, found.end()) for end in ends) else None


# --- all questions

def settings_key(config: ThoughtsConfig, writer: dict[str, Any], templates: Iterable[Template], seed: int) -> str:
    """Hash of what a tree depends on beside its question, its device and its threads; an endpoint's address and pace are not part of it."""
    paced = {"base_url", "api_key_env", "timeout", "retries", "backoff", "concurrency"}
    content = {"config": config.model_dump(mode="json", exclude={"questions"}) | {"evaluator": {k: v for k, v in config.evaluator.model_dump(mode="json").items() if k not in paced}},
               "writer": writer, "templates": ["\x1f".join(template.pieces) for template in templates], "seed": seed, "version": VERSIONS[config.evaluator.read]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def grow_all(
    questions: Sequence[Question], path: Path, writer: Callable[[], tuple[Writer, Evaluator]], config: ThoughtsConfig, templates: dict[str, tuple[Template, Template]], keys: dict[str, str],
    seed: int, progress: Callable[[int, int], None] | None = None,
) -> list[Tree]:
    """Grow the trees that a file does not have yet, one after the other.

    Args:
        questions: of any sets; names (set/id) are distinct.
        path: JSON lines; trees of other settings or of questions that are not asked stay in it and are not given back.
        writer: builds the models, and is called only where a tree is missing.
        config: how trees are grown.
        templates, keys: by set, see grow and settings_key.
        seed: see grow.
        progress: called with (trees there, trees in all) after each.

    Returns:
        a tree for each question, in the order of the questions.
    """
    there: dict[tuple[str, str, str], Tree] = {}
    for tree in read_trees(path):
        there.setdefault((tree.id, tree.key, tree.question), tree)  # two runs at once may have grown the same one
    wanted = [((f"{question.set}/{question.id}", keys[question.set], render(question)), question) for question in questions]
    missing = [entry for entry in wanted if entry[0] not in there]
    if missing:
        proposes, scores = writer()
        for place, question in missing:
            tree = there[place] = grow(question, proposes, scores, config, templates[question.set], place[1], seed)
            append_tree(path, tree)
            if progress is not None:
                progress(sum(place in there for place, _ in wanted), len(wanted))
    return [there[place] for place, _ in wanted]


def set_templates(name: str) -> tuple[Template, Template]:
    """The templates of a question set: of its next thought, and of a thought's value."""
    return thought_template(name), load_template("thoughts/value", "value")


# --- models

class PolicyWriter:
    """Thoughts by the policy that is to be trained, a prompt being the user's turn."""

    def __init__(self, config: PolicyConfig, thoughts: ThoughtsConfig, device: str) -> None:
        self.thoughts, self.policy = thoughts, Policy(config, device)

    def write(self, prompts: Sequence[str], seed: int) -> list[str]:
        """A sampled continuation of each prompt."""
        written = self.policy.generate(prompts, seed, self.thoughts.temperature, max_new_tokens=self.thoughts.max_thought_tokens)
        return [completions[0].text for completions in written]


class ModelEvaluator:
    """Scores by a causal language model here: the number that it writes, or the mean of its next token's probabilities of 1 to 10."""

    def __init__(self, options: EvaluatorOptions, device: str) -> None:
        """Load the model.

        Raises:
            ThoughtsError: the numbers 1 to 10 are not different in their first token, so that they cannot be told apart by it.
        """
        config = PolicyConfig(backbone=BackboneConfig(name=options.model, revision=options.revision), template="thoughts/policy", max_prompt_tokens=options.max_prompt_tokens,
                              max_new_tokens=options.max_new_tokens, generation_batch_size=options.batch_size)
        self.options, self.policy = options, Policy(config, device)
        if options.read == "expected":
            self._numbers = number_tokens(self.policy)

    def score(self, prompts: Sequence[str], seed: int) -> list[tuple[float | None, int]]:
        """A score (None: unreadable) of each prompt, and how often it was asked."""
        if self.options.read == "expected":
            return [(value, 1) for value in self._expected(prompts)]
        return ask_again(lambda texts, attempt: self._write(texts, seed, attempt), prompts, self.options.retries_unread)

    def _write(self, prompts: Sequence[str], seed: int, attempt: int) -> list[Reply]:
        encoded = [self.policy.encode(prompt) for prompt in prompts]
        written = complete(self.policy.model, self.policy.tokenizer, encoded, self.policy.device, self.options.batch_size, self.options.max_new_tokens,
                           derive(seed, "attempt", attempt), temperature=1.0 if attempt else 0.0)
        return [Reply(self.policy.tokenizer.decode(given.ids, skip_special_tokens=True), given.finished) for given, in written]

    def _expected(self, prompts: Sequence[str]) -> list[float]:
        import torch

        (*digits, ten), values = self._numbers, []
        with torch.inference_mode():
            for prompt in prompts:
                ids = self.policy.encode(prompt)
                following = self._next(ids)
                shares = [float(following[number[0]]) for number in (digits if len(ten) > 1 else self._numbers)]
                if len(ten) > 1:  # "10" is "1" and then "0": what of the 1 goes on is a ten
                    onward = float(self._next([*ids, ten[0]])[ten[1]])
                    shares = [shares[0] * (1 - onward), *shares[1:], shares[0] * onward]
                values.append(sum(n * share for n, share in enumerate(shares, 1)) / sum(shares))
        return values

    def _next(self, ids: Sequence[int]) -> Any:
        """Probabilities of the next token."""
        import torch

        return self.policy.model(input_ids=torch.tensor([[*ids]], device=self.policy.device), use_cache=False, logits_to_keep=1).logits[0, -1].double().softmax(-1)


def number_tokens(policy: Policy) -> list[list[int]]:
    """Token ids of the numbers 1 to 10, as an answer begins.

    Raises:
        ThoughtsError: 1 to 9 are not one token each, or 10 is neither one nor a 1 and a 0, so that their probabilities cannot be read off.
    """
    ids = [policy.tokenizer.encode(str(number), add_special_tokens=False) for number in range(1, 11)]
    if any(len(number) != 1 for number in ids[:9]) or not (len(ids[9]) == 1 or (len(ids[9]) == 2 and ids[9][0] == ids[0][0])):
        raise ThoughtsError(f"the tokenizer of '{policy.tokenizer.name_or_path}' splits the numbers 1 to 10 so that thoughts.evaluator.read 'expected' cannot read their probabilities: read 'text', or take another model.")
    return ids


class EndpointEvaluator:
    """Scores by an OpenAI-compatible endpoint."""

    def __init__(self, options: EvaluatorOptions) -> None:
        self.options = options
        self._chat = ChatEndpoint(options, options.model, options.max_new_tokens, "the evaluator's endpoint", ThoughtsError)

    def score(self, prompts: Sequence[str], seed: int) -> list[tuple[float | None, int]]:
        """As ModelEvaluator.score; what an endpoint samples is its own, so the seed has no say.

        Raises:
            ThoughtsError: it cannot be asked.
        """
        return ask_again(lambda texts, attempt: self._chat.ask(texts, temperature=1.0 if attempt else 0.0), prompts, self.options.retries_unread)


def ask_again(ask: Callable[[Sequence[str], int], list[Reply]], prompts: Sequence[str], retries: int) -> list[tuple[float | None, int]]:
    """Read a score from each answer, and ask again where there is none, up to `retries` times."""
    result: list[tuple[float | None, int]] = [(None, 0)] * len(prompts)
    for attempt in range(retries + 1):
        open_ones = [n for n, (score, _) in enumerate(result) if score is None]
        if not open_ones:
            break
        for n, reply in zip(open_ones, ask([prompts[n] for n in open_ones], attempt), strict=True):
            result[n] = (parse_score(*reply), attempt + 1)
    return result


def build_models(policy: PolicyConfig, config: ThoughtsConfig, device: str) -> tuple[Writer, Evaluator]:
    """The writer, and the evaluator that the options name."""
    evaluator = EndpointEvaluator(config.evaluator) if config.evaluator.base_url else ModelEvaluator(config.evaluator, device)
    return PolicyWriter(policy, config, device), evaluator
