"""Logging of the phase prepare: the partition, the data's hashes, and Data Docs."""

from __future__ import annotations

from pathlib import Path

from components.data.report import PreparationReport
from components.io import file_hash
from tasks.tracking.client import RunLog
from tasks.uncached import task


@task()
def log_data(run_id: str, prepared: Path, report: PreparationReport) -> None:
    """Log the partition (counts, plot, Data Docs) and the hashes of the prepared files."""
    log = RunLog.open(run_id)
    for name in ("pairs.parquet", "prompts.parquet", "judge.parquet"):
        log.set_tags({f"data.sha256.{name}": file_hash(prepared / name)})
    for name in ("partition.png", "clients.json", "report.json"):
        log.log_file(prepared / name, "data")
    if (prepared / "docs").is_dir():
        log.log_folder(prepared / "docs", "data/docs")
    log.log_metrics(report.metrics(), 0)
