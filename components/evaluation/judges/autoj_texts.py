"""The texts of Auto-J's protocol: the instruction with a comparison, and the verdict of a judgment."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from components.data.templates import Template, user_message
from components.evaluation.judges.judge import JudgeError
from components.evaluation.winrate import Verdict
from components.models.chat_template import ChatTemplate
from components.models.selector import Comparison

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.evaluation.judges.autoj import AutoJSection

_MARK = re.compile(r"final\s+decision\s+is(?![^\W_])", re.IGNORECASE)
_NAME = r"(?:response[\W_]*(?P<{0}>[12])|(?P<{0}_tie>tie|tied))(?![^\W_]|[.,]\d)"
_DECISION = re.compile(
    r"(?:[\W_]*\b(?:that|it|they|is|are|a|an|the)\b)*[\W_]*" + _NAME.format("decision"), re.IGNORECASE
)
_ALTERNATIVE = re.compile(
    r"(?P<gap>(?:[^\w.!?;]|_)*)"
    r"(?:(?P<conjunction>and/or|or|and|nor|vs|versus)(?:[^\w!?;]|_)*(?:an?(?:[^\w!?;]|_)+)?)?"
    + _NAME.format("alternative")
    + r"|\s*(?P<separator>[/|&,]|or\b|and\b)\s*[12](?![^\W_])",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"(?:[^\w.!?;\n]|_)*(?:[.!?;\n]|$)")


def judge_query(policy: Template | None, prompt: str) -> str:
    """Build the query: the user message of the policy's template, or the prompt itself."""
    return prompt if policy is None else user_message(policy, prompt)


def prompt_fields(comparison: Comparison, policy: Template | None = None) -> dict[str, str]:
    """Map the placeholders of an instruction to the texts of a comparison."""
    return {
        "prompt": judge_query(policy, comparison.prompt),
        "response": comparison.first,
        "response_another": comparison.second,
    }


def encode_question(
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    comparison: Comparison,
    options: AutoJSection,
    policy: Template | None = None,
) -> tuple[list[int], bool]:
    """Encode the instruction with a comparison, truncated to max_prompt_tokens.

    The prompt is truncated at its end first; if that is not sufficient, the responses are, the
    longer one first. The instruction and that of the policy's template are never truncated.

    Returns:
        token ids, and whether a text was truncated.

    Raises:
        JudgeError: the instructions alone take more than max_prompt_tokens.
    """
    ids = _encode(tokenizer, template, prompt_fields(comparison, policy), options)
    if len(ids) <= options.max_prompt_tokens:
        return ids, False
    tokens: dict[str, list[int]] = {
        name: tokenizer.encode(text, add_special_tokens=False)
        for name, text in prompt_fields(comparison).items()
    }
    while (surplus := len(ids) - options.max_prompt_tokens) > 0:
        if not any(tokens.values()):
            raise JudgeError(
                f"the instruction '{template.name}' alone takes {len(ids)} tokens, more than"
                f" evaluation.judge.max_prompt_tokens {options.max_prompt_tokens}: raise it."
            )
        name, count = _next_cut(tokens, surplus)
        tokens[name] = tokens[name][: max(0, len(tokens[name]) - count)]
        texts = {name: cast("str", tokenizer.decode(cut_ids)) for name, cut_ids in tokens.items()}
        truncated = Comparison(texts["prompt"], texts["response"], texts["response_another"])
        ids = _encode(tokenizer, template, prompt_fields(truncated, policy), options)
    return ids, True


def _next_cut(tokens: dict[str, list[int]], surplus: int) -> tuple[str, int]:
    """The text to truncate next, and the number of tokens to remove."""
    if tokens["prompt"]:
        return "prompt", surplus
    lengths = {name: len(tokens[name]) for name in ("response", "response_another")}
    longer = max(lengths, key=lambda name: lengths[name])
    difference = lengths[longer] - min(lengths.values())
    return longer, min(surplus, max((surplus + 1) // 2, difference))


def _encode(
    tokenizer: PreTrainedTokenizerBase, template: Template, texts: dict[str, str], options: AutoJSection
) -> list[int]:
    """Encode the instruction in the format of Auto-J, or in the model's chat template."""
    instruction = template.render(**texts)
    ids: list[int]
    if options.chat_template:
        chat = ChatTemplate(tokenizer, {}, options.chat_date)
        text = chat.render([{"role": "user", "content": instruction}], add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(f"[INST] {instruction} [/INST]")
    return ids


def parse_autoj(text: str) -> Verdict:
    """Parse the verdict of a judgment: the name after the last "final decision is", in any case.

    Markup, quotes, punctuation, line breaks and words such as "that it is a" may stand between. The
    verdict is unparsable if there is no name, another name ("Response 10"), or a choice of names
    ("Response 1 / Response 2 / Tie", "Response 1 or 2", "Response 1, Response 2"). As in the
    authors' code, reasons that follow the name are ignored, even if they mention the other
    response. A further name after a comma, a bracket or a line break is part of a choice only if no
    more words follow it in its line or sentence; after "or", "/" or "and" alone it always is.

    Args:
        text: any text; no text raises an error.
    """
    marks = list(_MARK.finditer(text))
    match = _DECISION.match(text, marks[-1].end()) if marks else None
    if match is None or _offers_choice(text, match.end()):
        return Verdict.UNPARSABLE
    if match["decision_tie"]:
        return Verdict.TIE
    return Verdict.FIRST if match["decision"] == "1" else Verdict.SECOND


def _offers_choice(text: str, end: int) -> bool:
    """Whether further names after a decision make it a choice of names."""
    alternative = _ALTERNATIVE.match(text, end)
    while alternative is not None:
        if _is_joined(alternative) or _CLAUSE_END.match(text, alternative.end()):
            return True
        alternative = _ALTERNATIVE.match(text, alternative.end())
    return False


def _is_joined(alternative: re.Match[str]) -> bool:
    """Whether a further name is joined to the one before it, whatever follows."""
    if alternative["separator"]:
        return alternative["separator"] != ","
    gap = set(alternative["gap"])
    conjunction = (alternative["conjunction"] or "").lower()
    if conjunction == "and":
        # After one of these characters "and" begins a new clause.
        return not gap & set(",:(\n\r-\u2013\u2014")
    return conjunction != "" or bool(gap & set("/|&"))
