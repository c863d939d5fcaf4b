"""The stages of dvc.yaml: the recipe is checked first, and only rounds that belong to it are resumed."""

import shutil

import pytest
import yaml

from components.config import Recipe
from components.data.records import DataError
from components.io import read_json, write_json
from components.models.backbone import fetch_backbone
from components.recipes import load_recipe
from components.recipes.inputs import store_inputs
from flows import process
from tasks.runs import Run, create_run
from tests.support.bound_methods import bind
from tests.support.command_line import fed_rlhf, refusal
from tests.support.pipeline import ROOT

MISSING_ANNOTATOR = "evaluation.alpaca_eval={annotators_config: nowhere}"


def check_recipe(folder, *overrides):
    """Run the stage check_recipe with the recipe `debug`."""
    return fed_rlhf("stage", "check_recipe", "--folder", str(folder), "--recipe", "debug", *overrides)


def refused_recipe(folder, *overrides):
    """The error of the stage check_recipe with the recipe `debug`."""
    return refusal("stage", "check_recipe", "--folder", str(folder), "--recipe", "debug", *overrides)


def test_the_whole_recipe_is_written_with_its_overrides(tmp_path):
    result = check_recipe(tmp_path, "federation.rounds=7", "seed=3")
    assert result.exit_code == 0
    assert result.stdout.startswith("debug: ")
    written = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert written["federation"]["rounds"] == 7
    assert written["seed"] == 3
    recipe = load_recipe("debug", ["federation.rounds=7", "seed=3"])
    assert written == store_inputs(recipe, tmp_path / "inputs").model_dump(mode="json")
    assert not list((tmp_path / "inputs").iterdir()), "the recipe names no file of its own"


def test_the_inputs_of_the_rounds_are_the_sections_that_the_method_names(tmp_path):
    assert check_recipe(tmp_path).exit_code == 0
    inputs = yaml.safe_load((tmp_path / "federate-inputs.yaml").read_text())
    assert set(inputs) == {"seed", "selector", "federation"}
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert inputs == {name: recipe[name] for name in inputs}


def test_the_inputs_of_backbones_are_their_names(tmp_path):
    folder = fetch_backbone("tiny-random")
    assert check_recipe(tmp_path, f"policy.backbone.name={folder}").exit_code == 0
    inputs = yaml.safe_load((tmp_path / "backbone-inputs.yaml").read_text())
    assert inputs["backbones"] == [folder, "tiny-random"]
    assert inputs["readers"]["policy"] == [str(folder), None]


@pytest.mark.parametrize(
    ("overrides", "sections"),
    [
        ([], {"thoughts"}),
        (
            ["data={source: thoughts}", "thoughts={questions: [{set: csqa}], depth: 2}"],
            {"seed", "policy", "thoughts"},
        ),
    ],
    ids=["without trees", "with trees"],
)
def test_the_inputs_of_trees_are_what_trees_depend_on(tmp_path, overrides, sections):
    assert check_recipe(tmp_path, *overrides, "seed=3").exit_code == 0
    inputs = yaml.safe_load((tmp_path / "grow-inputs.yaml").read_text())
    assert set(inputs) == sections
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert inputs == {name: recipe[name] for name in sections}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["thoughts={questions: [{set: csqa}]}", "data.trees=here"],
            ["thoughts", "data.trees", "(here)", "leave out one of them"],
        ),
        (
            [
                "thoughts={questions: [{set: csqa}]}",
                "data.source=thoughts",
                "data.options={}",
                "data.path=here",
            ],
            ["thoughts", "data.path", "(here)"],
        ),
        (
            ["data.source=thoughts", "data.options={}", "data.trees=here"],
            ["data.trees", "another source"],
        ),
        (
            ["data.min_margin=0.5"],
            ["data.min_margin is 0.5", "thoughts", "data.trees", "leave it out"],
        ),
        (
            ["data={source: thoughts}", "thoughts={}"],
            ["thoughts.questions", "name at least one"],
        ),
        (
            ["data={source: thoughts}", "thoughts={questions: [{set: cqsa}]}"],
            ["thoughts.questions.set 'cqsa'"],
        ),
        (
            ["data={source: thoughts}", "thoughts={questions: [{set: csqa, part: [2, 2]}]}"],
            ["part [k, n]"],
        ),
        (
            ["data={source: thoughts}"],
            ["data.source 'thoughts'", "section thoughts", "data.path"],
        ),
        (
            [
                "data={source: thoughts}",
                "thoughts={questions: [{set: csqa}, {set: aqua}, {set: csqa, count: 5}]}",
            ],
            [
                "thoughts.questions[0]",
                "thoughts.questions[2]",
                "parts [0, 1] and [0, 1]",
                "csqa",
                "part: [0, 2] and [1, 2]",
            ],
        ),
        (
            ["thoughts={questions: [{set: csqa, path: here}, {set: csqa, path: here/}]}"],
            ["parts [0, 1] and [0, 1]", "csqa"],
        ),
        (
            ["thoughts={questions: [{set: csqa, part: [1, 2]}, {set: csqa, part: [3, 4]}]}"],
            ["parts [1, 2] and [3, 4]", "csqa"],
        ),
        (
            ["thoughts={questions: [{set: csqa, part: [0, 2]}, {set: cose, part: [1, 3]}]}"],
            ["parts [0, 2] and [1, 3]", "csqa and cose"],
        ),
        (
            [
                "thoughts={questions: [{set: csqa, part: [0, 2]}]}",
                "evaluation.questions={questions: [{set: csqa, part: [1, 2]}, {set: csqa, part: [0, 4]}]}",
            ],
            [
                "evaluation.questions.questions[1]",
                "thoughts.questions[0]",
                "parts [0, 4] and [0, 2]",
                "csqa",
            ],
        ),
        (
            [
                "thoughts={questions: [{set: csqa, part: [0, 2]}]}",
                "evaluation.questions={questions: [{set: cose}]}",
            ],
            ["parts [0, 1] and [0, 2]", "cose and csqa"],
        ),
        (
            ["evaluation.questions={questions: [{set: csqa}, {set: csqa, part: [1, 2]}]}"],
            [
                "evaluation.questions.questions[0]",
                "evaluation.questions.questions[1]",
                "parts [0, 1] and [1, 2]",
                "csqa",
            ],
        ),
    ],
)
def test_trees_that_cannot_be_grown_are_refused_with_the_recipe(tmp_path, overrides, words):
    error = refused_recipe(tmp_path, *overrides)
    for word in words:
        assert word in error, word


