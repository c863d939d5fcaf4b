"""From a source to a prepared folder (records.py): split, partition, sample, validate, write."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.config import DataConfig, Recipe
from components.data.data_report import (
    ClientCounts,
    Limits,
    MarginSummary,
    PreparationReport,
    PromptSummary,
    RepeatCounts,
    RowCounts,
    TreeCounts,
    ValidationSummary,
    write_client_counts,
    write_report,
)
from components.data.partition import (
    assign_clients,
    iid,
    leave_out_unseen,
    pool_training,
    sample_pairs,
    summarize,
)
from components.data.prompts import server_prompts
from components.data.records import (
    SPLITS,
    TEXTS,
    TOO_LONG,
    UNSEEN,
    DataError,
    SourceData,
    drop_long,
    pairs_frame,
    write_table,
)
from components.data.same_text import one_prompt, same_text
from components.data.sources import load
from components.data.splits import JUDGE, conversation_warning, with_groups, with_splits
from components.data.trees import thought_pairs
from components.io import replaced_folder
from components.seeding import generator
from components.versions import SAME_TEXT

if TYPE_CHECKING:
    import pandas as pd


def prepare(
    data: DataConfig,
    seed: int,
    folder: Path,
    docs: bool = False,
    read: Callable[[DataConfig, int], DataSet] | None = None,
    label_balance: bool = True,
) -> PreparationReport:
    """Write the prepared folder of a recipe's data, replacing an existing one.

    The folder appears complete or not at all. If an expectation fails it is not written, and an
    existing one is unchanged; `<folder>.rejected/docs` then contains the Data Docs, if they are
    written.

    Args:
        data: the recipe's data section.
        seed: the recipe's seed.
        folder: to write; its parents are created.
        docs: whether to write the Data Docs, as HTML, into its subfolder docs.
        read: gives the data, which may be amended, before they are validated; None: assemble.
        label_balance: see Limits.

    Returns:
        the report, which is also written to report.json.

    Raises:
        DataError: the data cannot be used; one sentence, or one for each expectation that fails
            (validation.ExpectationsFailed).
    """
    folder = Path(folder)
    rejected = folder.with_name(f"{folder.name}.rejected")
    data_set = (read or assemble)(data, seed)
    limits = replace(expected(data_set, data), label_balance=label_balance)
    from components.data.validation import ExpectationsFailed, validate  # imports Great Expectations

    with replaced_folder(folder) as building:
        docs_folder = building / "docs" if docs else None
        try:
            expectations = validate(data_set.tables, limits, docs_folder)
        except ExpectationsFailed as error:
            shutil.rmtree(rejected, ignore_errors=True)
            if docs_folder is None:
                raise
            rejected.mkdir()
            docs_folder.rename(rejected / "docs")
            text = str(error).replace(str(docs_folder), str(rejected / "docs"))
            raise ExpectationsFailed(text, error.outcomes) from None
        report = _report(data_set, expectations)
        for name in ("pairs", "judge", "prompts"):
            write_table(building / f"{name}.parquet", data_set.tables[name])
        write_client_counts(building, data_set.clients)
        if data_set.unseen:
            (building / UNSEEN).mkdir()
            write_table(building / UNSEEN / "pairs.parquet", data_set.tables[UNSEEN])
            write_client_counts(building / UNSEEN, data_set.unseen)
        write_report(building, report)
    shutil.rmtree(rejected, ignore_errors=True)
    return report


REPEATED_CHARACTERS = 20
"""Length of a prompt (characters) from which completions that begin with it are said to repeat it."""


@dataclass(frozen=True)
class DataSet:
    """The data of a recipe before they are validated and written."""

    tables: dict[str, pd.DataFrame]  # pairs, judge and prompts, and unseen if there are any, see records
    clients: dict[str, ClientCounts]  # numbers of pairs by client, in the order of their names
    rows: RowCounts
    prompts: dict[str, PromptSummary]  # see PreparationReport
    warnings: tuple[str, ...]  # what may be wrong with the rows, as sentences
    repeats: RepeatCounts  # among the source's pairs by their owners, before they are assigned to clients
    control_tokens: int = 0  # pairs and prompts that hold control tokens of a model's tokenizer
    unseen: Mapping[str, ClientCounts] = field(default_factory=dict)  # of clients that take part in no round

    @property
    def splits(self) -> dict[str, int]:
        """Numbers of the clients' pairs."""
        return {split: sum(getattr(client, split) for client in self.clients.values()) for split in SPLITS}


