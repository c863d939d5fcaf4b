"""Benchmarks are read as strictly as recipes, and those of the package compare what they say."""

from functools import cache

import pytest
import yaml

from components.config import RecipeError
from components.federation.untrained import UntrainedMethod
from components.recipes.benchmarks import (
    BENCHMARKS,
    arm_recipe,
    benchmark_names,
    load_benchmark,
    plan_sweep,
    read_benchmark,
)

VALID = {
    "recipe": "debug",
    "seeds": [0],
    "arms": {"FedBis": [], "FedDPO": ["federation.method=feddpo"]},
    "contests": [["FedBis", "FedDPO"]],
}
COMPARE_PARTITIONS = ("multi-objective-clients", "multi-objective-partitions", "paper-firm-partitions")
"""Benchmarks whose arms differ in how pairs are assigned to clients."""
COMPARE_SIZES = ("when-to-federate",)
"""Benchmarks whose arms differ in the numbers of owners and of their pairs."""


def write_benchmark(tmp_path, **changes):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(VALID | changes))
    return str(path)


load_once = cache(load_benchmark)


@cache
def load_arms(name):
    """The recipe of each arm of a benchmark of the package, with its first seed."""
    benchmark = load_once(name)
    return {arm: arm_recipe(benchmark, arm, benchmark.seeds[0]) for arm in benchmark.arms}


# --- benchmarks of the package


@pytest.mark.parametrize("name", benchmark_names())
def test_all_arms_have_the_same_number_of_gradient_evaluations(name):
    """Of clients with 64 training pairs, as in personalized/demo; of an owner where sizes differ."""
    budgets = {}
    most = max(recipe.federation.clients_per_round for recipe in load_arms(name).values())
    for arm, recipe in load_arms(name).items():
        federation = recipe.federation
        if (
            isinstance(federation.options, UntrainedMethod) or arm == "short-8"
        ):  # which is a control of the budget
            continue
        rows = 64 * most if recipe.data.pooled else 64  # which count where rounds are passes
        gradients = federation.options.local().gradient_evaluations(federation, rows)
        owners = recipe.data.clients if name in COMPARE_SIZES else 1
        budgets[arm] = federation.rounds * federation.clients_per_round * gradients / owners
    assert len(set(budgets.values())) == 1, budgets


@pytest.mark.parametrize("name", [name for name in benchmark_names() if name.startswith("personalized")])
def test_all_arms_of_personalized_methods_have_the_same_decay_of_rates(name):
    decays = {repr(recipe.federation.rate_decay) for recipe in load_arms(name).values()}
    assert len(decays) == 1


TUNED = [name.removesuffix("-rates") for name in benchmark_names() if name.endswith("-rates")]


@pytest.mark.parametrize("name", TUNED)
def test_rates_are_chosen_on_validation_pairs_of_seeds_that_are_not_reported(name):
    plan = load_once(f"{name}-rates")
    reported = set().union(
        *(load_once(other).seeds for other in benchmark_names() if not load_once(other).choices)
    )
    assert not set(plan.seeds) & reported
    for recipe in load_arms(f"{name}-rates").values():
        assert recipe.federation.accuracy_split == "validation"
    assert {recipe.federation.accuracy_split for recipe in load_arms(name).values()} == {"test"}


@pytest.mark.parametrize("name", TUNED)
def test_rates_of_every_method_are_chosen_among_the_same_ones_and_at_most_one_beyond_them(name):
    recipes = load_arms(f"{name}-rates")
    tried = {}
    for choice, settings in load_once(f"{name}-rates").choices.items():
        federations = [recipes[arm].federation for arm in settings.among]
        tried[choice] = [federation.options.local().learning_rate(federation) for federation in federations]
        assert len({federation.method for federation in federations}) == 1
    same = set.intersection(*map(set, tried.values()))
    assert len(same) >= 3
    for rates in tried.values():
        assert rates == sorted(rates)
        assert same <= set(rates)
        assert len(rates) <= len(same) + 1
        assert all(rate < min(same) or rate > max(same) for rate in set(rates) - same)
    others = {
        "A1-no-bottleneck",
        "A2-no-reward-head",
        "few-shot",
    }  # with the rate of FedPDPO, and without one
    assert set(tried) == set(load_once(name).arms) - others


