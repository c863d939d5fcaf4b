"""Every method with clients and domains of odd names: stopped after a round, resumed, and reported.

The names are those that are not accepted as names of files, of MLflow's metrics and models, or in a
chart, and some that differ in little.
"""

import csv
import json
from html import unescape
from pathlib import Path

import pytest

from components.config.federation import METHODS
from components.names import mlflow_key, mlflow_model
from flows import fed_rlhf as flow
from tests.support.odd_names import ODD_NAMES, SHARED_START
from tests.support.pipeline import NOISE
from tests.support.registries import TRAINED_METHODS

OWNERS = (*ODD_NAMES, SHARED_START)
"""One of them, which depends on the seed, has the judge's pairs; the others are clients."""
REWARDS = (
    "rewards={Long: {kind: function, name: 'tests.support.reward_functions:score_length'},"
    " long: {kind: function, name: 'tests.support.reward_functions:score_vowels'}}"
)
OBJECTIVES = "{objectives: {Long: [Long], long: [long]}, ppo: {minibatch: 2, epochs: 1}, reward_prompts: 2}"
OPTIONS = {
    "drift": "{variant: sp, delta: 0.3}",
    "fedbiscuit": "{selectors: 3, warmup_rounds: 1, regroup_every: 1}",
    "fedcmoo": OBJECTIVES,
    "fedper": "{shared_layers: 1}",
    "fedpdpo": "{bottleneck: {width: 4}, reward_head: {width: 3}}",
    "fedprox": "{proximal: 0.1}",
    "firm": OBJECTIVES,
    "perfedavg": "{inner_steps: 1}",
}
"""By method, the options that it needs, or by which it does more than it does without."""
SETTINGS = dict.fromkeys(("fednova", "scaffold"), "federation.optimizer={name: sgd, lr: 0.1, clip: null}")
"""By method, a setting that it needs beside its options."""
SPLITS = ("train",) * 6 + ("validation", "test") * 2
"""Of the pairs of a client."""
ROUNDS = {"fedbiscuit": 4}
"""By method, the number of rounds; two where it has none here."""
OVERRIDES = [
    "data.source=jsonl",
    "data.options={align_share: 0.1}",
    "data.clients=null",
    "data.max_equal=1.0",
    "evaluation.prompts=3",
    "evaluation.preference_pairs=26",
    "federation.evaluate_every=1",
    f"federation.clients_per_round={len(ODD_NAMES)}",
    "federation.local_steps=2",
    "federation.batch_size=2",
    "policy.max_new_tokens=4",
    "policy.max_prompt_tokens=64",
    "alignment.dpo={epochs: 1, batch_size: 4, micro_batch_size: 4, kl_prompts: 2}",
]


def pairs(domains):
    """Pairs of all clients; each split has pairs of each domain."""
    rows = []
    for position, client in enumerate(OWNERS):
        for number, split in enumerate(SPLITS):
            question = f"Question {len(rows)}?"
            own = {"client_id": client, "domain": domains[(position + number) % len(domains)], "split": split}
            texts = ["Yes, it is.", "No."] if number % 2 else ["Yes.", "No, it is not."]
            rows.append(own | {"prompt": question, "chosen": texts[0], "rejected": texts[1]})
    return "".join(json.dumps(row) + "\n" for row in rows)


class StoppedError(Exception):
    """A run is stopped."""


def stop_after_a_round(patch):
    """Stop runs after the first complete round."""
    run_rounds = flow.run_rounds

    def run_first(*arguments):
        *others, after_step = arguments

        def then_stop(state, record):
            after_step(state, record)
            if record.ends_round:
                raise StoppedError

        return run_rounds(*others, then_stop)

    patch.setattr(flow, "run_rounds", run_first)


def complete_run(place, method):
    """A run that was stopped after its first round, and resumed."""
    number = sorted(METHODS.builtin).index(method)
    domains = ODD_NAMES[: len(ODD_NAMES) // 2] if number % 2 else ODD_NAMES[len(ODD_NAMES) // 2 :]
    path = place.folder / "pairs.jsonl"
    path.write_text(pairs(domains), encoding="utf-8")
    template = place.folder / "policy.txt"
    template.write_text("Q: {prompt}\nA:\n", encoding="utf-8")
    settings = [
        f"federation.method={method}",
        f"federation.rounds={ROUNDS.get(method, 2)}",
        f"federation.options={OPTIONS.get(method, '{}')}",
        f"seed={number}",
        f"data.path={path}",
        f"policy.template={template}",
    ]
    if method in SETTINGS:
        settings.append(SETTINGS[method])
    if OPTIONS.get(method) == OBJECTIVES:
        settings.append(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        stop_after_a_round(patch)
        place.fail(*OVERRIDES, *settings)
    return place.resume(place.newest()), domains


def command(arguments):
    """Exit status of `fed-rlhf`, whose output goes to the streams of this process."""
    from flows.cli import app

    return app(arguments, standalone_mode=False)


def logged_clients(run):
    """Clients of the table of an MLflow run's federated rounds."""
    path = run.mlflow.download_artifacts(run.phase_run("federate").info.run_id, "clients.json")
    table = json.loads(Path(path).read_text())
    column = table["columns"].index("client")
    return {row[column] for row in table["data"]}


def logged_adapters(run):
    """Names of the adapters that are models in MLflow, by their tag, and the names of these models."""
    experiments = [experiment.experiment_id for experiment in run.mlflow.search_experiments()]
    models = run.mlflow.search_logged_models(experiments, max_results=100)
    return {(model.tags["adapter"], model.name) for model in models if "adapter" in model.tags}


@pytest.mark.long
@pytest.mark.parametrize("method", sorted(TRAINED_METHODS))
def test_odd_names_come_back_from_every_method_as_they_are(new_workplace, method):
    place = new_workplace("names")
    run, domains = complete_run(place, method)
    rounds = ROUNDS.get(method, 2)
    assert f"resuming after round 1 of {rounds}" in run.output
    assert not NOISE.findall(run.output)

    clients = set(run.federation.records[-1].clients)
    assert len(clients) == len(ODD_NAMES)
    assert clients < set(OWNERS)
    with (run.folder / "report" / "accuracy.csv").open(encoding="utf-8", newline="") as file:
        assert {row["client"] for row in csv.DictReader(file)} == clients
    assert {row["aligned"].get("client_id") for row in run.answers} <= clients | {None}
    adapters = run.federation.adapters
    folders = {adapter.folder.lower() for adapter in adapters.values()}
    assert len(folders) == len(adapters)

    page = unescape((run.folder / "report" / "report.html").read_text(encoding="utf-8"))
    assert [name for name in clients if f'<th scope="row">{name}</th>' not in page] == []
    status, shown = place.main(command, "show", run.folder.name)
    assert status == 0
    assert [name for name in domains if f"  domain {name}  " not in shown] == []
    assert [name for name in adapters if f"\n  {name:<10}  " not in shown] == []
    prefix = "after/accuracy/domain/"
    reported = {name.removeprefix(prefix) for name in run.metrics if name.startswith(prefix)}
    assert reported == set(domains)

    metrics = run.mlflow.get_run(run.mlflow_id).data.metrics
    of_domains = {name for name in metrics if name.startswith("accuracy/domain/")}
    assert of_domains == {mlflow_key(f"accuracy/domain/{domain}") for domain in domains}
    assert logged_clients(run) == clients
    last = run.federation.records[-1].adapters
    assert logged_adapters(run) >= {(name, mlflow_model(f"{name}-round-{rounds}")) for name in last}
