"""Recipes: what is refused, in which words, and what may be imported to say so."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.config import Recipe, RecipeError, check_cohort, section_of
from components.recipes import RECIPES, dump_recipe, load_recipe, parse_recipe, recipe_names

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "prefect", "mlflow", "transformers", "peft", "trl", "datasets", "great_expectations", "pandas")


def refusal(*overrides: str, recipe: str = "debug") -> str:
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, overrides)
    return str(error.value)


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_valid_and_named_by_its_path(name):
    assert load_recipe(name).name == name


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_written_out_reads_back_the_same(name, tmp_path):
    recipe = load_recipe(name, ["federation.optimizer.lr=1e-5"])
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    again = load_recipe(str(tmp_path / "recipe.yaml"))
    assert again == recipe and again.federation.optimizer.lr == 1e-5


def test_the_tldr_recipe_holds_tables_3_and_5_of_the_paper():
    recipe = load_recipe("summarization/tldr")
    federation, dpo, lora = recipe.federation, recipe.alignment.dpo, recipe.selector.lora
    assert (recipe.data.source, recipe.data.clients) == ("tldr", 53)
    assert (federation.rounds, federation.clients_per_round, federation.local_steps, federation.batch_size) == (500, 5, 30, 32)
    assert (federation.optimizer.name, federation.optimizer.lr, federation.optimizer.betas) == ("adamw", 1e-5, [0.9, 0.95])
    assert (lora.r, lora.alpha, lora.dropout) == (8, 16, 0.05)
    assert (dpo.optimizer, dpo.lr, recipe.alignment.temperature) == ("rmsprop", 1e-6, 0.7)


def test_the_shp_recipe_holds_tables_2_4_and_5_of_the_paper():
    recipe = load_recipe("qa/shp")
    data, federation, dpo, lora = recipe.data, recipe.federation, recipe.alignment.dpo, recipe.selector.lora
    assert (data.source, data.partition, data.alpha, data.clients, data.options["max_tokens"]) == ("shp", "dirichlet", 0.3, 200, 512)
    assert (data.align_prompts.source, data.test_prompts.source) == ("safe-rlhf", "alpaca_eval")
    assert (federation.rounds, federation.clients_per_round, federation.local_steps, federation.batch_size) == (500, 10, 30, 32)
    assert (federation.optimizer.name, federation.optimizer.lr, federation.optimizer.betas) == ("adamw", 1e-5, [0.9, 0.95])
    assert (lora.r, lora.alpha, lora.dropout) == (8, 16, 0.05) and (recipe.policy.lora.r, recipe.policy.lora.dropout) == (8, 0.05)
    assert (dpo.optimizer, dpo.lr, dpo.epochs, dpo.batch_size) == ("rmsprop", 1e-6, 5, 32)
    assert (recipe.selector.backbone.name, recipe.policy.max_new_tokens, recipe.alignment.temperature) == ("google/gemma-2b", 300, 0.7)
    assert (recipe.selector.template, recipe.policy.template) == ("qa/selector", "qa/policy")
    assert (federation.method, federation.selectors, federation.options) == ("fedbiscuit", 3, {"warmup_rounds": 50, "regroup_every": 100, "weighting": "paper"})


def test_the_reasoning_recipe_holds_appendices_a_and_b_of_drift():
    recipe = load_recipe("reasoning/paper")
    federation, optimizer, policy, thoughts = recipe.federation, recipe.federation.optimizer, recipe.policy, recipe.thoughts
    assert (federation.method, federation.options["beta"], federation.rounds, federation.clients_per_round, federation.batch_size) == ("drift", 0.2, 50, 8, 4)
    assert (optimizer.name, optimizer.lr, optimizer.clip, optimizer.scheduler, optimizer.warmup_steps) == ("adamw_8bit", 5e-4, 1.0, "cosine", 4)
    assert (policy.backbone.name, policy.backbone.quantization, policy.lora.r) == ("meta-llama/Llama-3.1-8B", "8bit", 16)
    assert (policy.max_prompt_tokens, policy.max_prompt_tokens + policy.max_new_tokens) == (256, 512)
    assert (recipe.data.source, recipe.data.partition, thoughts.depth, thoughts.children) == ("thoughts", "natural", 3, 2)
    assert thoughts.evaluator.model == "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B" and thoughts.evaluator.max_new_tokens >= 1024
    assert {q.set: q.count for q in thoughts.questions} == dict.fromkeys(["aqua", "cose", "csqa", "mathqa", "medmcqa", "medqa", "piqa", "pubmedqa"], 300)
    asked = {q.set: q for q in recipe.evaluation.questions.questions}
    assert set(asked) == {q.set for q in thoughts.questions} and recipe.evaluation.questions.samples > 1, "section 7.1: success rate of N samples, accuracy"
    parts = [(q.set, tuple(q.part)) for q in (*thoughts.questions, *asked.values())]
    assert len(set(parts)) == 16 and len({part for name, part in parts if name in ("cose", "csqa")}) == 4, "nothing is asked that a tree was grown of, and csqa and cose share questions"


@pytest.mark.parametrize(("override", "key", "nearest"), [
    ("federation.round=3", "federation.round", "federation.rounds"),
    ("federation.optimizer.learning_rat=1", "federation.optimizer.learning_rat", None),
    ("federations.rounds=3", "federations", "federation"),
    ("selector.backbone.layer=2", "selector.backbone.layer", "selector.backbone.layers"),
    ("selector.clients_per_round=2", "selector.clients_per_round", "federation.clients_per_round"),
    ("evaluation.alpaca_eval.annotator_config=x", "evaluation.alpaca_eval.annotator_config", "evaluation.alpaca_eval.annotators_config"),
    ("evaluation.reference_outputs=x", "evaluation.reference_outputs", "evaluation.alpaca_eval.reference_outputs"),
    ("data.options.judge_anotators=2", "data.options.judge_anotators", "data.options.judge_annotators"),
    ("data.align_prompt={source: safe-rlhf}", "data.align_prompt", "data.align_prompts"),
    ("data.align_prompts={source: safe-rlhf, max_prompt: 3}", "data.align_prompts.max_prompt", "data.align_prompts.max_prompts"),
    ("data.test_prompts={source: alpaca_eval, options: {fil: x}}", "data.test_prompts.options.fil", "data.test_prompts.options.file"),
    ("data.test_prompts={source: alpaca_eval, seed: 1}", "data.test_prompts.seed", None),
    ("federation.options.weigting=paper", "federation.options.weigting", "federation.options.weighting")])
def test_an_unknown_key_is_named_with_the_nearest_one_and_those_that_are_allowed(override, key, nearest):
    message = refusal(override)
    assert f"unknown key '{key}'" in message and "Keys allowed here: " in message
    assert nearest is None or f"did you mean '{nearest}'?" in message


@pytest.mark.parametrize(("override", "parts"), [
    ("federation.rounds=three", ("'federation.rounds'", "'three'", "valid integer")),
    ("federation.rounds=2.5", ("'federation.rounds'", "2.5", "integer")),
    ("federation.rounds='3'", ("'federation.rounds'", "'3'", "integer")),
    ("federation.rounds=true", ("'federation.rounds'", "True", "integer")),
    ("federation.rounds=0", ("'federation.rounds'", "0", "greater than or equal to 1")),
    ("federation.optimizer.lr=-1e-3", ("'federation.optimizer.lr'", "-0.001", "greater than 0")),
    ("selector.orders=three", ("'selector.orders'", "'three'", "'both' or 'single'")),
    ("federation.optimizer.betas=[0.9, 1.5]", ("'federation.optimizer.betas'", "[0, 1)")),
    ("federation.options.weighting=mean", ("'federation.options.weighting'", "'mean'", "'paper' or 'participation'")),
    ("federation.method=fedbiss", ("federation.method 'fedbiss'", "Did you mean 'fedbis'?")),
    ("data=aclsum", ("key 'data' is text", "valid dictionary")),
    ("data.options={request:x}", ("unknown key 'data.options.request' with more in the same word", "a colon and a space). Keys allowed here: ")),
    ("data.source=aclsm", ("data source 'aclsm'", "Did you mean 'aclsum'?")),
    ("data.align_prompts={path: x.jsonl}", ("key 'data.align_prompts.source' is missing",)),
    ("data.align_prompts={source: safe-rlhf, max_prompts: 0}", ("'data.align_prompts.max_prompts' is 0", "greater than or equal to 1")),
    ("data.test_prompts={source: alpacaeval}", ("data.test_prompts.source 'alpacaeval' is not known", "Did you mean 'alpaca_eval'?"))])
def test_a_wrong_type_or_value_names_the_key_the_value_and_what_is_allowed(override, parts):
    message = refusal(override)
    assert all(part in message for part in parts), message


def test_more_clients_a_round_than_there_are_is_refused_with_both_numbers():
    message = refusal("federation.clients_per_round=5", "data.clients=3")
    assert "federation.clients_per_round is 5" in message and "only 3 clients (data.clients)" in message and "use at most 3" in message
    check_cohort(3, 3)
    check_cohort(3, None)


def test_an_even_ensemble_is_refused_and_the_odd_neighbours_are_offered():
    message = refusal("federation.selectors=2")
    assert "'federation.selectors' is 2" in message and "use 1 or 3" in message


@pytest.mark.parametrize(("overrides", "part"), [
    (["data.partition=iid", "data.clients=null"], "data.clients is needed with data.partition 'iid'"),
    (["data.partition=margin", "data.clients=null"], "data.clients is needed with data.partition 'margin'"),
    (["data.partition=column"], "key 'data': column is needed with partition 'column': name the column"),
    (["data.column=domain"], "key 'data': column is not used with partition 'natural'"),
    (["data.partition=iid", "data.column_clients={a: [x]}"], "key 'data': column_clients is not used with partition 'iid'"),
    (["data.partition=column", "data.column=domain", "data.column_clients={a: [x, y], b: [y]}"], "column_clients names the value 'y' twice (a, b)"),
    (["data.partition=column", "data.column=domain", "data.column_clients={}"], "'data.column_clients'"),
    (["data.partition=column", "data.column=domain", "data.column_clients={a: []}"], "'data.column_clients.a'"),
    (["data.partition=column", "data.column=domian"], "data.column 'domian' is not known"),
    (["data.partition=column", "data.column=domian"], "Did you mean 'domain'? A column of a file's own can be named with the sources jsonl, mixture, parquet."),
    (["data.validation=0.5", "data.test=0.5"], "leave nothing to train on"),
    (["federation.local_steps=4", "federation.optimizer.warmup_steps=4"],
     "key 'federation': optimizer.warmup_steps is 4, but local_steps is 4, so that no step would have the full learning rate: use at most 3."),
    (["evaluation.judge.steps=2", "evaluation.judge.optimizer.warmup_steps=9"], "key 'evaluation.judge': optimizer.warmup_steps is 9, but steps is 2"),
    (["federation.optimizer.warmup_steps=-1"], "greater than or equal to 0"),
    (["federation.optimizer.scheduler=cosin"], "'constant', 'linear' or 'cosine'"),
    (["alignment.dpo.batch_size=3"], "batch_size 3 must be a multiple of micro_batch_size 2"),
    (["alignment.dpo.reference=sft"], "reference 'sft' needs reference_adapter"),
    (["alignment.dpo.reference_adapter=somewhere"], "reference_adapter is not used with reference 'base'")])
def test_values_that_do_not_go_together_are_refused(overrides, part):
    assert part in refusal(*overrides)


@pytest.mark.parametrize(("sources", "part"), [
    ("[{source: auto-j}, {source: hh-rlhf, options: {subst: x}}]", "unknown key 'data.options.sources[1].options.subst'; did you mean 'data.options.sources[1].options.subset'?"),
    ("[{source: auto-j}, {source: hh-rlhf, options: {judge_share: 2}}]", "key 'data.options.sources[1].options.judge_share' is 2: "),
    ("[{source: auto-j}, {source: hh-rlfh}]", "data.options.sources[1].source 'hh-rlfh' is not known"),
    ("[{source: mixture}, {source: hh-rlhf}]", "data.options.sources[0].source is 'mixture', but a mixture is made of other sources"),
    ("[{source: auto-j}, {source: hh-rlhf, pth: x}]", "unknown key 'data.options.sources[1].pth'; did you mean 'data.options.sources[1].path'?"),
    ("[{source: auto-j}, {path: x}]", "key 'data.options.sources[1].source' is missing"),
    ("[{source: auto-j}, {source: auto-j}]", "data.options.sources names 'auto-j' more than once, but each source is a client of its own: give each a name"),
    ("[{source: auto-j, name: hh-rlhf}, {source: hh-rlhf}]", "data.options.sources names 'hh-rlhf' more than once"),
    ("[{source: auto-j}]", "'data.options.sources'")])
def test_a_mixture_is_checked_to_the_options_of_its_sources(sources, part):
    message = refusal("data.source=mixture", f"data.options={{sources: {sources}}}")
    assert part in message, message


def test_columns_and_mixtures_that_go_together_are_taken():
    recipe = load_recipe("debug", ["data.source=jsonl", "data.options={}", "data.partition=column", "data.column=region", "data.clients=null", "data.column_clients={a: [x], b: [y, z]}"])
    assert recipe.data.column_clients == {"a": ["x"], "b": ["y", "z"]}
    load_recipe("debug", ["data.source=mixture", "data.options={sources: [{source: auto-j}, {source: auto-j, name: other, options: {judge_share: 0.3}}]}"])


def test_a_warm_up_that_leaves_one_step_is_taken():
    optimizer = load_recipe("debug", ["federation.local_steps=4", "federation.optimizer.warmup_steps=3", "federation.optimizer.scheduler=cosine"]).federation.optimizer
    assert (optimizer.scheduler, optimizer.warmup_steps) == ("cosine", 3)


def test_every_error_is_said_at_once_on_a_line_of_its_own():
    lines = refusal("federation.rounds=0", "selector.max_length=x", "policies=1").splitlines()
    assert len(lines) == 3 and all(line.startswith(str(RECIPES / "debug.yaml")) for line in lines)


@pytest.mark.parametrize(("override", "part"), [
    ("federation.rounds", "expected key.path=value"),
    ("=3", "expected key.path=value"),
    ("federation..rounds=3", "expected key.path=value"),
    ("federation.rounds=[1", "not valid YAML"),
    ("name.x=1", "name is text, not a section")])
def test_an_override_that_cannot_be_read_is_quoted(override, part):
    message = refusal(override)
    assert f"override '{override}'" in message and part in message


def test_overrides_change_what_they_name_and_nothing_else():
    plain, changed = load_recipe("debug"), load_recipe("debug", ["federation.rounds=7", "selector.lora.r=4", "runtime.devices=[cpu]"])
    assert (changed.federation.rounds, changed.selector.lora.r, changed.runtime.devices) == (7, 4, ["cpu"])
    tree = changed.model_dump()
    tree["federation"]["rounds"], tree["selector"]["lora"]["r"], tree["runtime"]["devices"] = 3, 2, None
    assert tree == plain.model_dump()


def test_a_number_in_scientific_notation_without_a_point_is_a_number():
    assert load_recipe("debug", ["federation.optimizer.lr=1e-5"]).federation.optimizer.lr == 1e-5


def test_files_that_hold_no_recipe_are_refused_by_their_path(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("name: x\ndata: [\n")
    assert f"{path}, line 3" in refusal(recipe=str(path))
    path.write_text("- 1\n")
    assert "this file holds a list" in refusal(recipe=str(path))
    path.write_text("seed: 1\n")
    assert "key 'name' is missing" in refusal(recipe=str(path))
    assert "Did you mean 'debug'?" in refusal(recipe="debugg")


def test_a_recipe_cannot_be_changed_after_it_was_checked():
    recipe = load_recipe("debug")
    with pytest.raises(ValueError, match="frozen"):
        recipe.federation.rounds = 9


def test_a_fingerprint_changes_with_the_seed_and_its_sections_and_with_nothing_else():
    plain = load_recipe("debug")
    assert plain.fingerprint("selector") == load_recipe("debug", ["federation.rounds=9"]).fingerprint("selector")
    assert plain.fingerprint("federation") != load_recipe("debug", ["federation.rounds=9"]).fingerprint("federation")
    assert plain.fingerprint("selector") != load_recipe("debug", ["seed=9"]).fingerprint("selector")


def test_every_field_of_a_recipe_is_documented():
    def fields(model, prefix=""):
        for name, field in model.model_fields.items():
            inner = section_of(field.annotation)
            if inner is None or field.default is None:      # an optional section says itself what it is for
                yield prefix + name, field.description
            if inner is not None:
                yield from fields(inner, f"{prefix}{name}.")

    assert [name for name, description in fields(Recipe) if not description] == []


def test_a_parsed_tree_is_checked_to_the_options():
    tree = yaml.safe_load(dump_recipe(load_recipe("debug")))
    assert parse_recipe(tree, "here").name == "debug"
    tree["data"]["options"]["papers_per_annotator"] = 91
    with pytest.raises(RecipeError, match=r"here: .*papers_per_annotator.*91"):
        parse_recipe(tree, "here")


def command(*arguments: str) -> subprocess.CompletedProcess:
    """The command line in a process of its own, which says at its end what it has imported."""
    code = (f"import sys, runpy, atexit; sys.argv = ['fed_rlhf', *{list(arguments)!r}]\n"
            f"atexit.register(lambda: print('IMPORTED', [m for m in {HEAVY!r} if m in sys.modules]))\n"
            "runpy.run_module('flows.fed_rlhf', run_name='__main__')")
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("arguments", "status", "said"), [
    (["--help"], 0, "--resume"),
    (["--check", "--recipe", "debug"], 0, "debug: the recipe is valid"),
    (["--check", "--recipe", "summarization/tldr"], 0, "the recipe is valid"),
    (["--recipe", "debug", "federation.round=3"], 2, "did you mean 'federation.rounds'?"),
    (["--recipe", "debug", "federation.clients_per_round=5", "data.clients=3"], 2, "use at most 3"),
    (["--check", "--recipe", "debug", "evaluation.alpaca_eval={annotators_config: foo}"], 2, "evaluation.alpaca_eval"),
    (["--recipe", "debug", "evaluation.alpaca_eval={annotators_config: foo}"], 2, "evaluation.alpaca_eval"),
    (["--recipe", "nowhere"], 2, "recipe 'nowhere' is not known"),
    (["--resume", "RUN", "seed=1"], 2, "--resume goes on with the run's own recipe"),
    (["--resume", "RUN", "--recipe", "debug"], 2, "--resume goes on with the run's own recipe")])
def test_help_and_recipe_checks_answer_without_heavy_imports_and_without_a_stack_trace(arguments, status, said):
    done = command(*arguments)
    assert done.returncode == status and said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "IMPORTED []" in done.stdout


@pytest.mark.parametrize(("override", "words"), [
    ("policy.template=summarization/polcy", "Did you mean 'summarization/policy'?"),
    ("evaluation.judge.selector.template=nowhere", "selector template 'nowhere' is not known"),
    ("evaluation.judge.kind=selectr", "Did you mean 'selector'?"),
    ("federation.selectors=3", "fedbis trains 1 adapter"),
    ("federation.optimizer.lr=.inf", "federation.optimizer.lr"),
    ("tracking.registered_model=a/b", "tracking.registered_model"),
    ("alignment.dpo.optimizer=foo", "alignment.dpo.optimizer"),
    ("runtime.devices=[cpu, cpu]", "each device is named once"),
    ("runtime.devices=[gpu]", "'gpu' is not a device"),
])
def test_what_would_only_fail_after_the_rounds_is_refused_before_them(override, words):
    assert words in refusal(override)


def test_an_alias_in_a_recipe_is_a_value_of_its_own(tmp_path):
    """Else an override of one of two places that a YAML alias fills would change both."""
    file = tmp_path / "shared.yaml"
    file.write_text(
        "name: shared\ndata: {source: aclsum}\nselector: {backbone: &one {name: tiny-random}}\npolicy: {backbone: *one}\n", encoding="utf-8")
    recipe = load_recipe(str(file), ["policy.backbone.layers=1"])
    assert (recipe.policy.backbone.layers, recipe.selector.backbone.layers, recipe.selector.backbone.name) == (1, None, "tiny-random")


def test_a_judge_may_be_a_reward_of_the_recipe_by_its_name():
    recipe = load_recipe("multi-objective/demo", ["rewards.helpful.training.steps=7"])
    assert recipe.evaluation.judge.options == {"reward": recipe.rewards["helpful"].model_dump(mode="json")} and recipe.rewards["helpful"].training.steps == 7
    for override, words in (
            ("evaluation.judge.options.reward=helpfull", "Did you mean 'helpful'"),
            ("evaluation.judge.options.reward={kind: function, name: cleann}", "Did you mean 'clean'"),
            ("evaluation.judge.options.reward={kind: judge}", "is the recipe's judge itself"),
            ("evaluation.judge.kind=autoj", "options of the judge 'reward': with another kind give evaluation.judge.options={} too")):
        with pytest.raises(RecipeError, match=words):
            load_recipe("multi-objective/demo", [override])
    assert load_recipe("multi-objective/demo", ["evaluation.judge.kind=selector", "evaluation.judge.options={}"]).evaluation.judge.options == {}