@pytest.mark.parametrize("name", sorted(set(benchmark_names()) - {"when-to-federate"}))
def test_every_benchmark_has_clients_that_train_alone_and_pooled_pairs(name):
    arms = load_arms(name)
    alone = [
        recipe for recipe in arms.values() if getattr(recipe.federation.options, "average_over", "") == "self"
    ]
    pooled = [recipe for recipe in arms.values() if recipe.data.pooled]
    assert len(alone) == len(pooled) > 0
    assert {arm.partition("-")[0] for arm, recipe in arms.items() if recipe in alone} == {"local"}
    assert {arm.partition("-")[0] for arm, recipe in arms.items() if recipe in pooled} == {"pooled"}


@pytest.mark.parametrize("name", benchmark_names())
def test_all_arms_that_are_compared_by_answers_are_evaluated_in_the_same_way(name):
    arms = load_arms(name)
    compared = {arm for pair in load_once(name).contests for arm in pair} or set(arms)
    assert len({arms[arm].fingerprint("evaluation") for arm in compared}) == 1


@pytest.mark.parametrize("name", benchmark_names())
def test_all_arms_have_the_same_data_unless_partitions_are_compared(name):
    compared = {"clients", "partition", "alpha"} if name in COMPARE_PARTITIONS else set()
    compared = {"clients", "options"} if name in COMPARE_SIZES else compared
    data = {recipe.data.model_dump_json(exclude=compared | {"pooled"}) for recipe in load_arms(name).values()}
    assert len(data) == 1
    assert not (compared and load_once(name).contests)


@pytest.mark.parametrize("name", benchmark_names())
def test_all_arms_train_the_same_policy(name):
    recipes = load_arms(name).values()
    assert len({recipe.policy.model_dump_json(exclude={"lora"}) for recipe in recipes}) == 1
    if not name.endswith("-sensitivity"):
        assert len({recipe.policy.lora.model_dump_json() for recipe in recipes}) == 1


PAPER_SCALE = [name for name in benchmark_names() if name.startswith("paper-")]


@pytest.mark.parametrize("name", PAPER_SCALE)
def test_a_benchmark_of_paper_scale_names_its_table_and_says_that_it_was_not_run(name):
    text = (BENCHMARKS / f"{name}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    assert "Needs the hub and a GPU. Not run." in comment
    assert name.endswith("-rates") or "table" in comment or "figure" in comment


def test_a_benchmark_like_another_takes_what_it_leaves_out_from_it(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "like: paper-firm\nseeds: [7]\nsettings: [data.clients=4, federation.clients_per_round=4]"
    )
    like, other = load_benchmark(str(path)), load_once("paper-firm")
    assert (like.seeds, like.settings[0]) == ([7], "data.clients=4")
    assert (like.recipe, like.arms, like.claims) == (other.recipe, other.arms, other.claims)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("paper-fir", "like 'paper-fir' is not known; there are: .*paper-firm"),
        ("paper-firm-two-clients", "like 'paper-firm-two-clients', which is itself like 'paper-firm'"),
    ],
)
def test_a_benchmark_is_like_one_of_the_package_that_is_complete(tmp_path, other, sentence):
    path = tmp_path / "plan.yaml"
    path.write_text(f"like: {other}")
    with pytest.raises(RecipeError, match=sentence):
        load_benchmark(str(path))


