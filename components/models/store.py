"""Adapters as they are stored: fp32 tensors by name, in files named by the hashes of their content.

Nothing here needs PEFT, or a model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from components.config import UserError
from components.io import write_atomically

if TYPE_CHECKING:
    import torch

Adapter = dict[str, "torch.Tensor"]
AdapterHash = str  # name of a stored adapter: sha256 of its safetensors file
BLOCK_VALUES = 1 << 16  # of a block of `iterate_blocks`: 512 kB in fp64, which fits into a core's cache
MIN_BLOCK_WIDTH = 1 << 12  # least number of values per adapter in such a block


class AdapterError(UserError, ValueError):
    """An adapter that is damaged or does not fit. The message names the tensor or the file."""


class AdapterStore:
    """A folder of safetensors files named by the sha256 of their bytes; writes are atomic."""

    def __init__(self, root: Path, mode: int = 0o644) -> None:
        """The store in a folder; `mode` is that of its files."""
        self.root = Path(root)
        self._mode = mode

    def path(self, digest: AdapterHash) -> Path:
        """The file of an adapter."""
        return self.root / f"{digest}.safetensors"

    def size(self, digest: AdapterHash) -> int:
        """Bytes of the file of a stored adapter."""
        return self.path(digest).stat().st_size

    def put(self, adapter: Mapping[str, torch.Tensor]) -> AdapterHash:
        """Store an adapter, whose tensors must be fp32."""
        import torch
        from safetensors.torch import save

        for name, tensor in adapter.items():
            if tensor.dtype != torch.float32:
                raise AdapterError(f"tensor '{name}' is {tensor.dtype}, but adapters are stored in float32")
        data = save({name: adapter[name].detach().cpu().contiguous() for name in sorted(adapter)})
        digest = hashlib.sha256(data).hexdigest()
        path = self.path(digest)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            write_atomically(path, data, self._mode)
        return digest

    def get(self, digest: AdapterHash) -> Adapter:
        """Read an adapter; a file that is missing or does not match the hash is an AdapterError."""
        from safetensors.torch import load

        with self._open_file(digest) as file:
            data = file.read()
        self._verify(digest, hashlib.sha256(data).hexdigest())
        return load(data)

    def open(self, digests: Iterable[AdapterHash]) -> list[Adapter]:
        """Adapters in mapped files: pages are read on access, and can be dropped again.

        So more adapters can be open than fit into memory. All files are verified, as by `get`, before a
        tensor is read.
        """
        from safetensors.torch import load_file

        verified = list(digests)
        for digest in verified:
            with self._open_file(digest) as file:
                self._verify(digest, hashlib.file_digest(file, "sha256").hexdigest())
        return [load_file(self.path(digest)) for digest in verified]

    def _open_file(self, digest: AdapterHash) -> BufferedReader:
        path = self.path(digest)
        try:
            return path.open("rb")
        except FileNotFoundError:
            raise AdapterError(f"adapter {digest[:12]} is missing: expected the file {path}") from None

    def _verify(self, digest: AdapterHash, computed: str) -> None:
        if computed != digest:
            raise AdapterError(
                f"adapter {digest[:12]} is damaged: the bytes of {self.path(digest)} do not match its hash"
            )


def check_adapter(adapter: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Require that an adapter has the names, shapes and dtypes of another one, and finite values.

    Raises:
        AdapterError: names the first tensor that is wrong.
    """
    missing = sorted(set(expected) - set(adapter))
    if missing:
        raise AdapterError(f"tensor '{missing[0]}' is missing ({len(missing)} of {len(expected)} are)")
    extra = sorted(set(adapter) - set(expected))
    if extra:
        raise AdapterError(f"tensor '{extra[0]}' is not part of the adapter ({len(extra)} are not)")
    for name in sorted(expected):
        tensor = adapter[name]
        template = expected[name]
        if tensor.shape != template.shape:
            raise AdapterError(
                f"tensor '{name}' has shape {tuple(tensor.shape)}, expected {tuple(template.shape)}"
            )
        if tensor.dtype != template.dtype:
            raise AdapterError(f"tensor '{name}' is {tensor.dtype}, expected {template.dtype}")
        if not tensor.isfinite().all():
            count = int((~tensor.isfinite()).sum())
            raise AdapterError(f"tensor '{name}' has {count} values that are NaN or infinite")


def iterate_blocks(
    adapters: Sequence[Mapping[str, torch.Tensor]], names: Sequence[str] | None = None
) -> Iterator[np.ndarray]:
    """Iterate over the values of several adapters side by side, one tensor after the other.

    A tensor is read once from each adapter, just before its blocks, so a mapping may read it from a
    file. The blocks are NumPy arrays because torch distributes even small arrays to all its
    threads, and waking the threads takes longer than the work.

    Args:
        adapters: K adapters with the same tensors.
        names: tensors to read; None reads all of them in the order of their names.

    Yields:
        [K, n] float64, which the caller may overwrite. A block has at most BLOCK_VALUES values, or
        MIN_BLOCK_WIDTH values per adapter.

    Raises:
        AdapterError: the adapters differ in their tensors, or a value is NaN or infinite.
    """
    common_names = set(adapters[0]) if adapters else set()
    for position, adapter in enumerate(adapters):
        different = sorted(set(adapter) ^ common_names)
        if different:
            raise AdapterError(
                f"adapter {position} and adapter 0 do not have the same tensors: "
                f"only one of them has '{different[0]}'"
            )
    width = max(MIN_BLOCK_WIDTH, BLOCK_VALUES // max(1, len(adapters)))
    for name in sorted(common_names) if names is None else names:
        tensors = [adapter[name] for adapter in adapters]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise AdapterError(f"tensor '{name}' has shapes {sorted(shapes)} in different adapters")
        rows = [tensor.detach().cpu().float().numpy().reshape(-1) for tensor in tensors]
        for start in range(0, len(rows[0]), width):
            block = np.empty((len(rows), min(width, len(rows[0]) - start)))
            for values, row in zip(block, rows, strict=True):
                values[:] = row[start : start + width]
            if not math.isfinite(block.sum()):  # one pass; fp32 values cannot overflow an fp64 sum
                position = int(np.flatnonzero(~np.isfinite(block).all(axis=1))[0])
                raise AdapterError(f"adapter {position}: tensor '{name}' has values that are NaN or infinite")
            yield block
