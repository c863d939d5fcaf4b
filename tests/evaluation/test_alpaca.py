"""AlpacaEval: its schema, what is refused before a run, and its figures, which are the package's own. Nothing here asks a network."""

import csv
import hashlib
import json
import logging
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from components.config import AlpacaEvalConfig, PromptsConfig
from components.evaluation import alpaca
from components.evaluation.alpaca import (
    AlpacaEvalError,
    annotate,
    answered_by,
    check_alpaca_eval,
    check_prompts,
    figures,
    instructions_of,
    is_alpaca_eval,
    length_controlled_winrate,
    model_outputs,
    read_outputs,
    without_calibration,
)
from components.evaluation.length_control import length_controlled
from components.recipes import load_recipe

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "alpaca_eval"
PROMPTS = [f"question {i}" for i in range(40)]
OURS = model_outputs(PROMPTS, [f"ours {i}" for i in range(40)], "ours", "written")
THEIRS = model_outputs(PROMPTS, [f"theirs {i}" for i in range(40)], "theirs", "written")
OWN = [f"instruction {i}" for i in range(805)]
"""Stands for AlpacaEval's own list in tests that need no real sample."""

installed = pytest.mark.skipif(find_spec("alpaca_eval") is None, reason="the package alpaca-eval is not installed (extra alpaca-eval)")


def imports_the_package(test):
    """Importing it takes seconds."""
    return pytest.mark.slow(installed(test))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a test of AlpacaEval has asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in {name for names in alpaca.KEYS.values() for name in names}:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own_list(monkeypatch):
    monkeypatch.setattr(alpaca, "INSTRUCTIONS_HASH", hashlib.sha256("\x1f".join(OWN).encode()).hexdigest())
    return OWN


@pytest.fixture
def calibration(tmp_path):
    """A file with the columns of df_gamed.csv: two gamed models, and a difficulty for each instruction that grows with its number."""
    numbers, path = np.random.default_rng(0), tmp_path / "df_gamed.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(alpaca.CALIBRATION_COLUMNS)
        for model in ("concise", "verbose"):
            writer.writerows([model, i, round(float(numbers.random()), 4), round(float(numbers.normal()), 4), i / 400 - 1, False] for i in range(805))
    return path


def config(annotator="always_second", **settings):
    folder = FIXTURES / annotator
    return AlpacaEvalConfig(annotators_config=str(folder) if folder.is_dir() else annotator, **settings)


def written(path, rows):
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def annotations(preferences, ours=None, theirs=None, instructions=None):
    n = len(preferences)
    return [{
        "instruction": (instructions or OWN)[i], "output_1": "x" * (theirs or [50] * n)[i], "output_2": "y" * (ours or [50 + i] * n)[i],
        "generator_1": "theirs", "generator_2": "ours", "annotator": "a", "preference": preferences[i]} for i in range(n)]


# --- outputs

def test_answers_become_rows_of_the_schema_and_read_back_the_same(tmp_path):
    rows = model_outputs(["p", "q"], ["a", "ä"], "me", "set")
    assert rows == [{"dataset": "set", "instruction": "p", "output": "a", "generator": "me"}, {"dataset": "set", "instruction": "q", "output": "ä", "generator": "me"}]
    assert read_outputs(written(tmp_path / "outputs.json", rows)) == rows


def test_columns_of_other_models_files_that_are_not_needed_are_left_out_and_the_dataset_may_be_absent(tmp_path):
    path = written(tmp_path / "outputs.json", [{"instruction": "p", "output": "a", "generator": "m", "samples": ["a"]}])
    assert read_outputs(path) == [{"dataset": "", "instruction": "p", "output": "a", "generator": "m"}]


