"""AlpacaEval: its schema, what is refused before a run, and the package's own figures.

No test in this file uses the network.
"""

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
from components.data.records import DataError
from components.evaluation import alpaca_inputs
from components.evaluation.alpaca import (
    annotate,
    compute_figures,
    missing_rate_note,
    package_length_controlled_rate,
)
from components.evaluation.alpaca_inputs import (
    annotator_instructions,
    check_alpaca_eval,
    find_baseline,
    is_alpaca_eval,
    model_outputs,
    read_outputs,
)
from components.evaluation.length_control import fit_length_controlled_rate, style_differences
from components.recipes import load_recipe
from tests.support.command_line import fed_rlhf, refusal

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "alpaca_eval"
PROMPTS = [f"question {i}" for i in range(40)]
OURS = model_outputs(PROMPTS, [f"ours {i}" for i in range(40)], "ours", "written")
THEIRS = model_outputs(PROMPTS, [f"theirs {i}" for i in range(40)], "theirs", "written")
STAND_IN_LIST = [f"instruction {i}" for i in range(805)]
"""Stands for AlpacaEval's own instructions in tests that need no real sample."""

SUMMARY_TEMPLATE = "summarization/policy"
SUMMARY_INSTRUCTION = "Write a summary of the text in one paragraph of at most 50 words."

