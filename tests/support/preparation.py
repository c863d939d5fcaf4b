"""Reports of a preparation of data, with the fields that a test is about."""

from __future__ import annotations

from typing import Any

from components.data.data_report import PreparationReport

PARTITION = {"samples": 32, "clients": 4, "max": 12, "min": 6, "std": 2.24}
ROWS = {"source": 32, "pairs": 32, "left_out": {}, "judge": 10, "prompts": {"align": 3}, "dropped": {}}


def preparation_report(**fields: Any) -> PreparationReport:
    """A report of 32 pairs of four clients, with other values in the named fields."""
    values = {
        "rows": ROWS,
        "splits": {"train": 20},
        "partition": PARTITION,
        "partition_train": PARTITION | {"samples": 20},
        "clients_without_train": [],
        "expectations": {"success": True, "expectations": []},
    }
    return PreparationReport.model_validate(values | fields)