@pytest.mark.parametrize(("content", "said"), [
    ("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("{}", "holds no list of outputs"), ("[]", "holds no list of outputs"), ('["a"]', "row 1: instruction, output, generator must be text"),
    ('[{"instruction": "p", "output": "a", "generator": "m"}, {"instruction": "p", "output": null, "generator": "m"}]', "row 2: output must be text")])
def test_a_file_of_another_form_is_refused_by_its_row(tmp_path, content, said):
    (tmp_path / "outputs.json").write_text(content)
    with pytest.raises(AlpacaEvalError, match=said):
        read_outputs(tmp_path / "outputs.json")


def test_the_samples_are_alpaca_evals_own_instructions_in_their_order(samples):
    for model in ("gemma-2b-it", "gpt4_1106_preview", "alpaca-7b"):
        rows = read_outputs(samples / "alpaca_eval" / f"{model}.model_outputs.json")
        assert {row["generator"] for row in rows} == {model} and len(rows) == alpaca.INSTRUCTIONS
        instructions = [row["instruction"] for row in rows]
        assert is_alpaca_eval(instructions) and not is_alpaca_eval(instructions[::-1]) and not is_alpaca_eval(instructions[:-1])


# --- what is refused before anything is trained

@installed
def test_an_annotator_is_found_in_the_package_or_in_a_local_folder(monkeypatch):
    check_alpaca_eval(config())
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    check_alpaca_eval(AlpacaEvalConfig())
    with pytest.raises(AlpacaEvalError, match=r"'weighted_alpaca_eval_gpt4_turb' is not known.*Did you mean 'weighted_alpaca_eval_gpt4_turbo'\?.*local folder"):
        check_alpaca_eval(config("weighted_alpaca_eval_gpt4_turb"))


@installed
def test_a_service_without_a_key_is_refused_with_the_variable_that_holds_one():
    with pytest.raises(AlpacaEvalError, match=r"no key is in the environment: set OPENAI_API_KEY or .*\(never a recipe\)"):
        check_alpaca_eval(AlpacaEvalConfig())
    with pytest.raises(AlpacaEvalError, match="set ANTHROPIC_API_KEY"):
        check_alpaca_eval(config("claude"))


def test_a_package_that_is_not_installed_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr(alpaca, "find_spec", lambda name: None)
    with pytest.raises(AlpacaEvalError, match=r"not installed: pip install .*fed-rlhf\[alpaca-eval\]"):
        check_alpaca_eval(config())


@installed
def test_a_local_config_of_another_form_is_refused(tmp_path):
    (tmp_path / "configs.yaml").write_text("- a\n")
    with pytest.raises(AlpacaEvalError, match="is not an annotators config"):
        check_alpaca_eval(config(str(tmp_path)))
    shutil.copy(FIXTURES / "always_second" / "configs.yaml", tmp_path)
    with pytest.raises(AlpacaEvalError, match=r"prompt_template of 'always_second' is not at .*always_second/prompt.txt: the package looks beside the annotator's folder"):
        check_alpaca_eval(config(str(tmp_path)))


@installed
def test_files_that_are_missing_are_named_with_where_to_get_them(tmp_path):
    with pytest.raises(AlpacaEvalError, match=r"nowhere.json cannot be read \(No such file"):
        check_alpaca_eval(config(reference_outputs=str(tmp_path / "nowhere.json")))
    with pytest.raises(AlpacaEvalError, match=r"df_gamed.csv \(evaluation.alpaca_eval.calibration\) cannot be read \(No such file.*get df_gamed.csv from the hub's data set tatsu-lab/alpaca_eval"):
        check_alpaca_eval(config(calibration=str(tmp_path / "df_gamed.csv")))


@installed
def test_the_check_of_a_recipe_refuses_what_a_run_would(tmp_path, capsys):
    from flows import cli

    for settings, said in (("{annotators_config: foo}", "annotators_config 'foo' is not known"),
                           (f"{{annotators_config: {FIXTURES / 'always_second'}, calibration: {tmp_path / 'nowhere.csv'}}}", "nowhere.csv (evaluation.alpaca_eval.calibration) cannot be read")):
        assert cli.main(["--check", "--recipe", "debug", f"evaluation.alpaca_eval={settings}"]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["--check", "--recipe", "debug", f"evaluation.alpaca_eval={{annotators_config: {FIXTURES / 'always_second'}}}"]) == 0


@installed
def test_a_calibration_file_of_another_form_is_refused(tmp_path, calibration):
    lines = calibration.read_text().splitlines()
    other = tmp_path / "other.csv"
    other.write_text(",instruction_difficulty\n0,1\n")
    with pytest.raises(AlpacaEvalError, match="no column model, index, preference"):
        check_alpaca_eval(config(calibration=str(other)))
    other.write_text("\n".join(line for line in lines if not line.startswith(("concise,7,", "verbose,7,"))))
    with pytest.raises(AlpacaEvalError, match="no row for 1 of AlpacaEval's 805 instructions"):
        check_alpaca_eval(config(calibration=str(other)))


@installed
def test_calibration_is_refused_where_the_instructions_are_not_alpaca_evals_own(tmp_path, calibration, own_list):
    outputs = model_outputs(own_list, ["o"] * 805, "gpt", "set")
    check_alpaca_eval(config(calibration=str(calibration), reference_outputs=str(written(tmp_path / "r.json", outputs))))
    for rows in (outputs[::-1], outputs[:100]):
        with pytest.raises(AlpacaEvalError, match=r"calibration is for AlpacaEval's own 805 instructions, but reference_outputs"):
            check_alpaca_eval(config(calibration=str(calibration), reference_outputs=str(written(tmp_path / "r.json", rows))))
    with pytest.raises(AlpacaEvalError, match="calibration is for AlpacaEval's own"):
        check_alpaca_eval(config(calibration=str(calibration)))


def test_held_out_prompts_that_the_reference_did_not_answer_are_counted(tmp_path):
    given = config(reference_outputs=str(written(tmp_path / "r.json", THEIRS)))
    check_prompts(given, PROMPTS[5:9])
    with pytest.raises(AlpacaEvalError, match=r"no output for 2 of the 3 held-out prompts, e.g. 'other'"):
        check_prompts(given, ["other", PROMPTS[0], "another"])
    check_prompts(config(), ["other"])


def asked(recipe, source=None, template="summarization/policy", **settings):
    """A recipe with AlpacaEval, its held-out prompts from a source of their own where one is named."""
    return recipe.model_copy(update={
        "policy": recipe.policy.model_copy(update={"template": template}),
        "data": recipe.data.model_copy(update={"test_prompts": PromptsConfig(source=source) if source else None}),
        "evaluation": recipe.evaluation.model_copy(update={"alpaca_eval": config(**settings)})})


def test_the_annotator_is_told_what_the_policy_was_asked(debug):
    assert instructions_of(asked(debug), PROMPTS[:1]) == ["Write a summary of the text in one paragraph of at most 50 words.\n\nquestion 0"]
    assert instructions_of(asked(debug, "safe-rlhf"), PROMPTS[:1]) == instructions_of(asked(debug), PROMPTS[:1])
    assert instructions_of(asked(debug, template="qa/policy"), [" a\n"]) == [" a\n"], "a template without an instruction of its own changes nothing"


def test_alpaca_evals_own_instructions_stay_exact_whatever_the_policys_template(debug, tmp_path, own_list):
    reference = str(written(tmp_path / "r.json", model_outputs(own_list, ["o"] * 805, "gpt", "set")))
    for recipe in (asked(debug, "alpaca_eval"), asked(debug, reference_outputs=reference)):
        assert instructions_of(recipe, own_list[:3]) == own_list[:3]
    others = str(written(tmp_path / "s.json", THEIRS))
    assert instructions_of(asked(debug, reference_outputs=others), PROMPTS[:1]) != PROMPTS[:1]


def test_the_recipe_of_the_paper_for_questions_gives_the_annotator_the_bare_instructions():
    recipe = load_recipe("qa/shp")
    assert instructions_of(recipe, PROMPTS) == instructions_of(recipe.model_copy(update={"data": recipe.data.model_copy(update={"test_prompts": None})}), PROMPTS) == PROMPTS


def test_a_reference_may_name_what_it_answered_by_the_whole_instruction_or_by_the_prompt_alone(tmp_path):
    whole = [f"Summarize.\n\n{prompt}" for prompt in PROMPTS]
    given = config(reference_outputs=str(written(tmp_path / "r.json", model_outputs([*whole[:2], PROMPTS[2]], ["a", "b", "c"], "gpt", "set"))))
    check_prompts(given, PROMPTS[:3], whole[:3])
    assert [row["output"] for row in answered_by(read_outputs(tmp_path / "r.json"), PROMPTS[:3], whole[:3])] == ["a", "b", "c"]
    with pytest.raises(AlpacaEvalError, match="no output for 1 of the 2 held-out prompts, e.g. 'question 3'"):
        check_prompts(given, PROMPTS[2:4], whole[2:4])


# --- annotating

@imports_the_package
def test_an_annotator_that_looks_at_the_position_alone_lets_each_side_win_in_turn(tmp_path):
    """The package shows either output first at random, so its constant word is half of the time for us; rows stay in our order."""
    rows = annotate(config(), THEIRS, OURS, tmp_path / "cache.json", 0)
    assert [row["instruction"] for row in rows] == PROMPTS
    assert [(row["output_1"], row["output_2"]) for row in rows] == [(f"theirs {i}", f"ours {i}") for i in range(40)]
    assert {(row["generator_1"], row["generator_2"], row["annotator"]) for row in rows} == {("theirs", "ours", "always_second")}
    preferences = [row["preference"] for row in rows]
    assert set(preferences) == {1.0, 2.0} and 10 <= preferences.count(2.0) <= 30
    assert preferences == [row["preference"] for row in annotate(config(), THEIRS, OURS, tmp_path / "again.json", 0)]
    assert preferences != [row["preference"] for row in annotate(config(), THEIRS, OURS, tmp_path / "other.json", 1)]


@imports_the_package
def test_what_was_annotated_before_is_not_asked_again(tmp_path, monkeypatch):
    """The default annotator would ask a service: with all annotations in the cache it needs none, and the test has no network."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    paid = [{"instruction": p, "output_1": f"theirs {i}", "output_2": f"ours {i}", "annotator": "weighted_alpaca_eval_gpt4_turbo", "preference": 1 + i / 40}
            for i, p in enumerate(PROMPTS)]
    rows = annotate(AlpacaEvalConfig(), THEIRS, OURS, written(tmp_path / "cache.json", paid), 0)
    assert [row["preference"] for row in rows] == pytest.approx([1 + i / 40 for i in range(40)])
    assert figures(rows, 100)["win_rate"] == pytest.approx(100 * np.mean([i / 40 for i in range(40)]))


@imports_the_package
def test_a_run_that_has_all_its_annotations_goes_on_though_they_are_whole_numbers(tmp_path):
    """An annotator without weights says 1 or 2; pandas reads a column of these as integers."""
    first, again = (annotate(config(), THEIRS, OURS, tmp_path / "cache.json", 0) for _ in range(2))
    assert [row["preference"] for row in first] == [row["preference"] for row in again] and len(json.loads((tmp_path / "cache.json").read_text())) == 40


@imports_the_package
def test_the_packages_own_folder_is_not_written_to(tmp_path):
    folder = Path(next(iter(find_spec("alpaca_eval").submodule_search_locations)))
    before = {p for p in [*folder.rglob("*"), *FIXTURES.rglob("*")] if p.suffix != ".pyc" and p.name != "__pycache__"}
    annotate(config(), THEIRS, OURS, tmp_path / "deep" / "cache.json", 0)
    assert before == {p for p in [*folder.rglob("*"), *FIXTURES.rglob("*")] if p.suffix != ".pyc" and p.name != "__pycache__"}
    assert (tmp_path / "deep" / "cache.json").is_file()


@imports_the_package
def test_the_same_outputs_are_a_draw_and_are_not_put_to_the_annotator(tmp_path):
    rows = annotate(config("mumbles"), THEIRS[:3], [*OURS[:1], *THEIRS[1:3]], tmp_path / "cache.json", 0)
    assert [row["preference"] for row in rows] == [None, 1.5, 1.5]
    measured = figures(rows, 100)
    assert (measured["n_missing"], measured["n_total"], measured["n_draws"], measured["win_rate"]) == (1, 2, 2, 50.0)


@imports_the_package
def test_a_prompt_that_stands_twice_is_compared_twice_each_time_with_its_own_output(tmp_path):
    ours = model_outputs(["p", "q", "p"], ["first", "other", "second"], "ours", "written")
    theirs = model_outputs(["p", "q", "p"], ["a", "b", "c"], "theirs", "written")
    rows = annotate(config(), theirs, ours, tmp_path / "cache.json", 0)
    assert [(row["output_1"], row["output_2"]) for row in rows] == [("a", "first"), ("b", "other"), ("c", "second")]


@imports_the_package
def test_an_annotator_of_whom_nothing_can_be_parsed_gives_no_figures(tmp_path):
    rows = annotate(config("mumbles"), THEIRS, OURS, tmp_path / "cache.json", 0)
    with pytest.raises(AlpacaEvalError, match="none of the 40 annotations has a preference"):
        figures(rows)


@imports_the_package
def test_an_annotator_that_cannot_be_asked_is_explained_and_what_is_paid_for_is_kept(tmp_path):
    path = tmp_path / "always_second"
    shutil.copytree(FIXTURES / "always_second", path)
    (path / "configs.yaml").write_text((path / "configs.yaml").read_text().replace("test_completions", "no_such_completions"))
    with pytest.raises(AlpacaEvalError, match=r"stopped with ValueError: Unknown decoder: no_such_completions.*kept in .*cache.json"):
        annotate(config(str(path)), THEIRS, OURS, tmp_path / "cache.json", 0)


def test_outputs_for_other_instructions_than_the_references_are_not_compared(tmp_path):
    with pytest.raises(ValueError, match="row by row"):
        annotate(config(), THEIRS[::-1], OURS, tmp_path / "cache.json", 0)


@imports_the_package
def test_the_level_of_everybodys_logs_is_left_alone(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "alpaca_eval"]:
        monkeypatch.delitem(sys.modules, name)  # so that it is imported anew, which is when it sets the level
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    annotate(config(), THEIRS[:2], OURS[:2], tmp_path / "cache.json", 0)
    figures(annotations([1.2, 1.8]), 100)
    assert logging.getLogger().level == logging.ERROR


# --- figures

@imports_the_package
def test_figures_are_in_percent_and_count_wins_losses_and_draws():
    measured = figures(annotations([2, 1, 1.5, 0, 1.8, None], ours=[9, 10, 11, 12, 13, 15]), 100)
    assert measured["win_rate"] == pytest.approx(100 * (1 + 0 + 0.5 + 0.5 + 0.8) / 5) and measured["discrete_win_rate"] == pytest.approx(100 * 3 / 5)
    assert (measured["n_wins"], measured["n_wins_base"], measured["n_draws"], measured["n_total"], measured["n_missing"]) == (2, 1, 2, 5, 1)
    assert measured["standard_error"] == pytest.approx(100 * np.std([1, 0, 0.5, 0.5, 0.8], ddof=1) / np.sqrt(5))
    assert measured["avg_length"] == 11 and all(type(value) in (int, float) for value in measured.values())


@imports_the_package
def test_the_rate_at_equal_length_is_this_projects_on_the_annotators_probabilities():
    ours, theirs = [9, 30, 11, 40, 13], [10, 12, 14, 16, 18]
    measured = figures(annotations([1.1, 1.9, 1.5, 0, 1.2], ours, theirs), 200, 3)
    even = length_controlled([0.1, 0.9, 0.5, 0.5, 0.2], ours, theirs, 200, 3)
    assert (measured["equal_length_win_rate"], measured["equal_length_low"], measured["equal_length_high"]) == pytest.approx((100 * even.rate, 100 * even.low, 100 * even.high))


def real_annotations(samples):
    return json.loads((samples / "alpaca_eval" / "gemma-2b-it.annotations.json").read_text(encoding="utf-8"))


@imports_the_package
def test_the_published_figures_of_gemma_2b_it_are_those_of_its_annotations(samples):
    with (samples / "alpaca_eval" / "leaderboard.csv").open(newline="") as file:
        (published,) = [row for row in csv.DictReader(file) if row[""] == "gemma-2b-it"]
    measured = figures(real_annotations(samples), 100)
    for name in ("win_rate", "standard_error", "discrete_win_rate"):
        assert repr(measured[name]) == published[name], name
    for name in ("n_wins", "n_wins_base", "n_draws", "n_total", "avg_length"):
        assert measured[name] == int(published[name]), name


@imports_the_package
def test_our_rate_at_equal_length_is_that_of_the_packages_minimal_form_within_a_tenth_of_a_point(samples, calibration, monkeypatch):
    """The form without instruction difficulty; the package chooses its L1 penalty by cross-validation, ours is fixed."""
    import pandas as pd
    import sklearn
    from alpaca_eval.metrics import glm_winrate

    rows = real_annotations(samples)
    monkeypatch.setattr(glm_winrate, "hf_hub_download", lambda **_: str(calibration))  # it is read, but no term of this form uses it
    with sklearn.config_context():
        theirs = glm_winrate.get_length_controlled_winrate(
            pd.DataFrame(rows), glm_name="length_controlled_minimal", save_weights_dir=None, is_warn_extreme_changes=False)["length_controlled_winrate"]
    ours = figures(rows, 100)
    assert abs(ours["equal_length_win_rate"] - theirs) < 0.1
    assert abs(ours["equal_length_win_rate"] - ours["win_rate"]) > 3, "its answers are half as long as GPT-4's, so there is something to control for"


# --- AlpacaEval's own length-controlled win rate

@imports_the_package
def test_the_packages_model_gets_each_instructions_own_difficulty_whatever_the_order_of_the_rows(own_list, calibration, monkeypatch):
    """By itself the package takes the row number for the instruction: a shuffled or partial list would get others' difficulties."""
    from alpaca_eval.metrics import glm_winrate

    seen, fit = [], glm_winrate.fit_LogisticRegressionCV
    monkeypatch.setattr(glm_winrate, "fit_LogisticRegressionCV", lambda data, *rest, **more: (seen.append(data), fit(data, *rest, **more))[1])
    numbers = np.random.default_rng(1)
    rows = annotations([1 + float(p) for p in numbers.random(805)], list(map(int, numbers.integers(20, 90, 805))))
    chosen = numbers.permutation(805)[:300]
    length_controlled_winrate([rows[i] for i in chosen], own_list, calibration)
    fitted = seen[0][-300:]
    assert fitted["instruction_difficulty"].tolist() == pytest.approx([i / 400 - 1 for i in chosen])
    assert fitted["preference"].tolist() == pytest.approx([rows[i]["preference"] - 1 for i in chosen])
    assert len(seen[0]) == 2 * 805 + 300, "the gamed models of the file regularise the fit"


@imports_the_package
def test_the_packages_model_takes_length_into_account(own_list, calibration):
    ours = list(map(int, np.random.default_rng(2).integers(0, 200, 805)))
    rows = annotations([1 + 1 / (1 + np.exp(-(n - 50) / 20)) for n in ours], ours)
    assert 100 * np.mean([row["preference"] - 1 for row in rows]) > 70
    assert length_controlled_winrate(rows, own_list, calibration) == pytest.approx(50, abs=12)


@imports_the_package
def test_the_packages_model_leaves_scikit_learns_settings_and_its_own_folder_alone(own_list, calibration):
    import sklearn

    folder = Path(next(iter(find_spec("alpaca_eval").submodule_search_locations)))
    before = sklearn.get_config()
    length_controlled_winrate(annotations([1 + (i % 7) / 7 for i in range(805)]), own_list, calibration)
    assert sklearn.get_config() == before and not before["enable_metadata_routing"] and not (folder / "metrics" / "weights").exists()


def test_the_packages_model_is_refused_for_other_instructions_and_without_its_file(own_list, calibration, tmp_path):
    with pytest.raises(AlpacaEvalError, match="for its own 805 instructions, and these are others"):
        length_controlled_winrate(annotations([1.5], instructions=["another"]), own_list, calibration)
    with pytest.raises(AlpacaEvalError, match="for its own 805 instructions, and these are others"):
        length_controlled_winrate(annotations([1.5]), own_list[::-1], calibration)
    with pytest.raises(AlpacaEvalError, match="cannot be read"):
        length_controlled_winrate(annotations([1.5]), own_list, tmp_path / "nowhere.csv")


def test_what_stands_in_place_of_the_rate_says_what_is_missing(own_list):
    assert "needs df_gamed.csv" in without_calibration(own_list) and "evaluation.alpaca_eval.calibration" in without_calibration(own_list)
    assert "not defined for these prompts" in without_calibration(PROMPTS)


def test_the_references_own_prompts_as_the_data_source_gives_them_have_all_been_answered(samples):
    """Five of the 805 instructions have white space at an end, which the source strips."""
    from components.config import PromptsConfig
    from components.data.sources import load_prompts

    path = str(samples / "alpaca_eval" / "gpt4_1106_preview.model_outputs.json")
    prompts = [prompt for prompt, _ in load_prompts(PromptsConfig(source="alpaca_eval", path=path), "data.test_prompts", 0).prompts]
    config = AlpacaEvalConfig(annotators_config="any", reference_outputs=path)
    assert len(prompts) == 805
    alpaca.check_prompts(config, prompts)
    alpaca.check_prompts(config, [f"{prompt}\n" for prompt in prompts])
    with pytest.raises(alpaca.AlpacaEvalError, match="no output for 1 of the 2 held-out prompts"):
        alpaca.check_prompts(config, [prompts[0], "another"])