def assemble(data: DataConfig, seed: int, source: SourceData | None = None) -> DataSet:
    """Load, split and partition the data of a recipe.

    Args:
        data: the recipe's data section.
        seed: the recipe's seed.
        source: what the source gives; None: it is loaded.

    Raises:
        DataError: the data cannot be used, as a sentence.
    """
    import pandas as pd

    source = source or load(data, seed)
    short: dict[str, Any] = {}
    dropped = dict(source.dropped)
    for name, kind in (("pairs", "pair"), ("judge", "judge's pair"), ("prompts", "prompt")):
        candidates = getattr(source, name)
        short[name] = drop_long(candidates, f"{kind}s of source {data.source}", data)
        if len(short[name]) < len(candidates):
            dropped[f"{kind} {TOO_LONG}"] = len(candidates) - len(short[name])
    source = replace(source, **short, dropped=dropped)
    rows, judge = (
        pairs_frame(with_splits(pairs, data.validation, data.test, seed), data.source)
        for pairs in with_groups(source.pairs, source.judge)
    )
    owned, left_out = assign_clients(rows, set(judge["client_id"]), data, seed)
    sampled = sample_pairs(owned, data, seed)
    own, unseen = leave_out_unseen(sampled, data, seed)
    clients = sorted(set(own["client_id"]))
    left_out |= {
        "over max_pairs": len(owned) - len(sampled),
        "owner takes part in no round": len(sampled) - len(own),
    }
    pairs, trees = _with_trees(own, clients, data, seed)
    if data.pooled:
        pairs, clients = pool_training(pairs, clients, unseen)
    if not (pairs["split"] == "train").any():
        raise DataError(
            f"of {len(pairs)} pairs none is in the train split: bring more pairs, or lower data.test and"
            " data.validation, or raise data.max_pairs"
        )
    pairs, unseen = (
        frame.sort_values(["client_id", "pair_id"], kind="stable", ignore_index=True)
        for frame in (pairs, unseen)
    )
    known = pd.concat([pairs, judge, unseen])[["prompt", "split"]].itertuples(index=False, name=None)
    prompts, summaries = server_prompts(data, source.prompts, list(known), seed)
    counts = RowCounts(
        source=len(rows),
        pairs=len(pairs),
        left_out={reason: count for reason, count in left_out.items() if count},
        judge=len(judge),
        prompts=dict(sorted(Counter(prompts["split"]).items())),
        dropped=source.dropped,
        trees=trees,
    )
    total = counts.source + (counts.trees.pairs if counts.trees else 0)
    if total != counts.pairs + sum(counts.left_out.values()):
        raise AssertionError(
            f"of {total} pairs, {counts.pairs} are prepared and {counts.left_out} are left out"
        )
    tables = {"pairs": pairs, "judge": judge, "prompts": prompts}
    true_clusters = source.true_clusters if data.partition == "natural" else {}
    repeats = count_repeats(rows, judge[judge["client_id"] != JUDGE])
    conversations = conversation_warning(
        pd.concat([pairs, judge])[[*TEXTS, "split"]].itertuples(index=False, name=None)
    )
    warnings = [*source.warnings, *repeat_warnings(repeats), *alike_warnings("clients", clients)]
    warnings += [conversations] if conversations else []
    return DataSet(
        tables | ({UNSEEN: unseen} if len(unseen) else {}),
        _client_counts(pairs, clients, true_clusters),
        counts,
        summaries,
        (*warnings, *alike_warnings("domains", pairs["domain"].dropna().unique())),
        repeats,
        unseen=_client_counts(unseen, sorted(set(unseen["client_id"])), true_clusters),
    )


