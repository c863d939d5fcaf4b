"""From a source to a prepared folder: split by prompt, partition, sample, validate, write (see records.py)."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.config import DataConfig, unknown_name
from components.data import partition, sources
from components.data.picture import partition_picture
from components.data.prompts import server_prompts
from components.data.records import PAIR_COLUMNS, PROMPT_COLUMNS, SPLITS, DataError
from components.data.registry import EXTRA, TEXT_COLUMNS, pairs_dataset
from components.data.splits import assign, one_spelling, sample
from components.data.trees import thought_pairs
from components.data.validation import validate
from components.seeding import generator

if TYPE_CHECKING:
    import pandas as pd


def prepare(data: DataConfig, seed: int, folder: Path) -> dict[str, Any]:
    """Write the prepared folder of a recipe's data, replacing one that is there.

    The folder appears whole or not at all. Where the expectations fail it is not written, and what was there stays;
    `<folder>.rejected/docs` then holds the Data Docs.

    Args:
        data: the recipe's data section.
        seed: the recipe's seed.
        folder: to write; its parents are made.

    Returns:
        The report that is also written to report.json:
            rows        pairs the source gave ("source"), pairs kept ("pairs"), pairs left out by reason ("left_out":
                        their sum is the difference), the judge's pairs ("judge"), prompts by split ("prompts"), and
                        raw rows that the source itself dropped by reason ("dropped"); where the recipe adds trees of
                        thoughts, their pairs, their questions and what gave no pair ("trees")
            prompts     where the recipe takes prompts from elsewhere: by split, see prompts.server_prompts
            splits      pairs by split
            margins     of the pairs of thoughts, the judge's among them: how many, and the least, median and greatest difference of
                        their scores ("pairs", "min", "median", "max"); where there are any
            partition   the row of table 5 over all the clients' pairs, see partition.statistics
            partition_train   the same over their training pairs
            clients_without_train   clients that have no training pair
            expectations   outcome of the suite, see validation.validate

    Raises:
        RecipeError: an unknown source or option.
        DataError: the data cannot be used; one sentence, or one for each expectation that failed.
    """
    import pandas as pd

    loaded = sources.load(data, seed)
    spelling = one_spelling((*loaded.pairs["prompt"], *loaded.judge["prompt"]))
    pairs, judge = (_frame(rows, spelling, data, seed) for rows in (loaded.pairs, loaded.judge))
    given = len(pairs)
    if not given:
        raise DataError(f"source {data.source} gives no pairs")

    pairs, left_out = _partition(pairs, data, seed)
    clients = sorted(set(pairs["client_id"]))
    shared = sorted(set(clients) & set(judge["client_id"]))
    if shared:
        raise DataError(f"source {data.source}: {len(shared)} owners are clients and the judge's too ({', '.join(shared[:5])}): the judge's owners must take no part, so rename these clients")
    pairs, left_out["over max_pairs"] = _sample(pairs, data.max_pairs, seed)
    bare = sorted(set(clients) - set(pairs["client_id"]))
    if bare:
        raise DataError(f"data.max_pairs {data.max_pairs} leaves {len(bare)} of {len(clients)} clients without a pair (such as {bare[0]}): raise it, or lower data.clients")
    thoughts, dealt = _thoughts(data, clients, seed)
    pairs = pd.concat([pairs, thoughts], ignore_index=True) if dealt else pairs
    if not (pairs["split"] == "train").any():
        raise DataError(f"of {len(pairs)} pairs none is in the train split: bring more pairs, or lower data.test and data.validation, or raise data.max_pairs")
    pairs = pairs.sort_values(["client_id", "pair_id"], kind="stable", ignore_index=True)
    prompts, other_prompts = server_prompts(data, loaded, pairs, judge, seed)
    left_out = {reason: n for reason, n in left_out.items() if n}
    came = given + dealt.get("pairs", 0)
    if came != len(pairs) + sum(left_out.values()):
        raise AssertionError(f"{came} pairs came in, but {len(pairs)} went out and {left_out} were left out")

    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    rejected = folder.with_name(f"{folder.name}.rejected")
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        try:
            expectations = validate(
                pairs, prompts, clients, judge=judge, max_characters=data.max_characters, one_client_groups=data.partition not in ("natural", "column"), docs=building / "docs")
        except DataError as error:
            shutil.rmtree(rejected, ignore_errors=True)
            rejected.mkdir()
            (building / "docs").rename(rejected / "docs")
            raise DataError(str(error).replace(str(building / "docs"), str(rejected / "docs"))) from None
        by_client = dict(list(pairs.groupby("client_id")))
        groups = loaded.groups if data.partition == "natural" else {}
        table = {c: {s: int((by_client[c]["split"] == s).sum()) for s in SPLITS} | {"group": groups.get(c)} for c in clients}
        report = {
            "rows": {"source": given, "pairs": len(pairs), "left_out": left_out, "judge": len(judge), "prompts": dict(sorted(Counter(prompts["split"]).items())),
                     "dropped": dict(getattr(loaded, "dropped", {}))} | ({"trees": dealt} if dealt else {}),
            "splits": {s: int((pairs["split"] == s).sum()) for s in SPLITS},
            "prompts": other_prompts,
            "partition": partition.statistics([sum(table[c][s] for s in SPLITS) for c in clients]),
            "partition_train": partition.statistics([table[c]["train"] for c in clients]),
            "clients_without_train": [c for c in clients if not table[c]["train"]],
            "expectations": expectations} | _margins(pairs, judge)
        _write(building, pairs, judge, prompts, table, report)
        partition_picture({c: dict(Counter(by_client[c]["domain"])) for c in clients}, building / "partition.png")
        _replace(folder, building)
        shutil.rmtree(rejected, ignore_errors=True)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return report


def _thoughts(data: DataConfig, clients: list[str], seed: int) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The pairs of data.trees, in splits, the questions of each split dealt among the clients; and the report's counts. Empty where there are none."""
    import pandas as pd

    if data.trees is None:
        return pd.DataFrame(), {}
    rows, dropped = thought_pairs(Path(data.trees), "data.trees", data.min_margin)
    parts = assign((row["group"] for row in rows), data.validation, data.test, seed)
    owners = {}
    for split in SPLITS:
        groups = [row["group"] for row, part in zip(rows, parts, strict=True) if part == split]
        if groups:
            order = generator(seed, "trees", split).permutation(len(clients))
            turns = partition.iid(groups, min(len(clients), len(set(groups))), seed)
            owners |= {group: clients[order[turn]] for group, turn in zip(groups, turns, strict=True)}
    owned = [row | {"client_id": owners[row["group"]], "split": part} for row, part in zip(rows, parts, strict=True)]
    return _frame(pairs_dataset(owned, "thoughts"), {}, data, seed), {"pairs": len(owned), "questions": len(owners), "dropped": dropped}


