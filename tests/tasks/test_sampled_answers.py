"""Several sampled answers per prompt: their rows, their ids, and the verdicts on them."""

import logging
from contextlib import contextmanager

import pytest

from components.data.records import answered_prompt
from components.evaluation.contests import Contest
from components.federation.clients.context import ClientContexts
from components.federation.outcome import Workspace
from components.io import read_json
from components.models.adapters import AdapterStore
from components.recipes import load_recipe
from tasks.evaluation import answers as module
from tasks.evaluation import judging
from tasks.evaluation.answers import BASE, EvaluatedPolicy, answer_prompts, join_answers
from tasks.evaluation.judging import JudgedRun
from tests.support.judges import AlphabetSection, with_judge

SAMPLED = ("evaluation.answers_per_prompt=3", "evaluation.answer_temperature=1.5")


@pytest.fixture(autouse=True)
def plain_log(monkeypatch):
    for name in (module, judging):
        monkeypatch.setattr(name, "get_run_logger", lambda: logging.getLogger("test"))


@pytest.fixture
def answer(prepared, tmp_path):
    """A function that gives the base policy's rows under a recipe's settings."""

    @contextmanager
    def lend():
        yield None

    def write(*overrides, name="base"):
        recipe = load_recipe("debug", overrides)
        contexts = ClientContexts(AdapterStore(tmp_path / "adapters"), prepared / "pairs.parquet")
        workspace = Workspace(recipe, contexts, lend_trainer=lend, lend_device=lend)
        path = tmp_path / f"answers-{name}.json"
        answer_prompts.fn(EvaluatedPolicy(BASE, None, tmp_path), workspace, prepared, path)
        return read_json(path)

    return write


def test_each_sampled_answer_is_a_row_whose_id_names_its_prompt(answer):
    greedy = [row["prompt_id"] for row in answer(name="greedy")]
    rows = answer(*SAMPLED)
    ids = [row["prompt_id"] for row in rows]
    assert len(set(ids)) == len(ids) == 3 * len(greedy)
    assert [answered_prompt(name) for name in ids] == [name for name in greedy for _ in range(3)]
    assert set(greedy) < set(ids)
    assert len({row["text"] for row in rows[:3]}) > 1


def test_one_answer_is_greedy_whatever_the_temperature(answer):
    assert answer(name="one") == answer("evaluation.answer_temperature=9.0", name="other")


def test_every_sampled_answer_is_judged_and_prompts_are_the_unit_of_the_interval(answer, prepared, tmp_path):
    rows = answer(*SAMPLED)
    files = dict.fromkeys(("base", "aligned"), tmp_path / "answers-base.json")
    join_answers(files, tmp_path / "answers.json")
    recipe = with_judge(load_recipe("debug", SAMPLED), AlphabetSection())
    judged = judging.judge_answers.fn(JudgedRun(recipe, prepared, tmp_path), tmp_path / "answers.json", {})
    contest = Contest.read(tmp_path / "contests" / "aligned_vs_base.json")
    assert contest.prompts == [row["prompt_id"] for row in rows]
    assert judged.contests["aligned_vs_base"].ties == len(rows)
