"""Which recipes can be protected, and which sentence refuses the others."""

import pytest

from components.config import RecipeError
from components.config.data import SOURCES
from components.config.federation import METHODS
from components.federation.methods.fedbis import FedBis
from components.federation.spending import privacy_spent
from components.recipes import load_recipe
from components.recipes.privacy_checks import check_privacy
from components.reporting.lines import privacy_line
from tests.support.variants import VARIANTS

LABEL = "federation.privacy={unit: label, epsilon: 2}"
OWN_FILE = ["data.source=jsonl", "data.path=pairs.jsonl", "data.options={}", "data.partition=iid"]
PROMPTS = [f"data.{name}_prompts={{source: alpaca_eval, path: {name}.json}}" for name in ("align", "test")]


def refusal(*overrides):
    with pytest.raises(RecipeError) as error:
        load_recipe("debug", [LABEL, *overrides])
    return str(error.value)


@pytest.mark.parametrize(
    "method",
    [
        VARIANTS["firm"],
        ["federation.method=feddpo", "federation.options={objective: ppo}", "rewards={one: {kind: judge}}"],
    ],
)
def test_methods_without_verdicts_are_refused(method):
    sentence = refusal(*method)
    assert "protects verdicts" in sentence and "leave out federation.privacy" in sentence


def test_corrected_losses_need_a_clip_and_a_method_whose_losses_can_be_corrected():
    assert "set a clip, such as 1.0, or debias to false" in refusal("federation.optimizer.clip=null")
    plain = LABEL.replace("}", ", debias: false}")
    assert load_recipe("debug", [plain, "federation.optimizer.clip=null"]).federation.privacy.flip > 0
    private = "federation.options={bottleneck: {width: 4}, reward_head: {width: 3}}"
    assert "set exclusion to null" in refusal("federation.method=fedpdpo", private)
    adapting = ["federation.method=perfedavg", "federation.options={inner_steps: 1}"]
    assert "inner steps of federation.method 'perfedavg' are not clipped" in refusal(*adapting)
    for method in (["federation.method=fedpdpo", private], adapting):
        assert load_recipe("debug", [plain, *method])


def test_pairs_by_the_scores_of_models_are_no_judgements():
    assert "data.trees adds pairs by the scores of a model" in refusal("data.trees=trees.jsonl")


def test_sources_say_whether_their_pairs_are_judgements():
    answers = {name: SOURCES.load(name).not_judgements for name in SOURCES.builtin}
    judgements = {name for name, reason in answers.items() if not reason}
    assert judgements == {
        *("aclsum", "tldr", "owners", "jsonl", "parquet", "csv", "hh-rlhf", "webgpt", "auto-j", "mixture")
    }
    sentence = refusal(
        "data.source=chitchat", "data.options={}", "data.partition=natural", "data.clients=null"
    )
    assert "source 'chitchat' shows the verdict in the texts" in sentence
    parts = "data.options={sources: [{source: webgpt}, {source: ultrafeedback}]}"
    sentence = refusal("data.source=mixture", parts, "data.partition=natural", "data.clients=null", *PROMPTS)
    assert "source 'ultrafeedback' does not say" in sentence


def test_chosen_completions_are_no_answers_to_the_servers_prompts():
    sentence = refusal(*OWN_FILE)
    assert "data.align_prompts is missing" in sentence and "federation.privacy protects" in sentence
    assert load_recipe("debug", [LABEL, *OWN_FILE, *PROMPTS])


def test_the_plan_of_a_recipe_has_an_epsilon():
    spent = privacy_spent(load_recipe("debug", [LABEL]).federation, 4, 0)
    assert (spent.epsilon, spent.delta, spent.unit) == (2.0, 0.0, "label")
    assert privacy_line(spent) == "privacy, unit label: epsilon 2 (randomised response); not covered: texts"
    seeded = load_recipe("debug", [LABEL.replace("}", ", simulated: true}")])
    simulated = privacy_spent(seeded.federation, 4, 0)
    assert simulated.epsilon is None
    assert "no epsilon" in privacy_line(simulated)
    assert privacy_spent(load_recipe("debug").federation, 4, 0) is None


# --- clients

CLIENT = [
    "federation.privacy={unit: client, clip: 0.1, noise_multiplier: 1, delta: 0.1}",
    "federation.sampling=round-robin",
    "federation.max_update_ratio=null",
    "federation.options={aggregator: expected}",
]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (["federation.sampling=uniform"], "federation.sampling is 'uniform', for which no epsilon is known"),
        (["federation.max_update_ratio=10"], "set it to null"),
        (["federation.options.aggregator=participation"], "set it to 'expected'"),
        (["federation.privacy.delta=0.3"], "permits to publish one of 4 clients: set it below 0.25"),
        (["federation.accuracy_split=validation"], "set it to 'test'"),
        (
            ["federation.privacy.noise_multiplier=null"],
            "one of noise_multiplier and target_epsilon is needed",
        ),
        (["federation.privacy.noise_multiplier=0"], "greater than 0"),
        (["federation.privacy.clip=.inf"], "finite number"),
        (["federation.privacy.delta=1"], "less than 1"),
        (["federation.options.finetune_rounds=1"], "with average_over or finetune_rounds uses more"),
        (["federation.method=fedamp", "federation.options={}"], "federation.method 'fedamp' uses more"),
        (
            ["federation.method=drift", "federation.options={}"],
            "take unit 'label', or a method such as 'feddpo'",
        ),
        (["federation.method=fedbiscuit"], "federation.method 'fedbiscuit' uses more"),
        (["data.pooled=true"], "data.pooled makes one client of all owners"),
        (["federation.method=fedpdpo"], "federation.method 'fedpdpo' uses more"),
    ],
)
def test_recipes_that_would_not_protect_clients_are_refused(changed, sentence):
    assert load_recipe("debug", CLIENT)
    with pytest.raises(RecipeError) as error:
        load_recipe("debug", [*CLIENT, *changed])
    assert sentence in str(error.value)


def test_a_method_says_itself_that_its_sums_protect_clients():
    class Derived(FedBis):
        """It may need single updates."""

    recipe = load_recipe("debug", CLIENT)
    own = recipe.federation.model_copy(update={"options": Derived(aggregator="expected")})
    with pytest.raises(RecipeError, match="protects one sum"):
        check_privacy(recipe.model_copy(update={"federation": own}))
    protecting = {name for name in METHODS.builtin if vars(METHODS.load(name)).get("sums_protect_clients")}
    assert protecting == {"fedavg", "fedbis", "feddpo", "fedprox", "ffa_lora"}
