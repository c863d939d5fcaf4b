"""Rewards that the pipeline trains on pairs of owners outside the federation.

They are trained by TRL's RewardTrainer. The loss is that of Bradley and Terry (1952), as in Ouyang
et al. 2022, eq. 1: the mean of -log sigmoid(score of chosen - score of rejected).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from components.config import BackboneConfig, FrozenModel, LoraConfig, Section
from components.data.records import DataError, Pair, read_judges_rows
from components.environment import disable_transformers_progress_bars
from components.io import file_hash, read_json, write_atomically
from components.models.adapters import to_peft_config
from components.models.backbone import (
    BackboneError,
    fetch_backbone,
    load_reported,
    load_tokenizer,
    require_stored,
    truncate_layers,
)
from components.models.lora_targets import check_targets
from components.models.rewards.classifier import (
    ClassifierReward,
    ClassifierScoring,
    ResponseFormat,
    RewardModel,
    check_template,
    choose_padding,
)
from components.models.rewards.reward_section import (
    PreparedReward,
    Progress,
    RewardFunction,
    RewardResources,
)
from components.versions import TRAINED_REWARD

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from trl.trainer.reward_config import RewardConfig as TrainingArguments

RECORD = "figures.json"
"""File with the metrics of a trained reward, written last: a folder without it is incomplete."""
HEAD_NAMES = ("score", "classifier")
"""Parts of the names of a classification head's weights, which a backbone does not have."""


