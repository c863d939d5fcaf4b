"""Published shapes of the models that recipes and benchmarks of paper scale name, and a hub that has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.config import BackboneConfig
from components.models.backbone import read_model_config
from perf.throughput import read_configs

SHAPES: dict[str, dict[str, Any]] = read_configs()


def hub_with_shapes(folder: Path) -> Callable[[BackboneConfig], dict[str, Any]]:
    """A read_model_config for which the hub has the config.json of these models, in a folder."""

    def read(backbone: BackboneConfig) -> dict[str, Any]:
        if backbone.name not in SHAPES:
            return read_model_config(backbone)
        model = folder / backbone.name
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(SHAPES[backbone.name]))
        return read_model_config(backbone.model_copy(update={"name": str(model)}))

    return read
