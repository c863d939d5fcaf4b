"""How fast a device trains a selector: tokens/s, model FLOP utilisation, peak memory, and what the time goes to.

    python -m flows.throughput [--shape qwen2-0.5b gemma-2b] [--rows 32] [--length 512] [--device cuda:0]

The backbone has the shape of the named one and random weights, since speed does not depend on them. A step is the
project's own: the resident PEFT model, two rows of the head, cross-entropy, AdamW over the fp32 adapter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from components.environment import quiet

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gemma-2b": {
        "model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "tie_word_embeddings": True},
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "tie_word_embeddings": True},
}
"""Published shapes of Qwen/Qwen2-0.5B, google/gemma-2b and HuggingFaceTB/SmolLM2-135M."""
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s as the makers state them, by what the device's name contains."""


def main(argv: list[str] | None = None) -> int:
    """Print one table for each shape, and a line of JSON with the same figures."""
    parser = argparse.ArgumentParser(prog="python -m flows.throughput", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["qwen2-0.5b", "gemma-2b"])
    parser.add_argument("--rows", type=int, default=32, help="rows of a step (default: 32, the batch size of FedBiscuit's tables 3 and 4)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row (default: 512)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default: 20), after three that are not")
    parser.add_argument("--layers", type=int, help="first layers only, to try it on a small machine")
    parser.add_argument("--device", help="default: the first CUDA device, else the CPU")
    parser.add_argument("--peak-tflops", type=float, help="the device's peak, where its name is not known")
    given = parser.parse_args(argv)
    if min(given.rows, given.length, given.steps) < 1:
        print("error: --rows, --length and --steps are at least 1", file=sys.stderr)
        return 2
    quiet()
    for shape in given.shape:
        measured = measure(shape, given.rows, given.length, given.steps, given.device, given.layers, given.peak_tflops)
        print(table(measured))
        print(json.dumps(measured))
    return 0


def random_model(shape: str, device: str, layers: int | None = None) -> PreTrainedModel:
    """A frozen model of a published shape with random weights, in the dtype that the project uses on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from components.models.backbone import choose_dtype

    values = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = AutoConfig.for_model(**values, max_position_embeddings=8192)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=choose_dtype("auto", device))
    return model.requires_grad_(False).eval()


def step_flops(config: PretrainedConfig, linear: int, adapter: int, rows: int, length: int) -> float:
    """FLOPs that a step needs, recomputation not counted: the basis of the model FLOP utilisation (Chowdhery et al. 2022, appendix B).

    A frozen matrix takes 2 FLOPs a weight and token forwards and 2 backwards, because its own gradient is not needed; an
    adapter's takes 6. Attention takes 4 x width x length forwards and twice that backwards for each token and layer, the
    masked half counted, as is the custom. The two rows of the head are left out.

    Args:
        config: of the backbone.
        linear: weights of its linear layers, embeddings and head not counted.
        adapter: trained weights.
        rows, length: of a step.
    """
    tokens = rows * length
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return tokens * (4.0 * linear + 6.0 * adapter + 12.0 * config.num_hidden_layers * width * length)


def measure(shape: str, rows: int, length: int, steps: int, device: str | None = None, layers: int | None = None, peak_tflops: float | None = None) -> dict[str, Any]:
    """Train a selector of a shape for some steps, and say what a step takes.

    Returns:
        median seconds a step, tokens/s, FLOPs, FLOP/s, utilisation (None where the peak is not known), peak memory (MB; on
        the CPU that of the process), and the three kernels with the largest time of their own, as shares of all.
    """
    import resource

    import torch
    import transformers
    from torch.profiler import ProfilerActivity, profile

    from components.config import LoraConfig, OptimizerConfig
    from components.learning.local import build_optimizer
    from components.learning.objectives import selector_loss
    from components.models.adapters import AdapterSlot, attach
    from components.models.backbone import choose_device
    from components.models.selector import choice_logits

    device = device or choose_device()[0]
    on_cuda = device.startswith("cuda")
    base = random_model(shape, device, layers)
    linear = sum(m.weight.numel() for name, m in base.named_modules() if isinstance(m, torch.nn.Linear) and m is not base.get_output_embeddings())
    model = attach(base, LoraConfig(dropout=0.0))
    slot = AdapterSlot(model)
    slot.load(slot.initial_adapter(0))
    model.to(device).train()
    adapter = sum(p.numel() for p in slot.parameters)
    optimizer = build_optimizer(slot.parameters, OptimizerConfig())
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(0, base.config.vocab_size, (rows, length), generator=numbers).to(device)
    last, labels = torch.full((rows,), length - 1, device=device), torch.arange(rows, device=device) % 2

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        selector_loss(choice_logits(base, ids, last, (0, 1)), labels).mean().backward()
        torch.nn.utils.clip_grad_norm_(slot.parameters, 1.0)
        optimizer.step()

    def timed() -> float:
        start = time.perf_counter()
        step()
        if on_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(3):
        timed()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median([timed() for _ in range(steps)])
    memory = torch.cuda.max_memory_allocated(device) / 2**20 if on_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as recorded:
        timed()
    name = torch.cuda.get_device_name(device) if on_cuda else "CPU"
    peak = peak_tflops * 1e12 if peak_tflops else next((flops for known, flops in PEAKS.items() if known in name), None)
    flops = step_flops(base.config, linear, adapter, rows, length)
    return {
        "shape": shape, "layers": base.config.num_hidden_layers, "rows": rows, "length": length, "device": name, "dtype": str(base.dtype).removeprefix("torch."),
        "threads": None if on_cuda else torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
        "seconds": seconds, "tokens_per_s": rows * length / seconds, "flops": flops, "flops_per_s": flops / seconds,
        "utilisation": flops / seconds / peak if peak else None, "peak_mb": memory, "costs": largest_costs(recorded, on_cuda)}


def largest_costs(recorded: torch.profiler.profile, on_cuda: bool, count: int = 3) -> dict[str, float]:
    """The operations (on a GPU: kernels) with the largest time of their own, as shares of the time of all."""
    key = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    events = recorded.key_averages()
    if on_cuda:
        from torch.autograd import DeviceType

        events = [event for event in events if event.device_type == DeviceType.CUDA]
    total = sum(getattr(event, key) for event in events)
    largest = sorted(events, key=lambda event: getattr(event, key), reverse=True)[:count]
    return {event.key: getattr(event, key) / total for event in largest}


def table(measured: dict[str, Any]) -> str:
    """The figures as text."""
    where = f"{measured['device']}, {measured['dtype']}, torch {measured['torch']}, transformers {measured['transformers']}"
    return "\n".join([
        f"\nSelector training at the shape of {measured['shape']} ({measured['layers']} layers), {measured['rows']} rows of {measured['length']} tokens; {where}",
        f"  {measured['seconds']:.4f} s a step, {measured['tokens_per_s']:.0f} tokens/s, {measured['flops_per_s'] / 1e12:.2f} TFLOP/s, model FLOP utilisation "
        + (f"{measured['utilisation']:.1%}" if measured["utilisation"] is not None else "not known (give --peak-tflops)"),
        f"  peak memory {measured['peak_mb']:.0f} MB",
        *(f"  {share:6.1%}  {name}" for name, share in measured["costs"].items())])


if __name__ == "__main__":
    raise SystemExit(main())
