"""Rounds of FedBis as a Flower app: LoRA on a binary selector, averaged by FedAvg.

    python -c 'import flower_app; flower_app.main()' FOLDER --cores 2 --clients-at-once 1 [--tuned]

FOLDER holds exchange.json and adapter.safetensors. Node p does the p-th job of each round. By default
a client loads the model for each message and computes all logits, as Flower's examples do. With
--tuned a process keeps the model between messages, and two rows of the head are computed at the
answer position. The last line of the output is JSON: seconds and losses of each round.

The module is imported by its name, and not run as a script, so that actors import it too and its
caches live as long as they do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import (  # type: ignore[import-not-found, unused-ignore]
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # type: ignore[import-not-found, unused-ignore]
from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found, unused-ignore]
from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found, unused-ignore]
from flwr.simulation import run_simulation  # type: ignore[import-not-found, unused-ignore]
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM


@cache
def read_exchange(folder: str) -> dict[str, Any]:
    """The content of exchange.json, read once by a process."""
    content: dict[str, Any] = json.loads((Path(folder) / "exchange.json").read_text(encoding="utf-8"))
    return content


def load_model(folder: str) -> Any:
    """The first layers of the backbone with a new LoRA."""
    settings = read_exchange(folder)["model"]
    config = AutoConfig.from_pretrained(settings["path"])
    config.num_hidden_layers = settings["layers"]
    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_pretrained(settings["path"], config=config, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings["lora"]))


cached_model = cache(load_model)
"""The model of a process, for all messages."""


def choice_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, choices: list[int]) -> torch.Tensor:
    """Logits of both answers after the last token of each row [N, 2], from all logits [N, L, V]."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    at_answer: torch.Tensor = logits[torch.arange(len(ids)), mask.sum(1) - 1]
    return at_answer[:, choices]


def tuned_choice_logits(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, choices: list[int]
) -> torch.Tensor:
    """As `choice_logits`, with one position and two rows of the head."""
    base = model.get_base_model()
    states = base.model(input_ids=ids, attention_mask=mask).last_hidden_state
    at_answer: torch.Tensor = states[torch.arange(len(ids)), mask.sum(1) - 1]
    weight: torch.Tensor = base.lm_head.weight[choices]
    return at_answer @ weight.T


def collate(rows: list[list[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N, L], padded on the right, and the attention mask."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def train_locally(model: Any, exchange: dict[str, Any], job: dict[str, Any], tuned: bool) -> list[float]:
    """Train the adapter on the job's minibatches; gives the loss of each step (nats)."""
    optimizer_settings = exchange["optimizer"]
    client = exchange["clients"][job["client"]]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=optimizer_settings["lr"],
        betas=tuple(optimizer_settings["betas"]),
        weight_decay=optimizer_settings["weight_decay"],
    )
    compute = tuned_choice_logits if tuned else choice_logits
    model.train()
    losses = []
    for indices in job["minibatches"]:
        ids, mask = collate([client["rows"][i] for i in indices], exchange["model"]["pad_token_id"])
        labels = torch.tensor([client["labels"][i] for i in indices])
        loss = torch.nn.functional.cross_entropy(
            compute(model, ids, mask, exchange["model"]["choices"]), labels
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if optimizer_settings["clip"] is not None:
            torch.nn.utils.clip_grad_norm_(parameters, optimizer_settings["clip"])
        optimizer.step()
        losses.append(loss.item())
    return losses


client_app = ClientApp()


@client_app.train()  # type: ignore[untyped-decorator, unused-ignore]
def train(message: Message, context: Context) -> Message:
    """A client's work in a round: load the server's adapter, train it, and send it back."""
    config = message.content["config"]
    torch.set_num_threads(config["threads"])
    exchange = read_exchange(config["folder"])
    node = context.node_config["partition-id"]
    job = exchange["rounds"][config["server-round"] - 1][node]
    model = cached_model(config["folder"]) if config["tuned"] else load_model(config["folder"])
    set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
    losses = train_locally(model, exchange, job, config["tuned"])
    metrics = {
        "num-examples": len(exchange["clients"][job["client"]]["rows"]),
        "node": node,
        "loss-first": losses[0],
        "loss-last": losses[-1],
    }
    content = RecordDict(
        {
            "arrays": ArrayRecord(get_peft_model_state_dict(model)),
            "metrics": MetricRecord(metrics),
        }
    )
    return Message(content=content, reply_to=message)


class TimedFedAvg(FedAvg):  # type: ignore[misc, unused-ignore]
    """FedAvg that notes when a round starts and ends, and the losses of its clients.

    Attributes:
        rounds: seconds of each round, and the first and the last loss of each client.
    """

    def __init__(self, jobs: list[list[dict[str, Any]]]) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=len(jobs[0]))
        self.rounds: list[dict[str, Any]] = []
        self._jobs = jobs
        self._start = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round, which starts now."""
        self._start = time.perf_counter()
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[Any, Any]:
        """The mean of the adapters by the clients' numbers of rows; the round ends with it."""
        received = list(replies)
        result: tuple[Any, Any] = super().aggregate_train(server_round, received)
        seconds = time.perf_counter() - self._start
        losses = {}
        for reply in received:
            metrics = reply.content["metrics"]
            client = self._jobs[server_round - 1][metrics["node"]]["client"]
            losses[client] = [metrics["loss-first"], metrics["loss-last"]]
        self.rounds.append({"seconds": seconds, "losses": losses})
        return result


def build_server_app(strategy: TimedFedAvg, folder: Path, config: dict[str, Any]) -> ServerApp:
    """The server, which runs all rounds of the exchange."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(load_file(folder / "adapter.safetensors")),
            num_rounds=len(read_exchange(str(folder))["rounds"]),
            train_config=ConfigRecord(config),
        )

    return app


def main() -> None:
    """Run the rounds in Flower's simulation, and print their times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--clients-at-once", type=int, default=1)
    parser.add_argument("--tuned", action="store_true")
    options = parser.parse_args()
    threads = max(1, options.cores // options.clients_at_once)
    rounds = read_exchange(str(options.folder))["rounds"]
    strategy = TimedFedAvg(rounds)
    config = {"folder": str(options.folder), "tuned": options.tuned, "threads": threads}
    run_simulation(
        server_app=build_server_app(strategy, options.folder, config),
        client_app=client_app,
        num_supernodes=len(rounds[0]),
        backend_config={
            "init_args": {"num_cpus": options.cores, "_node_ip_address": "127.0.0.1"},
            "client_resources": {"num_cpus": threads, "num_gpus": 0.0},
        },
    )
    print(json.dumps(strategy.rounds))
