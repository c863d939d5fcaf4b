"""Logging of the phase prepare: the data sets, the partition, and Data Docs."""

from __future__ import annotations

from pathlib import Path

from components.config import DataConfig
from components.data.report import PreparationReport
from tasks.tracking.client import LoggedData, RunLog, data_digest
from tasks.uncached import task


@task()
def log_data(run_id: str, parent: str, prepared: Path, data: DataConfig, report: PreparationReport) -> None:
    """Log the prepared files as data sets of the parent run, and the partition at the phase's run."""
    RunLog.open(parent).log_data(
        [
            LoggedData(
                name,
                data_digest(prepared / f"{name}.parquet"),
                data.source,
                str(data.path.name) if data.path is not None else data.source,
                rows,
                context,
            )
            for name, rows, context in (
                ("pairs", report.rows.pairs, "training"),
                ("prompts", sum(report.rows.prompts.values()), "evaluation"),
                ("judge", report.rows.judge, "judge"),
            )
        ]
    )
    log = RunLog.open(run_id)
    for name in ("clients.json", "report.json"):
        log.log_file(prepared / name, "data")
    if (prepared / "docs").is_dir():
        log.log_folder(prepared / "docs", "data/docs")
    log.log_metrics(report.metrics(), 0)
