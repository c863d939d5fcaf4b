"""Comparison of measured ratios with those of earlier runs under the same conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from components.config import UserError

if TYPE_CHECKING:
    import pandas as pd

MIN_EARLIER = 3
"""Earlier runs without which a ratio is not judged."""


def check_rule(tolerance: float, earlier_runs: int) -> None:
    """Refuse a rule out of its range.

    Raises:
        UserError: a value is outside its range.
    """
    if not 0 < tolerance < 1:
        raise UserError(f"tolerance is {tolerance:g}, expected a fraction between 0 and 1.")
    if earlier_runs < MIN_EARLIER:
        raise UserError(f"earlier_runs is {earlier_runs}, expected at least {MIN_EARLIER}.")


def judge(
    ratios: Mapping[str, float],
    conditions: Mapping[str, str],
    runs: pd.DataFrame,
    tolerance: float,
    earlier_runs: int,
) -> pd.DataFrame:
    """Compare each ratio with its median in the last runs under the same conditions that have it.

    Args:
        ratios: of this run.
        conditions: parameters of this run; only runs with the same ones are compared.
        runs: parameters and metrics of earlier runs, the newest first.
        tolerance: fraction by which a ratio may be below the median.
        earlier_runs: number of last runs that the median is of.

    Returns:
        by ratio: now, the median before, the number of runs that it is of, and whether it is judged
        and is a regression.
    """
    import pandas as pd

    for name, value in conditions.items():
        runs = runs[runs.get(name, pd.Series(index=runs.index, dtype=object)) == value]
    empty = pd.Series(dtype=float)
    earlier = {name: runs.get(name, empty).dropna()[:earlier_runs] for name in ratios}
    table = pd.DataFrame({"now": ratios})
    table["before"] = {name: values.median() for name, values in earlier.items()}
    table["runs"] = {name: len(values) for name, values in earlier.items()}
    table["judged"] = table["runs"] >= MIN_EARLIER
    table["regression"] = table["judged"] & (table["now"] < (1 - tolerance) * table["before"])
    return table


def rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """The table of judge as it is shown."""
    shown = []
    for ratio, now, before, runs, judged, regression in table.itertuples():
        verdict = "regression" if regression else "no regression"
        if not judged:
            verdict = f"not judged: {runs} earlier runs of at least {MIN_EARLIER}"
        shown.append(
            {
                "ratio": ratio,
                "now": f"{now:.3f}",
                "median before": f"{before:.3f}" if judged else "-",
                "change": f"{now / before - 1:+.1%}" if judged else "-",
                "verdict": verdict,
            }
        )
    return shown


def regressions(table: pd.DataFrame) -> dict[str, str]:
    """A sentence on each ratio that is a regression."""
    return {
        name: f"{name} is {now:.3f}, the median of {runs} earlier runs is {before:.3f}"
        for name, now, before, runs, *_ in table[table["regression"]].itertuples()
    }


def summarize(table: pd.DataFrame, tolerance: float) -> str:
    """One sentence on all ratios."""
    if details := "; ".join(regressions(table).values()):
        count = table["regression"].sum()
        return f"{count} of {len(table)} ratios fell by more than {tolerance:.0%}: {details}."
    if table["judged"].any():
        return f"No regression: {table['judged'].sum()} of {len(table)} ratios were judged."
    return (
        f"{len(table)} ratios were measured and none was judged, because fewer than {MIN_EARLIER}"
        " earlier runs were measured under the same conditions."
    )


def regression_tag(table: pd.DataFrame) -> str:
    """The tag `regressions` of the MLflow run: names of ratios, "none" or "not judged"."""
    return ", ".join(regressions(table)) or ("none" if table["judged"].any() else "not judged")
