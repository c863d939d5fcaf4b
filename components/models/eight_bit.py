"""bitsandbytes, the optional library of 8-bit weights (LLM.int8(), Dettmers et al. 2022) and of an AdamW with 8-bit moments (Dettmers et al. 2021).

Whoever asks for 8 bits gets them, or a sentence that says why not; nothing falls back to more bits. bitsandbytes 0.50 has
both for CUDA and for the CPU (where int8 products are fast only with AVX-512). Both were run on the CPU with this project;
no GPU was at hand when this was written.
"""

from __future__ import annotations

from types import ModuleType

from components.config import Explained

PLAIN = {"8bit": "none", "adamw_8bit": "adamw"}
"""What a recipe may ask for, and what it then says without bitsandbytes."""


class EightBitError(Explained, RuntimeError):
    """8 bits that cannot be had here."""


def library(key: str, value: str) -> ModuleType:
    """The module bitsandbytes.

    Args:
        key, value: what of the recipe asks for it, for the error.

    Raises:
        EightBitError: it cannot be imported.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise EightBitError(f"{key} is '{value}', but the library bitsandbytes cannot be imported here ({error}): pip install 'fed-rlhf[8bit]', or set {key} to '{PLAIN[value]}'.") from None
    return bitsandbytes


def check(key: str, value: str, device: str) -> None:
    """Make sure that a device can do what is asked for, by a product of a small layer, or a step over a small tensor. Other values pass.

    Args:
        key, value: of the recipe, e.g. 'federation.optimizer.name' and 'adamw_8bit'.
        device: e.g. 'cpu' or 'cuda:0'.

    Raises:
        EightBitError: the library cannot be imported, or not used on the device.
    """
    if value not in PLAIN:
        return
    import torch

    bitsandbytes = library(key, value)
    try:
        with torch.random.fork_rng(devices=[]):  # a new layer draws its first values
            if value == "8bit":
                layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to(device)
                done = layer(torch.ones(1, 64, dtype=torch.float16, device=device))
            else:
                done = torch.nn.Parameter(torch.ones(64, 64, device=device))
                done.grad = torch.ones_like(done)
                bitsandbytes.optim.AdamW8bit([done]).step()
        finite = bool(done.isfinite().all())
    except Exception as error:  # without its binary for a device it raises what comes first: RuntimeError, NameError, AttributeError, ...
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EightBitError(f"{key} is '{value}', which bitsandbytes {bitsandbytes.__version__} cannot do on {device} ({reason}): take another device (runtime.devices), or set {key} to '{PLAIN[value]}'.") from None
    if not finite:
        raise EightBitError(f"{key} is '{value}', but bitsandbytes {bitsandbytes.__version__} gives values that are not finite on {device}: set {key} to '{PLAIN[value]}'.")
