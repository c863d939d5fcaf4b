"""Tasks that get the backbones and the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.config import Recipe
from components.data.records import DataError
from tasks.runs import file_hash, write_json
from tasks.uncached import task


@task(task_run_name="fetch backbone {name}")
def fetch_backbone(name: str) -> str:
    """Make sure that a backbone is there; gives what from_pretrained takes for it."""
    from components.models import backbone

    return backbone.fetch_backbone(name)


@task()
def note_backbones(backbones: dict[str, str], path: Path) -> None:
    """Write down which backbones a recipe uses: the hashes of a local folder's files; of a hub id only the name."""
    write_json(path, {
        name: {file.name: file_hash(file) for file in sorted(Path(source).iterdir()) if file.is_file()} if Path(source).is_dir() else {}
        for name, source in backbones.items()})


@task()
def prepare_data(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Load, split, partition and validate the recipe's data into a folder; gives the report."""
    from components.data.prepare import prepare
    from components.data.records import read_rows
    from components.evaluation.alpaca import check_alpaca_eval, check_prompts
    from components.evaluation.judges import check_judge

    if recipe.evaluation.alpaca_eval:
        check_alpaca_eval(recipe.evaluation.alpaca_eval)
    report = prepare(recipe.data, recipe.seed, folder)
    check_judge(recipe.evaluation.judge, folder)
    if recipe.evaluation.alpaca_eval:
        check_prompts(recipe.evaluation.alpaca_eval, read_rows(folder / "prompts.parquet", split="test")["prompt"])
    prompts, splits = report["rows"]["prompts"], report["splits"]
    for count, what, elsewhere in (
            (prompts.get("align", 0), "server prompts to align on", ", or take them from elsewhere (data.align_prompts)"),
            (prompts.get("test", 0), "held-out prompts to evaluate on", ", or take them from elsewhere (data.test_prompts)"),
            (splits.get("test", 0), "held-out pairs to measure the selector on", ""),
            (splits.get("train", 0), "pairs to train on", "")):
        if not count:
            raise DataError(f"source {recipe.data.source} leaves no {what}: see data.test, data.validation and data.options (e.g. align_share){elsewhere}.")
    return report