def _margins(*frames: pd.DataFrame) -> dict[str, dict[str, float]]:
    """The report's margins; empty where there are no pairs of thoughts."""
    margins = [margin for frame in frames if "margin" in frame for margin in frame.loc[frame["source"] == "thoughts", "margin"]]
    if not margins:
        return {}
    return {"margins": {"pairs": len(margins), "min": float(np.min(margins)), "median": float(np.median(margins)), "max": float(np.max(margins))}}


def _frame(rows: Any, spelling: Mapping[str, str], data: DataConfig, seed: int) -> pd.DataFrame:
    """A source's pairs with a group (the prompt where the source names none, in the spelling that stands for it) and a split in every row."""
    frame = rows.to_pandas()
    prompts = frame["prompt"].map(spelling)
    if "group" not in frame:
        frame["group"] = prompts
    frame["group"] = frame["group"].where(frame["group"].notna() & (frame["group"] != ""), prompts)
    open_rows = frame["split"] == ""
    frame.loc[open_rows, "split"] = assign(frame.loc[open_rows, "group"], data.validation, data.test, seed)
    return frame


def _partition(pairs: pd.DataFrame, data: DataConfig, seed: int) -> tuple[pd.DataFrame, dict[str, int]]:
    """The pairs with their clients, and how many rows of owners or values that are no client's were left out, by reason."""
    pairs = pairs.copy()
    try:
        if data.partition in ("natural", "column"):
            return _owned(pairs, data)
        assert data.clients is not None     # the recipe's own check
        groups = list(pairs["group"])
        if data.partition == "margin":
            _refuse_bare(pairs, ~np.isfinite(pairs["margin"].to_numpy(np.float64)) if "margin" in pairs else np.ones(len(pairs), dtype=bool), "no margin (a finite number)")
            owners = partition.by_margin(list(pairs["margin"]), groups, data.clients)
        elif data.partition == "dirichlet":
            owners = partition.dirichlet(list(pairs["domain"]), groups, data.clients, data.alpha, seed)
        else:
            owners = partition.iid(groups, data.clients, seed)
    except ValueError as error:
        raise DataError(f"partition '{data.partition}': {error}") from None
    width = max(2, len(str(data.clients - 1)))
    pairs["client_id"] = [f"client-{i:0{width}d}" for i in owners]
    return pairs, {}


