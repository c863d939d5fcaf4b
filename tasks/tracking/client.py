"""The client of the tracking store, and how metrics, tables and plots are written with it."""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from components.config import Recipe, RecipeError, UserError
from components.data.records import pairs_digest
from components.io import file_hash
from components.names import file_name, mlflow_key
from components.paths import artifact_root, tracking_uri, without_credentials
from tasks.runs import Run, published_digest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment
    from plotly.graph_objects import Figure

BATCH = 1000
"""Metrics that MLflow takes in one call."""
MAIN = re.compile(
    r"(unseen/)?accuracy(_assigned)?/(mean|worst|best|domain/.*)|train/loss.*|server/(.*/)?server_step"
    r"|round/bytes_sent|dpo/(loss|rewards/margins)"
)
"""Names of the curves that people compare, which are at the parent run and not at the phase."""
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.note.content": (
        "Columns to begin with: the metrics after/accuracy/mean, aligned_vs_base/ties_half and"
        " aligned_vs_base/length_controlled, and the parameters federation.method and seed. A run without a"
        " parent is a run or a benchmark."
    ),
}
"""Tags of experiments that have no others. Without the kind, MLflow opens its pages for generative
applications, which are empty. The note is the description of the experiment."""


WRONG_CALL = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""Codes of MLflow where a call is wrong, and not the store."""

Point = tuple[str, Any, int]
"""Name, value and step of a metric."""
TableRow = dict[str, Any]
"""Values of a table by the names of its columns."""


class TrackingError(UserError):
    """The tracking store failed while a run logged to it, or was deleted from it."""


class explained_failures(ContextDecorator):
    """Raises a failure of the tracking store in a block, or a decorated function, as a TrackingError.

    Calls that MLflow refuses by their arguments are left as they are.
    """

    def __init__(self, next_step: str = "resume the run") -> None:
        self.next_step = next_step  # what to do once the store works

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Explain an error of the block."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, MlflowException | SQLAlchemyError):
            return
        if getattr(error, "error_code", "") in WRONG_CALL:
            return
        cause: BaseException = error
        while (earlier := cause.__cause__ or cause.__context__) is not None:
            cause = earlier
        first_line = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        needed = "its server answers" if is_server() else "the file is there, and can be written"
        advice = f"see that {needed}, and {self.next_step}"
        if "schema" in first_line:
            advice = f"copy it, change it by `mlflow db upgrade`, and {self.next_step}"
        raise TrackingError(
            f"MLflow's store {without_credentials(tracking_uri())} failed ({first_line}). What the run has"
            f" committed is kept: {advice}."
        ) from error


def mlflow_client() -> MlflowClient:
    """A client of the tracking store, whose registry is in the same place."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri(), registry_uri=tracking_uri())


def find_or_create_experiment(client: MlflowClient, name: str) -> str:
    """Id of an experiment, which is created where it is missing.

    Raises:
        RecipeError: the experiment is deleted, or its artifacts are at another place, since the project was
            moved or copied.
    """
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        _check_experiment(experiment)
        for key, value in EXPERIMENT_TAGS.items():
            if key not in experiment.tags:
                client.set_experiment_tag(experiment.experiment_id, key, value)
        return str(experiment.experiment_id)
    location = None if is_server() else artifact_folder(name).as_uri()
    try:
        return client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS)
    except MlflowException:  # another run has created it in the meantime
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return str(experiment.experiment_id)


def is_server() -> bool:
    """Whether the store is a tracking server, which chooses where artifacts are."""
    return tracking_uri().startswith("http")


def artifact_folder(experiment: str) -> Path:
    """Folder of the artifacts of an experiment, without a tracking server."""
    return artifact_root(tracking_uri()) / file_name(experiment)


