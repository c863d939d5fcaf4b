"""The speed of selector training on a device: tokens/s, model FLOP utilization, peak memory, costs.

    python -m perf throughput [qwen2-0.5b gemma-2b] [--rows 32] [--length 512] [--device cuda:0]

The backbone has a published shape and random weights, because speed does not depend on their values.
A step is the project's own: the resident PEFT model, two rows of the head, cross-entropy, AdamW over
the fp32 adapter.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from components.config import UserError
from perf.harness import show

if TYPE_CHECKING:
    from torch.profiler import profile
    from transformers import PretrainedConfig, PreTrainedModel

    from components.models.adapters import AdapterSlot

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "gemma-2b": {
        "model_type": "gemma",
        "vocab_size": 256000,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}
"""Published shapes of Qwen/Qwen2-0.5B, google/gemma-2b and HuggingFaceTB/SmolLM2-135M."""
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s as stated by the vendors, by a part of the device's name."""
CHOICES = (0, 1)
"""Vocabulary ids of the two answers; the speed does not depend on them."""
WARM_UP = 3
"""Steps that are not timed."""
LISTED_COSTS = 3


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
        show(f"Selector training at the shape of {name}", table[table[""] != "costs"])
        show("Largest costs", pd.DataFrame(figures["costs"].items(), columns=["operation", "share of time"]))
        print(json.dumps(figures))


def random_model(shape: str, device: str, layers: int | None = None) -> PreTrainedModel:
    """A frozen model of a published shape with random weights, in the project's dtype on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from components.models.backbone import choose_dtype

    values = dict(SHAPES[shape])
    if layers is not None:
        values["num_hidden_layers"] = layers
    config = AutoConfig.for_model(**values, max_position_embeddings=8192)
    auto_model: Any = AutoModelForCausalLM
    with torch.device(device):
        model = auto_model.from_config(config, dtype=choose_dtype("auto", device))
    return cast("PreTrainedModel", model.requires_grad_(False).eval())


def step_flops(config: PretrainedConfig, linear: int, adapter: int, step: Step) -> float:
    """FLOPs that a step needs, without recomputation (Chowdhery et al. 2022, appendix B).

    They are the basis of the model FLOP utilization. A frozen matrix takes 2 FLOPs per weight and token
    in the forward pass and 2 in the backward pass, because its own gradient is not needed; an adapter
    takes 6. Attention takes 4 x width x length in the forward pass and twice that in the backward pass
    for each token and layer; as is the custom, the masked half is counted. The two rows of the head
    are left out.

    Args:
        config: of the backbone.
        linear: weights of its linear layers without embeddings and head.
        adapter: trained weights.
        step: its rows and length.
    """
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 12.0 * config.num_hidden_layers * heads * head_dim * step.length
    return float(step.rows * step.length * (4.0 * linear + 6.0 * adapter + attention))


def count_linear_weights(model: PreTrainedModel) -> int:
    """Weights of the linear layers of a backbone without its head."""
    import torch

    from components.models.head import output_embeddings

    head = output_embeddings(model)
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    return sum(layer.weight.numel() for layer in layers)


class TrainingStep:
    """A step of selector training on random rows.

    Attributes:
        base: the frozen backbone.
        slot: the trained adapter.
        linear: weights of the backbone's linear layers.
    """

    def __init__(self, step: Step, device: str) -> None:
        import torch

        from components.config import LoraConfig, OptimizerConfig
        from components.learning.loop import build_optimizer
        from components.models.adapters import AdapterSlot, attach_lora

        self.base = random_model(step.shape, device, step.layers)
        self.linear = count_linear_weights(self.base)
        model = attach_lora(self.base, LoraConfig(dropout=0.0))
        self.slot: AdapterSlot = AdapterSlot(model)
        self.slot.load(self.slot.initial_adapter(0))
        model.to(device).train()
        self._device = device
        self._optimizer = build_optimizer(self.slot.parameters, OptimizerConfig())
        numbers = torch.Generator().manual_seed(0)
        vocabulary = int(self.base.config.vocab_size)
        self._ids = torch.randint(0, vocabulary, (step.rows, step.length), generator=numbers).to(device)
        self._last = torch.full((step.rows,), step.length - 1, device=device)
        self._labels = torch.arange(step.rows, device=device) % 2

    @cached_property
    def on_cuda(self) -> bool:
        """Whether the step runs on a GPU."""
        return self._device.startswith("cuda")

    def run(self) -> float:
        """Train one step; gives its seconds."""
        import torch

        from components.learning.objectives import selector_loss
        from components.models.selector_model import choice_logits

        start = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        logits = choice_logits(self.base, self._ids, self._last, CHOICES)
        torch.autograd.backward(selector_loss(logits, self._labels).mean())
        torch.nn.utils.clip_grad_norm_(self.slot.parameters, 1.0)
        self._optimizer.step()
        if self.on_cuda:
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start

    def profile(self) -> dict[str, float]:
        """The most expensive operations of a step, see largest_costs."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.on_cuda:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded:
            self.run()
        return largest_costs(recorded, self.on_cuda)

    def reset_peak_memory(self) -> None:
        """Measure the peak of a GPU's memory from now on."""
        import torch

        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_mb(self) -> float:
        """Peak memory (MB) of the GPU, or of this process."""
        import torch

        if self.on_cuda:
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def device_name(self) -> str:
        """Name of the device."""
        import torch

        return torch.cuda.get_device_name(self._device) if self.on_cuda else "CPU"


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
        its conditions, seconds, rates, peak memory (on the CPU that of the process), and largest costs.
        The utilization is the share of the device's peak, None where that is not known.
    """
    import torch
    import transformers

    from components.models.backbone import choose_devices

    training = TrainingStep(step, device or choose_devices()[0])
    for _ in range(WARM_UP):
        training.run()
    training.reset_peak_memory()
    seconds = statistics.median([training.run() for _ in range(steps)])
    memory = training.peak_mb()
    costs = training.profile()
    config = training.base.config
    adapter = sum(parameter.numel() for parameter in training.slot.parameters)
    flops = step_flops(config, training.linear, adapter, step)
    name = training.device_name()
    peak = peak_tflops * 1e12 if peak_tflops else peak_flops(name)
    return {
        "shape": step.shape,
        "layers": int(config.num_hidden_layers),
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
        "costs": costs,
    }


def peak_flops(device_name: str) -> float | None:
    """Peak of a device by its name; None where it is not known."""
    return next((flops for part, flops in PEAKS.items() if part in device_name), None)


def largest_costs(recorded: profile, on_cuda: bool) -> dict[str, float]:
    """The operations (on a GPU: kernels) with the largest time of their own, as shares of all time."""
    key = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    events: list[Any] = list(recorded.key_averages())
    if on_cuda:
        events = [event for event in events if event.device_type.name == "CUDA"]
    times = {event.key: float(getattr(event, key)) for event in events}
    total = sum(times.values())
    largest = sorted(times, key=lambda name: times[name], reverse=True)[:LISTED_COSTS]
    return {name: times[name] / total for name in largest}