def server_data(data: DataConfig, seed: int) -> DataSet:
    """The server's prompts and the judge's pairs, of data whose other pairs stay with their owners.

    Raises:
        DataError: the data cannot be used, as a sentence.
    """
    source = load(data, seed)
    short = drop_long(source.judge, "the judge's pairs", data)
    nobody, judge = (
        pairs_frame(with_splits(pairs, data.validation, data.test, seed), data.source)
        for pairs in with_groups([], short)
    )
    known = judge[["prompt", "split"]].itertuples(index=False, name=None)
    prompts, summaries = server_prompts(data, [], list(known), seed)
    dropped = len(source.judge) - len(short)
    counts = RowCounts(
        source=0,
        pairs=0,
        left_out={},
        judge=len(judge),
        prompts=dict(sorted(Counter(prompts["split"]).items())),
        dropped={f"judge's pair {TOO_LONG}": dropped} if dropped else {},
    )
    tables = {"pairs": nobody, "judge": judge, "prompts": prompts}
    return DataSet(tables, {}, counts, summaries, source.warnings, RepeatCounts())


def expected(data_set: DataSet, data: DataConfig) -> Limits:
    """What the tables must meet."""
    one_client_groups = data.partition not in ("natural", "column")
    clients = [*data_set.clients, *data_set.unseen]
    return Limits(clients, data.max_characters, one_client_groups, data.max_equal)


def check_rows(recipe: Recipe, splits: Mapping[str, int], prompts: Mapping[str, int]) -> None:
    """Refuse data without rows that a phase needs.

    Args:
        recipe: the recipe.
        splits: numbers of the clients' pairs.
        prompts: numbers of the server's prompts, by split.
    """
    required = {
        "held-out prompts to evaluate on": (prompts.get("test", 0), "data.test_prompts"),
        "held-out pairs to measure accuracy on": (splits.get("test", 0), ""),
        "pairs to train on": (splits.get("train", 0), ""),
    }
    if recipe.aligns_a_policy:
        align = {"server prompts to align on": (prompts.get("align", 0), "data.align_prompts")}
        required = align | required
    for rows, (count, key) in required.items():
        if not count:
            elsewhere = f", or take them from elsewhere ({key})" if key else ""
            raise DataError(
                f"source {recipe.data.source} leaves no {rows}: see data.test, data.validation and"
                f" data.options (e.g. align_share){elsewhere}."
            )


def _report(data_set: DataSet, expectations: ValidationSummary) -> PreparationReport:
    pairs, judge = data_set.tables["pairs"], data_set.tables["judge"]
    clients = data_set.clients.values()
    repeats = data_set.repeats
    return PreparationReport(
        rows=data_set.rows,
        splits=data_set.splits,
        prompts=data_set.prompts,
        partition=summarize([sum(client.rows().values()) for client in clients]),
        partition_train=summarize([client.train for client in clients]),
        clients_without_train=[name for name, client in data_set.clients.items() if not client.train],
        expectations=expectations,
        warnings=[*data_set.warnings, *expectations.warnings],
        repeats=repeats,
        same_text=SAME_TEXT,
        control_tokens=data_set.control_tokens,
        margins=_margins(pairs, judge),
    )


def _with_trees(
    pairs: pd.DataFrame, clients: Sequence[str], data: DataConfig, seed: int
) -> tuple[pd.DataFrame, TreeCounts | None]:
    """The pairs, with those of data.trees, whose questions are assigned to the clients."""
    import pandas as pd

    if data.trees is None:
        return pairs, None
    thoughts, dropped = thought_pairs(Path(data.trees), "data.trees", data.min_margin)
    short = drop_long(thoughts, "pairs of data.trees", data)
    if len(short) < len(thoughts):
        dropped[TOO_LONG] = len(thoughts) - len(short)
    drawn = with_splits(short, data.validation, data.test, seed)
    owners: dict[str, str] = {}
    for split in SPLITS:
        groups = [pair.split_group for pair in drawn if pair.split == split]
        if groups:
            order = generator(seed, "trees", split).permutation(len(clients))
            turns = iid(groups, min(len(clients), len(set(groups))), seed)
            owners |= {group: clients[order[turn]] for group, turn in zip(groups, turns, strict=True)}
    owned = [replace(pair, client_id=owners[pair.split_group]) for pair in drawn]
    counts = TreeCounts(pairs=len(owned), questions=len(owners), dropped=dropped)
    return pd.concat([pairs, pairs_frame(owned, "thoughts")], ignore_index=True), counts


