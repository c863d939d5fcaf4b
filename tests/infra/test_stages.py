"""The stages of dvc.yaml: the recipe is checked first, and rounds that do not belong to it are not gone on with."""

import pytest
import yaml

from components.recipes import load_recipe
from flows import cli
from tasks.runs import Run, claim_folder


def test_the_recipe_is_written_out_in_full_with_its_overrides(tmp_path, capsys):
    assert cli.stage(["check_recipe", "--folder", str(tmp_path), "--recipe", "debug", "federation.rounds=7", "seed=3"]) == 0
    assert capsys.readouterr().out == "debug: the recipe is valid\n"
    written = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert (written["federation"]["rounds"], written["seed"]) == (7, 3)
    assert written == load_recipe("debug", ["federation.rounds=7", "seed=3"]).model_dump(mode="json")


def test_the_stage_of_the_trees_follows_what_trees_depend_on_and_nothing_without_any(tmp_path):
    trees = ["data={source: thoughts}", "thoughts={questions: [{set: csqa}], depth: 2}"]
    for overrides, followed in ((["seed=3"], {"thoughts"}), ([*trees, "seed=3"], {"seed", "policy", "thoughts"})):
        assert cli.stage(["check_recipe", "--folder", str(tmp_path), "--recipe", "debug", *overrides]) == 0
        grown = yaml.safe_load((tmp_path / "grown.yaml").read_text())
        assert set(grown) == followed and grown == {key: load_recipe("debug", overrides).model_dump(mode="json")[key] for key in followed}


@pytest.mark.parametrize(("overrides", "sentence"), [
    (["thoughts={questions: [{set: csqa}]}", "data.trees=here"], "The section thoughts grows trees, but data.trees names some that are there (here): leave out one of them"),
    (["thoughts={questions: [{set: csqa}]}", "data.source=thoughts", "data.options={}", "data.path=here"], "The section thoughts grows trees, but data.path names some that are there (here)"),
    (["data.source=thoughts", "data.options={}", "data.trees=here"], "data.trees is for trees beside another source"),
    (["data.min_margin=0.5"], "data.min_margin is 0.5, but there are no trees of thoughts whose scores it could be of (a section thoughts, or data.trees): leave it out"),
    (["data={source: thoughts}", "thoughts={}"], "thoughts.questions is empty: name at least one question set"),
    (["data={source: thoughts}", "thoughts={questions: [{set: cqsa}]}"], "thoughts.questions.set 'cqsa' is not known"),
    (["data={source: thoughts}", "thoughts={questions: [{set: csqa, part: [2, 2]}]}"], "is not a part [k, n]"),
    (["data={source: thoughts}"], "data.source 'thoughts' has no trees: give a section thoughts, which grows some, or data.path"),
    (["data={source: thoughts}", "thoughts={questions: [{set: csqa}, {set: aqua}, {set: csqa, count: 5}]}"],
     "thoughts.questions[0] and thoughts.questions[2]: parts [0, 1] and [0, 1] of set csqa have questions in common: give each a part of its own, such as part: [0, 2] and [1, 2].\n"),
    (["thoughts={questions: [{set: csqa, path: here}, {set: csqa, path: here/}]}"], "parts [0, 1] and [0, 1] of set csqa have"),
    (["thoughts={questions: [{set: csqa, part: [1, 2]}, {set: csqa, part: [3, 4]}]}"], "parts [1, 2] and [3, 4] of set csqa have"),
    (["thoughts={questions: [{set: csqa, part: [0, 2]}, {set: cose, part: [1, 3]}]}"], "parts [0, 2] and [1, 3] of sets csqa and cose, which ask the same questions, have questions in common: give each"),
    (["thoughts={questions: [{set: csqa, part: [0, 2]}]}", "evaluation.questions={questions: [{set: csqa, part: [1, 2]}, {set: csqa, part: [0, 4]}]}"],
     "evaluation.questions.questions[1] and thoughts.questions[0]: parts [0, 4] and [0, 2] of set csqa have questions in common, and answers to questions that trees are grown for say nothing of new ones: give"),
    (["thoughts={questions: [{set: csqa, part: [0, 2]}]}", "evaluation.questions={questions: [{set: cose}]}"], "parts [0, 1] and [0, 2] of sets cose and csqa, which ask the same questions, have"),
    (["evaluation.questions={questions: [{set: csqa}, {set: csqa, part: [1, 2]}]}"], "evaluation.questions.questions[0] and evaluation.questions.questions[1]: parts [0, 1] and [1, 2] of set csqa have")])
