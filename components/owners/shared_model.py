"""The model that a host of simulated owners loads once for the processes that it forks."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Mapping

import torch
from pydantic import JsonValue

from components.config import InputFile, Recipe
from components.federation.clients.trainer import Trainer
from components.federation.clients.worker import build_trainer, trainer_key
from components.recipes.inputs import named_files


class SharedModel:
    """A trainer on the CPU that no job has used; a forked process takes it as its own."""

    def __init__(self) -> None:
        self._content = ""  # hash of what it was loaded for
        self._key = ""  # see trainer_key
        self._trainer: Trainer | None = None

    def load(self, values: Mapping[str, JsonValue], name: str) -> None:
        """Load the trainer of a recipe, in place of an earlier one.

        There is none where its files are not those of this machine, or it cannot be built: then the owner's
        process builds it, and reports the error.

        Args:
            values: the recipe.
            name: of the trainer, see build_trainer.
        """
        content = hashlib.sha256(json.dumps([values, name], sort_keys=True).encode()).hexdigest()
        if content == self._content:
            return
        self._content, self._key, self._trainer = content, "", None
        gc.unfreeze()
        gc.collect()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a process that is forked later has none of OpenMP's threads
        try:
            recipe = Recipe.model_validate(values)
            if not any(
                isinstance(named, InputFile) for key, named in named_files(recipe) if key[:5] != "data."
            ):
                self._trainer = build_trainer(recipe, "cpu", name)
                self._key = trainer_key(recipe, name)
        except Exception:
            self._trainer = None
        finally:
            torch.set_num_threads(threads)
        gc.freeze()  # its pages stay shared, as no collection writes to them

    def take(self, key: str, device: str) -> Trainer | None:
        """The trainer, if it is that of a key; it is no other process's."""
        trainer, self._trainer = self._trainer, None
        return trainer if key == self._key and device == "cpu" else None


SHARED = SharedModel()
