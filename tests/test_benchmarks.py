"""Benchmarks are read as strictly as recipes."""

import json

import pytest
import yaml

from components.benchmarks import BENCHMARKS, benchmark_names, load_benchmark
from components.config import RecipeError
from components.federation.strategy import options_model

GOOD = {"recipe": "debug", "seeds": [0], "arms": {"FedBis": [], "FedDPO": ["federation.method=feddpo"]}, "contests": [["FedBis", "FedDPO"]]}


def written(tmp_path, **changes) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(GOOD | changes))
    return str(path)


def halves(federation) -> int:
    """Trainings that a client makes a round, of local_steps each."""
    options = options_model(federation.method, "test").model_validate(federation.options)
    return 2 if getattr(options, "halves", "") == "apart" and options.personal_steps is None and options.personal_epochs is None else 1


def test_the_projects_own_benchmarks_are_valid_and_give_every_method_the_same_client_steps():
    assert "summarization" in benchmark_names()
    for name in benchmark_names():
        plan = load_benchmark(name)
        recipes = {arm: plan.recipe_of(arm, plan.seeds[0]) for arm in plan.arms}
        budgets = {arm: (r := recipe.federation).rounds * r.clients_per_round * r.local_steps * halves(r) for arm, recipe in recipes.items()}
        assert len(set(budgets.values())) == 1, budgets
        assert len({recipe.fingerprint("evaluation") for recipe in recipes.values()}) == 1
        dealt = {"clients", "partition", "alpha"} if name in ("multi-objective-clients", "multi-objective-partitions") else set()     # what these two compare
        assert len({recipe.data.model_dump_json(exclude=dealt) for recipe in recipes.values()}) == 1 and not (dealt and plan.contests)
        assert len({json.dumps(recipe.policy.model_dump(mode="json", exclude={"lora"})) for recipe in recipes.values()}) == 1
        assert len({recipe.policy.lora.model_dump_json() for recipe in recipes.values()}) == 1 or name == "personalized-sensitivity"
    assert (BENCHMARKS / "summarization.yaml").is_file()


