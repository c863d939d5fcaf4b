"""Logging of the alignment, and registration of the aligned policy."""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import components
import tasks.policy_model
from components.config import BackboneConfig, Recipe
from components.data.records import read_rows
from components.data.templates import with_text
from components.models.policy import has_client_adapters
from components.results import AlignmentResult
from tasks.tracking.client import RunLog, mlflow_client, tracking_uri
from tasks.uncached import task

SHOWN_PAIRS = 100
"""Labeled pairs of the logged table."""
PAIR_COLUMNS = ("prompt_id", "prompt", "chosen", "rejected", "label", "margin")
MAIN = ("loss", "rewards/margins")
"""Curves of DPO that are at the parent run and not at the phase."""
REQUIREMENTS = (
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "pydantic",
    "pyyaml",
    "gguf",
    "accelerate",
    "numpy",
)


@task()
def log_alignment(run_id: str, parent: str, folder: Path, result: AlignmentResult) -> None:
    """Log the curves of DPO, the KL to the reference, the labeled pairs, and the checkpoints' adapters.

    The loss and the margin of DPO are at the parent run.
    """
    log = RunLog.open(run_id)
    log.set_tags({"dpo.reference": result.reference, "model_uri": result.model_uri})
    main: list[tuple[str, float, int]] = []
    other: list[tuple[str, float, int]] = []
    for entry in result.history:
        for name, value in entry.items():
            if name != "step":
                (main if name in MAIN else other).append((f"dpo/{name}", value, int(entry["step"])))
    RunLog.open(parent).log_points(main)
    log.log_points(other)
    log.log_metrics({f"align/{name}": value for name, value in result.metrics.items()}, 0)
    for group, values in (("sampling", result.sampling), ("labelling", result.labelling)):
        if values is not None:
            log.log_metrics({f"{group}/{name}": value for name, value in values.model_dump().items()}, 0)
    for path in [*result.checkpoints, result.policy.folder]:
        log.log_folder(folder / path, f"adapters/{Path(path).name}")
    if (folder / "pairs.parquet").is_file():
        rows = list(read_rows(folder / "pairs.parquet").to_list())[:SHOWN_PAIRS]
        columns = {key: [row[key] for row in rows] for key in PAIR_COLUMNS}
        log.log_table(columns, "labelled_pairs.json")


@dataclass(frozen=True)
class RegisteredModel:
    """A version of a registered model.

    Attributes:
        uri: its URI, for `mlflow.pyfunc.load_model`.
        version: its version.
    """

    uri: str
    version: str


@task()
def register_policy(run_id: str, recipe: Recipe, adapter: Path) -> RegisteredModel:
    """Register the aligned policy as a model version that `mlflow.pyfunc.load_model` loads.

    The model holds the adapter, the recipe's policy section and this project's components; the
    backbone is fetched by its name when the model is loaded.
    """
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.models import ModelSignature
    from mlflow.types.schema import ColSpec, Schema

    inputs = ["prompt", "client_id"] if has_client_adapters(adapter) else ["prompt"]
    mlflow.set_tracking_uri(tracking_uri())
    mlflow.set_registry_uri(tracking_uri())
    with tempfile.TemporaryDirectory() as scratch, mlflow.start_run(run_id=run_id):
        policy = Path(scratch) / "policy.json"
        section = recipe.policy.model_dump(mode="json")
        section["backbone"]["name"] = recipe.policy.backbone.location
        section["template"] = with_text(recipe.policy.template).dump()
        policy.write_text(json.dumps(section), encoding="utf-8")
        logged = mlflow.pyfunc.log_model(
            name="policy",
            python_model=str(Path(tasks.policy_model.__file__)),
            artifacts={"adapter": str(adapter), "policy": str(policy)},
            code_paths=[str(Path(components.__file__).parent)],
            pip_requirements=_requirements(recipe.policy.backbone),
            signature=ModelSignature(
                inputs=Schema([ColSpec("string", name) for name in inputs]),
                outputs=Schema([ColSpec("string", "completion")]),
            ),
        )
    client = mlflow_client()
    name = recipe.tracking.registered_model
    with contextlib.suppress(MlflowException):  # the model exists already
        client.create_registered_model(name)
    registered = client.create_model_version(
        name, logged.model_uri, run_id=run_id, model_id=logged.model_id, tags={"recipe": recipe.name}
    )
    client.set_registered_model_alias(name, "latest-aligned", registered.version)
    client.update_run(run_id, status="RUNNING")  # leaving start_run() has ended it
    return RegisteredModel(f"models:/{name}/{registered.version}", str(registered.version))


def _requirements(backbone: BackboneConfig) -> list[str]:
    names = [*REQUIREMENTS]
    if backbone.quantization == "8bit":
        names.append("bitsandbytes")
    return [f"{name}=={version(name).split('+')[0]}" for name in names]