installed = pytest.mark.skipif(
    find_spec("alpaca_eval") is None, reason="the package alpaca-eval is not installed (extra alpaca-eval)"
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a test of AlpacaEval tried to use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def own_list(monkeypatch):
    """The stand-in list, which the module then takes for AlpacaEval's own instructions."""
    digest = hashlib.sha256("\x1f".join(STAND_IN_LIST).encode()).hexdigest()
    monkeypatch.setattr(alpaca_inputs, "INSTRUCTIONS_HASH", digest)
    return STAND_IN_LIST


def difficulty(number):
    """The difficulty of an instruction in the calibration file below."""
    return number / 400 - 1


@pytest.fixture
def calibration(tmp_path):
    """A file with the columns of df_gamed.csv, for two gamed models."""
    numbers = np.random.default_rng(0)
    path = tmp_path / "df_gamed.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(alpaca_inputs.CALIBRATION_COLUMNS)
        for model in ("concise", "verbose"):
            for i in range(805):
                preference = round(float(numbers.random()), 4)
                std_delta_len = round(float(numbers.normal()), 4)
                writer.writerow([model, i, preference, std_delta_len, difficulty(i), False])
    return path


def config(annotator="always_second", **settings):
    folder = FIXTURES / annotator
    return AlpacaEvalConfig(annotators_config=str(folder) if folder.is_dir() else annotator, **settings)


def write_rows(path, rows):
    plain = [row if isinstance(row, dict) else row.model_dump() for row in rows]
    path.write_text(json.dumps(plain), encoding="utf-8")
    return path


def annotations(preferences, lengths_2=None, lengths_1=None, instructions=STAND_IN_LIST):
    """Rows of the package with outputs of the given lengths."""
    rows = []
    for i, preference in enumerate(preferences):
        rows.append(
            {
                "instruction": instructions[i],
                "output_1": "x" * (lengths_1[i] if lengths_1 else 50),
                "output_2": "y" * (lengths_2[i] if lengths_2 else 50 + i),
                "generator_1": "theirs",
                "generator_2": "ours",
                "annotator": "a",
                "preference": preference,
            }
        )
    return rows


# --- Outputs


def test_answers_are_written_in_the_schema_and_read_back_without_further_columns(tmp_path):
    rows = model_outputs(["p\n", "q"], ["a", "ä"], "me", "set")
    assert [row.model_dump() for row in rows] == [
        {"dataset": "set", "instruction": "p\n", "output": "a", "generator": "me"},
        {"dataset": "set", "instruction": "q", "output": "ä", "generator": "me"},
    ]
    assert read_outputs(write_rows(tmp_path / "outputs.json", rows)) == rows
    row = {"instruction": "p", "output": "a", "generator": "m"}
    path = write_rows(tmp_path / "outputs.json", [row | {"samples": ["a"]}])
    assert [row.model_dump() for row in read_outputs(path)] == [{"dataset": "", **row}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read .it is not JSON.: expected a JSON list of objects with dataset, instruction"),
        ("[" * 100_000, "cannot be read .it is not JSON."),
        ("{}", "expected a JSON list of objects"),
        ("[]", "expected a JSON list of objects"),
        ('["a"]', "expected a JSON list of objects"),
        ('[{"output": "a"}]', "row 1: columns 'instruction', 'generator' are missing"),
        (
            '[{"instruction": "p", "output": "a", "generator": "m"},'
            ' {"instruction": "p", "output": null, "generator": "m"}]',
            "row 2: column 'output' is null, but text is needed",
        ),
    ],
)
def test_a_file_in_another_format_is_refused_with_its_row(tmp_path, content, message):
    (tmp_path / "outputs.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_outputs(tmp_path / "outputs.json")


def test_texts_stay_as_they_are_since_lengths_count(tmp_path):
    row = {"instruction": "p\r\nq", "output": "\ufeffa\r\nb\r", "generator": "m", "dataset": ""}
    (tmp_path / "outputs.txt").write_text(json.dumps([row]))
    assert read_outputs(tmp_path / "outputs.txt")[0].model_dump() == row


@pytest.mark.parametrize("model", ["gemma-2b-it", "gpt4_1106_preview", "alpaca-7b"])
def test_published_outputs_answer_alpaca_evals_own_instructions_in_their_order(samples, model):
    rows = read_outputs(samples / "alpaca_eval" / f"{model}.model_outputs.json")
    instructions = [row.instruction for row in rows]
    assert {row.generator for row in rows} == {model}
    assert len(rows) == alpaca_inputs.INSTRUCTIONS
    assert is_alpaca_eval(instructions)
    assert not is_alpaca_eval(instructions[::-1])
    assert not is_alpaca_eval(instructions[:-1])


# --- Checks before a run


@installed
def test_an_annotator_is_found_in_the_package_or_a_folder_and_an_unknown_one_refused():
    check_alpaca_eval(config())
    check_alpaca_eval(AlpacaEvalConfig())
    nearest = r"'weighted_alpaca_eval_gpt4_turb' is not known.*'weighted_alpaca_eval_gpt4_turbo'"
    with pytest.raises(DataError, match=nearest + ".*local folder"):
        check_alpaca_eval(config("weighted_alpaca_eval_gpt4_turb"))


def test_a_missing_package_is_reported_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setattr(alpaca_inputs, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"not installed: pip install .*-e '.\[alpaca-eval\]'"):
        check_alpaca_eval(config())


@installed
def test_a_local_annotator_in_another_format_or_without_its_template_is_refused(tmp_path):
    (tmp_path / "configs.yaml").write_text("- a\n")
    with pytest.raises(DataError, match="is not an annotators config"):
        check_alpaca_eval(config(str(tmp_path)))
    shutil.copy(FIXTURES / "always_second" / "configs.yaml", tmp_path)
    with pytest.raises(
        DataError, match=r"prompt_template of 'always_second' is not at .*always_second/prompt.txt"
    ):
        check_alpaca_eval(config(str(tmp_path)))


@installed
def test_missing_reference_outputs_or_calibration_are_refused_with_their_path(tmp_path):
    with pytest.raises(
        DataError, match=r"nowhere.json \(evaluation.alpaca_eval.reference_outputs\) cannot be read \(No such"
    ):
        check_alpaca_eval(config(reference_outputs=str(tmp_path / "nowhere.json")))
    with pytest.raises(
        match=r"df_gamed.csv \(evaluation.alpaca_eval.calibration\) cannot be read \(No such file.*"
        "get df_gamed.csv from the hub's data set tatsu-lab/alpaca_eval",
    ):
        check_alpaca_eval(config(calibration=str(tmp_path / "df_gamed.csv")))


@installed
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{annotators_config: foo}", "annotators_config 'foo' is not known"),
        (
            f"{{annotators_config: {FIXTURES / 'always_second'}, calibration: /nowhere.csv}}",
            "nowhere.csv (evaluation.alpaca_eval.calibration) cannot be read",
        ),
    ],
)
def test_the_check_of_a_recipe_refuses_what_would_fail_in_a_run(settings, message):
    assert message in refusal("check", "debug", f"evaluation.alpaca_eval={settings}")