def test_the_benchmark_for_a_gpu_is_the_other_one_with_selectors_of_full_depth_and_500_local_steps_a_client():
    full, usual = load_benchmark("summarization-full"), load_benchmark("summarization")
    assert (full.recipe, full.seeds, list(full.arms), full.contests) == (usual.recipe, usual.seeds, list(usual.arms), usual.contests)
    for arm in full.arms:
        ours, theirs = (plan.recipe_of(arm, 0) for plan in (full, usual))
        federation = ours.federation
        assert federation.rounds * federation.clients_per_round * federation.local_steps == 500 * ours.data.clients
        assert ours.selector.backbone.layers == (None if federation.method in ("fedbis", "fedbiscuit") else 4) and ours.evaluation.judge.selector.backbone.layers == 8
        backbone = ours.selector.backbone.model_copy(update={"layers": 4})
        same = {"selector": ours.selector.model_copy(update={"backbone": backbone}),
                "federation": federation.model_copy(update={key: getattr(theirs.federation, key) for key in ("rounds", "options")})}
        assert ours.model_copy(update=same) == theirs
    options = full.recipe_of("FedBiscuit", 0).federation.options
    assert 0.3 < options["warmup_rounds"] * 3 / 125 < 0.36 and len(range(options["warmup_rounds"] * 3, 125, options["regroup_every"])) == len(range(2 * 3, 18, 2))
    first = (BENCHMARKS / "summarization-full.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("#") and "GPU" in first and "not run here" in first


def test_the_benchmark_of_objectives_for_a_gpu_is_the_one_of_preferences_for_four_times_the_rounds_and_with_a_reward_of_full_depth():
    full, usual = load_benchmark("multi-objective-full"), load_benchmark("multi-objective-preferences")
    assert (full.recipe, full.seeds, full.contests, full.fronts, list(full.arms)) == (usual.recipe, usual.seeds, usual.contests, usual.fronts, [*usual.arms, "unregularised"])
    assert full.claims[: len(usual.claims)] == usual.claims and {claim.figure for claim in full.claims} == {"hypervolume", "rank", "sent", "lambda_drift", "mean_reward"}
    for arm in usual.arms:
        ours, theirs = (plan.recipe_of(arm, 0) for plan in (full, usual))
        assert ours.federation.rounds == 4 * theirs.federation.rounds and ours.rewards["helpful"].training.backbone.layers is None
        federation, training = ours.federation, ours.rewards["helpful"].training
        training = training.model_copy(update={"steps": theirs.rewards["helpful"].training.steps, "backbone": theirs.rewards["helpful"].training.backbone})
        rewards = ours.rewards | {"helpful": ours.rewards["helpful"].model_copy(update={"training": training})}
        same = {"federation": federation.model_copy(update={"rounds": theirs.federation.rounds}), "rewards": rewards, "evaluation": theirs.evaluation}  # whose judge is the reward
        assert ours.model_copy(update=same) == theirs
    beta = {arm: full.recipe_of(arm, 0).federation.options["beta"] for arm in ("unregularised", "FIRM-5-5")}
    assert beta == {"unregularised": 0, "FIRM-5-5": 2.0}
    first = (BENCHMARKS / "multi-objective-full.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("#") and "GPU" in first and "not run here" in first


def test_the_deltas_of_the_study_lie_below_what_a_path_can_have_and_one_above():
    plan = load_benchmark("delta")
    federations = [plan.recipe_of(arm, 0).federation for arm in plan.arms]
    assert [federation.options["delta"] for federation in federations] == [0.0, 0.05, 0.1, 0.15, 0.2, 1.0] == [int(arm.split("-")[1]) / 100 for arm in plan.arms]
    assert {(federation.options["variant"], federation.clients_per_round) for federation in federations} == {("sp", 16)}


def test_an_arm_is_the_recipe_with_its_settings_and_the_seed(tmp_path):
    plan = load_benchmark(written(tmp_path))
    recipe = plan.recipe_of("FedDPO", 7)
    assert (recipe.federation.method, recipe.seed, recipe.name) == ("feddpo", 7, "debug")


@pytest.mark.parametrize(("changes", "words"), [
    ({"seeds": [1, 1]}, "each is named once"), ({"seeds": []}, "seeds"), ({"arms": {"a/b": []}, "contests": []}, "Arm 'a/b': use letters"),
    ({"contests": [["FedBis", "FedBis"]]}, "cannot be compared with itself"), ({"arms": {"FedBis": ["seed=3"]}, "contests": []}, "sets the seed"), ({"settings": ["seed=3"]}, "The benchmark sets the seed"), ({"settings": ["federation.round=3"]}, "plan.yaml: settings: "), ({"settings": ["federation.rounds=3"], "arms": {"FedBis": ["federation.round=3"]}, "contests": []}, "arm FedBis: "), ({"seeds": [0, -1]}, "seed"),
    ({"contests": [["FedBis", "FedAvg"]]}, "there is no arm 'FedAvg' (there are: FedBis, FedDPO)"),
    ({"arms": {"FedBis": ["federation.round=3"]}, "contests": []}, "arm FedBis: "), ({"recipe": "debgu"}, "Did you mean 'debug'?"), ({"seed": 3}, "did you mean 'seeds'?"),
    ({"claims": [{"arm": "FedBis", "figure": "comon", "above": 0}]}, "Did you mean 'common'?"), ({"claims": [{"arm": "FedBis", "figure": "common"}]}, "set one of at_least and above"),
    ({"claims": [{"arm": "FedBis", "figure": "common", "above": 0, "at_least": 0}]}, "set one of at_least and above"),
    ({"claims": [{"arm": "FedAvg", "figure": "common", "above": 0}]}, "there is no 'FedAvg' (there are: FedBis, FedDPO)"),
    ({"claims": [{"arm": "FedBis", "figure": "common", "against": ["raw policy"], "above": 0}]}, "there is no 'raw policy' (there are: FedBis, FedDPO)"),
    ({"claims": [{"arm": "FedBis", "figure": "common", "against": ["FedBis"], "above": 0}]}, "cannot be compared with itself"),
    ({"claims": [{"arm": "FedBis", "figure": "wins", "above": 0.5}]}, "name in 'against' whom"),
    ({"claims": [{"arm": "FedDPO", "figure": "wins", "against": ["FedBis"], "above": 0.5}]}, "there is no such contest, add [FedDPO, FedBis]"),
    ({"claims": [{"arm": "FedBis", "figure": "common", "atleast": 0}]}, "did you mean 'claims[0].at_least'? Keys allowed here: arm, figure, against, times, at_least, above.")])
def test_what_cannot_be_run_is_refused_in_a_sentence_before_anything_runs(tmp_path, changes, words):
    with pytest.raises(RecipeError) as error:
        load_benchmark(written(tmp_path, **changes))
    assert words in str(error.value)


def test_fronts_are_of_arms_with_the_same_objectives_and_may_be_claimed_of(tmp_path):
    plan = load_benchmark("multi-objective-preferences")
    assert set(plan.fronts) == {"FIRM", "FedCMOO-A"} and {claim.arm for claim in plan.claims} >= {"FIRM"}
    tree = plan.model_dump(mode="json")
    for changes, words in (
            ({"fronts": {"front": ["FIRM-1-9", "nobody"]}}, "there is no arm 'nobody'"), ({"fronts": {"FIRM-1-9": ["FIRM-1-9", "FIRM-3-7"]}}, "has the name of an arm"), ({"fronts": {"front": ["FIRM-1-9"]}}, "front"),
            ({"claims": [{"arm": "FIRM-1-9", "figure": "reward:helpfulnes", "above": 0}]}, "has no such objective"), ({"claims": [{"arm": "FIRM", "figure": "hypervolum", "above": 0}]}, "Did you mean 'hypervolume'"),
            ({"fronts": {"front": ["FIRM-1-9", "other"]}, "arms": tree["arms"] | {"other": ["federation.options.objectives={helpfulness: [helpful, clean]}", "federation.options.preference=null"]}}, "do not have the same objectives")):
        path = tmp_path / "benchmark.yaml"
        path.write_text(yaml.safe_dump(tree | {"claims": []} | changes))
        with pytest.raises(RecipeError, match=words):
            load_benchmark(str(path))


def test_settings_of_all_arms_give_way_to_those_of_the_command_line_and_these_to_an_arms_own(tmp_path):
    arms, given = {"FedBis": ["federation.rounds=2"], "FedDPO": ["federation.method=feddpo"]}, ["federation.rounds=7", "data.clients=2", "federation.batch_size=3"]
    plan = load_benchmark(written(tmp_path, arms=arms, settings=given), ["federation.rounds=5", "data.clients=3"])
    found = [(recipe.federation.rounds, recipe.data.clients, recipe.federation.batch_size) for recipe in (plan.recipe_of("FedBis", 0), plan.recipe_of("FedDPO", 0))]
    assert found == [(2, 3, 3), (5, 3, 3)]
    for setting, words in (("federation.round=5", "did you mean"), ("seed=4", "sets the seed")):
        with pytest.raises(RecipeError, match=words):
            load_benchmark(written(tmp_path), [setting])


def test_a_benchmark_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(RecipeError, match="benchmark 'sumarization' is not known.*Did you mean 'summarization'"):
        load_benchmark("sumarization")


def test_claims_name_arms_of_the_benchmark_and_are_kept_in_the_folder_as_they_were(tmp_path):
    claims = [{"arm": "FedBis", "figure": "wins", "against": ["raw policy", "FedDPO"], "above": 0.5}, {"arm": "FedDPO", "figure": "common", "at_least": 0}]
    plan = load_benchmark(written(tmp_path, claims=claims))
    assert [(claim.figure, claim.against, claim.at_least, claim.above) for claim in plan.claims] == [("wins", ["raw policy", "FedDPO"], None, 0.5), ("common", [], 0.0, None)]
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(plan.model_dump(mode="json")))
    assert load_benchmark(str(again)) == plan and load_benchmark(written(tmp_path)).claims == []


def test_what_the_papers_claim_is_checked_in_the_projects_own_benchmarks():
    assert {(claim.arm, claim.figure) for claim in load_benchmark("summarization").claims} == {
        ("FedBiscuit", "adjusted_rand_index"), ("FedBiscuit", "own_assigned"), ("FedBiscuit", "common_assigned"), ("FedBis", "wins"), ("FedBiscuit", "wins")}
    assert {(claim.arm, claim.figure, len(claim.against)) for claim in load_benchmark("reasoning").claims} == {(arm, figure, 4) for arm in ("DRIFT-MST", "DRIFT-SP") for figure in ("margin", "accuracy")}
