"""Logits of a selector's training step, compiled by torch.compile (Ansel et al. 2024).

A program is compiled for each shape of its inputs. Rows are therefore padded to one of a few lengths,
which bounds the number of programs. Values and gradients are those of the model as it is, up to
rounding. Nothing is chosen by timing, so the same inputs have the same bytes in every process of one
machine.

While a thread compiles, `torch.compiler.is_compiling` holds for the whole process, and code that asks
for it, such as attention in transformers, takes another branch in the other threads. They may run
compiled programs meanwhile, but no model as it is. A run that compiles thus trains one client at a
time (tasks/devices.py).
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import UserError

if TYPE_CHECKING:
    import torch

    LogitsFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LENGTH_BUCKETS = 8
"""Lengths to which rows are padded, at equal distances up to the longest input."""
RECOMPILE_LIMIT = 8 * LENGTH_BUCKETS
"""Programs of one model: each length for two sizes of a minibatch's parts, and all of them again when
adapters are added for scoring. Beyond it torch raises an error."""
_COMPILING = threading.Lock()


class CompileError(UserError, RuntimeError):
    """A training step that cannot be compiled on this machine."""


def bucket_lengths(max_length: int) -> list[int]:
    """The lengths to which rows of at most this length are padded (tokens), in increasing order."""
    return sorted({-(-max_length * n // LENGTH_BUCKETS) for n in range(1, LENGTH_BUCKETS + 1)})


def missing_tool(device: str) -> str | None:
    """What a machine lacks to compile for a device; None if nothing is missing.

    Args:
        device: e.g. 'cpu' or 'cuda:0'.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler is installed (install g++, or name a compiler in CXX)"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"Python's headers are not installed (no Python.h in {headers})"
    if device.startswith("cuda") and not has_triton():
        return "triton is not installed, or does not support the GPU"
    return None


class CompiledLogits:
    """A function of padded rows that is compiled at the first call with each shape.

    Attributes:
        lengths: lengths to which its rows are padded.
    """

    def __init__(self, logits: LogitsFunction, max_length: int, device: str) -> None:
        """Prepare the compilation.

        Args:
            logits: from input ids [N, L] and positions [N] to logits [N, 2].
            max_length: longest row (tokens).
            device: device of the tensors.

        Raises:
            CompileError: the machine has no compiler for the device.
        """
        import torch

        missing = missing_tool(device)
        if missing is not None:
            raise CompileError(
                f"runtime.compile is true, but {missing}. A run that was started with it can only resume"
                " where it can compile, because its bytes depend on it; a new run may set it to false."
            )
        self.lengths = bucket_lengths(max_length)
        self._shapes: set[tuple[int, ...]] = set()
        options: Any = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}  # not in its types
        self._compiled: LogitsFunction = torch.compile(
            logits, fullgraph=True, dynamic=False, options={"deterministic": True}, **options
        )

    def width(self, length: int) -> int:
        """The length to which rows are padded whose longest one has this length (tokens)."""
        return next(width for width in self.lengths if width >= length)

    def __call__(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Logits of ' A' and ' B' after the last token of each row, [N, 2] fp32.

        Args:
            input_ids: [N, L], padded on the right to one of the lengths.
            last: [N], position of the last real token.

        Raises:
            CompileError: torch cannot compile the model.
        """
        shape = tuple(input_ids.shape)
        if shape in self._shapes:
            return self._compiled(input_ids, last)
        with _COMPILING:  # one thread compiles a shape, and the others use its program
            logits = self._compile(input_ids, last)
        self._shapes.add(shape)
        return logits

    def _compile(self, input_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._compiled(input_ids, last)
        except TorchDynamoException as error:
            raise CompileError(
                f"torch could not compile the selector's training step ({type(error).__name__}:"
                f" {str(error).strip().splitlines()[0]}): set runtime.compile to false."
            ) from error


def forget_programs() -> None:
    """Drop all compiled programs of this process. Call it when their models are no longer needed."""
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compiler.reset()
