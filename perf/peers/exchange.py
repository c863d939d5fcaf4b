"""The work that is compared, as a folder that the project and the peers read.

It holds the recipe and its prepared data, which only the project reads, and for the peers
`adapter.safetensors`, the adapter that all clients start from, under PEFT's names, and `exchange.json`:

    model       path of the backbone, number of its first layers that are used, arguments of
                peft.LoraConfig, pad_token_id, and choices: vocabulary ids of a selector's answers
    optimizer   of AdamW with a constant rate: lr, betas, decoupled weight_decay, and clip, the largest norm
                of the gradient (null does not clip)
    beta        of DPO; null for a selector
    clients     by name: rows, token ids of comparisons, or of a policy triples (prompt, chosen,
                rejected); labels, of a selector the better completion of each row, 0 or 1
    rounds      of each the jobs: client, and minibatches, indices of its rows by optimizer step

Token ids are written rather than texts, so that all train on equal rows; the peers save the time of
tokenizing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from components.config import DpoObjective, PolicyConfig, Recipe, SelectorConfig, UserError
from components.io import write_atomically

if TYPE_CHECKING:
    from components.data.records import Pair
    from components.federation.protocol import Federation, TrainJob
    from components.models.adapters import AdapterSlot
    from components.models.store import Adapter, AdapterStore

    ClientRows = dict[str, list[Any]]
    Opened = tuple[dict[str, Any], AdapterSlot, Callable[[Sequence[Pair]], ClientRows]]

OVERRIDES = (
    "runtime.devices=[cpu]",
    "runtime.task_runner=threads",
    "selector.lora.dropout=0.0",
    "policy.lora.dropout=0.0",
    "tracking.experiment=benchmark",
)
"""Of the recipe: the peers run on the CPU, and draw other random numbers for dropout."""


def load_peer_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe as the peers can run it.

    Raises:
        UserError: the clients' optimizer is not AdamW with a constant rate.
    """
    from components.recipes import load_recipe

    recipe = load_recipe(name, [*overrides, *OVERRIDES])
    optimizer = recipe.federation.optimizer
    is_plain = optimizer.name == "adamw" and optimizer.scheduler == "constant"
    if not is_plain or optimizer.warmup_steps or optimizer.accumulation > 1:
        raise UserError(
            f"the peers cannot train with federation.optimizer of the recipe '{name}': expected adamw with a"
            " constant scheduler, without warm-up and accumulation; choose another recipe, such as"
            " summarization/demo."
        )
    return recipe


def write_exchange(recipe: Recipe, folder: Path, clients: int | None = None) -> None:
    """Write the work of a recipe's rounds.

    Args:
        recipe: of load_peer_recipe, with the method fedbis or feddpo.
        folder: with the recipe's prepared data, see prepared_folder.
        clients: largest number of jobs of a round; None writes all.
    """
    from safetensors.torch import save_file

    from components.data.records import read_pairs
    from components.models.store import AdapterStore
    from components.recipes.load import dump_recipe

    write_atomically(folder / "recipe.yaml", dump_recipe(recipe).encode())
    method = recipe.federation.options
    open_model = _open_selector if method.trained_model == "selector" else _open_policy
    model, slot, encode = open_model(recipe)
    save_file(_changed(slot.initial_adapter(recipe.seed)), folder / "adapter.safetensors")
    store = AdapterStore(folder / "plan" / "adapters")
    jobs = [step[:clients] for step in plan_rounds(recipe, open_federation(recipe, folder, store), store)]
    names = sorted({job.client for step in jobs for job in step})
    rows = {name: encode(read_pairs(pairs_file(folder), name, "train")) for name in names}
    objective = method.local().objective
    exchange = {
        "model": model,
        "optimizer": recipe.federation.optimizer.model_dump(include={"lr", "betas", "weight_decay", "clip"}),
        "beta": objective.beta if isinstance(objective, DpoObjective) else None,
        "clients": rows,
        "rounds": [
            [
                {"client": job.client, "minibatches": _minibatches(recipe, job, rows[job.client])}
                for job in step
            ]
            for step in jobs
        ],
    }
    write_atomically(folder / "exchange.json", json.dumps(exchange).encode())


def prepared_folder(folder: Path) -> Path:
    """The prepared data of an exchange folder."""
    return folder / "prepared"


def pairs_file(folder: Path) -> Path:
    """The prepared pairs of an exchange folder."""
    return prepared_folder(folder) / "pairs.parquet"


def open_federation(recipe: Recipe, folder: Path, store: AdapterStore) -> Federation:
    """The federation of an exchange folder, whose initial adapter is put into a store."""
    from safetensors.torch import load_file

    from components.data.records import read_clients
    from components.federation.protocol import build_federation

    initial = store.put(load_file(folder / "adapter.safetensors"))
    return build_federation(
        read_clients(prepared_folder(folder)), initial, recipe.federation.clients_per_round
    )


def plan_rounds(recipe: Recipe, federation: Federation, store: AdapterStore) -> list[list[TrainJob]]:
    """The jobs of all rounds; those of later rounds have the initial adapter."""
    from components.federation.server import Server

    method = recipe.federation.options
    server = Server(recipe.federation, store)
    state = method.start(federation, recipe.seed)
    rounds = range(recipe.federation.rounds)
    return [
        cast("list[TrainJob]", list(method.plan(state.model_copy(update={"round": number}), server)))
        for number in rounds
    ]


def _changed(adapter: Adapter) -> Adapter:
    """An adapter that changes the model; with LoRA's B of zeros, first losses of DPO are all log 2."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    return {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=numbers) for name, tensor in adapter.items()
    }


def _open_selector(recipe: Recipe) -> Opened:
    from components.learning.selector_training import build_labeled_comparisons
    from components.models.selector_model import Selector

    selector = Selector(recipe.selector, "cpu")

    def encode(pairs: Sequence[Pair]) -> ClientRows:
        comparisons, labels = build_labeled_comparisons(pairs)
        return {
            "rows": [selector.encode(comparison) for comparison in comparisons],
            "labels": labels.tolist(),
        }

    model = _describe_model(selector.model, selector.tokenizer, recipe.selector, selector.choices)
    return model, selector.slot, encode


def _open_policy(recipe: Recipe) -> Opened:
    from components.models.resident import ResidentPolicy

    resident = ResidentPolicy(recipe.policy, "cpu")

    def encode(pairs: Sequence[Pair]) -> ClientRows:
        return {"rows": [resident.encode(*pair.texts) for pair in pairs], "labels": []}

    model = _describe_model(resident.model, resident.policy.tokenizer, recipe.policy)
    return model, resident.slot, encode


def _describe_model(
    model: Any, tokenizer: Any, section: SelectorConfig | PolicyConfig, choices: Sequence[int] = ()
) -> dict[str, Any]:
    from components.models.backbone import fetch_backbone

    lora = section.lora
    return {
        "path": fetch_backbone(section.backbone.name),
        "layers": model.config.num_hidden_layers,
        "lora": {
            "r": lora.r,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "target_modules": lora.target_modules,
        },
        "pad_token_id": tokenizer.pad_token_id,
        "choices": choices,
    }


def _minibatches(recipe: Recipe, job: TrainJob, client: ClientRows) -> list[list[int]]:
    """The minibatches that the project draws for a job."""
    from components.learning.loop import draw_minibatches

    config = recipe.federation
    rows = len(client["rows"])
    steps = config.local_steps_for(rows // 2 if client["labels"] else rows)
    return [indices.tolist() for indices in draw_minibatches(rows, config.batch_size, steps, job.seed)]
