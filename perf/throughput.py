"""The speed of selector training on a device: tokens/s, model FLOP utilization, peak memory.

    python -m perf throughput [qwen2-0.5b gemma-2b] [--rows 32] [--length 512] [--device cuda:0]

The backbone has a published shape and random weights, because speed does not depend on their values.
A step is the project's own: the resident PEFT model, two rows of the head, cross-entropy, AdamW over
the fp32 adapter.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import yaml

from components.config import BackboneConfig, LoraConfig, UserError
from components.models.memory import ModelShape
from perf.harness import peak_mb, show

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from components.models.adapters import AdapterSlot

MODELS = {
    "qwen2-0.5b": "Qwen/Qwen2-0.5B",
    "gemma-2b": "google/gemma-2b",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
}


def read_configs() -> dict[str, dict[str, Any]]:
    """The published config.json of models, by their names on the hub."""
    path = Path(__file__).with_name("paper_backbones.yaml")
    configs: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return configs


SHAPES = {name: read_configs()[model] for name, model in MODELS.items()}
"""The published config.json of these models."""
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s as stated by the vendors, by a part of the device's name."""
CHOICES = (0, 1)
"""Vocabulary ids of the two answers; the speed does not depend on them."""
LORA = LoraConfig(dropout=0.0)
WARM_UP = 3
"""Steps that are not timed."""


@dataclass(frozen=True)
class Step:
    """What is measured."""

    shape: str  # key of SHAPES
    rows: int
    length: int  # tokens of a row
    layers: int | None = None  # number of first layers; None takes all


def show_throughput(
    shape: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(SHAPES)}; by default 2.")] = None,
    rows: Annotated[
        int,
        typer.Option(min=1, help="Rows of a step; the default is of FedBiscuit's tables 3 and 4."),
    ] = 32,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help=f"Timed steps, after {WARM_UP} that are not.")] = 20,
    layers: Annotated[int | None, typer.Option(min=1, help="First layers only, for a small machine.")] = None,
    device: Annotated[str | None, typer.Option(help="By default the first GPU, else the CPU.")] = None,
    peak_tflops: Annotated[float | None, typer.Option(help="Of a device whose name is not known.")] = None,
) -> None:
    """Speed of selector training on a device, as a table and a line of JSON for each shape."""
    import pandas as pd

    for name in shape or ("qwen2-0.5b", "gemma-2b"):
        if name not in SHAPES:
            raise UserError(f"shape '{name}' is not known; choose from {', '.join(SHAPES)}.")
        figures = measure(Step(name, rows, length, layers), steps, device, peak_tflops)
        table = pd.DataFrame(figures.items(), columns=["", "value"])
        show(f"Selector training at the shape of {name}", table)
        print(json.dumps(figures))


def random_model(config: Mapping[str, Any], device: str) -> PreTrainedModel:
    """A frozen model of a config.json with random weights, in the project's dtype on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from components.models.backbone import choose_dtype

    auto_model: Any = AutoModelForCausalLM
    with torch.device(device):
        model = auto_model.from_config(
            AutoConfig.for_model(**config, max_position_embeddings=8192), dtype=choose_dtype("auto", device)
        )
    return cast("PreTrainedModel", model.requires_grad_(False).eval())


def step_flops(shape: ModelShape, lora: LoraConfig, step: Step) -> float:
    """FLOPs that a step needs, without recomputation (Chowdhery et al. 2022, appendix B).

    They are the basis of the model FLOP utilization. As is the custom, attention's masked half is
    counted. A frozen matrix takes 2 FLOPs per weight and token in the forward pass and 2 in the
    backward pass, because its own gradient is not needed; an adapter takes 6. The two rows of the head
    are left out.
    """
    attention = 12 * shape.layers * shape.heads * shape.head_dim * step.length
    per_token = 4 * shape.linear_values + 6 * shape.lora_values(lora) + attention
    return float(step.rows * step.length * per_token)


class TrainingStep:
    """A step of selector training on random rows."""

    def __init__(self, config: Mapping[str, Any], step: Step, device: str) -> None:
        import torch

        from components.config import OptimizerConfig
        from components.learning.loop import build_optimizer
        from components.models.adapters import AdapterSlot, attach_lora

        self.base = random_model(config, device)
        model = attach_lora(self.base, LORA)
        self.on_cuda = device.startswith("cuda")
        self._slot: AdapterSlot = AdapterSlot(model)
        self._slot.load(self._slot.initial_adapter(0))
        model.to(device).train()
        self._device = device
        self._optimizer = build_optimizer(self._slot.parameters, OptimizerConfig())
        numbers = torch.Generator().manual_seed(0)
        size = (step.rows, step.length)
        self._ids = torch.randint(0, config["vocab_size"], size, generator=numbers).to(device)
        self._last = torch.full((step.rows,), step.length - 1, device=device)
        self._labels = torch.arange(step.rows, device=device) % 2

    def run(self) -> float:
        """Train one step; gives its seconds."""
        import torch

        from components.learning.objectives import selector_loss
        from components.models.selector_model import choice_logits

        start = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        logits = choice_logits(self.base, self._ids, self._last, CHOICES)
        torch.autograd.backward(selector_loss(logits, self._labels).mean())
        torch.nn.utils.clip_grad_norm_(self._slot.parameters, 1.0)
        self._optimizer.step()
        if self.on_cuda:
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start


def measure(
    step: Step, steps: int, device: str | None = None, peak_tflops: float | None = None
) -> dict[str, Any]:
    """Train a selector for some steps, and measure a step.

    Args:
        step: the shape of the model and of the rows.
        steps: timed steps.
        device: None takes the first that a run would use.
        peak_tflops: the device's peak; None looks its name up in PEAKS.

    Returns:
        its conditions, seconds, rates, peak memory (on the CPU that of the process).
        The utilization is the share of the device's peak, None where that is not known.
    """
    import torch
    import transformers

    from components.models.backbone import choose_devices

    config = SHAPES[step.shape]
    if step.layers is not None:
        config = config | {"num_hidden_layers": step.layers}
    shape = ModelShape.from_config(config, BackboneConfig(name=step.shape))
    device = device or choose_devices()[0]
    training = TrainingStep(config, step, device)
    for _ in range(WARM_UP):
        training.run()
    if training.on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median([training.run() for _ in range(steps)])
    memory = peak_mb(device)
    flops = step_flops(shape, LORA, step)
    name = torch.cuda.get_device_name(device) if training.on_cuda else "CPU"
    peak = peak_tflops * 1e12 if peak_tflops else peak_flops(name)
    return {
        "shape": step.shape,
        "layers": shape.layers,
        "rows": step.rows,
        "length": step.length,
        "device": name,
        "dtype": str(training.base.dtype).removeprefix("torch."),
        "threads": None if training.on_cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": seconds,
        "tokens_per_s": step.rows * step.length / seconds,
        "flops": flops,
        "flops_per_s": flops / seconds,
        "utilization": flops / seconds / peak if peak else None,
        "peak_mb": memory,
    }


def peak_flops(device_name: str) -> float | None:
    """Peak of a device by its name; None where it is not known."""
    return next((flops for part, flops in PEAKS.items() if part in device_name), None)