@pytest.mark.parametrize(
    ("grown", "answered"),
    [
        ("{set: csqa, part: [0, 2]}, {set: csqa, part: [1, 2]}, {set: mathqa}", "{set: aqua}"),
        (
            "{set: csqa, part: [0, 4]}, {set: cose, part: [1, 2]}",
            "{set: csqa, part: [2, 4]}, {set: cose, part: [2, 4]}",
        ),
        ("{set: csqa, path: here}, {set: csqa, path: there}", "{set: csqa}"),
        ("{set: csqa, revision: a}, {set: csqa, revision: b}", "{set: piqa}"),
        ("{set: csqa, path: here}", "{set: cose, path: there}"),
    ],
)
def test_parts_without_common_questions_are_accepted(grown, answered):
    recipe = load_recipe(
        "debug",
        [f"thoughts={{questions: [{grown}]}}", f"evaluation.questions={{questions: [{answered}]}}"],
    )
    assert len(recipe.thoughts.questions) == grown.count("set:")
    assert len(recipe.evaluation.questions.questions) == answered.count("set:")


def test_an_unknown_key_is_refused_with_the_nearest_one_and_writes_nothing(tmp_path):
    error = refused_recipe(tmp_path / "new", "federation.round=7")
    assert "'federation.round'" in error
    assert "'federation.rounds'" in error
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["stage", "check_recipe", "--folder", "new", "--recipe", "debug", MISSING_ANNOTATOR],
        ["check", "debug", MISSING_ANNOTATOR],
        ["run", "debug", MISSING_ANNOTATOR],
        ["benchmark", "plan.yaml", "--check"],
    ],
    ids=["stage", "check", "run", "benchmark"],
)
def test_a_missing_annotator_is_reported_before_anything_is_written(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FED_RLHF_RUNS", str(tmp_path / "runs"))
    plan = {"recipe": "debug", "seeds": [0], "arms": {"plain": [], "alpaca": [MISSING_ANNOTATOR]}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    error = refusal(*command)
    assert "evaluation.alpaca_eval" in error
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_run_of_a_deployment_is_refused_before_it_has_a_folder(monkeypatch):
    from flows import fed_rlhf

    monkeypatch.setattr(fed_rlhf, "open_run", lambda recipe: pytest.fail("a run was opened"))
    with pytest.raises(DataError, match=r"evaluation.alpaca_eval"):
        fed_rlhf.fed_rlhf.fn("debug", [MISSING_ANNOTATOR])


def test_a_resumed_run_needs_the_annotator_only_until_it_is_evaluated(tmp_path, monkeypatch):
    run = create_run(load_recipe("debug", [MISSING_ANNOTATOR]), tmp_path)
    monkeypatch.setattr(process, "run_flow", lambda *_, **parameters: (1, None))
    assert "evaluation.alpaca_eval" in refusal("resume", str(tmp_path))
    run.evaluation.mkdir()
    (run.evaluation / "result.json").write_text("{}")
    assert fed_rlhf("resume", str(tmp_path)).exit_code == 1


def test_a_stage_without_a_checked_recipe_is_refused_with_the_remedy(tmp_path):
    error = refusal("stage", "federate", "--folder", str(tmp_path))
    assert f"{tmp_path}/recipe.yaml" in error
    assert "check_recipe" in error


@pytest.mark.parametrize("argument", [["--recipe", "debug"], ["seed=3"]], ids=["recipe", "override"])
def test_a_later_stage_takes_neither_a_recipe_nor_overrides(tmp_path, argument):
    check_recipe(tmp_path)
    error = refusal("stage", "prepare", "--folder", str(tmp_path), *argument)
    assert "check_recipe" in error


@pytest.mark.parametrize(
    ("overrides", "finished", "resumed"),
    [
        ([], False, True),
        (["runtime.retries=3"], False, True),
        (["federation.rounds=9"], False, False),
        (["seed=1"], False, False),
        ([], True, False),
    ],
    ids=[
        "interrupted",
        "interrupted, another runtime",
        "other rounds",
        "another seed",
        "complete, so that another dependency has changed",
    ],
)
def test_rounds_are_resumed_only_where_they_belong_to_the_recipe(
    tmp_path, prepared, overrides, finished, resumed
):
    from flows.stages import _remove_finished_rounds

    recipe = load_recipe("debug")
    run = create_run(recipe, tmp_path)
    run.prepared.symlink_to(prepared)
    commit_first_state(run, recipe)
    if finished:
        (run.federation / "result.json").write_text("{}")
    _remove_finished_rounds(run, load_recipe("debug", overrides))
    assert (run.federation / "commits").exists() == resumed
    _remove_finished_rounds(run, load_recipe("debug", overrides))  # harmless where there are no rounds


def test_rounds_of_other_clients_begin_anew_and_who_joined_or_left_is_named(tmp_path, prepared):
    from flows.stages import _remove_finished_rounds

    recipe = load_recipe("debug")
    run = create_run(recipe, tmp_path / "run")
    shutil.copytree(prepared, run.prepared)
    commit_first_state(run, recipe)
    counts = read_json(run.prepared / "clients.json")
    counts["eve"] = counts.pop("ada")
    write_json(run.prepared / "clients.json", counts)
    with (run.prepared / "pairs.parquet").open("ab") as file:
        file.write(b" ")  # other data
    assert _remove_finished_rounds(run, recipe) == "eve joined and ada left"
    assert not run.federation.exists()
    assert _remove_finished_rounds(run, recipe) == ""


def test_rounds_whose_adapters_dvc_took_away_begin_anew(tmp_path, prepared):
    from flows.stages import _remove_finished_rounds

    recipe = load_recipe("debug")
    run = create_run(recipe, tmp_path)
    run.prepared.symlink_to(prepared)
    commit_first_state(run, recipe)
    shutil.rmtree(run.federation / "adapters")
    _remove_finished_rounds(run, recipe)
    assert not run.federation.exists()


def commit_first_state(run: Run, recipe: Recipe) -> None:
    """Commit the state before the first round."""
    import torch

    from components.data.records import read_clients
    from components.federation.protocol import build_federation
    from tasks.federation import open_commits

    commits = open_commits(run, recipe)
    initial = commits.store.put({"a": torch.zeros(2)})
    federation = build_federation(read_clients(run.prepared), initial, 2)
    state = bind(recipe.federation, commits.store).start(federation, recipe.seed)
    commits.write(state, None)


RESULTS = {
    "federate": "prepared/report.json",
    "align": "federation/result.json",
    "evaluate": "alignment/result.json",
    "report": "evaluation/result.json",
}


@pytest.fixture
def pipeline(tmp_path):
    """The folder of the pipeline after its first stage."""
    assert check_recipe(tmp_path).exit_code == 0
    return tmp_path


def shown(folder):
    """What `fed-rlhf show` prints of a folder."""
    return fed_rlhf("show", str(folder)).stdout


def test_a_stopped_pipeline_is_shown_with_its_first_missing_stage_and_resumed_by_dvc_only(pipeline):
    assert "stopped: prepare\n" in shown(pipeline)
    for stage, result in RESULTS.items():
        (pipeline / result).parent.mkdir()
        (pipeline / result).write_text("{}")
        assert f"stopped: {stage}\n" in shown(pipeline)
    assert "resume it   dvc repro" in shown(pipeline)
    assert "`dvc repro`" in refusal("resume", str(pipeline))


def test_a_finished_pipeline_is_shown_as_finished(pipeline):
    (pipeline / "report").mkdir()
    (pipeline / "report" / "report.html").write_text("")
    assert "fedbis, finished\n" in shown(pipeline)


def test_dvc_shows_the_main_metrics_of_the_pipeline(tmp_path):
    from flows.stages import write_headline

    main = {"before/accuracy/mean": 0.5, "after/accuracy/mean": 0.6, "aligned_vs_base/ties_half": 0.7}
    run = Run("pipeline", tmp_path / "data" / "pipeline")
    write_json(run.report / "metrics.json", main | {"dpo/loss": 0.1})
    write_headline(run)
    (metrics,) = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["report"]["metrics"]
    (path,) = metrics
    assert read_json(tmp_path / path) == main
