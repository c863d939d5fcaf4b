"""Recipes: what they hold, what is refused with key, value and remedy, and what a check may import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from components.config import Recipe, RecipeError
from components.config.section import section_model
from components.recipes import load_recipe
from components.recipes.load import dump_recipe, parse_recipe, recipe_names

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "prefect",
    "mlflow",
    "transformers",
    "peft",
    "trl",
    "datasets",
    "great_expectations",
    "pandas",
)


def refusal(*overrides: str, recipe: str = "debug") -> str:
    """The message with which a recipe is refused."""
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, overrides)
    return str(error.value)


# --- recipes of the package


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_the_package_is_valid_and_named_by_its_path(name):
    assert load_recipe(name).name == name


@pytest.mark.parametrize("name", recipe_names())
def test_a_dumped_recipe_is_read_back_unchanged(name, tmp_path):
    recipe = load_recipe(name, ["federation.optimizer.lr=1e-5"])
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    read = load_recipe(str(path))
    assert read == recipe
    assert read.federation.optimizer.lr == 1e-5


def test_the_tldr_recipe_has_the_values_of_tables_3_and_5_of_fedbiscuit():
    recipe = load_recipe("summarization/tldr")
    federation = recipe.federation
    optimizer = federation.optimizer
    lora = recipe.selector.lora
    assert (recipe.data.source, recipe.data.clients) == ("tldr", 53)
    assert (federation.rounds, federation.clients_per_round) == (500, 5)
    assert (federation.local_steps, federation.batch_size) == (30, 32)
    assert (optimizer.name, optimizer.lr, optimizer.betas) == ("adamw", 1e-5, [0.9, 0.95])
    assert (lora.r, lora.alpha, lora.dropout) == (8, 16, 0.05)
    assert (recipe.alignment.dpo.optimizer, recipe.alignment.dpo.lr) == ("rmsprop", 1e-6)
    assert recipe.alignment.temperature == 0.7


def test_the_shp_recipe_has_the_data_and_models_of_tables_2_and_4_of_fedbiscuit():
    recipe = load_recipe("qa/shp")
    data = recipe.data
    assert (data.source, data.partition, data.alpha, data.clients) == ("shp", "dirichlet", 0.3, 200)
    assert data.options.max_tokens == 512
    assert (data.align_prompts.source, data.test_prompts.source) == ("safe-rlhf", "alpaca_eval")
    assert recipe.selector.backbone.name == "google/gemma-2b"
    for lora in (recipe.selector.lora, recipe.policy.lora):
        assert (lora.r, lora.alpha, lora.dropout) == (8, 16, 0.05)
    assert (recipe.selector.template.name, recipe.policy.template.name) == ("qa/selector", "alpaca/policy")
    assert (recipe.policy.backbone.name, recipe.policy.chat) == ("mlabonne/Gemmalpaca-2B", "none")
    assert recipe.policy.max_new_tokens == 300


def test_the_shp_recipe_has_the_training_of_table_5_of_fedbiscuit():
    recipe = load_recipe("qa/shp")
    federation = recipe.federation
    optimizer = federation.optimizer
    dpo = recipe.alignment.dpo
    assert federation.method == "fedbiscuit"
    assert (federation.options.selectors, federation.options.warmup_rounds) == (3, 50)
    assert (federation.options.regroup_every, federation.options.aggregator.kind) == (100, "uniform")
    assert (federation.rounds, federation.clients_per_round) == (500, 10)
    assert (federation.local_steps, federation.batch_size) == (30, 32)
    assert (optimizer.name, optimizer.lr, optimizer.betas) == ("adamw", 1e-5, [0.9, 0.95])
    assert (dpo.optimizer, dpo.lr, dpo.epochs, dpo.batch_size) == ("rmsprop", 1e-6, 5, 32)
    assert recipe.alignment.temperature == 0.7


def test_the_reasoning_recipe_has_the_training_of_appendix_a_of_drift():
    recipe = load_recipe("reasoning/paper")
    federation = recipe.federation
    optimizer = federation.optimizer
    policy = recipe.policy
    assert (federation.method, federation.options.objective.beta) == ("drift", 0.2)
    assert (federation.rounds, federation.clients_per_round, federation.batch_size) == (50, 8, 4)
    assert (optimizer.name, optimizer.lr, optimizer.clip) == ("adamw_8bit", 5e-4, 1.0)
    assert (optimizer.scheduler, optimizer.warmup_steps) == ("cosine", 4)
    assert (policy.backbone.name, policy.backbone.quantization) == ("meta-llama/Llama-3.1-8B", "8bit")
    assert policy.lora.r == 16
    assert (policy.max_prompt_tokens, policy.max_prompt_tokens + policy.max_new_tokens) == (256, 512)


def test_the_reasoning_recipe_has_the_trees_of_drift_and_asks_other_questions():
    recipe = load_recipe("reasoning/paper")
    thoughts = recipe.thoughts
    sets = ["aqua", "cose", "csqa", "mathqa", "medmcqa", "medqa", "piqa", "pubmedqa"]
    assert (recipe.data.source, recipe.data.partition) == ("thoughts", "natural")
    assert (thoughts.depth, thoughts.children) == (3, 2)
    assert thoughts.evaluator.model == "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"
    assert thoughts.evaluator.max_new_tokens >= 1024
    assert {section.set: section.count for section in thoughts.questions} == dict.fromkeys(sets, 300)
    grown = recipe.thoughts.questions
    answered = recipe.evaluation.questions.questions
    assert {section.set for section in answered} == {section.set for section in grown}
    assert recipe.evaluation.questions.samples > 1
    assert {section.set for section in answered if section.split is None} == {"pubmedqa"}
    shared_pool = [section for section in (*grown, *answered) if section.set in ("cose", "csqa")]
    parts = {(section.set, tuple(section.part)) for section in shared_pool}
    assert parts == {("cose", (1, 2)), ("csqa", (0, 2))}


# --- refusals


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("federation.round=3", "federation.round", "federation.rounds"),
        ("federation.optimizer.learning_rat=1", "federation.optimizer.learning_rat", None),
        ("federations.rounds=3", "federations", "federation"),
        ("selector.backbone.layer=2", "selector.backbone.layer", "selector.backbone.layers"),
        ("selector.clients_per_round=2", "selector.clients_per_round", "federation.clients_per_round"),
        ("policy.r=2", "policy.r", "policy.lora.r"),
        ("policy.model=x", "policy.model", "policy.backbone.name"),
        ("evaluation.model=x", "evaluation.model", None),
        ("lr=1", "lr", "federation.optimizer.lr"),
        (
            "evaluation.alpaca_eval.annotator_config=x",
            "evaluation.alpaca_eval.annotator_config",
            "evaluation.alpaca_eval.annotators_config",
        ),
        (
            "evaluation.reference_outputs=x",
            "evaluation.reference_outputs",
            "evaluation.alpaca_eval.reference_outputs",
        ),
        ("data.options.judge_anotators=2", "data.options.judge_anotators", "data.options.judge_annotators"),
        ("data.align_prompt={source: safe-rlhf}", "data.align_prompt", "data.align_prompts"),
        (
            "data.align_prompts={source: safe-rlhf, max_prompt: 3}",
            "data.align_prompts.max_prompt",
            "data.align_prompts.max_prompts",
        ),
        (
            "data.test_prompts={source: alpaca_eval, options: {fil: x}}",
            "data.test_prompts.options.fil",
            "data.test_prompts.options.file",
        ),
        ("data.test_prompts={source: alpaca_eval, seed: 1}", "data.test_prompts.seed", "seed"),
        (
            "federation.options.agregator=paper",
            "federation.options.agregator",
            "federation.options.aggregator",
        ),
        ("[=1", "[", None),
        ("list[str]=1", "list[str]", None),
        ("int=1", "int", None),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one_and_the_allowed_ones(override, key, nearest):
    message = refusal(override)
    assert f"unknown key '{key}'" in message
    assert "Keys allowed here: " in message
    assert re.findall("did you mean '(.*?)'", message) == ([] if nearest is None else [nearest])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("federation.rounds=three", ("'federation.rounds'", "'three'", "valid integer")),
        ("federation.rounds=2.5", ("'federation.rounds'", "2.5", "integer")),
        ("federation.rounds='3'", ("'federation.rounds'", "'3'", "integer")),
        ("federation.rounds=true", ("'federation.rounds'", "True", "integer")),
        ("federation.rounds=0", ("'federation.rounds'", "0", "greater than or equal to 1")),
        ("federation.optimizer.lr=-1e-3", ("'federation.optimizer.lr'", "-0.001", "greater than 0")),
        ("selector.orders=three", ("'selector.orders'", "'three'", "'both' or 'single'")),
        ("federation.optimizer.betas=[0.9, 1.5]", ("'federation.optimizer.betas'", "[0, 1)")),
        (
            "federation.options.aggregator=mean",
            (
                "'federation.options.aggregator'",
                "'mean'",
                "exact, expected, paper, participation, trimmed, uniform",
            ),
        ),
        ("federation.method=fedbiss", ("'federation.method'", "'fedbiss'", "Did you mean 'fedbis'?")),
        ("data=aclsum", ("'data'", "text", "dictionary")),
        ("name.x=1", ("'name'", "valid string")),
        (
            "data.options={request:x}",
            ("'data.options.request'", "a colon and a space", "Keys allowed here: "),
        ),
        ("data.source=aclsm", ("data", "'aclsm'", "Did you mean 'aclsum'?")),
        ("data.align_prompts={path: x.jsonl}", ("'data.align_prompts.source'", "missing")),
        (
            "data.align_prompts={source: safe-rlhf, max_prompts: 0}",
            ("'data.align_prompts.max_prompts'", "0", "greater than or equal to 1"),
        ),
        (
            "data.test_prompts={source: alpacaeval}",
            ("data.test_prompts.source", "'alpacaeval'", "Did you mean 'alpaca_eval'?"),
        ),
    ],
)
def test_a_wrong_type_or_value_is_refused_with_key_value_and_what_is_allowed(override, parts):
    message = refusal(override)
    for part in parts:
        assert part in message


def test_a_suggested_name_ends_the_sentence():
    assert refusal("evaluation.judge.kind=selectr").endswith("Did you mean 'selector'?")


def test_more_clients_per_round_than_clients_are_refused_with_both_numbers():
    message = refusal("federation.clients_per_round=5", "data.clients=3")
    assert "federation.clients_per_round is 5" in message
    assert "3 clients (data.clients)" in message
    assert "use at most 3" in message


@pytest.mark.parametrize("clients", ["3", "4", "null"])
def test_a_round_of_up_to_all_clients_is_accepted(clients):
    recipe = load_recipe("debug", ["federation.clients_per_round=3", f"data.clients={clients}"])
    assert recipe.federation.clients_per_round == 3


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["data.partition=iid", "data.clients=null"], "data.clients is needed with data.partition 'iid'"),
        (
            ["data.partition=margin", "data.clients=null"],
            "data.clients is needed with data.partition 'margin'",
        ),
        (["data.partition=column"], "column is needed with partition 'column'"),
        (["data.column=domain"], "column is not used with partition 'natural'"),
        (
            ["data.partition=iid", "data.column_clients={a: [x]}"],
            "column_clients is not used with partition 'iid'",
        ),
        (
            ["data.partition=column", "data.column=domain", "data.column_clients={a: [x, y], b: [y]}"],
            "names the value 'y' twice (a, b)",
        ),
        (["data.partition=column", "data.column=domain", "data.column_clients={}"], "'data.column_clients'"),
        (
            ["data.partition=column", "data.column=domain", "data.column_clients={a: []}"],
            "'data.column_clients.a'",
        ),
        (["data.partition=column", "data.column=domian"], "data.column 'domian' is not known"),
        (["data.partition=column", "data.column=domian"], "Did you mean 'domain'?"),
        (["data.validation=0.5", "data.test=0.5"], "their sum must be below 1"),
        (
            ["federation.local_steps=4", "federation.optimizer.warmup_steps=4"],
            "optimizer.warmup_steps is 4, but local_steps is 4",
        ),
        (
            ["evaluation.judge.steps=2", "evaluation.judge.optimizer.warmup_steps=9"],
            "optimizer.warmup_steps is 9, but steps is 2",
        ),
        (["federation.optimizer.warmup_steps=-1"], "greater than or equal to 0"),
        (["federation.optimizer.scheduler=cosin"], "'constant', 'linear' or 'cosine'"),
        (["alignment.dpo.batch_size=3"], "micro_batch_size 2"),
        (["alignment.dpo.reference=sft"], "reference_adapter"),
        (["alignment.dpo.reference_adapter=somewhere"], "reference_adapter"),
        (["alignment.dpo.max_kl=3.0", "alignment.dpo.kl_prompts=0"], "set kl_prompts above 0"),
        (
            ["evaluation.alpaca_eval={}", "evaluation.answers_per_prompt=4"],
            "alpaca_eval compares one answer to each prompt, but answers_per_prompt is 4",
        ),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(overrides, part):
    assert part in refusal(*overrides)


@pytest.mark.parametrize(
    ("sources", "parts"),
    [
        (
            "[{source: auto-j}, {source: hh-rlhf, options: {subst: x}}]",
            ("'data.options.sources[1].options.subst'", "'data.options.sources[1].options.subset'?"),
        ),
        (
            "[{source: auto-j}, {source: hh-rlhf, options: {judge_share: 2}}]",
            ("'data.options.sources[1].options.judge_share' is 2",),
        ),
        ("[{source: auto-j}, {source: hh-rlfh}]", ("data.options.sources[1].source", "'hh-rlfh'")),
        ("[{source: mixture}, {source: hh-rlhf}]", ("data.options.sources[0].source", "'mixture'")),
        (
            "[{source: auto-j}, {source: hh-rlhf, pth: x}]",
            ("'data.options.sources[1].pth'", "'data.options.sources[1].path'?"),
        ),
        ("[{source: auto-j}, {path: x}]", ("'data.options.sources[1].source'", "missing")),
        ("[{source: auto-j}, {source: auto-j}]", ("'auto-j' more than once", "name")),
        ("[{source: auto-j, name: hh-rlhf}, {source: hh-rlhf}]", ("'hh-rlhf' more than once",)),
        ("[{source: auto-j}]", ("'data.options.sources'",)),
    ],
)
def test_a_mixture_is_checked_down_to_the_options_of_its_sources(sources, parts):
    message = refusal("data.source=mixture", f"data.options={{sources: {sources}}}")
    for part in parts:
        assert part in message


def test_columns_that_name_owners_are_accepted():
    recipe = load_recipe(
        "debug",
        [
            "data.source=jsonl",
            "data.options={}",
            "data.partition=column",
            "data.column=region",
            "data.clients=null",
            "data.column_clients={a: [x], b: [y, z]}",
        ],
    )
    assert recipe.data.column_clients == {"a": ["x"], "b": ["y", "z"]}


def test_a_mixture_of_one_source_twice_and_a_warm_up_that_leaves_one_step_are_accepted():
    sources = "[{source: auto-j}, {source: auto-j, name: other, options: {judge_share: 0.3}}]"
    recipe = load_recipe("debug", ["data.source=mixture", f"data.options={{sources: {sources}}}"])
    assert recipe.data.source == "mixture"
    overrides = [
        "federation.local_steps=4",
        "federation.optimizer.warmup_steps=3",
        "federation.optimizer.scheduler=cosine",
    ]
    optimizer = load_recipe("debug", overrides).federation.optimizer
    assert (optimizer.scheduler, optimizer.warmup_steps) == ("cosine", 3)


def test_all_errors_are_shown_at_once_on_lines_of_their_own():
    lines = refusal("federation.rounds=0", "selector.max_length=x", "policies=1").splitlines()
    assert len(lines) == 3
    for line, key in zip(
        sorted(lines), ("federation.rounds", "policies", "selector.max_length"), strict=True
    ):
        assert line.startswith(f"override '{key}': ")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("policy.template=summarization/polcy", "Did you mean 'summarization/policy'?"),
        ("evaluation.judge.selector.template=nowhere", "selector template 'nowhere' is not known"),
        ("evaluation.judge.kind=selectr", "Did you mean 'selector'?"),
        ("federation.options.selectors=3", "unknown key 'federation.options.selectors'"),
        ("federation.optimizer.lr=.inf", "federation.optimizer.lr"),
        ("tracking.registered_model=a/b", "tracking.registered_model"),
        ("alignment.dpo.optimizer=foo", "alignment.dpo.optimizer"),
        ("runtime.devices=[cpu, cpu]", "runtime.devices"),
        ("runtime.devices=[gpu]", "'gpu' is not a device"),
        (
            "runtime={task_runner: threads, ray_address: '10.0.0.1:6379'}",
            "ray_address is for task_runner 'ray': set task_runner too",
        ),
        (
            "runtime={task_runner: ray, ray_address: head}",
            "'head' is no address of a cluster: expected HOST:PORT",
        ),
        (
            "runtime={ray_address: '10.0.0.1:6379', devices: [cpu]}",
            "devices are those of this machine: a Ray cluster has the GPUs that its nodes were started with",
        ),
    ],
)
def test_what_would_fail_after_the_rounds_is_refused_before_them(override, part):
    assert part in refusal(override)


# --- overrides and files


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("federation.rounds", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("federation..rounds=3", "expected key.path=value"),
        ("federation.rounds=[1", "not valid YAML"),
        ("federation.rounds.x=1", "federation.rounds is a whole number, not a section"),
    ],
)
def test_an_override_that_cannot_be_read_is_quoted(override, part):
    message = refusal(override)
    assert f"override '{override}'" in message
    assert part in message


def test_overrides_change_the_named_values_alone_and_may_be_in_scientific_notation():
    overrides = ["federation.rounds=7", "selector.lora.r=4", "runtime.devices=[cpu]"]
    tree = load_recipe("debug", overrides).model_dump()
    assert tree["federation"]["rounds"] == 7
    assert tree["selector"]["lora"]["r"] == 4
    assert tree["runtime"]["devices"] == ["cpu"]
    tree["federation"]["rounds"] = 3
    tree["selector"]["lora"]["r"] = 2
    tree["runtime"]["devices"] = None
    assert tree == load_recipe("debug").model_dump()
    assert load_recipe("debug", ["federation.optimizer.lr=1e-5"]).federation.optimizer.lr == 1e-5


def test_an_override_of_a_key_below_a_named_kind_keeps_the_kind():
    """`aggregator: paper` stands for a section, so that a key can be set below it."""
    message = refusal("federation.options={aggregator: paper}", "federation.options.aggregator.x=1")
    assert "unknown key 'federation.options.aggregator.x'" in message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("name: x\ndata: [\n", "line 3"),
        ("- 1\n", "this file holds a list"),
        ("seed: 1\n", "key 'name' is missing"),
        (
            "name: x\nfederation:\n  rounds: 3\n  rounds: 4\n",
            "line 4: this is not valid YAML (the key 'rounds' is named twice, in lines 3 and 4)",
        ),
    ],
)
def test_a_file_without_a_recipe_is_refused_by_its_path(tmp_path, content, part):
    path = tmp_path / "r.yaml"
    path.write_text(content)
    message = refusal(recipe=str(path))
    assert message.startswith(str(path))
    assert part in message


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    assert "Did you mean 'debug'?" in refusal(recipe="debugg")


@pytest.mark.parametrize("value", ["&a [*a]", "[" * 3000])
def test_yaml_that_contains_itself_or_is_nested_too_deeply_is_refused(tmp_path, value):
    path = tmp_path / "own.yaml"
    path.write_text(f"name: {value}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"not valid YAML \(an alias contains itself, or .* too deeply\)"):
        load_recipe(str(path))


def test_an_alias_of_yaml_is_a_value_of_its_own(tmp_path):
    """Otherwise an override of one of the two places that it fills would change both."""
    path = tmp_path / "shared.yaml"
    path.write_text(
        "name: shared\n"
        "data: {source: aclsum}\n"
        "selector: {backbone: &one {name: tiny-random}}\n"
        "policy: {backbone: *one}\n",
        encoding="utf-8",
    )
    recipe = load_recipe(str(path), ["policy.backbone.layers=1"])
    assert recipe.policy.backbone.layers == 1
    assert recipe.selector.backbone.layers is None
    assert recipe.selector.backbone.name == "tiny-random"


def test_a_parsed_tree_is_checked_down_to_the_options():
    tree = yaml.safe_load(dump_recipe(load_recipe("debug")))
    assert parse_recipe(tree, "here").name == "debug"
    tree["data"]["options"]["papers_per_annotator"] = 91
    with pytest.raises(RecipeError, match=r"here: .*papers_per_annotator.*91"):
        parse_recipe(tree, "here")


# --- the recipe itself


def test_a_recipe_is_immutable():
    recipe = load_recipe("debug")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.federation.rounds = 9


def test_a_fingerprint_depends_on_the_seed_and_the_named_sections_alone():
    plain = load_recipe("debug")
    more_rounds = load_recipe("debug", ["federation.rounds=9"])
    other_seed = load_recipe("debug", ["seed=9"])
    assert plain.fingerprint("selector") == more_rounds.fingerprint("selector")
    assert plain.fingerprint("federation") != more_rounds.fingerprint("federation")
    assert plain.fingerprint("selector") != other_seed.fingerprint("selector")


def undocumented_fields(model, prefix=""):
    """Keys without a description, but for `kind`; an optional section has one of its own."""
    names = []
    for name, field in model.model_fields.items():
        inner = section_model(field.annotation)
        if name != "kind" and not field.description and (inner is None or field.default is None):
            names.append(prefix + name)
        if inner is not None:
            names += undocumented_fields(inner, f"{prefix}{name}.")
    return names


def test_every_key_of_a_recipe_and_every_registered_option_is_documented():
    assert undocumented_fields(Recipe) == []
    from components.config.evaluation import JUDGES, REWARDS
    from components.config.federation import AGGREGATORS, METHODS

    for registry in (AGGREGATORS, JUDGES, METHODS, REWARDS):
        for name in registry.names():
            assert undocumented_fields(registry.load(name)) == [], f"{registry.key} {name}"


# --- the judge and rewards


def test_a_judge_may_be_a_reward_of_the_recipe_by_its_name():
    recipe = load_recipe("multi-objective/demo", ["rewards.helpful.training.steps=7"])
    assert recipe.rewards["helpful"].training.steps == 7
    assert recipe.evaluation.judge.reward == recipe.rewards["helpful"]


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("evaluation.judge.reward=helpfull", "Did you mean 'helpful'"),
        ("evaluation.judge.reward={kind: function, name: cleann}", "Did you mean 'clean'"),
        ("evaluation.judge.reward={kind: judge}", "judge"),
        ("evaluation.judge.kind=autoj", "unknown key 'evaluation.judge.reward'"),
    ],
)
def test_a_judge_that_cannot_be_built_is_refused(override, part):
    assert part in refusal(override, recipe="multi-objective/demo")


def test_another_kind_of_judge_takes_the_place_of_the_whole_section():
    recipe = load_recipe("multi-objective/demo", ["evaluation.judge={kind: selector}"])
    assert recipe.evaluation.judge.kind == "selector"


# --- the command line


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, which prints at its end what it has imported."""
    code = (
        f"import sys, runpy, atexit; sys.argv = ['fed-rlhf', *{list(arguments)!r}]\n"
        f"atexit.register(lambda: print('IMPORTED', [m for m in {HEAVY!r} if m in sys.modules]))\n"
        "runpy.run_module('flows.cli', run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


ANNOTATOR = "evaluation.alpaca_eval={annotators_config: foo}"


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["--help"], 0, "resume"),
        (["check", "summarization/tldr", "--print-recipe"], 0, "summarization/tldr"),
        (["run", "debug", "federation.clients_per_round=5", "data.clients=3"], 2, "use at most 3"),
        (["resume", "RUN"], 2, "there is no run 'RUN'"),
        pytest.param(["check", "debug", "--print-recipe"], 0, "debug", marks=pytest.mark.long),
        pytest.param(["run", "debug", "federation.round=3"], 2, "did you mean", marks=pytest.mark.long),
        pytest.param(["check", "debug", ANNOTATOR], 2, "evaluation.alpaca_eval", marks=pytest.mark.long),
        pytest.param(["run", "debug", ANNOTATOR], 2, "evaluation.alpaca_eval", marks=pytest.mark.long),
        pytest.param(["run", "nowhere"], 2, "recipe 'nowhere' is not known", marks=pytest.mark.long),
    ],
)
def test_help_and_checks_answer_without_heavy_imports_and_without_a_stack_trace(arguments, status, part):
    done = run_command(*arguments)
    assert done.returncode == status
    assert part in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "IMPORTED []" in done.stdout


@pytest.mark.long
@pytest.mark.pipeline
def test_a_check_of_the_embedded_models_reads_no_tokenizer():
    done = run_command("check", "debug")
    assert done.returncode == 0
    # torch says which devices there are, and the others read and check the data
    assert "IMPORTED ['torch', 'pandas']" in done.stdout


def test_recipes_that_earlier_runs_stored_with_options_that_were_removed_are_read():
    assert "compile" not in load_recipe("debug", ["runtime.compile=false"]).runtime.model_dump()
    with pytest.raises(RecipeError, match=r"unknown key 'runtime\.compile'"):
        load_recipe("debug", ["runtime.compile=true"])
    assert "trainer" not in load_recipe("debug", ["alignment.dpo.trainer=packed"]).alignment.dpo.model_dump()
    with pytest.raises(RecipeError, match=r"'alignment\.dpo': trainer 'trl' was removed.*leave trainer out"):
        load_recipe("debug", ["alignment.dpo.trainer=trl"])
