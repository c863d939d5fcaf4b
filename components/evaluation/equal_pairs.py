"""What the models of a recipe read of prepared pairs: equal completions, hidden answers, dialogues.

A policy is trained on completions cut to policy.max_new_tokens, selectors and rewards on inputs of
max_length. Two completions with a long common beginning are then one and the same, and training
learns nothing from their pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

from components.config import Recipe
from components.data.data_report import EqualCompletions
from components.data.dialogues import has_repeated_speaker, is_unread_dialogue
from components.data.records import DataError, PairRow, Pairs, read_rows
from components.evaluation.judges.judge import JudgeSection
from components.federation.method import method_of
from components.models.pair_reader import PairReader, policy_pair_reader, selector_pair_reader
from components.models.policy import PolicyTexts
from components.models.rewards.reward_section import RewardSection

CLIENTS = "pairs.parquet"
JUDGE = "judge.parquet"


def count_equal_completions(
    recipe: Recipe, folder: Path, known: Sequence[EqualCompletions] = (), refuse: bool = True
) -> list[EqualCompletions]:
    """Count the pairs that are equal to each model that trains on them.

    Args:
        recipe: the recipe.
        folder: prepared data.
        known: counts on the same data, which are reused where the model's section is the same.
        refuse: raise the error.

    Raises:
        DataError: with `refuse`, they are more than the share data.max_equal of a model's pairs.
    """
    counts_by_model = {(counts.model, counts.settings): counts for counts in known}
    counted: list[EqualCompletions] = []
    limit = recipe.data.max_equal
    for reader, table in _readers(recipe):
        counts = counts_by_model.get((reader.model, reader.settings))
        counts = counts or _count(reader, read_rows(folder / table))
        if refuse and counts.equal > limit * counts.pairs:
            raise DataError(
                f"{describe_equal(counts)}, more than the share {limit:g} that is allowed (data.max_equal):"
                f" {_remedy(counts)}, or raise data.max_equal."
            )
        counted.append(counts)
    return counted


def hidden_warnings(recipe: Recipe, rows: Iterable[PairRow]) -> list[str]:
    """A sentence on the pairs that the policy trains on without a part of an answer.

    Raises:
        DataError: it does so of all pairs.
    """
    method = method_of(recipe.federation)
    if method.scores_completions or recipe.federation.options.trained_model == "selector":
        return []
    texts = PolicyTexts(recipe.policy)
    hidden = [texts.hides(row["prompt"], row["chosen"], row["rejected"]) for row in rows]
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


def _readers(recipe: Recipe) -> Iterator[tuple[PairReader, str]]:
    """The readers of the models that train on pairs, each with its table of pairs."""
    if not method_of(recipe.federation).scores_completions:  # otherwise the clients train on their own
        if recipe.federation.options.trained_model == "selector":
            yield selector_pair_reader(recipe.selector, "selector"), CLIENTS
        else:
            yield policy_pair_reader(recipe.policy), CLIENTS
    readers = [cast(JudgeSection, recipe.evaluation.judge).pair_reader()]
    readers += [
        cast(RewardSection, reward).pair_reader(f"rewards.{name}") for name, reward in recipe.rewards.items()
    ]
    for reader in readers:
        if reader is not None:
            yield reader, JUDGE


def _count(reader: PairReader, rows: Pairs) -> EqualCompletions:
    by_client: dict[str, dict[str, int]] = {}
    same_text = 0
    for row in rows:
        chosen, rejected = reader.read(row)
        if list(chosen) == list(rejected):
            splits = by_client.setdefault(row["client_id"], {})
            splits[row["split"]] = splits.get(row["split"], 0) + 1
            same_text += row["chosen"].strip() == row["rejected"].strip()
    return EqualCompletions(
        model=reader.model,
        settings=reader.settings,
        key=reader.key,
        length=reader.length,
        pairs=len(rows),
        equal=sum(sum(splits.values()) for splits in by_client.values()),
        same_text=same_text,
        by_client=by_client,
    )


def describe_equal(counts: EqualCompletions) -> str:
    """The number of equal pairs, and the client with most of them."""
    totals = {client: sum(splits.values()) for client, splits in counts.by_client.items()}
    most = min(totals, key=lambda client: (-totals[client], client))
    splits = ", ".join(f"{count} {split}" for split, count in counts.by_client[most].items())
    return (
        f"{counts.equal} of {counts.pairs} pairs have two completions that are equal to {counts.model}"
        f" ({counts.same_text} the same text, {counts.equal - counts.same_text} after the cut to {counts.key}"
        f" {counts.length}; most of client {most}: {splits})"
    )


def equal_warnings(counted: Sequence[EqualCompletions]) -> list[str]:
    """A sentence for each model that reads equal completions."""
    return [
        f"{describe_equal(counts)}: training learns nothing from them; {_remedy(counts)}."
        for counts in counted
        if counts.equal
    ]


def _remedy(counts: EqualCompletions) -> str:
    remedies = ["leave pairs of the same text out of the data"] if counts.same_text else []
    if counts.same_text < counts.equal:
        remedies.append(f"raise {counts.key}")
    return " and ".join(remedies)


def dialogue_warnings(recipe: Recipe, folder: Path) -> list[str]:
    """Sentences on the prompts that policy.chat 'turns' may not read as they are meant.

    They are one turn with a marker in its text, or have two turns of one speaker in a row.
    """
    if recipe.policy.chat != "turns":
        return []
    prompts: set[str] = set()
    for table in (CLIENTS, "prompts.parquet"):
        prompts.update(row["prompt"] for row in read_rows(folder / table))
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