@pytest.mark.parametrize("name", ["summarization-full", "multi-objective-full"])
def test_a_benchmark_for_a_gpu_says_that_it_was_not_run(name):
    first_line = (BENCHMARKS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("#")
    assert "GPU" in first_line
    assert "not run" in first_line


def test_the_benchmark_of_summaries_for_a_gpu_has_the_arms_of_the_usual_one():
    full = load_once("summarization-full")
    usual = load_once("summarization")
    assert (full.recipe, full.seeds, full.contests) == (usual.recipe, usual.seeds, usual.contests)
    assert list(full.arms) == list(usual.arms)


@pytest.mark.parametrize("arm", read_benchmark("summarization").arms)
def test_the_benchmark_of_summaries_for_a_gpu_differs_in_rounds_and_depth_alone(arm):
    full = load_arms("summarization-full")[arm]
    usual = load_arms("summarization")[arm]
    federation = full.federation
    steps = federation.rounds * federation.clients_per_round * federation.local_steps
    trains_selectors = federation.method in ("fedbis", "fedbiscuit", "few_shot_selector")
    if not isinstance(federation.options, UntrainedMethod):
        assert steps == 500 * full.data.clients
    assert full.selector.backbone.layers == (None if trains_selectors else 4)
    assert full.evaluation.judge.selector.backbone.layers == 8
    backbone = full.selector.backbone.model_copy(update={"layers": 4})
    same_length = {"rounds": usual.federation.rounds, "options": usual.federation.options}
    shortened = full.model_copy(
        update={
            "selector": full.selector.model_copy(update={"backbone": backbone}),
            "federation": federation.model_copy(update=same_length),
        }
    )
    assert shortened == usual


def test_the_warm_up_and_the_groupings_of_the_benchmark_for_a_gpu_are_those_of_the_usual_one_in_shares():
    options = load_arms("summarization-full")["FedBiscuit"].federation.options
    warmup = 3 * options.warmup_rounds
    assert 0.3 < warmup / 125 < 0.36
    assert len(range(warmup, 125, options.regroup_every)) == len(range(2 * 3, 18, 2))


def test_the_benchmark_of_objectives_for_a_gpu_has_the_arms_of_preferences_and_an_unregularized_one():
    full = load_once("multi-objective-full")
    usual = load_once("multi-objective-preferences")
    assert (full.recipe, full.seeds, full.contests) == (usual.recipe, usual.seeds, usual.contests)
    assert full.fronts == usual.fronts
    assert full.claims[: len(usual.claims)] == usual.claims
    figures = {"hypervolume", "rank", "sent", "lambda_drift", "mean_reward"}
    assert {claim.figure for claim in full.claims} == figures
    (additional,) = set(full.arms) - set(usual.arms)
    arms = load_arms("multi-objective-full")
    assert arms[additional].federation.options.beta == 0
    assert arms["FIRM-5-5"].federation.options.beta == 2.0


@pytest.mark.parametrize("arm", read_benchmark("multi-objective-preferences").arms)
def test_the_benchmark_of_objectives_for_a_gpu_differs_in_rounds_and_the_reward_alone(arm):
    full = load_arms("multi-objective-full")[arm]
    usual = load_arms("multi-objective-preferences")[arm]
    reward = full.rewards["helpful"]
    usual_training = usual.rewards["helpful"].training
    assert full.federation.rounds == 4 * usual.federation.rounds
    assert reward.training.backbone.layers is None
    shorter = {"steps": usual_training.steps, "backbone": usual_training.backbone}
    training = reward.training.model_copy(update=shorter)
    shortened = full.model_copy(
        update={
            "federation": full.federation.model_copy(update={"rounds": usual.federation.rounds}),
            "rewards": full.rewards | {"helpful": reward.model_copy(update={"training": training})},
            "evaluation": usual.evaluation,  # its judge is the reward
        }
    )
    assert shortened == usual


def test_the_deltas_of_the_study_are_below_the_longest_path_and_one_is_above_it():
    arms = {arm: recipe for arm, recipe in load_arms("delta").items() if arm not in ("local", "pooled")}
    federations = {arm: recipe.federation for arm, recipe in arms.items()}
    deltas = [federation.options.delta for federation in federations.values()]
    assert deltas == [0.0, 0.05, 0.1, 0.15, 0.2, 1.0]
    assert deltas == [int(arm.split("-")[1]) / 100 for arm in federations]
    assert {federation.options.variant for federation in federations.values()} == {"sp"}
    assert {federation.clients_per_round for federation in federations.values()} == {16}


def test_the_claims_of_fedbiscuit_and_drift_are_checked_against_all_that_they_name():
    claims = {(claim.arm, claim.figure) for claim in load_once("summarization").claims}
    assert claims == {
        ("FedBiscuit", "adjusted_rand_index"),
        ("FedBiscuit", "own_assigned"),
        ("FedBiscuit", "common_assigned"),
        ("FedBis", "common"),
        ("FedBis", "wins_equal_length"),
        ("FedBiscuit", "wins_equal_length"),
    }
    claims = {(claim.arm, claim.figure): sorted(claim.against) for claim in load_once("reasoning").claims}
    assert set(claims) == {
        ("DRIFT-MST", "margin"),
        ("DRIFT-SP", "margin"),
        ("DRIFT-MST", "accuracy"),
        ("DRIFT-SP", "accuracy"),
    }
    for against in claims.values():
        assert against == ["FedAvg", "FedCDA", "FedOPT", "FedProx", "local"]


# --- arms


def test_an_arm_is_the_recipe_with_its_settings_and_the_seed(tmp_path):
    recipe = arm_recipe(load_benchmark(write_benchmark(tmp_path)), "FedDPO", 7)
    assert (recipe.federation.method, recipe.seed, recipe.name) == ("feddpo", 7, "debug")


def test_settings_of_the_command_line_take_precedence_over_all_but_an_arms_own(tmp_path):
    path = write_benchmark(
        tmp_path,
        arms={"FedBis": ["federation.rounds=2"], "FedDPO": ["federation.method=feddpo"]},
        settings=["federation.rounds=7", "data.clients=2", "federation.batch_size=3"],
    )
    benchmark = load_benchmark(path, ["federation.rounds=5", "data.clients=3"])
    values = {}
    for arm in benchmark.arms:
        recipe = arm_recipe(benchmark, arm, 0)
        values[arm] = (recipe.federation.rounds, recipe.data.clients, recipe.federation.batch_size)
    assert values == {"FedBis": (2, 3, 3), "FedDPO": (5, 3, 3)}


def test_settings_of_the_command_line_are_checked(tmp_path):
    with pytest.raises(RecipeError, match="did you mean"):
        load_benchmark(write_benchmark(tmp_path), ["federation.round=5"])


@pytest.mark.parametrize("setting", ["seed=4", "seeds=[0,1]"])
def test_seeds_are_set_in_the_file_of_a_benchmark(tmp_path, setting):
    path = write_benchmark(tmp_path)
    for name, way in (
        ("summarization", "'like: summarization' and 'seeds: [0, 1]'"),
        (path, f"set them in {path}"),
    ):
        with pytest.raises(RecipeError) as error:
            load_benchmark(name, [setting])
        assert f"'{setting}': the seeds of a benchmark are set in its file" in str(error.value)
        assert way in str(error.value)


def test_a_number_is_accepted_as_the_name_of_an_arm(tmp_path):
    path = tmp_path / "numbers.yaml"
    path.write_text("recipe: debug\nseeds: [0]\narms: {1: [], 2: []}\n")
    assert list(load_benchmark(str(path)).arms) == ["1", "2"]


# --- refusals

CLAIM = {"arm": "FedBis", "figure": "common"}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"seeds": [1, 1]}, ("eeds [1, 1]", "only once")),
        ({"seeds": []}, ("seeds",)),
        ({"seeds": [0, -1]}, ("seeds", "-1")),
        ({"seed": 3}, ("did you mean 'seeds'?",)),
        ({"recipe": "debgu"}, ("Did you mean 'debug'?",)),
        ({"arms": {"a/b": []}, "contests": []}, ("rm 'a/b'", "letters")),
        ({"arms": {"a": [], "A": []}, "contests": []}, ("'A' and 'a' differ only in case",)),
        ({"contests": [["FedBis", "FedBis"]]}, ("cannot be compared with itself",)),
        ({"contests": [["FedBis", "FedAvg"]]}, ("no arm 'FedAvg'", "FedBis, FedDPO")),
        ({"arms": {"FedBis": ["seed=3"]}, "contests": []}, ("FedBis", "sets the seed")),
        ({"settings": ["seed=3"]}, ("sets the seed",)),
        ({"settings": ["federation.round=3"]}, ("plan.yaml: settings: ", "federation.round")),
        ({"arms": {"FedBis": ["federation.round=3"]}, "contests": []}, ("arm FedBis: ", "federation.round")),
        (
            {"settings": ["federation.rounds=3"], "arms": {"FedBis": ["federation.round=3"]}, "contests": []},
            ("arm FedBis: ",),
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(tmp_path, changes, parts):
    with pytest.raises(RecipeError) as error:
        load_benchmark(write_benchmark(tmp_path, **changes))
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("claim", "parts"),
    [
        ({"figure": "comon", "above": 0}, ("figure 'comon'", "Did you mean 'common'?")),
        ({}, ("set one of at_least and above",)),
        ({"above": 0, "at_least": 0}, ("set one of at_least and above",)),
        ({"arm": "FedAvg", "above": 0}, ("no 'FedAvg'", "FedBis, FedDPO")),
        ({"against": ["base policy"], "above": 0}, ("no 'base policy'", "FedBis, FedDPO")),
        ({"against": ["FedBis"], "above": 0}, ("cannot be compared with itself",)),
        ({"figure": "wins", "above": 0.5}, ("name in 'against'",)),
        (
            {"arm": "FedDPO", "figure": "wins", "against": ["FedBis"], "above": 0.5},
            ("no such contest", "[FedDPO, FedBis]"),
        ),
        ({"atleast": 0}, ("did you mean 'claims[0].at_least'?", "Keys allowed here: ")),
        ({"above": 0, "times": 2.0}, ("times", "'against'")),
    ],
)
def test_a_claim_that_cannot_be_checked_is_refused(tmp_path, claim, parts):
    with pytest.raises(RecipeError) as error:
        load_benchmark(write_benchmark(tmp_path, claims=[CLAIM | claim]))
    for part in parts:
        assert part in str(error.value)


