"""What a policy does not read of prepared texts as it is meant: parts of answers, turns, dialogues."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from components.config import Recipe
from components.data.dialogues import MARKERS, dialogue_turns, has_repeated_speaker, is_unread_dialogue
from components.data.records import DataError, Pair
from components.models.backbone import EMBEDDED, TINY, BackboneError
from components.models.chat_template import ChatTemplate
from components.models.policy import PolicyTexts


def reading_warnings(recipe: Recipe, pairs: Sequence[Pair], prompts: Iterable[str] = ()) -> list[str]:
    """Sentences on what the policy does not read, or not as it is meant.

    Args:
        recipe: with the day of a chat template that prints one.
        pairs: of the clients.
        prompts: of the server.

    Raises:
        DataError: a part of an answer is not read in any of the pairs.
    """
    shown = {*prompts, *(pair.prompt for pair in pairs)}
    if recipe.policy.backbone.name in (EMBEDDED, TINY):  # whose templates write every turn as it is
        return list(_dialogue_warnings(recipe.policy.chat, shown))
    method = recipe.federation.options
    on_pairs = not method.sampling and method.trained_model != "selector"
    if recipe.policy.chat == "none":
        return []
    try:
        texts = PolicyTexts(recipe.policy)
    except BackboneError:
        if on_pairs:
            raise
        return []  # who trains a selector need not have the policy
    if texts.chat is None:
        return []
    warnings = list(_template_warnings(recipe, texts.chat))
    warnings += _answer_warnings(texts, pairs) if on_pairs else []
    return [*warnings, *_dialogue_warnings(recipe.policy.chat, shown)]


def _template_warnings(recipe: Recipe, chat: ChatTemplate) -> Iterator[str]:
    omitted = chat.omitted_roles
    if recipe.policy.system is not None and "system" in omitted:
        yield (
            "the policy's chat template does not write the turn of the system, so that policy.system is not"
            " read: use another chat template, or leave policy.system out."
        )
    if recipe.policy.chat == "turns" and {"user", "assistant"} & {*omitted}:
        yield (
            "the policy's chat template leaves turns of a dialogue out, so that they are not read: use"
            " another chat template, or policy.chat 'auto', which gives a dialogue as one turn."
        )


def _answer_warnings(texts: PolicyTexts, pairs: Sequence[Pair]) -> list[str]:
    """Sentences on the pairs that the policy trains on without a part of an answer, or after another text."""
    otherwise = sum(texts.samples_otherwise(pair.prompt, pair.chosen) for pair in pairs)
    warnings = [
        f"{otherwise} of {len(pairs)} preferred answers begin in another way in the policy's chat template"
        " than answers that are sampled, such as without '<think>': use a chat template, or"
        " policy.chat_template_kwargs, with which both begin alike."
    ]
    warnings = warnings if otherwise else []
    hidden = [texts.hides(*pair.texts) for pair in pairs]
    if not any(hidden):
        return warnings
    sentence = (
        f"{sum(hidden)} of {len(hidden)} pairs have an answer that the policy's chat template does not write"
        " in full, such as one with thoughts before '</think>', so that training does not read what was"
        " preferred: use a chat template that writes them (chat_template.jinja of the model, or"
        " policy.chat_template_kwargs), or policy.chat=none, or take these parts out of the data."
    )
    if all(hidden):
        raise DataError(sentence)
    return [*warnings, sentence]


def _dialogue_warnings(chat: str, prompts: Collection[str]) -> Iterator[str]:
    """Sentences on the prompts that a chat template gets otherwise than as the turns that they are."""
    marked = {prompt for prompt in prompts if MARKERS.search(prompt)} if chat != "none" else set()
    if chat == "auto" and (joined := sum(len(dialogue_turns(prompt)) > 1 for prompt in marked)):
        yield (
            f"{joined} of {len(prompts)} prompts are dialogues, and policy.chat 'auto' gives each as one turn"
            " of the user, with 'Human:' and 'Assistant:' in its text: set policy.chat to 'turns'."
        )
    if chat != "turns":
        return
    unread = set(filter(is_unread_dialogue, marked))
    if unread:
        yield (
            f"{len(unread)} of {len(prompts)} prompts are read as one turn of the user by policy.chat"
            " 'turns', although 'Human:' or 'Assistant:' is in their text: begin each turn with its marker at"
            " the start of a line, unless these are quotations."
        )
    repeated = sum(map(has_repeated_speaker, marked - unread))
    if repeated:
        yield (
            f"{repeated} of {len(prompts)} prompts have two turns of one speaker in a row, which"
            " policy.chat 'turns' joins: if one is a quotation, remove the empty line before its marker."
        )