def _owned(pairs: pd.DataFrame, data: DataConfig) -> tuple[pd.DataFrame, dict[str, int]]:
    """The pairs of the largest data.clients owners, or of all, who are the source's own or those that a column gives; and the rows left out by reason.

    Raises:
        ValueError: a row has no owner or no value, there is no such column or value, or there are fewer owners than asked for.
    """
    given, left_out = len(pairs), {}
    if data.partition == "natural":
        partition.natural(list(pairs["client_id"]))
        there, what = f"source {data.source} has", "owners"
    else:
        texts = [c for c in TEXT_COLUMNS if c in pairs]
        if "column" not in pairs and data.column not in texts:
            raise ValueError(unknown_name("data.column", data.column, texts))
        values = [None if _missing(value) else value for value in pairs["column" if "column" in pairs else data.column]]
        _refuse_bare(pairs, np.array([not (value or "").strip() for value in values]), f"no value in the column '{data.column}'")
        pairs["client_id"] = partition.by_column(values, data.column_clients)
        pairs = pairs[pairs["client_id"].notna()]
        left_out["value of data.column not among the clients"] = given - len(pairs)
        there, what = f"data.column '{data.column}' gives", "clients"
    held = Counter(pairs["client_id"])
    if data.clients is not None and data.clients > len(held):
        raise ValueError(f"data.clients is {data.clients}, but {there} only {len(held)} {what} with pairs (those of the judge are set apart, see data.options): use at most that many, or another data.partition")
    kept = sorted(held, key=lambda c: (-held[c], c))[:data.clients]
    chosen = pairs[pairs["client_id"].isin(kept)]
    return chosen, left_out | {"owner not among the clients": len(pairs) - len(chosen)}


def _refuse_bare(pairs: pd.DataFrame, bare: Any, what: str) -> None:
    """Refuse rows that lack what a partition needs, saying how many of which source.

    Raises:
        ValueError: there are such rows.
    """
    if bare.any():
        lacking = ", ".join(f"{n} of source {name}" for name, n in sorted(Counter(pairs.loc[bare, "source"]).items()))
        raise ValueError(f"{int(bare.sum())} of {len(pairs)} rows have {what}: {lacking}; bring one for each row, or use another data.partition")


def _sample(pairs: pd.DataFrame, most: int | None, seed: int) -> tuple[pd.DataFrame, int]:
    """At most so many pairs, see splits.sample; and how many were left out."""
    if most is None or len(pairs) <= most:
        return pairs, 0
    kept = pairs[pairs["prompt"].isin(sample(list(pairs["prompt"]), list(pairs["split"]), most, seed))]
    return kept, len(pairs) - len(kept)


def _write(folder: Path, pairs: pd.DataFrame, judge: pd.DataFrame, prompts: pd.DataFrame, clients: dict, report: dict) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    for name, frame, wanted in (("pairs", pairs, PAIR_COLUMNS), ("judge", judge, PAIR_COLUMNS), ("prompts", prompts, PROMPT_COLUMNS)):
        columns = [*wanted, *(c for c in EXTRA if c in frame and name != "prompts")]
        kinds = {"references": pa.list_(pa.string())} | {c: getattr(pa, kind)() for c, kind in EXTRA.items()}
        values = {c: pa.array([None if _missing(v) else v for v in frame[c].tolist()], type=kinds.get(c, pa.string())) for c in columns if c != "references"}
        if "references" in columns:
            values["references"] = pa.array([list(r) for r in frame["references"]], type=kinds["references"])
        pyarrow.parquet.write_table(pa.table({c: values[c] for c in columns}), folder / f"{name}.parquet")
    for name, content in (("clients", clients), ("report", report)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _replace(folder: Path, building: Path) -> None:
    """Put a finished folder in its place; only the moment between the two renames has neither."""
    building.chmod(0o755)       # mkdtemp's is private
    if folder.exists():
        old = building.with_name(building.name + ".old")
        folder.rename(old)
        building.rename(folder)
        shutil.rmtree(old)
    else:
        building.rename(folder)