@installed
def test_the_check_of_a_recipe_accepts_a_local_annotator():
    settings = f"evaluation.alpaca_eval={{annotators_config: {FIXTURES / 'always_second'}}}"
    assert fed_rlhf("check", "debug", settings).exit_code == 0


@installed
def test_a_calibration_file_without_a_column_or_an_instruction_is_refused(tmp_path, calibration):
    path = tmp_path / "other.csv"
    path.write_text(",instruction_difficulty\n0,1\n")
    with pytest.raises(DataError, match="no column model, index, preference"):
        check_alpaca_eval(config(calibration=str(path)))
    lines = calibration.read_text().splitlines()
    path = tmp_path / "other.csv"
    path.write_text("\n".join(line for line in lines if not line.startswith(("concise,7,", "verbose,7,"))))
    with pytest.raises(DataError, match="does not begin with a row for each of AlpacaEval's 805"):
        check_alpaca_eval(config(calibration=str(path)))


@installed
def test_calibration_is_accepted_for_alpaca_evals_own_instructions(tmp_path, calibration, own_list):
    reference = write_rows(tmp_path / "r.json", model_outputs(own_list, ["o"] * 805, "gpt", "set"))
    check_alpaca_eval(config(calibration=str(calibration), reference_outputs=str(reference)))


@installed
@pytest.mark.parametrize("rows", [slice(None, None, -1), slice(100)])
def test_calibration_is_refused_for_other_instructions_than_alpaca_evals_own(
    tmp_path, calibration, own_list, rows
):
    outputs = model_outputs(own_list, ["o"] * 805, "gpt", "set")[rows]
    reference = write_rows(tmp_path / "r.json", outputs)
    with pytest.raises(DataError, match=r"calibration is for AlpacaEval's own 805 .*reference_outputs"):
        check_alpaca_eval(config(calibration=str(calibration), reference_outputs=str(reference)))


@installed
def test_calibration_is_refused_without_reference_outputs(calibration):
    with pytest.raises(DataError, match="calibration is for AlpacaEval's own"):
        check_alpaca_eval(config(calibration=str(calibration)))


def test_held_out_prompts_need_outputs_of_the_reference_if_there_is_one(tmp_path):
    settings = config(reference_outputs=str(write_rows(tmp_path / "r.json", THEIRS)))
    assert find_baseline(settings, PROMPTS[5:9], PROMPTS[5:9]) == THEIRS[5:9]
    prompts = ["other", PROMPTS[0], "another"]
    with pytest.raises(DataError, match=r"no output for 2 of the 3 held-out prompts \(first: number 1\):"):
        find_baseline(settings, prompts, prompts)
    assert find_baseline(config(), ["other"], ["other"]) is None


# --- Instructions


def test_the_annotator_sees_the_instruction_that_the_policy_was_given_if_there_was_one():
    assert annotator_instructions(["question 0"], SUMMARY_TEMPLATE) == [
        f"{SUMMARY_INSTRUCTION}\n\nquestion 0"
    ]
    other_source = PromptsConfig(source="safe-rlhf")
    assert annotator_instructions(["question 0"], SUMMARY_TEMPLATE, other_source) == [
        f"{SUMMARY_INSTRUCTION}\n\nquestion 0"
    ]
    assert annotator_instructions([" a\n"], "qa/policy") == [" a\n"]