def test_trees_that_cannot_be_grown_are_refused_with_the_recipe(tmp_path, capsys, overrides, sentence):
    assert cli.stage(["check_recipe", "--folder", str(tmp_path), "--recipe", "debug", *overrides]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("grown", "asked"), [
    ("{set: csqa, part: [0, 2]}, {set: csqa, part: [1, 2]}, {set: mathqa}", "{set: aqua}"), ("{set: csqa, part: [0, 4]}, {set: cose, part: [1, 2]}", "{set: csqa, part: [2, 4]}, {set: cose, part: [2, 4]}"),
    ("{set: csqa, path: here}, {set: csqa, path: there}", "{set: csqa}"), ("{set: csqa, revision: a}, {set: csqa, revision: b}", "{set: piqa}"), ("{set: csqa, path: here}", "{set: cose, path: there}")])
def test_parts_that_share_nothing_or_may_not_are_not_refused_with_the_recipe(grown, asked):
    recipe = load_recipe("debug", [f"thoughts={{questions: [{grown}]}}", f"evaluation.questions={{questions: [{asked}]}}"])
    assert len(recipe.thoughts.questions) == grown.count("set:") and len(recipe.evaluation.questions.questions) == asked.count("set:")


def test_a_bad_recipe_is_one_sentence_and_writes_nothing(tmp_path, capsys):
    assert cli.stage(["check_recipe", "--folder", str(tmp_path / "new"), "--recipe", "debug", "federation.round=7"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "unknown key 'federation.round'; did you mean 'federation.rounds'?" in error
    assert not (tmp_path / "new").exists()


NOWHERE = "evaluation.alpaca_eval={annotators_config: nowhere}"


def test_what_is_not_here_is_refused_by_the_check_that_comes_first_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FED_RLHF_RUNS", str(tmp_path / "runs"))
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"recipe": "debug", "seeds": [0], "arms": {"plain": [], "asks": [NOWHERE]}}))
    for command, arguments in ((cli.stage, ["check_recipe", "--folder", str(tmp_path / "new"), "--recipe", "debug", NOWHERE]), (cli.main, ["--check", "--recipe", "debug", NOWHERE]),
                               (cli.main, ["--recipe", "debug", NOWHERE]), (cli.benchmark, ["--check", "--benchmark", str(tmp_path / "plan.yaml")])):
        assert command(arguments) == 2
        said = capsys.readouterr()
        assert "evaluation.alpaca_eval" in said.err and said.err.count("\n") == 1 and not said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml"]


def test_a_run_from_a_deployment_is_refused_before_it_has_a_folder(monkeypatch):
    from components.data.records import DataError
    from flows import fed_rlhf

    monkeypatch.setattr(fed_rlhf, "open_run", lambda recipe: pytest.fail("a run was opened"))
    with pytest.raises(DataError, match=r"evaluation.alpaca_eval"):
        fed_rlhf.fed_rlhf.fn("debug", [NOWHERE])


def test_a_run_that_is_resumed_is_asked_for_it_only_as_long_as_it_has_not_been_measured(tmp_path, capsys):
    run = claim_folder(load_recipe("debug", [NOWHERE]), tmp_path)
    assert cli.main(["--check", "--resume", str(tmp_path)]) == 2 and "evaluation.alpaca_eval" in capsys.readouterr().err
    run.evaluation.mkdir()
    (run.evaluation / "result.json").write_text("{}")
    assert cli.main(["--check", "--resume", str(tmp_path)]) == 0


def test_a_stage_without_a_checked_recipe_says_what_to_do(tmp_path, capsys):
    assert cli.stage(["federate", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/recipe.yaml is missing: run the stage check_recipe first, or `dvc repro`, which does.\n"


@pytest.mark.parametrize(("overrides", "finished", "kept"), [
    ([], False, True), (["runtime.retries=3"], False, True), (["federation.rounds=9"], False, False), (["seed=1"], False, False), ([], True, False)],
    ids=["interrupted", "interrupted, another runtime", "other rounds", "another seed", "complete, so that something else has changed"])
def test_rounds_are_gone_on_with_only_where_they_belong_to_the_recipe(tmp_path, prepared, overrides, finished, kept):
    import torch

    from components.data.records import read_clients
    from components.federation.strategy import build_federation, build_strategy
    from flows.fed_rlhf import open_commits
    from flows.stages import _keep_or_start_anew

    recipe = load_recipe("debug")
    claim_folder(recipe, tmp_path)
    (tmp_path / "prepared").symlink_to(prepared)
    run = Run("pipeline", tmp_path)
    commits = open_commits(run, recipe)
    initial = commits.store.put({"a": torch.zeros(2)})
    state = build_strategy(recipe.federation, commits.store).init(build_federation(read_clients(prepared), initial, 2), recipe.seed)
    commits.write(state, {})
    if finished:
        (run.federation / "result.json").write_text("{}")
    _keep_or_start_anew(run, load_recipe("debug", overrides))
    assert (run.federation / "commits").exists() == kept
    _keep_or_start_anew(run, load_recipe("debug", overrides))  # harmless where there is nothing
