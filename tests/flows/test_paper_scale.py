"""The recipes of paper scale run to their end, over files laid out as on the hub.

The models are small ones of the named families with random weights. Counts are reduced: clients,
rounds, steps, batches and lengths. Everything else is as the recipe says, except where the machine
lacks a library or a model is too small to do its part, which is said at the recipe.
"""

import json

import pytest

from tests.support.hub_data import (
    alpaca_eval_rows,
    comparisons,
    dialogues,
    posts,
    votes,
    write_code_vulnerability,
    write_hh,
    write_imdb,
    write_py_dpo,
    write_safe_rlhf_prompts,
    write_shp,
    write_tldr,
    write_ultrafeedback,
    write_webgpt,
)
from tests.support.hub_questions import QUESTION_SETS, write_question_set
from tests.support.pipeline import NOISE
from tests.support.tiny_models import write_models

ALL = (
    "federation.rounds=2",
    "federation.batch_size=4",
    "federation.evaluate_every=1",
    "policy.max_new_tokens=6",
    "evaluation.judge.steps=2",
    "evaluation.judge.batch_size=4",
    "evaluation.bootstrap=100",
    "runtime={torch_threads: 1, data_docs: false}",
)
SELECTORS = (
    "federation.micro_batch_size=2",
    "federation.local_steps=2",
    "alignment.dpo.epochs=1",
    "alignment.dpo.batch_size=4",
    "alignment.dpo.micro_batch_size=2",
    "alignment.dpo.kl_prompts=2",
    "evaluation.judge.micro_batch_size=2",
    "evaluation.prompts=4",
)
PERSONALIZED = ("federation.local_epochs=1", "evaluation.prompts=4", "policy.max_prompt_tokens=160")
LANGUAGES = ["javascript", "php", "python", "ruby", "java", "c#", "kotlin", "swift", "c++", "go", "fortran"]
MIXED = ", ".join(
    f"{{source: {name}, options: {{align_share: 0.0, judge_share: 0.2}}, {more}}}"
    for name, more in (
        ("webgpt", "max_pairs: {train: 30, test: 4}"),
        ("py-dpo", "test: 0.2"),
        ("ultrafeedback", "max_pairs: {train: 20}"),
    )
)

RECIPES = {
    "summarization/tldr": (
        *SELECTORS,
        "data.clients=5",
        # Of 40 pairs, one in a hundred is none
        "data.validation=0.2",
        "data.test=0.2",
        "policy.max_prompt_tokens=300",
    ),
    "qa/shp": (
        *SELECTORS,
        "data.clients=4",
        "federation.clients_per_round=4",
        "federation.options={selectors: 3, warmup_rounds: 1, regroup_every: 1, aggregator: uniform}",
        "federation.rounds=4",
        "policy.max_prompt_tokens=300",
    ),
    "personalized/imdb": (*PERSONALIZED, "data.options.judge_share=0.2"),
    "personalized/code_vulnerability": (*PERSONALIZED, "data.options.judge_share=0.2"),
    "personalized/cross_domain": (*PERSONALIZED, f"data.options.sources=[{MIXED}]"),
    "multi-objective/hh": (
        "data.clients=3",
        "federation.clients_per_round=2",
        "federation.local_steps=1",
        "federation.options={objectives: {helpfulness: [helpful], harmlessness: [harmless]},"
        " ppo: {epochs: 2, minibatch: 2, horizon: 2000}, reward_prompts: 4}",
        "federation.accuracy_pairs=4",
        "evaluation.judge.micro_batch_size=2",
        "evaluation.prompts=4",
    ),
    # Weights and moments are not in 8 bits, for which the tests have no library. A random model writes
    # no score, so that its probabilities of the scores are read.
    "reasoning/paper": (
        "policy.backbone.quantization=none",
        "federation.optimizer.name=adamw",
        "federation.optimizer.warmup_steps=1",
        "thoughts.evaluator.read=expected",
        "thoughts.depth=2",
        "thoughts.max_thought_tokens=6",
        "federation.local_steps=2",
        "evaluation.questions.samples=2",
        "evaluation.questions.max_new_tokens=6",
        "evaluation.judge.micro_batch_size=2",
        "evaluation.prompts=4",
    ),
}
"""By recipe: the settings that are reduced or replaced."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder whose subfolders stand for the models and data sets of the hub."""
    folder = tmp_path_factory.mktemp("hub")
    write_models(folder)
    workers = {"train": [f"w{n}" for n in range(5)], "validation": ["j0", "j1", "j2"]}
    compared = {split: comparisons(names, 8, 1000 * len(names)) for split, names in workers.items()}
    write_tldr(folder, compared, {"train": posts(range(30)), "test": posts(range(30, 40))})
    ranges = {"train": range(48), "validation": range(48, 72), "test": range(72, 90)}
    write_shp(folder, {split: votes(numbers, split) for split, numbers in ranges.items()})
    write_safe_rlhf_prompts(folder, range(6))
    for start, subset in ((0, "helpful-base"), (1000, "harmless-base")):
        write_hh(
            folder,
            subset,
            {"train": dialogues(range(start, start + 60)), "test": dialogues(range(start + 60, start + 75))},
        )
    write_imdb(folder, {"train": range(60), "test": range(60, 90)})
    write_ultrafeedback(folder, range(40), range(40, 50))
    write_webgpt(folder, range(50))
    write_py_dpo(folder, range(100, 150))
    write_code_vulnerability(folder, range(110), LANGUAGES)
    for name in QUESTION_SETS:
        write_question_set(folder, name, questions=12, held_out=6)
    return folder


@pytest.fixture
def in_the_hub(hub, tmp_path, monkeypatch):
    """The folder as working folder, so that ids are read from it, with a cache of the test's own."""
    import datasets

    monkeypatch.chdir(hub)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return hub


@pytest.fixture(scope="module")
def workplace(new_workplace):
    return new_workplace("paper-scale")


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_paper_scale_runs_to_its_end(in_the_hub, workplace, tmp_path, recipe):
    overrides = [*ALL, *RECIPES[recipe]]
    if recipe == "qa/shp":
        # The hub's file is downloaded by its address, which has no stand-in among the folders
        instructions = tmp_path / "alpaca_eval.json"
        instructions.write_text(json.dumps(alpaca_eval_rows(range(6))))
        overrides.append(f"data.test_prompts={{source: alpaca_eval, path: {instructions}}}")
    run = workplace.run(*overrides, recipe=recipe)
    assert run.federation.evaluations[-1].rounds_done == run.federation.rounds
    assert not [line for line in run.output.splitlines() if NOISE.match(line)]
    assert run.metrics
    assert (run.folder / "evaluate.done").exists()