def test_own_instructions_stay_unchanged_and_others_have_the_template_of_the_policy(tmp_path, own_list):
    reference = write_rows(tmp_path / "r.json", model_outputs(own_list, ["o"] * 805, "gpt", "set"))
    by_source = annotator_instructions(own_list[:3], SUMMARY_TEMPLATE, PromptsConfig(source="alpaca_eval"))
    by_reference = annotator_instructions(
        own_list[:3], SUMMARY_TEMPLATE, config=config(reference_outputs=str(reference))
    )
    assert by_source == own_list[:3]
    assert by_reference == own_list[:3]
    settings = config(reference_outputs=str(write_rows(tmp_path / "s.json", THEIRS)))
    assert annotator_instructions(PROMPTS[:1], SUMMARY_TEMPLATE, config=settings) != PROMPTS[:1]


def test_the_recipe_of_the_paper_for_questions_gives_the_annotator_the_bare_instructions():
    recipe = load_recipe("qa/shp")
    template = recipe.policy.template
    assert annotator_instructions(PROMPTS, template, recipe.data.test_prompts) == PROMPTS
    assert annotator_instructions(PROMPTS, template) == PROMPTS


def test_a_reference_may_hold_the_complete_instruction_or_the_prompt_alone(tmp_path):
    instructions = [f"Summarize.\n\n{prompt}" for prompt in PROMPTS]
    outputs = model_outputs([*instructions[:2], PROMPTS[2]], ["a", "b", "c"], "gpt", "set")
    path = write_rows(tmp_path / "r.json", outputs)
    settings = config(reference_outputs=str(path))
    baseline = find_baseline(settings, PROMPTS[:3], instructions[:3])
    assert [row.output for row in baseline] == ["a", "b", "c"]
    assert [row.instruction for row in baseline] == instructions[:3]
    with pytest.raises(DataError, match=r"no output for 1 of the 2 held-out prompts \(first: number 2\):"):
        find_baseline(settings, PROMPTS[2:4], instructions[2:4])


def test_the_reference_has_answered_the_prompts_of_the_data_source(samples):
    """Five of the 805 instructions have white space at an end, which the source strips."""
    from components.data.sources import load_prompts

    path = str(samples / "alpaca_eval" / "gpt4_1106_preview.model_outputs.json")
    source = load_prompts(PromptsConfig(source="alpaca_eval", path=path), "data.test_prompts", 0)
    prompts = [prompt for prompt, _ in source.prompts]
    settings = AlpacaEvalConfig(annotators_config="any", reference_outputs=path)
    assert len(prompts) == 805
    padded = [f"{prompt}\n" for prompt in prompts]
    assert len(find_baseline(settings, prompts, prompts)) == 805
    assert [row.instruction for row in find_baseline(settings, padded, padded)] == padded
    with pytest.raises(DataError, match="no output for 1 of the 2 held-out prompts"):
        find_baseline(settings, [prompts[0], "another"], [prompts[0], "another"])


# --- Annotation


@installed
def test_annotations_keep_the_order_and_the_sides_of_the_outputs(tmp_path):
    rows = annotate(config(), THEIRS, OURS, tmp_path / "cache.json", 0)
    assert [row["instruction"] for row in rows] == PROMPTS
    assert [row["output_1"] for row in rows] == [f"theirs {i}" for i in range(40)]
    assert [row["output_2"] for row in rows] == [f"ours {i}" for i in range(40)]
    assert {row["generator_1"] for row in rows} == {"theirs"}
    assert {row["generator_2"] for row in rows} == {"ours"}
    assert {row["annotator"] for row in rows} == {"always_second"}


@installed
def test_the_order_of_presentation_is_random_and_a_function_of_the_seed(tmp_path):
    """An annotator that prefers the second output prefers each side in about half of the rows."""

    def preferences(file, seed):
        return [row["preference"] for row in annotate(config(), THEIRS, OURS, tmp_path / file, seed)]

    first = preferences("cache.json", 0)
    assert set(first) == {1.0, 2.0}
    assert 10 <= first.count(2.0) <= 30
    assert first == preferences("same.json", 0)
    assert first != preferences("other.json", 1)


