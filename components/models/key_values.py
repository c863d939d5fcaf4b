"""Keys and values of the rows of a continuous batch, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

SPARE_COLUMNS = 64  # beyond the longest row, after which the columns of the rows move to the front


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # has no annotations
    """Keys and values of one layer, of which the columns [left, end) are in use."""

    is_sliding = False
    is_croppable = False
    keys: Any  # [rows, heads, columns, size]
    values: Any

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # has no annotations
        self.left = self.end = 0
        self._rows = rows
        self._columns = columns

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(self._rows, states.shape[-3], self._columns, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new columns, and give those of all columns in use."""
        columns = slice(self.end, self.end + key_states.shape[-2])
        in_use = slice(self.left, columns.stop)
        self.keys[:, :, columns] = key_states
        self.values[:, :, columns] = value_states
        self.end = columns.stop
        return self.keys[:, :, in_use], self.values[:, :, in_use]

    def get_seq_length(self) -> int:
        return self.end - self.left

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._columns

    def enter(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the keys and values [heads, P, size] of a prompt into the last P columns of a row."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        columns = slice(self.end - keys.shape[-2], self.end)
        self.keys[row, :, columns] = keys
        self.values[row, :, columns] = values

    def move(self, end: int) -> None:
        """Move the columns in use, so that they end at a column."""
        moved = slice(end - self.get_seq_length(), end)
        in_use = slice(self.left, self.end)
        self.keys[:, :, moved] = self.keys[:, :, in_use].clone()
        self.values[:, :, moved] = self.values[:, :, in_use].clone()
        self.left, self.end = moved.start, moved.stop

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows, in this order."""
        self.keys, self.values = self.keys[rows], self.values[rows]

    def reset(self) -> None:
        self.left = self.end = 0


class RowCache(Cache):
    """The past of the rows of a batch, which end at the same column and start at columns of their own."""

    def __init__(self, layers: int, rows: int, longest_prompt: int, max_new_tokens: int) -> None:
        columns = longest_prompt + max_new_tokens + min(max_new_tokens, SPARE_COLUMNS)
        self._row_layers = [RowLayer(rows, columns) for _ in range(layers)]
        super().__init__(layers=list(self._row_layers))
        self._longest_prompt = longest_prompt
        self._columns = columns
        self._first = [0] * rows
        for layer in self._row_layers:
            layer.left = layer.end = longest_prompt

    @property
    def _end(self) -> int:
        return self._row_layers[0].end

    def enter(self, row: int, key_values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put a prompt into a free row: keys and values of each layer, [heads, P, size]."""
        self._first[row] = self._end - key_values[0][0].shape[-2]
        for layer, (keys, values) in zip(self._row_layers, key_values, strict=True):
            layer.enter(row, keys, values)

    def open_column(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare for one more token of rows; the other rows, which are free, see only the new column.

        Returns:
            the mask of the columns, [all rows, columns in use + 1], and the position of the new token in
            its row, [all rows, 1].
        """
        left = min(self._first[row] for row in rows)
        for layer in self._row_layers:
            layer.left = left
        if self._end == self._columns:
            end = max(self._longest_prompt, self._end - left)
            distance = self._end - end
            self._first = [start - distance for start in self._first]
            for layer in self._row_layers:
                layer.move(end)
        end = self._end
        used = set(rows)
        first = torch.tensor([start if row in used else end for row, start in enumerate(self._first)])
        columns = torch.arange(self._row_layers[0].left, end + 1)
        return (columns >= first[:, None]).long(), (end - first)[:, None]

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows, in this order."""
        self._first = [self._first[row] for row in rows]
        for layer in self._row_layers:
            layer.select(rows)