def test_claims_are_read_and_dumped_unchanged(tmp_path):
    claims = [
        {"arm": "FedBis", "figure": "wins", "against": ["base policy", "FedDPO"], "above": 0.5},
        {"arm": "FedDPO", "figure": "common", "at_least": 0},
    ]
    benchmark = load_benchmark(write_benchmark(tmp_path, claims=claims))
    first, second = benchmark.claims
    assert (first.figure, first.against, first.at_least, first.above) == (
        "wins",
        ["base policy", "FedDPO"],
        None,
        0.5,
    )
    assert (second.figure, second.against, second.at_least, second.above) == ("common", [], 0.0, None)
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(yaml.safe_dump(benchmark.model_dump(mode="json")))
    assert load_benchmark(str(dumped)) == benchmark


def test_a_benchmark_needs_no_claims_and_fronts_may_be_claimed_of(tmp_path):
    assert load_benchmark(write_benchmark(tmp_path)).claims == []
    benchmark = load_once("multi-objective-preferences")
    assert set(benchmark.fronts) == {"FIRM", "FedCMOO-A"}
    assert "FIRM" in {claim.arm for claim in benchmark.claims}


OTHER_OBJECTIVES = [
    "federation.options.objectives={helpfulness: [helpful, clean]}",
    "federation.options.preference=null",
]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"fronts": {"front": ["FIRM-1-9", "nobody"]}}, "no arm 'nobody'"),
        ({"fronts": {"FIRM-1-9": ["FIRM-1-9", "FIRM-3-7"]}}, "has the name of an arm"),
        ({"fronts": {"front": ["FIRM-1-9"]}}, "front"),
        (
            {"claims": [{"arm": "FIRM-1-9", "figure": "reward:helpfulnes", "above": 0}]},
            "has no such objective",
        ),
        ({"claims": [{"arm": "FIRM", "figure": "hypervolum", "above": 0}]}, "Did you mean 'hypervolume'"),
        (
            {
                "fronts": {"front": ["FIRM-1-9", "other"]},
                "arms": {"FIRM-1-9": [], "other": OTHER_OBJECTIVES},
            },
            "without the same objectives",
        ),
    ],
)
def test_fronts_that_cannot_be_drawn_are_refused(tmp_path, changes, part):
    tree = load_once("multi-objective-preferences").model_dump(mode="json")
    path = tmp_path / "benchmark.yaml"
    path.write_text(yaml.safe_dump(tree | {"claims": [], "contests": []} | changes))
    with pytest.raises(RecipeError, match=part):
        load_benchmark(str(path))


