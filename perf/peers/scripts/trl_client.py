"""Clients of FedDPO with a new DPOTrainer of TRL each, as in OpenFedLLM (Ye et al. 2024).

    python trl_client.py FOLDER --threads 2

FOLDER holds exchange.json and adapter.safetensors. Each client of the first round loads the model,
attaches the LoRA, builds a trainer on its rows, trains, and writes its adapter. The rows are token
ids in the order in which the client draws them, and the reference is the model without the adapter.
Gradient checkpointing, TRL's default, is off, because it costs time and saves memory that a CPU has.
The last line of the output is JSON: seconds and losses of each client.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer


class TokenizedTrainer(DPOTrainer):
    """A trainer on token ids instead of text."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


def training_arguments(exchange: dict[str, Any], batch_size: int, output: Path) -> DPOConfig:
    """The settings of a client's training."""
    optimizer = exchange["optimizer"]
    return DPOConfig(
        output_dir=str(output),
        beta=exchange["beta"],
        learning_rate=optimizer["lr"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["clip"] or 0.0,  # 0 does not clip
        lr_scheduler_type="constant",
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        max_length=None,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def build_trainer(folder: Path, exchange: dict[str, Any], job: dict[str, Any], output: Path) -> DPOTrainer:
    """A trainer on the rows that a client draws, which starts from the server's adapter."""
    settings = exchange["model"]
    config = AutoConfig.from_pretrained(settings["path"])
    config.num_hidden_layers = settings["layers"]
    auto_model: Any = AutoModelForCausalLM
    rows = exchange["clients"][job["client"]]["rows"]
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    drawn = [dict(zip(columns, rows[i], strict=True)) for indices in job["minibatches"] for i in indices]
    trainer = TokenizedTrainer(
        model=auto_model.from_pretrained(settings["path"], config=config, dtype=torch.float32),
        args=training_arguments(exchange, len(job["minibatches"][0]), output),
        train_dataset=Dataset.from_list(drawn),
        processing_class=AutoTokenizer.from_pretrained(settings["path"]),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **settings["lora"]),
    )
    set_peft_model_state_dict(trainer.model, load_file(folder / "adapter.safetensors"))
    return trainer


def train_client(folder: Path, exchange: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a client's work, and its losses in the first and the last step (nats)."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as output:
        trainer = build_trainer(folder, exchange, job, Path(output))
        trainer.train()
        adapter = get_peft_model_state_dict(trainer.model)
        save_file(adapter, Path(output) / "adapter.safetensors")
    seconds = time.perf_counter() - start
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return {"seconds": seconds, "losses": {job["client"]: [losses[0], losses[-1]]}}


def main() -> None:
    """Train the clients of the first round, one after the other, and print their times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    exchange = json.loads((options.folder / "exchange.json").read_text(encoding="utf-8"))
    print(json.dumps([train_client(options.folder, exchange, job) for job in exchange["rounds"][0]]))


if __name__ == "__main__":
    main()
