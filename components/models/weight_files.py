"""What the files of a model hold, and whether a loaded model has it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.io import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def hub_snapshot(name: str, revision: str | None) -> str:
    """The commit of the hub from which a model's files are read here; empty for a local folder.

    A revision such as `main` may name another commit on another day.
    """
    from huggingface_hub import try_to_load_from_cache

    if Path(name).is_dir() or name.count("/") > 1:
        return ""
    cached = try_to_load_from_cache(name, "config.json", revision=revision or "main")
    return Path(cached).parent.name if isinstance(cached, str) else ""


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
    for path in _weight_files(source, revision):
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


def _weight_files(source: str, revision: str | None) -> list[Path]:
    """The files of safetensors of a local folder, or of the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source)
    if not folder.is_dir():
        cached = try_to_load_from_cache(source, "config.json", revision=revision or "main")
        if not isinstance(cached, str):
            return []
        folder = Path(cached).parent
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else []