@installed
def test_cached_annotations_are_not_requested_again(tmp_path, monkeypatch):
    """The default annotator needs a service; all annotations are in the cache."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    cached = [
        {
            "instruction": prompt,
            "output_1": f"theirs {i}",
            "output_2": f"ours {i}",
            "annotator": "weighted_alpaca_eval_gpt4_turbo_new",
            "preference": 1 + i / 40,
        }
        for i, prompt in enumerate(PROMPTS)
    ]
    rows = annotate(AlpacaEvalConfig(), THEIRS, OURS, write_rows(tmp_path / "cache.json", cached), 0)
    assert [row["preference"] for row in rows] == pytest.approx([1 + i / 40 for i in range(40)])
    expected = 100 * np.mean([i / 40 for i in range(40)])
    assert compute_figures(rows, 100).win_rate == pytest.approx(expected)


@installed
def test_a_cache_of_whole_numbers_is_read_again(tmp_path):
    """Annotators without weights give 1 or 2, and pandas reads a column of these as integers."""
    first, again = (annotate(config(), THEIRS, OURS, tmp_path / "cache.json", 0) for _ in range(2))
    assert [row["preference"] for row in first] == [row["preference"] for row in again]
    assert len(json.loads((tmp_path / "cache.json").read_text())) == 40


def source_files(*folders):
    """All files and folders in some folders, compiled modules excepted."""
    paths = set()
    for folder in folders:
        paths.update(p for p in folder.rglob("*") if p.suffix != ".pyc" and p.name != "__pycache__")
    return paths


@installed
def test_nothing_is_written_to_the_packages_folder(tmp_path):
    package = Path(next(iter(find_spec("alpaca_eval").submodule_search_locations)))
    before = source_files(package, FIXTURES)
    annotate(config(), THEIRS, OURS, tmp_path / "deep" / "cache.json", 0)
    assert source_files(package, FIXTURES) == before
    assert (tmp_path / "deep" / "cache.json").is_file()


@installed
def test_equal_outputs_are_a_draw_without_asking_the_annotator(tmp_path):
    rows = annotate(config("mumbles"), THEIRS[:3], [*OURS[:1], *THEIRS[1:3]], tmp_path / "cache.json", 0)
    assert [row["preference"] for row in rows] == [None, 1.5, 1.5]
    figures = compute_figures(rows, 100)
    assert figures.n_missing == 1
    assert figures.n_total == 2
    assert figures.n_draws == 2
    assert figures.win_rate == 50.0


@installed
def test_a_repeated_prompt_is_compared_with_its_own_output_each_time(tmp_path):
    ours = model_outputs(["p", "q", "p"], ["first", "other", "second"], "ours", "written")
    theirs = model_outputs(["p", "q", "p"], ["a", "b", "c"], "theirs", "written")
    rows = annotate(config(), theirs, ours, tmp_path / "cache.json", 0)
    assert [row["output_1"] for row in rows] == ["a", "b", "c"]
    assert [row["output_2"] for row in rows] == ["first", "other", "second"]


@installed
def test_replies_that_cannot_be_parsed_give_no_figures(tmp_path):
    rows = annotate(config("mumbles"), THEIRS, OURS, tmp_path / "cache.json", 0)
    with pytest.raises(DataError, match="none of the 40 annotations has a preference"):
        compute_figures(rows)


@installed
def test_a_failing_annotator_is_reported_with_the_cache_that_keeps_its_annotations(tmp_path):
    path = tmp_path / "always_second"
    shutil.copytree(FIXTURES / "always_second", path)
    settings = (path / "configs.yaml").read_text()
    (path / "configs.yaml").write_text(settings.replace("test_completions", "no_such_completions"))
    with pytest.raises(
        match=r"stopped with ValueError: Unknown decoder: no_such_completions.*stored in .*cache.json",
    ):
        annotate(config(str(path)), THEIRS, OURS, tmp_path / "cache.json", 0)


def test_outputs_for_other_instructions_than_the_references_are_refused(tmp_path):
    with pytest.raises(ValueError, match="row by row"):
        annotate(config(), THEIRS[::-1], OURS, tmp_path / "cache.json", 0)


@installed
def test_the_level_of_the_root_logger_is_unchanged(tmp_path, monkeypatch):
    """The package sets the level when it is first imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "alpaca_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    annotate(config(), THEIRS[:2], OURS[:2], tmp_path / "cache.json", 0)
    compute_figures(annotations([1.2, 1.8]), 100)
    assert logging.getLogger().level == logging.ERROR


