"""The day that chat templates print is chosen when a run starts, and stored with it."""

from datetime import date

import pytest

from components.evaluation.judges.autoj import AutoJSection
from components.models.backbone import BackboneError
from components.models.policy import PolicyTexts
from components.recipes import load_recipe
from components.recipes.inputs import set_chat_dates
from tasks import runs
from tasks.runs import create_run, write_stage_inputs
from tests.support.chat_templates import build_chat_tokenizer, family, write_chat_policy
from tests.support.tokenizers import write_backbone

FIRST, SECOND = date(2026, 3, 1), date(2026, 3, 2)


@pytest.fixture
def dated(tmp_path):
    """The recipe debug with a policy whose chat template prints the present day."""
    config = write_chat_policy("llama-3.2", tmp_path / "dated")
    return load_recipe("debug", [f"policy.backbone.name={config.backbone.name}"])


@pytest.fixture
def set_day(monkeypatch):
    """A function that sets the day which new runs take for today's."""

    def set_day(day):
        class Day(date):
            @classmethod
            def today(cls):
                return day

        monkeypatch.setattr(runs, "date", Day)

    return set_day


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_run_stores_the_day_on_which_it_starts(dated, set_day, tmp_path):
    set_day(FIRST)
    run = create_run(dated, tmp_path / "run")
    set_day(SECOND)
    policy = run.recipe().policy
    assert policy.chat_date == "2026-03-01"
    assert "Today Date: 01 Mar 2026" in PolicyTexts(policy).render("p").text


def test_a_day_of_the_recipe_stays(dated):
    chosen = dated.model_copy(update={"policy": dated.policy.model_copy(update={"chat_date": "2020-01-01"})})
    assert set_chat_dates(chosen, FIRST) == chosen


@pytest.mark.parametrize("name", ["debug", "summarization/demo"])
def test_a_run_whose_chat_templates_print_no_day_does_not_depend_on_it(name, tmp_path):
    recipe = load_recipe(name)
    assert set_chat_dates(recipe, FIRST) == recipe
    one = create_run(recipe, tmp_path / "one", FIRST)
    other = create_run(recipe, tmp_path / "other", SECOND)
    assert read_files(one.folder) == read_files(other.folder)


def test_without_its_chat_template_a_policy_prints_no_day(dated):
    recipe = dated.model_copy(update={"policy": dated.policy.model_copy(update={"chat": "none"})})
    assert set_chat_dates(recipe, FIRST) == recipe


def test_stages_of_a_pipeline_print_the_day_of_its_first_run(dated, set_day, tmp_path):
    folder = tmp_path / "pipeline"
    set_day(FIRST)
    write_stage_inputs(dated, folder)
    first = read_files(folder)
    assert b"2026-03-01" in first["recipe.yaml"]
    set_day(SECOND)
    for output in ("recipe.yaml", "federate-inputs.yaml"):  # DVC removes what a stage writes
        (folder / output).unlink()
    write_stage_inputs(dated, folder)
    assert read_files(folder) == first


def test_a_judge_prints_the_day_in_its_own_chat_template_only(tmp_path):
    name = str(write_chat_policy("dated", tmp_path).backbone.name)
    section = AutoJSection(model=name, chat_template=True)
    assert section.with_chat_date("2026-03-01").chat_date == "2026-03-01"
    for other in (AutoJSection(model=name), section.model_copy(update={"base_url": "http://127.0.0.1:1/v1"})):
        assert other.with_chat_date("2026-03-01") == other


def test_an_evaluator_of_thoughts_prints_the_day(tmp_path):
    write_backbone(build_chat_tokenizer(family("dated")), tmp_path)
    recipe = load_recipe("reasoning/demo", [f"thoughts.evaluator.model={tmp_path}"])
    dated = set_chat_dates(recipe, FIRST)
    assert dated.thoughts.evaluator.chat_date == "2026-03-01"
    assert dated.policy == recipe.policy


def test_a_model_without_a_readable_tokenizer_is_named_when_a_run_starts(tmp_path):
    recipe = load_recipe("debug", [f"policy.backbone.name={tmp_path}"])
    with pytest.raises(BackboneError, match=f"the tokenizer of '{tmp_path}' cannot be read"):
        create_run(recipe, tmp_path / "run")
