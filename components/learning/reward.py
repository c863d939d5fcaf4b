"""Rewards of a recipe: loaded, imported, or trained here by TRL's RewardTrainer on the pairs of owners outside the federation (Bradley and Terry 1952; Ouyang et al. 2022, eq. 1)."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.config import RewardConfig, RewardTrainingConfig
from components.data.records import DataError, read_judges_rows
from components.models.adapters import peft_config, write_atomically
from components.models.backbone import BackboneError, fetch_backbone, first_layers, load_tokenizer, quiet_transformers
from components.models.reward import RewardModel, encode, shortened
from components.models.reward_functions import RewardFunction, find_reward_function

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WAY = 2
"""Of training, in the cache's keys and in the commits of runs with such rewards: a change of train_reward that changes its weights raises it, so that no reward of before is taken for one of now."""


def build_reward(
    config: RewardConfig, prepared: Path, cache: Path, seed: int, device: str, progress: Callable[[int, float], None] | None = None,
) -> tuple[RewardFunction, dict[str, float]]:
    """A reward that scores single responses.

    Args:
        config: of the recipe; kind 'judge' compares, and is no such reward.
        prepared: folder of prepared data; a reward that is trained here reads judge.parquet of it, and nothing else.
        cache: folder of rewards that were trained before, which are used again.
        seed: of what is trained.
        device: where it runs.
        progress: called with (step, loss) while it is trained.

    Returns:
        the reward, and what is known of it (of one that was trained here its accuracy on held-out pairs).

    Raises:
        BackboneError, RecipeError, DataError: it cannot be had.
        TypeError: it is a judge.
    """
    if config.kind == "judge":
        raise TypeError("a judge compares two responses, and scores none by itself")
    if config.kind == "function":
        function = find_reward_function(config.name)
        return lambda prompts, responses: np.asarray(function(prompts, responses), dtype=np.float64), {}
    if config.kind == "classifier":
        return RewardModel(config, device).score, {}
    folder, figures = trained_reward(config, prepared, cache, seed, device, progress)
    return load_reward(config, folder, device), figures


def load_reward(config: RewardConfig, folder: Path | None, device: str) -> RewardFunction:
    """As build_reward, of one that is there already: `folder` is that of one that was trained here.

    Raises:
        DataError: it was not trained.
    """
    if config.kind == "trained" and folder is None:
        raise DataError("a reward of kind 'trained' has not been trained: the flow does it before the rounds.")
    return build_reward(as_classifier(config, folder) if config.kind == "trained" else config, Path(), Path(), 0, device)[0]


def as_classifier(config: RewardConfig, folder: Path) -> RewardConfig:
    """A reward that was trained here as the classifier that it is."""
    return config.model_copy(update={"kind": "classifier", "name": str(folder), "training": None})


def trained_reward(
    config: RewardConfig, prepared: Path, cache: Path, seed: int, device: str, progress: Callable[[int, float], None] | None = None,
) -> tuple[Path, dict[str, float]]:
    """The folder of a sequence classifier that is trained here, and its figures; from the cache where it was trained before.

    The cache's key is the hash of its recipe, the way of training, the seed and the judges' rows.

    Raises:
        DataError: there are no pairs to learn from, or none to measure it on.
        BackboneError: the backbone cannot be had.
    """
    table = prepared / "judge.parquet"
    rows, held_out = read_judges_rows(prepared, "a reward of kind 'trained'")
    content = {"reward": config.model_dump(mode="json"), "way": WAY, "seed": seed, "rows": hashlib.sha256(table.read_bytes()).hexdigest()}
    folder = cache / hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    record = folder / "figures.json"
    if not record.is_file():  # the last thing that is written
        model, tokenizer, losses = train_reward(config, rows, seed, device, progress)
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))  # another run may be at the same reward
        try:
            model.save_pretrained(building)
            tokenizer.save_pretrained(building)
            scorer = RewardModel(as_classifier(config, building), device)
            chosen, rejected = (scorer.score([row["prompt"] for row in held_out], [row[side] for row in held_out]) for side in ("chosen", "rejected"))
            figures = {"accuracy": float(((chosen > rejected) + 0.5 * (chosen == rejected)).mean()), "pairs": len(rows), "held_out_pairs": len(held_out), "loss_last": losses[-1]}
            write_atomically(building / record.name, json.dumps({"figures": figures, "losses": losses, **content}).encode())
            if not record.is_file():
                shutil.rmtree(folder, ignore_errors=True)  # of one that was stopped
            try:
                building.rename(folder)
            except OSError:  # the other one was first, and its folder is as good
                if not record.is_file():
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder, json.loads(record.read_text(encoding="utf-8"))["figures"]


def train_reward(
    config: RewardConfig, rows: Sequence[Mapping[str, Any]], seed: int, device: str, progress: Callable[[int, float], None] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[float]]:
    """Train a classifier with one output on pairs: the mean of -log sigmoid(score of chosen - score of rejected). The output begins at 0, and the learning rate falls linearly to 0.

    Returns:
        the model, its LoRA merged; its tokenizer; and the loss of each step.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForSequenceClassification, PrinterCallback, TrainerCallback
    from trl import RewardConfig as Arguments
    from trl import RewardTrainer

    class Progress(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses.append(logs["loss"])
                if progress is not None:
                    progress(state.global_step, logs["loss"])

    losses: list[float] = []
    quiet_transformers()
    training = config.training or RewardTrainingConfig()
    source, revision = fetch_backbone(training.backbone.name), training.backbone.revision or "main"
    try:
        tokenizer = load_tokenizer(training.backbone)
        shape = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False, num_labels=1)
    except (OSError, ConnectionError) as error:
        raise BackboneError(f"the backbone '{training.backbone.name}' of a reward could not be loaded: {str(error).splitlines()[0]}") from None
    tokenizer.truncation_side = "left"
    first_layers(shape, training.backbone)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**31)  # of a head's inner layers, which the backbone does not have
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            source, config=shape, revision=revision, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, output_loading_info=True)
    missing = sorted(name for name in loaded["missing_keys"] if "score" not in name and "classifier" not in name)
    if missing:
        raise BackboneError(f"the backbone '{training.backbone.name}' of a reward has no weights for {missing[0]}, so that they would be random.")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in loaded["missing_keys"] and len(parameter) == shape.num_labels:
                parameter.zero_()  # the output: every response has the score 0 at first, where random weights would give it noise that training has to undo
    on_cuda = device.startswith("cuda")
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as scratch:
        trainer = RewardTrainer(
            model=model,
            args=Arguments(
                output_dir=scratch, max_steps=training.steps, per_device_train_batch_size=training.batch_size, learning_rate=training.lr, lr_scheduler_type="linear", max_length=None,
                bf16=False, fp16=False, use_cpu=not on_cuda, gradient_checkpointing=False, seed=seed % 2**31, data_seed=seed % 2**31, logging_steps=1, logging_nan_inf_filter=False,
                save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=on_cuda),
            train_dataset=Dataset.from_list([
                {f"{side}_ids": encode(tokenizer, config, [(row["prompt"], shortened(tokenizer, config, row[side]))])["input_ids"][0].tolist() for side in ("chosen", "rejected")} for row in rows]),
            processing_class=tokenizer, callbacks=[Progress()], peft_config=peft_config(training.lora, task="SEQ_CLS"))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.model.merge_and_unload(), tokenizer, losses