# --- Figures


@installed
def test_figures_are_plain_numbers_in_percent_and_count_wins_losses_and_draws():
    figures = compute_figures(annotations([2, 1, 1.5, 0, 1.8, None], [9, 10, 11, 12, 13, 15]), 100)
    labels = [1, 0, 0.5, 0.5, 0.8]
    assert figures.win_rate == pytest.approx(100 * sum(labels) / 5)
    assert figures.discrete_win_rate == pytest.approx(100 * 3 / 5)
    assert (figures.n_wins, figures.n_wins_base, figures.n_draws) == (2, 1, 2)
    assert (figures.n_total, figures.n_missing) == (5, 1)
    assert figures.standard_error == pytest.approx(100 * np.std(labels, ddof=1) / np.sqrt(5))
    assert figures.avg_length == 11
    figures = compute_figures(annotations([2, 1, 1.5, 0, 1.8, None]), 100).model_dump(exclude_defaults=True)
    assert not {"length_controlled_winrate", "equal_style_win_rate", "style_effects"} & figures.keys()
    assert all(type(value) in (int, float) for value in figures.values())


@installed
def test_the_rate_at_equal_length_is_fitted_to_the_annotators_probabilities():
    ours = [9, 30, 11, 40, 13]
    theirs = [10, 12, 14, 16, 18]
    figures = compute_figures(annotations([1.1, 1.9, 1.5, 0, 1.2], ours, theirs), 200, 3)
    expected = fit_length_controlled_rate([0.1, 0.9, 0.5, 0.5, 0.2], ours, theirs, 200, 3)
    assert figures.equal_length_win_rate == pytest.approx(100 * expected.rate)
    assert figures.equal_length_low == pytest.approx(100 * expected.low)
    assert figures.equal_length_high == pytest.approx(100 * expected.high)


@pytest.fixture
def real_annotations(samples):
    return json.loads((samples / "alpaca_eval" / "gemma-2b-it.annotations.json").read_text(encoding="utf-8"))


@installed
def test_the_figures_of_gemma_2b_it_are_the_published_ones(samples, real_annotations):
    with (samples / "alpaca_eval" / "leaderboard.csv").open(newline="") as file:
        (published,) = [row for row in csv.DictReader(file) if row[""] == "gemma-2b-it"]
    figures = compute_figures(real_annotations, 100).model_dump()
    for name in ("win_rate", "standard_error", "discrete_win_rate"):
        assert repr(figures[name]) == published[name], name
    for name in ("n_wins", "n_wins_base", "n_draws", "n_total", "avg_length"):
        assert figures[name] == int(published[name]), name


@installed
def test_the_rate_at_equal_length_is_within_0_1_points_of_the_packages_minimal_form(
    real_annotations, calibration, monkeypatch
):
    """The minimal form has no difficulty, and its L1 penalty is chosen by cross-validation."""
    import pandas as pd
    import sklearn
    from alpaca_eval.metrics import glm_winrate

    # The package reads the file, but no term of this form uses it.
    monkeypatch.setattr(glm_winrate, "hf_hub_download", lambda **_: str(calibration))
    with sklearn.config_context():
        packages = glm_winrate.get_length_controlled_winrate(
            pd.DataFrame(real_annotations),
            glm_name="length_controlled_minimal",
            save_weights_dir=None,
            is_warn_extreme_changes=False,
        )["length_controlled_winrate"]
    figures = compute_figures(real_annotations, 100)
    assert abs(figures.equal_length_win_rate - packages) < 0.1
    # The model's answers are half as long as GPT-4's, so that length makes a difference.
    assert abs(figures.equal_length_win_rate - figures.win_rate) > 3