class RewardTrainingConfig(Section):
    """Training of a reward: a backbone with a LoRA adapter and one output."""

    backbone: BackboneConfig = Field(default_factory=lambda: BackboneConfig(name="embedded", layers=8))
    """Backbone; the classification head is new."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Adapter that is trained with the output, and merged afterwards."""
    steps: int = Field(100, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(8, ge=1)
    """Pairs per step."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of AdamW, decayed linearly to 0 (the default of TRL)."""

    @model_validator(mode="after")
    def _check_backbone(self) -> Self:
        if self.backbone.quantization != "none" or self.backbone.dtype != "auto":
            raise ValueError("a reward is trained in float32: leave out backbone.dtype and quantization")
        if self.backbone.device_map is not None:
            raise ValueError("a reward is trained on one device: leave out backbone.device_map")
        return self


class TrainedReward(ClassifierScoring):
    """A reward that is trained on pairs of owners outside the federation."""

    uses_judge_pairs: ClassVar[bool] = True
    artifact_version: ClassVar[int | None] = TRAINED_REWARD

    kind: Literal["trained"] = "trained"
    template: str = Field(
        description="Text with {prompt} and {response} that the reward reads, e.g. '{prompt}\n\n{response}'."
    )
    training: RewardTrainingConfig = Field(default_factory=RewardTrainingConfig)
    """How it is trained."""

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        check_template(self.template)
        return self

    @property
    def description(self) -> str:
        backbone = self.training.backbone
        layers = f"first {backbone.layers} layers" if backbone.layers else "all layers"
        return f"{backbone.name}, {layers}, trained centrally on owners outside the federation"

    def required_backbones(self) -> list[BackboneConfig]:
        return [self.training.backbone]

    def frozen_models(self, name: str) -> list[FrozenModel]:
        backbone = self.training.backbone.model_copy(update={"dtype": self.dtype})
        return [FrozenModel(name, backbone, self.batch_size, self.max_length)]

    def prepare(self, resources: RewardResources, progress: Progress | None = None) -> PreparedReward:
        data = read_judges_rows(resources.prepared, "a reward of kind 'trained'")
        content = {  # what the trained weights depend on
            "reward": self.model_dump(mode="json"),
            "version": self.artifact_version,
            "seed": resources.seed,
            "rows": file_hash(resources.prepared / "judge.parquet"),
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        folder = resources.cache / "rewards" / key
        if not (folder / RECORD).is_file():
            self._train_and_store(folder, content, data, resources, progress)
        return PreparedReward(folder, read_json(folder / RECORD)["figures"])

    def _train_and_store(
        self,
        folder: Path,
        content: dict[str, Any],
        data: tuple[list[Pair], list[Pair]],
        resources: RewardResources,
        progress: Progress | None,
    ) -> None:
        """Train on the first of two lists of pairs, measure the accuracy on the second one."""
        rows, held_out = data
        model, tokenizer, losses = train_reward(self, rows, resources.seed, resources.device, progress)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Another run may train the same reward at the same time, so a complete folder is renamed.
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            model.save_pretrained(building)
            tokenizer.save_pretrained(building)
            scorer = RewardModel(self.as_classifier(building), resources.device)
            figures = measure_reward(scorer, held_out) | {"pairs": len(rows), "loss_last": losses[-1]}
            record = json.dumps({"figures": figures, "losses": losses} | content)
            write_atomically(building / RECORD, record.encode())
            _move_into_place(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def load(self, device: str, folder: Path | None) -> RewardFunction:
        if folder is None:
            raise DataError(
                "a reward of kind 'trained' has not been trained: run the flow, which trains it before the"
                " first round."
            )
        return RewardModel(self.as_classifier(folder), device).score

    def as_classifier(self, folder: Path) -> ClassifierReward:
        """The trained reward in a folder, as a section of a classifier."""
        scoring = self.model_dump(include={"template", *ClassifierScoring.model_fields} - {"kind"})
        return ClassifierReward(name=str(folder), **scoring)


def measure_reward(reward: RewardModel, held_out: Sequence[Pair]) -> dict[str, float]:
    """Accuracy on held-out pairs, where equal scores count half, and the number of these pairs."""
    prompts = [row.prompt for row in held_out]
    chosen = reward.score(prompts, [row.chosen for row in held_out])
    rejected = reward.score(prompts, [row.rejected for row in held_out])
    accuracy = float(((chosen > rejected) + 0.5 * (chosen == rejected)).mean())
    return {"accuracy": accuracy, "held_out_pairs": len(held_out)}


def _move_into_place(building: Path, folder: Path) -> None:
    if (folder / RECORD).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)  # left by a training that was stopped
    try:
        building.rename(folder)
    except OSError:
        if not (folder / RECORD).is_file():  # otherwise another run has written the same reward
            raise


def train_reward(
    reward: TrainedReward, rows: Sequence[Pair], seed: int, device: str, progress: Progress | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[float]]:
    """Train a classifier with one output on pairs; gives its tokenizer and each step's loss (nats) too.

    The output layer starts at 0, so every response has the score 0 before the first step. The
    learning rate decays linearly to 0. The adapter is merged. The order of the pairs and the
    adapter's initial values are functions of the seed; the random generators of the process keep
    their state. `progress` is called with (step, loss) after each step.
    """
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl.trainer.reward_trainer import RewardTrainer

    disable_transformers_progress_bars()
    training = reward.training
    losses: list[float] = []
    tokenizer, shape = _load_tokenizer_and_config(training.backbone)
    model = _load_classifier(training.backbone, shape, seed)
    check_targets(model, training.lora, classifier=True)
    reader = ResponseFormat(reward.template, reward.max_length)
    encoded: list[list[list[int]]] = []
    for row in rows:
        texts = [(row.prompt, reader.shorten(tokenizer, text)) for text in (row.chosen, row.rejected)]
        encoded.append([reader.encode(tokenizer, [text])["input_ids"][0].tolist() for text in texts])
    columns = [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in encoded]
    pad_token = tokenizer.pad_token
    # No text contains the padding, because the model reads the last token that is not padding.
    tokens = set(chain.from_iterable(chain.from_iterable(encoded)))
    padding = choose_padding(model, tokens, cast("int", tokenizer.pad_token_id))
    tokenizer.pad_token = str(tokenizer.convert_ids_to_tokens(padding))
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as scratch:
        trainer = RewardTrainer(
            model=model,
            args=_training_arguments(training, seed, device, scratch),
            train_dataset=Dataset.from_list(columns),
            processing_class=tokenizer,
            callbacks=[_loss_callback(losses, progress)],
            peft_config=to_peft_config(training.lora, task="SEQ_CLS"),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    tokenizer.pad_token = pad_token
    trained = cast("PreTrainedModel", cast("PeftModel", trainer.model).merge_and_unload())
    trained.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return trained, tokenizer, losses


def _training_arguments(
    training: RewardTrainingConfig, seed: int, device: str, folder: str
) -> TrainingArguments:
    import torch
    from trl.trainer.reward_config import RewardConfig as TrainingArguments

    on_cuda = device.startswith("cuda")
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,
        learning_rate=training.lr,
        lr_scheduler_type="linear",
        max_length=None,
        bf16=False,
        fp16=False,
        use_cpu=not on_cuda,
        gradient_checkpointing=training.backbone.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=seed % 2**31,
        data_seed=seed % 2**31,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_cuda,
    )
    if on_cuda:
        # transformers' Trainer would use all devices that are visible, and the first one. It asks its
        # arguments, and Accelerate's state, which these arguments have made.
        place = torch.device(device)
        vars(arguments).update(_setup_devices=place, _n_gpu=1)
        arguments.distributed_state.device = place
    return arguments


def _loss_callback(losses: list[float], progress: Progress | None) -> TrainerCallback:
    from transformers import TrainerCallback

    class LossCallback(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
        ) -> None:
            if logs and "loss" in logs:
                losses.append(logs["loss"])
                if progress is not None:
                    progress(state.global_step, logs["loss"])

    return LossCallback()


def _load_tokenizer_and_config(backbone: BackboneConfig) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    from transformers import AutoConfig

    try:
        tokenizer = load_tokenizer(backbone)
        shape = AutoConfig.from_pretrained(
            fetch_backbone(backbone.location),
            revision=backbone.revision or "main",
            trust_remote_code=False,
            num_labels=1,
        )
    except (OSError, ConnectionError) as error:
        raise BackboneError(
            f"the backbone '{backbone.name}' of a reward could not be loaded:"
            f" {str(error).splitlines()[0].rstrip('.')}. Give 'embedded', a folder with config.json and"
            " safetensors weights, or a hub id that this machine can reach (training.backbone.name)."
        ) from None
    tokenizer.truncation_side = "left"
    truncate_layers(shape, backbone)
    return tokenizer, shape


def _load_classifier(backbone: BackboneConfig, shape: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The backbone with a classification head whose output layer is 0."""
    import torch
    from transformers import AutoModelForSequenceClassification

    name = f"the backbone '{backbone.name}' of a reward"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**31)  # inner layers of the head are random
        model, loading = load_reported(
            AutoModelForSequenceClassification,
            name,
            fetch_backbone(backbone.location),
            config=shape,
            revision=backbone.revision or "main",
            dtype=torch.float32,
        )
    missing = sorted(name for name in loading["missing_keys"] if not any(part in name for part in HEAD_NAMES))
    if missing:
        raise BackboneError(
            f"{name} has no weights for {missing[0]}, which would be"
            " random: use a backbone whose weights are complete (training.backbone.name)."
        )
    require_stored(model, name, fetch_backbone(backbone.location), backbone.revision)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in loading["missing_keys"] and len(parameter) == shape.num_labels:
                parameter.zero_()
    return cast("PreTrainedModel", model)