def test_an_unknown_benchmark_is_refused_with_the_nearest_name():
    with pytest.raises(RecipeError, match=r"benchmark 'sumarization'.*Did you mean 'summarization'"):
        load_benchmark("sumarization")


def test_a_sweep_has_an_arm_for_each_combination_of_values():
    plan = plan_sweep(
        "debug",
        [
            "federation.optimizer.lr=1e-3,1e-4",
            "alignment.dpo.lr=1e-5, 1e-6",
            "federation.rounds=2",
            "seed=0,3",
        ],
    )
    assert plan.seeds == [0, 3]
    assert plan.arms == {
        f"optimizer-lr-{one}_dpo-lr-{other}": [
            f"federation.optimizer.lr={one}",
            f"alignment.dpo.lr={other}",
            "federation.rounds=2",
        ]
        for one in ("1e-3", "1e-4")
        for other in ("1e-5", "1e-6")
    }


def test_a_sweep_has_the_seed_of_its_recipe(tmp_path):
    (tmp_path / "own.yaml").write_text("extends: debug\nname: own\nseed: 7\n")
    assert plan_sweep(str(tmp_path / "own.yaml"), ["federation.rounds=1,2"]).seeds == [7]


def test_the_settings_of_a_sweep_are_applied_in_their_order():
    plan = plan_sweep(
        "debug", ["federation.options={},{aggregator: uniform}", "federation.options.average_over=self"]
    )
    arms = [arm_recipe(plan, arm, 0).federation.options for arm in plan.arms]
    assert [options.average_over for options in arms] == ["self", "self"]
    assert [options.aggregator.kind for options in arms] == ["participation", "uniform"]