@installed
def test_the_rate_at_equal_style_is_the_minimum_of_the_penalized_loss_on_real_annotations(real_annotations):
    """Of the annotations of gemma-2b-it against GPT-4, whose answers have more headings and list items."""
    from scipy.optimize import minimize

    figures = compute_figures(real_annotations, 200, style_control=True)
    assert figures.equal_length_win_rate == compute_figures(real_annotations, 200).equal_length_win_rate
    texts = [(row["output_2"], row["output_1"]) for row in real_annotations]
    style = style_differences(*zip(*texts, strict=True))
    d = np.array([[len(ours) - len(theirs) for ours, theirs in texts], *style.values()])
    x = np.tanh(d / d.std(axis=1, ddof=1, keepdims=True))
    labels = np.array([row["preference"] for row in real_annotations]) - 1

    def loss(coefficients):
        z = coefficients[0] + coefficients[1:] @ x
        return np.sum(np.logaddexp(0, z) - labels * z) + 0.01 / 2 * np.sum(coefficients[1:] ** 2)

    theta, *effects = minimize(loss, np.zeros(5), tol=1e-10).x
    assert figures.equal_style_win_rate == pytest.approx(100 / (1 + np.exp(-theta)), abs=1e-3)
    assert list(figures.style_effects.values()) == pytest.approx(effects, abs=1e-3)
    assert figures.equal_style_win_rate == pytest.approx(6.03, abs=0.005)
    assert figures.equal_style_low < figures.equal_style_win_rate < figures.equal_style_high


# --- AlpacaEval's own length-controlled win rate


@installed
def test_each_instruction_gets_its_own_difficulty_in_any_order_of_the_rows(
    own_list, calibration, monkeypatch
):
    """By itself the package takes the row number for the number of the instruction."""
    from alpaca_eval.metrics import glm_winrate

    tables = []
    fit = glm_winrate.fit_LogisticRegressionCV

    def recorded_fit(data, *arguments, **options):
        tables.append(data)
        return fit(data, *arguments, **options)

    monkeypatch.setattr(glm_winrate, "fit_LogisticRegressionCV", recorded_fit)
    numbers = np.random.default_rng(1)
    preferences = [1 + float(p) for p in numbers.random(805)]
    rows = annotations(preferences, [int(n) for n in numbers.integers(20, 90, 805)])
    chosen = numbers.permutation(805)[:300]
    package_length_controlled_rate([rows[i] for i in chosen], own_list, calibration)
    fitted = tables[0][-300:]
    assert fitted["instruction_difficulty"].tolist() == pytest.approx([difficulty(i) for i in chosen])
    assert fitted["preference"].tolist() == pytest.approx([preferences[i] - 1 for i in chosen])
    assert len(tables[0]) == 2 * 805 + 300, "the gamed models of the file regularize the fit"


@installed
def test_the_packages_model_removes_the_effect_of_length_and_leaves_settings_and_its_folder(
    own_list, calibration
):
    lengths = [int(n) for n in np.random.default_rng(2).integers(0, 200, 805)]
    rows = annotations([1 + 1 / (1 + np.exp(-(n - 50) / 20)) for n in lengths], lengths)
    assert 100 * np.mean([row["preference"] - 1 for row in rows]) > 70
    assert package_length_controlled_rate(rows, own_list, calibration) == pytest.approx(50, abs=12)
    import sklearn

    package = Path(next(iter(find_spec("alpaca_eval").submodule_search_locations)))
    before = sklearn.get_config()
    rows = annotations([1 + (i % 7) / 7 for i in range(805)])
    package_length_controlled_rate(rows, own_list, calibration)
    assert sklearn.get_config() == before
    assert not before["enable_metadata_routing"]
    assert not (package / "metrics" / "weights").exists()


def test_a_missing_rate_is_explained_with_the_file_that_it_needs_or_where_it_is_not_defined(own_list):
    note = missing_rate_note(own_list)
    assert "needs df_gamed.csv" in note
    assert "evaluation.alpaca_eval.calibration" in note
    assert "not defined for these prompts" in missing_rate_note(PROMPTS)
