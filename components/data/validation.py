"""The expectation suite: what must hold of prepared data before anything trains on them (Great Expectations).

Two rules need a word. Prompts are the same where they differ in case and white space only. And label balance: the
learner shows each pair in both orders, so A and B are balanced by construction there; what can be out of balance is the
data set itself. Two things are checked, where at least 50 pairs can tell:

    the longer completion    the share of pairs whose chosen completion is the longer one
    a label-free order       the share of pairs whose chosen completion comes first in an order (by hash) that knows
                             nothing of the labels

Both must lie within 2% and 98%. The first lies at an end where the labels are nothing but lengths (completions cut
off on one side, a column that was filled by sorting); the second where the same answer wins again and again, a label
column that is constant. Neither can see labels that are all reversed: that is what a source's label-direction test is for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.data.records import SPLITS, DataError
from components.data.splits import normal

if TYPE_CHECKING:
    import pandas as pd

BALANCE = (0.02, 0.98)
PAIRS_THAT_TELL = 50
SHOWN_ROWS, SHOWN_CHARACTERS = 5, 80


def validate(pairs: pd.DataFrame, prompts: pd.DataFrame, clients: Collection[str], *, judge: pd.DataFrame, max_characters: int,
             one_client_groups: bool, docs: Path | None) -> dict[str, Any]:
    """Check prepared pairs and prompts; write the Data Docs first, then complain.

    Args:
        pairs: the clients' pairs (PAIR_COLUMNS and `group`).
        prompts: the server's prompts (PROMPT_COLUMNS).
        clients: the clients there are.
        judge: pairs of owners that must not be among the clients; may have no rows.
        max_characters: longest prompt or completion (characters).
        one_client_groups: whether the partition promises that a group has one client (dirichlet, iid and margin do).
        docs: folder for the Data Docs (its index.html is the entry), or None.

    Returns:
        {"success": True, "expectations": [{"suite", "expectation", "type", "column", "rows", "success"}, ...]}.

    Raises:
        DataError: the expectations that failed, in how many rows each, five of the rows, and where the Data Docs are.
    """
    import pandas as pd

    together = pd.concat([pairs, judge], ignore_index=True)
    frames = {"pairs": _with_helpers(together, prompts, clients), "prompts": _with_helpers(prompts, together, clients)}
    suites = {"pairs": _pair_expectations(frames["pairs"], clients, set(judge["client_id"]), max_characters, one_client_groups),
              "prompts": _prompt_expectations(max_characters)}
    results = _run({name: suites[name] for name, frame in frames.items() if name == "pairs" or len(frame)}, frames, docs)
    failed = [r for r in results if not r["success"]]
    if failed:
        lines = [f"the data do not meet {len(failed)} of {len(results)} expectations, so nothing is trained:"]
        lines += [line for result in failed for line in _sentences(result, frames[result["suite"]])]
        raise DataError("\n".join(lines + ([f"Data Docs: {docs / 'index.html'}"] if docs else [])))
    keys = ("suite", "expectation", "type", "column", "rows", "success")
    return {"success": True, "expectations": [{k: r[k] for k in keys} for r in results]}


def label_free_first(chosen: str, rejected: str) -> bool:
    """Whether chosen comes before rejected in an order by hash, which knows nothing of the labels."""
    first, second = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in (chosen, rejected))
    return first < second


def _with_helpers(frame: pd.DataFrame, others: pd.DataFrame, clients: Collection[str]) -> pd.DataFrame:
    """Columns for rules about several rows: GX's expectations over rows look at one row at a time."""
    import pandas as pd

    frame = frame.copy()
    known = pd.concat([frame[["prompt", "split"]], others[["prompt", "split"]]])
    of_prompt = known.groupby(known["prompt"].map(normal, na_action="ignore"))["split"].nunique()
    frame["prompt_in_one_split"] = frame["prompt"].map(normal, na_action="ignore").map(of_prompt).fillna(1) <= 1
    if "chosen" in frame:
        frame["group_in_one_split"] = frame.groupby("group")["split"].transform("nunique") <= 1
        federated = frame["client_id"].where(frame["client_id"].isin(list(clients)))     # the judge may know a question too
        frame["group_in_one_client"] = federated.groupby(frame["group"]).transform("nunique") <= 1
        frame["chosen_differs"] = frame["chosen"].fillna("").str.strip() != frame["rejected"].fillna("").str.strip()
        chosen, rejected = frame["chosen"].fillna(""), frame["rejected"].fillna("")
        longer = (chosen.str.len() > rejected.str.len()).astype("float64")
        frame["chosen_is_longer"] = longer.where(chosen.str.len() != rejected.str.len())
        frame["chosen_is_first"] = [float(label_free_first(c, r)) for c, r in zip(chosen, rejected, strict=True)]
    return frame