def _check_experiment(experiment: Experiment) -> None:
    command = f"MLFLOW_TRACKING_URI={without_credentials(tracking_uri())} mlflow experiments"
    named = f"the experiment '{experiment.name}' of MLflow"
    if experiment.lifecycle_stage == "deleted":
        raise RecipeError(
            f"{named} is deleted: restore it with `{command} restore -x {experiment.experiment_id}`, or name"
            " another one as tracking.experiment."
        )
    folder = artifact_folder(experiment.name)
    stored = Path(unquote(urlsplit(experiment.artifact_location).path))
    is_folder = experiment.artifact_location.startswith("file:")
    is_of_project = is_folder and stored.parts[-2:] == folder.parts[-2:]
    if not is_server() and is_of_project and stored.resolve() != folder.resolve():
        raise RecipeError(
            f"{named} keeps its artifacts in {experiment.artifact_location}, but those of this project are in"
            f" {folder}, since the project was moved or copied. Rename the experiment, so that a new one is"
            f" made, with `{command} rename -x {experiment.experiment_id} -n NAME`, or run the project where"
            " it was."
        )


def data_digest(run: Run, recipe: Recipe, table: str) -> str:
    """Digest of a table of a run's prepared folder, as long as MLflow allows."""
    if table == "pairs":
        return published_digest(run, recipe, pairs_digest(run.prepared))[:36]
    return file_hash(run.prepared / f"{table}.parquet")[:36]


@dataclass(frozen=True)
class RunLog:
    """Writes to one MLflow run; it is the sink of methods' diagnostics."""

    client: MlflowClient
    run_id: str

    @classmethod
    def open(cls, run_id: str) -> RunLog:
        """A log of a run in the tracking store."""
        return cls(mlflow_client(), run_id)

    def log_metrics(self, metrics: Mapping[str, float], step: int, **of: str) -> None:
        """Log numbers at a step; see log_points."""
        self.log_points(((name, value, step) for name, value in metrics.items()), **of)

    def log_points(self, points: Iterable[Point], **of: str) -> None:
        """Log (name, value, step) in batches; values that are no finite numbers are skipped.

        Args:
            points: the numbers.
            of: what they measure: model_id of a logged model, dataset_name and dataset_digest.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(mlflow_key(name), float(value), now, step, **of)
            for name, value, step in points
            if isinstance(value, int | float) and math.isfinite(value)
        ]
        for start in range(0, len(metrics), BATCH):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + BATCH])

    def log_json(self, content: Any, path: str) -> None:
        """Log a JSON document as an artifact."""
        self.client.log_dict(self.run_id, content, path)

    def log_charts(self, figures: Sequence[Figure], path: str) -> None:
        """Log charts as an artifact, one HTML page that needs no network."""
        from components.evaluation.charts import write_charts

        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / Path(path).name
            write_charts(figures, file)
            self.log_file(file, str(Path(path).parent))

    def log_file(self, file: Path, folder: str | None = None) -> None:
        """Log a file as an artifact."""
        self.client.log_artifact(self.run_id, str(file), folder)

    def log_folder(self, source: Path, folder: str) -> None:
        """Log the files of a folder as artifacts."""
        self.client.log_artifacts(self.run_id, str(source), folder)

    def log_table(self, rows: Sequence[TableRow], file: str) -> None:
        """Log a table for the MLflow UI; a table with this name stays, as MLflow would append rows."""
        import pandas as pd

        if file not in {info.path for info in self.client.list_artifacts(self.run_id)}:
            self.client.log_table(self.run_id, pd.DataFrame(rows), file)

    def describe(self, text: str) -> None:
        """Set the description of the run, as markdown."""
        self.client.set_tag(self.run_id, "mlflow.note.content", text)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        for key, value in tags.items():
            self.client.set_tag(self.run_id, key, value)


def log_curves(run_id: str, parent: str, points: Iterable[Point], **of: str) -> None:
    """Log points: the main curves at the parent run, all others at the phase's; see log_points."""
    curves: dict[str, list[Point]] = {parent: [], run_id: []}
    for point in points:
        curves[parent if MAIN.fullmatch(point[0]) else run_id].append(point)
    for target, own in curves.items():
        RunLog.open(target).log_points(own, **of)