@pytest.mark.parametrize(
    ("settings", "arms"),
    [
        (["federation.optimizer.betas=[0.9, 0.95],[0.8, 0.9]"], ["betas-_0_9_0_95_", "betas-_0_8_0_9_"]),
        (["tracking.experiment='a,b',c"], ["experiment-_a_b_", "experiment-c"]),
        (["selector.lora.r=4,8", "selector.lora.alpha=8,8"], ["r-4", "r-8"]),
        (["tracking.experiment='it''s, a',b"], ["experiment-_it_s_a_", "experiment-b"]),
        (["federation.optimizer.lr=1.0,1_0"], ["lr-1_0", "lr-1_0-2"]),
        (["tracking.experiment=a.0,a_0-2,a_0"], ["experiment-a_0", "experiment-a_0-2", "experiment-a_0-3"]),
        (["seed=1,2"], ["recipe"]),
    ],
)
def test_values_of_a_sweep_are_separated_by_commas_outside_of_brackets_and_quotes(settings, arms):
    plan = plan_sweep("debug", settings)
    assert list(plan.arms) == arms


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["federation.rounds=2"], "no setting has several values"),
        (["federation.rounds=2,"], "write it as KEY.PATH=VALUE or"),
        (["federation.rounds"], "write it as KEY.PATH=VALUE or"),
        (["federation.rounds=1,2", "federation.rounds=3"], "federation.rounds is given twice"),
        (["federation.rounds=1,none"], "the sweep of debug: arm rounds-none: "),
        (["federation.runds=1,2"], "the sweep of debug: arm runds-1: .*federation.rounds"),
        (["seed=0,one"], "'seed=0,one': seeds are whole numbers"),
        (["seed=[0,1"], "seeds are whole numbers"),
        (["seed=0,'"], "seeds are whole numbers"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        plan_sweep("debug", settings)
