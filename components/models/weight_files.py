"""What the files of a model hold, and whether a loaded model has it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.hub import find_cached
from components.io import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def first_not_finite(model: PreTrainedModel) -> str | None:
    """The first weight with a NaN or an infinity in its first or last row; None if there is none.

    Rows of an embedding that is not the head too are not looked at: they may be of tokens that no text has.
    """
    untyped: Any = model
    embedding, head = untyped.get_input_embeddings(), untyped.get_output_embeddings()
    is_tied = getattr(head, "weight", None) is embedding.weight
    for name, weight in model.named_parameters():
        if weight.is_meta or not weight.dtype.is_floating_point or not weight.numel() or not weight.dim():
            continue
        if (is_tied or weight is not embedding.weight) and not weight.detach()[[0, -1]].isfinite().all():
            return name
    return None


def first_other_weight(model: PreTrainedModel, source: str, revision: str | None) -> str | None:
    """The first weight whose first or last row is not that of the model's files; None if there is none.

    transformers may report that it has loaded all weights, and have initialized some of them again. Two
    rows of each weight are read. Weights that it converts while it loads them are not compared: quantized
    ones, those of families whose names or shapes differ from their files, and those on the meta device.
    """
    from safetensors import safe_open
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    mapping: Any = get_checkpoint_conversion_mapping
    if mapping(model.config.model_type) or hasattr(model, "hf_quantizer"):
        return None
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    prefix = f"{model.base_model_prefix}."
    for path in _weight_files(model, source, revision):
        with safe_open(path, "pt") as file:
            name: str
            for name in file.keys():  # noqa: SIM118 -- it is no mapping
                names = (name, f"{prefix}{name}", name.removeprefix(prefix))
                weight = next((weights[known] for known in names if known in weights), None)
                if weight is not None and not _equal_ends(weight, file.get_slice(name)):
                    return name
    return None


def _equal_ends(weight: torch.Tensor, stored: Any) -> bool:
    shape = tuple(stored.get_shape())
    is_compared = shape and all(shape) and shape == weight.shape
    if weight.is_meta or not weight.dtype.is_floating_point or not is_compared:
        return True
    for end in (slice(0, 1), slice(shape[0] - 1, shape[0])):
        own = weight.detach()[end].cpu()
        if not own.nan_to_num().equal(stored[end].to(own.dtype).nan_to_num()):
            return False
    return True


def _weight_files(model: PreTrainedModel, source: str, revision: str | None) -> list[Path]:
    """The files that transformers reads of a local folder, or of the hub's cache: a whole one first."""
    folder = Path(source)
    if not folder.is_dir():
        cached = find_cached(source, "config.json", revision)
        if cached is None:
            return []
        folder = cached.parent
    named = getattr(model.config, "transformers_weights", None)
    for path in (folder / name for name in (named, WHOLE, INDEX) if name is not None):
        if path.is_file() and path.name.endswith(".index.json"):
            return [folder / name for name in sorted(set(read_json(path)["weight_map"].values()))]
        if path.is_file():
            return [path]
    return []
