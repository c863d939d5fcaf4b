"""bitsandbytes, the optional library of 8-bit weights and of an AdamW with 8-bit moments.

The weights are LLM.int8() (Dettmers et al. 2022), the optimizer is that of Dettmers et al. 2021. A
recipe that requests 8 bits uses them or fails; nothing falls back to more bits. bitsandbytes 0.50
supports both on CUDA and on the CPU, where int8 products are fast only with AVX-512.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from components.config import UserError

# Values of a recipe that need bitsandbytes, and the value to use without it.
ALTERNATIVES = {"8bit": "none", "adamw_8bit": "adamw"}


def import_bitsandbytes(key: str, value: str) -> ModuleType:
    """Import bitsandbytes, which a key of the recipe needs for its value."""
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise UserError(
            f"{key} is '{value}', but the library bitsandbytes cannot be imported here ({error}): "
            f"pip install -e '.[8bit]' in a checkout, or set {key} to '{ALTERNATIVES[value]}'."
        ) from None


def check_support(key: str, value: str, device: str) -> None:
    """Check by a small computation that a device supports a value, if it needs bitsandbytes."""
    if value not in ALTERNATIVES:
        return
    import torch

    bitsandbytes = import_bitsandbytes(key, value)
    remedy = f"set {key} to '{ALTERNATIVES[value]}'"
    library = f"bitsandbytes {bitsandbytes.__version__}"
    try:
        if value == "8bit":
            with torch.random.fork_rng(devices=[]):  # a new layer draws initial values
                layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to(device)
                computed = layer(torch.ones(1, 64, dtype=torch.float16, device=device))
        else:
            computed = torch.nn.Parameter(torch.ones(64, 64, device=device))
            computed.grad = torch.ones_like(computed)
            bitsandbytes.optim.AdamW8bit([computed]).step()
        finite = bool(computed.isfinite().all())
    except Exception as error:
        # Without a binary for the device, bitsandbytes raises RuntimeError, NameError, ...
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{key} is '{value}', which {library} does not support on {device} ({reason}): "
            f"use another device (runtime.devices), or {remedy}."
        ) from None
    if not finite:
        raise UserError(
            f"{key} is '{value}', but {library} computes values that are not finite on {device}: {remedy}."
        )