def _client_counts(
    pairs: pd.DataFrame, clients: Sequence[str], true_clusters: Mapping[str, str]
) -> dict[str, ClientCounts]:
    counts = Counter(zip(pairs["client_id"], pairs["split"], strict=True))
    return {
        client: ClientCounts(
            **{split: counts[client, split] for split in SPLITS}, group=true_clusters.get(client)
        )
        for client in clients
    }


def _margins(*frames: pd.DataFrame) -> MarginSummary | None:
    """Margins of the pairs of thoughts; None where there are none."""
    margins: list[float] = []
    for frame in frames:
        if "margin" in frame:
            margins += list(frame.loc[frame["source"] == "thoughts", "margin"])
    if not margins:
        return None
    return MarginSummary(
        pairs=len(margins),
        min=float(np.min(margins)),
        median=float(np.median(margins)),
        max=float(np.max(margins)),
    )


def count_repeats(*frames: pd.DataFrame) -> RepeatCounts:
    """Count the pairs with equal completions, and those that repeat or contradict others of their owner.

    Args:
        frames: pairs with the columns client_id, prompt, chosen and rejected.
    """
    import pandas as pd

    own = pd.concat([frame[["client_id", *TEXTS]] for frame in frames], ignore_index=True)
    normal = own.assign(**{name: own[name].map(one_prompt) for name in TEXTS})
    alike = normal["chosen"] == normal["rejected"]  # such a pair prefers a spelling
    normal.loc[alike, ["chosen", "rejected"]] = own.loc[alike, ["chosen", "rejected"]]
    given = set(normal.itertuples(index=False, name=None))
    duplicates = own.duplicated()
    return RepeatCounts(
        duplicates=int(duplicates.sum()),
        normalized=int((normal.duplicated() & ~duplicates).sum()),
        contradictory=sum(
            (owner, prompt, rejected, chosen) in given and chosen != rejected
            for owner, prompt, chosen, rejected in normal.itertuples(index=False, name=None)
        ),
        equal=int((own["chosen"].str.strip() == own["rejected"].str.strip()).sum()),
        prompts=sum(
            len(start := prompt.strip()) >= REPEATED_CHARACTERS
            and all(text.lstrip().startswith(start) for text in completions)
            for prompt, *completions in own[[*TEXTS]].itertuples(index=False, name=None)
        ),
    )


def repeat_warnings(counts: RepeatCounts) -> Iterator[str]:
    """What the counts mean, as sentences; none where nothing repeats."""
    weigh = "they have more weight than others"
    if counts.duplicates:
        yield f"pairs that repeat an earlier one of the same owner: {counts.duplicates:,}; {weigh}."
    if counts.normalized:
        yield (
            "pairs that repeat an earlier one of the same owner in another Unicode form, or with other white"
            f" space around their texts: {counts.normalized:,}; {weigh}."
        )
    if counts.contradictory:
        yield (
            "pairs that are there the other way round too, of the same owner where owners are known:"
            f" {counts.contradictory:,}; a model cannot learn both."
        )
    if counts.equal:
        yield f"pairs whose two completions are the same text: {counts.equal:,}; training learns nothing."
    if counts.prompts:
        yield (
            f"pairs whose two completions repeat the prompt, as base models write them: {counts.prompts:,}; a"
            " policy learns to repeat it too, so leave it out unless it is a part of the answer, as in code."
        )


def alike_warnings(kind: str, names: Iterable[str]) -> Iterator[str]:
    """A sentence where names are the same text (same_text), such as two ids of one owner."""
    spellings: dict[str, set[str]] = {}
    for name in names:
        spellings.setdefault(same_text(name), set()).add(name)
    alike = sorted(sorted(own) for own in spellings.values() if len(own) > 1)
    if alike:
        yield (
            f"{kind} that differ only in case, white space or code points: {sum(map(len, alike)):,}; each"
            " counts as one of its own, so write one name where it is one."
        )
