"""Several sampled answers per prompt: their rows, their ids, and the verdicts on them."""

import logging

import pytest

from components.data.records import answered_prompt
from components.evaluation.contests import Contest
from components.io import read_json, write_json
from components.recipes import load_recipe
from tasks.evaluation import judging
from tasks.evaluation.answers import BASE, answer_prompts, join_answers
from tasks.policies import EvaluatedPolicy
from tasks.runs import Run, contest_file
from tests.support.judges import AlphabetSection, with_judge
from tests.support.policies import without_prefect

SAMPLED = ("evaluation.answers_per_prompt=3", "evaluation.answer_temperature=1.5")


@pytest.fixture(autouse=True)
def plain_log(monkeypatch):
    without_prefect(monkeypatch)
    monkeypatch.setattr(judging, "get_run_logger", lambda: logging.getLogger("test"))


@pytest.fixture
def run(prepared, tmp_path):
    (tmp_path / "prepared").symlink_to(prepared)
    return Run("run", tmp_path)


@pytest.fixture
def answer(run):
    """A function that gives the base policy's rows under a recipe's settings."""

    def write(*overrides):
        path = run.evaluation / "answers-base.json"
        path.unlink(missing_ok=True)
        answer_prompts(run, load_recipe("debug", overrides), EvaluatedPolicy(BASE, None))
        return read_json(path)

    return write


def test_each_sampled_answer_is_a_row_whose_id_names_its_prompt(answer):
    greedy = [row["prompt_id"] for row in answer()]
    rows = answer(*SAMPLED)
    ids = [row["prompt_id"] for row in rows]
    assert len(set(ids)) == len(ids) == 3 * len(greedy)
    assert [answered_prompt(name) for name in ids] == [name for name in greedy for _ in range(3)]
    assert set(greedy) < set(ids)
    assert len({row["text"] for row in rows[:3]}) > 1


def test_one_answer_is_greedy_whatever_the_temperature(answer):
    assert answer() == answer("evaluation.answer_temperature=9.0")


def test_every_sampled_answer_is_judged_and_prompts_are_the_unit_of_the_interval(answer, run):
    rows = answer(*SAMPLED)
    write_json(run.evaluation / "answers-aligned.json", rows)
    join_answers(run)
    recipe = with_judge(load_recipe("debug", SAMPLED), AlphabetSection())
    judged = judging.judge_answers(run, recipe)
    contest = Contest.read(contest_file(run.evaluation, "aligned_vs_base"))
    assert contest.prompts == [row["prompt_id"] for row in rows]
    assert judged.contests["aligned_vs_base"].ties == len(rows)
    for policy in ("aligned", "base"):
        assert judged.answers[f"{policy}_tokens"] == sum(row["tokens"] for row in rows) / len(rows)
        assert judged.answers[f"{policy}_finished_share"] == sum(row["finished"] for row in rows) / len(rows)


def test_answers_of_the_policies_to_different_prompts_are_refused_with_the_files(answer, run):
    write_json(run.evaluation / "answers-aligned.json", answer()[1:])
    with pytest.raises(ValueError, match=r"answers-aligned\.json.*expected answers to the same prompts"):
        join_answers(run)
