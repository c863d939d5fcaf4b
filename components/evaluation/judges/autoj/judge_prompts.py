"""The instruction with a comparison, as texts and as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from components.data.templates import Template, user_message
from components.evaluation.judges.judge import JudgeError
from components.models.chat_template import ChatTemplate
from components.models.selector import Comparison

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.evaluation.judges.autoj.autoj_judge import AutoJSection


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
