"""What a policy does not read of prepared pairs as it is meant: hidden parts of answers, dialogues."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from components.config import Recipe
from components.data.dialogues import has_repeated_speaker, is_unread_dialogue
from components.data.records import DataError, Pair, read_pairs, read_prompts
from components.models.policy import PolicyTexts


def hidden_warnings(recipe: Recipe, rows: Iterable[Pair]) -> list[str]:
    """A sentence on the pairs that the policy trains on without a part of an answer.

    Raises:
        DataError: it does so of all pairs.
    """
    method = recipe.federation.options
    if method.sampling or method.trained_model == "selector":
        return []
    texts = PolicyTexts(recipe.policy)
    hidden = [texts.hides(*row.texts) for row in rows]
    if not any(hidden):
        return []
    sentence = (
        f"{sum(hidden)} of {len(hidden)} pairs have an answer that the policy's chat template does not write"
        " in full, such as one with thoughts before '</think>', so that training does not read what was"
        " preferred: use a chat template that writes them (chat_template.jinja of the model, or"
        " policy.chat_template_kwargs), or policy.chat=none, or take these parts out of the data."
    )
    if all(hidden):
        raise DataError(sentence)
    return [sentence]


def dialogue_warnings(recipe: Recipe, folder: Path) -> list[str]:
    """Sentences on the prompts that policy.chat 'turns' may not read as they are meant.

    They are one turn with a marker in its text, or have two turns of one speaker in a row.
    """
    if recipe.policy.chat != "turns":
        return []
    prompts = {pair.prompt for pair in read_pairs(folder / "pairs.parquet")}
    prompts.update(row.prompt for row in read_prompts(folder))
    warnings = []
    unread = set(filter(is_unread_dialogue, prompts))
    if unread:
        warnings.append(
            f"{len(unread)} of {len(prompts)} prompts are read as one turn of the user by policy.chat"
            " 'turns', although 'Human:' or 'Assistant:' is in their text: begin each turn with its marker at"
            " the start of a line, unless these are quotations."
        )
    repeated = sum(map(has_repeated_speaker, prompts - unread))
    if repeated:
        warnings.append(
            f"{repeated} of {len(prompts)} prompts have two turns of one speaker in a row, which"
            " policy.chat 'turns' joins: if one is a quotation, remove the empty line before its marker."
        )
    return warnings
