"""Benchmarks are read as strictly as recipes."""

import pytest
import yaml

from components.benchmarks import BENCHMARKS, benchmark_names, load_benchmark
from components.config import RecipeError

GOOD = {"recipe": "debug", "seeds": [0], "arms": {"FedBis": [], "FedDPO": ["federation.method=feddpo"]}, "contests": [["FedBis", "FedDPO"]]}


def written(tmp_path, **changes) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(GOOD | changes))
    return str(path)


def test_the_projects_own_benchmarks_are_valid_and_give_every_method_the_same_client_steps():
    assert "summarization" in benchmark_names()
    for name in benchmark_names():
        plan = load_benchmark(name)
        budgets = {arm: (r := plan.recipe_of(arm, plan.seeds[0]).federation).rounds * r.clients_per_round * r.local_steps for arm in plan.arms}
        assert len(set(budgets.values())) == 1, budgets
        assert len({plan.recipe_of(arm, plan.seeds[0]).fingerprint("data", "policy", "evaluation") for arm in plan.arms}) == 1
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


def test_an_arm_is_the_recipe_with_its_settings_and_the_seed(tmp_path):
    plan = load_benchmark(written(tmp_path))
    recipe = plan.recipe_of("FedDPO", 7)
    assert (recipe.federation.method, recipe.seed, recipe.name) == ("feddpo", 7, "debug")


@pytest.mark.parametrize(("changes", "words"), [
    ({"seeds": [1, 1]}, "each is named once"), ({"seeds": []}, "seeds"), ({"arms": {"a/b": []}, "contests": []}, "Arm 'a/b': use letters"),
    ({"contests": [["FedBis", "FedBis"]]}, "cannot be compared with itself"), ({"arms": {"FedBis": ["seed=3"]}, "contests": []}, "sets the seed"), ({"seeds": [0, -1]}, "seed"),
    ({"contests": [["FedBis", "FedAvg"]]}, "there is no arm 'FedAvg' (there are: FedBis, FedDPO)"),
    ({"arms": {"FedBis": ["federation.round=3"]}, "contests": []}, "arm FedBis: "), ({"recipe": "debgu"}, "Did you mean 'debug'?"), ({"seed": 3}, "did you mean 'seeds'?")])
def test_what_cannot_be_run_is_refused_in_a_sentence_before_anything_runs(tmp_path, changes, words):
    with pytest.raises(RecipeError) as error:
        load_benchmark(written(tmp_path, **changes))
    assert words in str(error.value)


def test_a_benchmark_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(RecipeError, match="benchmark 'sumarization' is not known.*Did you mean 'summarization'"):
        load_benchmark("sumarization")