def _pair_expectations(frame: pd.DataFrame, clients: Collection[str], judges: Collection[str], max_characters: int, one_client_groups: bool) -> list[Any]:
    import great_expectations.expectations as gxe

    def holds(column: str, what: str) -> Any:
        return gxe.ExpectColumnValuesToBeInSet(column=column, value_set=[True], description=what)

    rules = [gxe.ExpectTableRowCountToBeBetween(min_value=1, description="there are pairs")]
    for column in ("prompt", "chosen", "rejected"):
        rules += _text(column, max_characters)
    rules += [
        holds("chosen_differs", "chosen differs from rejected"),
        gxe.ExpectColumnValuesToNotBeNull(column="client_id", description="every pair has a client"),
        gxe.ExpectColumnValuesToBeInSet(column="client_id", value_set=sorted({*clients, *judges}), description="the client is known"),
        gxe.ExpectColumnValuesToBeInSet(column="split", value_set=list(SPLITS), description="the split is known"),
        gxe.ExpectColumnValuesToBeUnique(column="pair_id", description="the pair_id is unique"),
        holds("prompt_in_one_split", "no prompt in two splits"),
        holds("group_in_one_split", "no group in two splits"),
        gxe.ExpectColumnDistinctValuesToContainSet(column="client_id", value_set=sorted(clients), description="every client has a pair")]
    if one_client_groups:
        rules.append(holds("group_in_one_client", "no group in two clients"))
    for column, what in (("chosen_is_longer", "label balance: chosen is the longer completion"), ("chosen_is_first", "label balance: chosen comes first in a label-free order")):
        if frame[column].count() >= PAIRS_THAT_TELL:
            rules.append(gxe.ExpectColumnMeanToBeBetween(column=column, min_value=BALANCE[0], max_value=BALANCE[1], description=what))
    return rules


def _prompt_expectations(max_characters: int) -> list[Any]:
    import great_expectations.expectations as gxe

    return [
        *_text("prompt", max_characters),
        gxe.ExpectColumnValuesToBeInSet(column="split", value_set=["align", "test"], description="the split is known"),
        gxe.ExpectColumnValuesToBeUnique(column="prompt_id", description="the prompt_id is unique"),
        gxe.ExpectColumnValuesToBeInSet(column="prompt_in_one_split", value_set=[True], description="no prompt in two splits")]


def _text(column: str, max_characters: int) -> list[Any]:
    import great_expectations.expectations as gxe

    return [gxe.ExpectColumnValuesToNotBeNull(column=column, description=f"{column} is there"),
            gxe.ExpectColumnValuesToMatchRegex(column=column, regex=r"\S", description=f"{column} is not empty"),
            gxe.ExpectColumnValueLengthsToBeBetween(column=column, max_value=max_characters, description=f"{column} has at most {max_characters} characters")]


def _run(suites: dict[str, list[Any]], frames: dict[str, pd.DataFrame], docs: Path | None) -> list[dict[str, Any]]:
    """Run the suites in a context that lives in memory, and build the Data Docs if a folder is given."""
    results = []
    with _quiet():
        import great_expectations as gx

        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False}
        actions = []
        for site in list(context.get_site_names()):
            context.delete_data_docs_site(site)         # the default one writes into the temporary folder
        if docs is not None:
            store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve())}
            context.add_data_docs_site("docs", {"class_name": "SiteBuilder", "store_backend": store, "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"}})
            actions = [gx.checkpoint.UpdateDataDocsAction(name="docs", site_names=["docs"])]
        source = context.data_sources.add_pandas("prepared")
        for name, rules in suites.items():
            batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
            suite = context.suites.add(gx.ExpectationSuite(name, expectations=rules))
            definition = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=batch, suite=suite))
            checkpoint = context.checkpoints.add(gx.Checkpoint(name=name, validation_definitions=[definition], actions=actions, result_format="COMPLETE"))
            outcome = next(iter(checkpoint.run(batch_parameters={"dataframe": frames[name]}).run_results.values()))
            for result in outcome.results:
                config, seen = result.expectation_config, result.result or {}
                results.append({
                    "suite": name, "expectation": config.description, "type": config.type, "column": config.kwargs.get("column"), "success": bool(result.success),
                    "rows": int(seen.get("unexpected_count") or 0), "indices": list(seen.get("unexpected_index_list") or []),
                    "observed": seen.get("observed_value"), "raised": (result.exception_info or {}).get("exception_message")})
    return results


@contextmanager
def _quiet() -> Iterator[None]:
    """No telemetry, no log lines and no warnings of the library's own while it runs."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")      # read when great_expectations is first imported
    logger = logging.getLogger("great_expectations")
    level = logger.level
    logger.setLevel(logging.ERROR)
    insisting = logging.getLogger("great_expectations.data_context.types.base")     # sets its own level when imported
    insisting.addFilter(_nothing)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        insisting.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _sentences(result: dict[str, Any], frame: pd.DataFrame) -> Iterator[str]:
    where = f" (column {result['column']})" if result["column"] else ""
    if result["raised"]:
        yield f"- {result['suite']}: '{result['expectation']}'{where} could not be checked: {result['raised']}"
        return
    rows = result["indices"] or list(frame.index[:SHOWN_ROWS])
    if result["indices"]:
        yield f"- {result['suite']}: '{result['expectation']}'{where} fails in {result['rows']} of {len(frame)} rows:"
    elif "mean" in result["type"]:
        yield (f"- {result['suite']}: '{result['expectation']}'{where} holds in {float(result['observed']):.1%} of {int(frame[result['column']].count())} pairs, "
               f"but {BALANCE[0]:.0%} to {BALANCE[1]:.0%} is expected; the first of {len(frame)} rows:")
    else:
        yield f"- {result['suite']}: '{result['expectation']}'{where} fails for the {len(frame)} rows as a whole"
    columns = [c for c in ("pair_id", "prompt_id", "client_id", "split", "group", "prompt", "chosen", "rejected") if c in frame]
    for index in rows[:SHOWN_ROWS]:
        yield "    " + "; ".join(f"{c}: {_short(frame.at[index, c])}" for c in columns if c != "group" or "group" in str(result["column"]))


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS - 1] + "…")
