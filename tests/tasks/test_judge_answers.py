"""Tasks of the judge: verdicts become win rates, and a judge in words is told the task."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from components.config import RecipeError, UserError
from components.evaluation.contests import Contest
from components.evaluation.judges.autoj import AutoJSection
from components.io import read_json, write_json
from components.learning import selector_training
from components.models.policy import Policy
from components.models.samples import Reply
from components.models.selector import Comparison
from components.models.store import AdapterStore
from components.reporting.metrics import result_metrics
from components.results import Outcome
from components.seeding import derive
from tasks import benchmark
from tasks.benchmark_folder import contest_path
from tasks.evaluation import judging
from tasks.evaluation.judging import policy_pairs
from tasks.policies import compare_by_selectors
from tasks.runs import RESULT, Run
from tests.support.judges import AlphabetSection, FirstSection, with_judge
from tests.support.policies import without_prefect
from tests.support.recipes import with_section
from tests.support.results import federation_result

SUMMARIZE = "Write a summary of the text in one paragraph of at most 50 words.\n\n"
"""The instruction of the debug recipe's template."""


@pytest.fixture(autouse=True)
def plain_log(monkeypatch):
    without_prefect(monkeypatch)
    monkeypatch.setattr(judging, "get_run_logger", lambda: logging.getLogger("test"))


@pytest.fixture
def answers(tmp_path):
    rows = [
        {
            "prompt_id": f"p{i}",
            "prompt": f"query {i}",
            "references": [f"human {i}"],
            "base": {"text": f"model {i}", "finished": True, "tokens": 2},
            "aligned": {"text": f"aligned {i}", "finished": False, "tokens": 3},
        }
        for i in range(3)
    ]
    path = tmp_path / "evaluation" / "answers.json"
    write_json(path, rows)
    return path


def judge(recipe, answers):
    return judging.judge_answers(Run("run", answers.parents[1]), recipe)


def test_both_orders_and_the_first_alone_are_counted_and_are_metrics_of_their_own(debug, answers):
    # The first answer is always preferred: ours wins where it is first, and ties over both orders.
    contest = judge(with_judge(debug, FirstSection()), answers).contests["aligned_vs_human"]
    assert (contest.wins, contest.ties, contest.losses) == (0, 3, 0)
    assert contest.win_rate == 0.0
    assert contest.consistency == 0.0
    single = contest.single_order
    assert (single.wins, single.ties, single.losses, single.win_rate) == (3, 0, 0, 1.0)
    judged = judge(with_judge(debug, FirstSection()), answers)
    metrics = result_metrics(judged)
    assert metrics["aligned_vs_human/single_order/wins"] == 3
    assert metrics["aligned_vs_human/wins"] == 0
    assert "aligned_vs_human/single_order" not in metrics


def test_only_the_contests_of_the_recipe_are_judged(debug, answers):
    recipe = with_judge(debug, AlphabetSection())
    evaluation = recipe.evaluation.model_copy(update={"contests": ["aligned_vs_human"]})
    result = judge(recipe.model_copy(update={"evaluation": evaluation}), answers)
    assert result.contests.keys() == {"aligned_vs_human"}
    assert [path.name for path in (answers.parent / "contests").iterdir()] == ["aligned_vs_human.json"]


def test_the_verdicts_of_a_contest_are_stored_and_give_its_figures(debug, answers):
    result = judge(with_judge(debug, FirstSection()), answers)
    contest = Contest.read(answers.parent / "contests" / "aligned_vs_base.json")
    assert contest.prompts == ["p0", "p1", "p2"]
    assert contest.original == contest.swapped == ["response 1"] * 3
    assert (contest.ours, contest.theirs) == ([9] * 3, [7] * 3)
    seed = derive(debug.seed, "bootstrap", "aligned_vs_base")
    figures = contest.figures(debug.evaluation.bootstrap, seed)
    assert figures.model_dump_json() == result.contests["aligned_vs_base"].model_dump_json()


def test_a_recipe_with_style_control_has_the_rates_at_equal_style(debug, answers):
    recipe = with_judge(debug, FirstSection())
    evaluation = recipe.evaluation.model_copy(update={"style_control": True})
    result = judge(recipe.model_copy(update={"evaluation": evaluation}), answers)
    contest = Contest.read(answers.parent / "contests" / "aligned_vs_base.json")
    assert contest.style == {name: [0] * 3 for name in ("headings", "list_items", "bold")}
    for figures in result.contests.values():
        assert set(figures.style_effects) == {"length", "headings", "list_items", "bold"}


def test_a_contest_with_references_that_do_not_exist_is_refused(debug, answers):
    rows = [row | {"references": []} for row in read_json(answers)]
    with pytest.raises(RecipeError, match=r"evaluation\.contests names base_vs_human.*reference"):
        policy_pairs(rows, ["aligned_vs_base", "base_vs_human"])


def test_a_judge_without_figures_or_texts_gives_win_rates(debug, answers):
    result = judge(with_judge(debug, AlphabetSection()), answers)
    assert result.judge_figures == {}
    assert not answers.with_name("judgements.json").exists()
    rates = {name: contest.win_rate for name, contest in result.contests.items()}
    assert rates == {"aligned_vs_base": 1.0, "aligned_vs_human": 1.0, "base_vs_human": 0.0}


def test_the_texts_of_a_judge_are_stored_beside_the_answers(debug, answers):
    result = judge(with_judge(debug, AlphabetSection(writes=True)), answers)
    texts = read_json(answers.with_name("judgements.json"))
    assert len(texts) == 18
    assert texts[0] == {"prompt": "query 0", "text": "because"}
    assert result.judge_figures == {"judge_shortened": 0}


@pytest.fixture
def in_words(debug, monkeypatch):
    """The recipe with Auto-J on the tiny model, which prefers the first response of each pair."""
    decision = Reply("So, the final decision is Response 1", True)
    monkeypatch.setattr(Policy, "write", lambda policy, prompts, **_: [decision for _ in prompts])
    section = AutoJSection(model="tiny-random", max_prompt_tokens=1600, max_new_tokens=6)
    return with_judge(debug, section)


def test_a_judge_in_words_reads_the_policys_instruction_before_the_prompt(in_words, answers):
    judge(in_words, answers)
    texts = read_json(answers.with_name("judgements.json"))
    assert [row["prompt"] for row in texts[:3]] == [f"{SUMMARIZE}query {i}" for i in range(3)]


def test_a_contest_of_two_arms_is_judged_with_the_instruction_of_both(in_words, tmp_path, monkeypatch):
    queries = []
    write = Policy.write

    def record(self, prompts, **arguments):
        shown = [prompt.partition("USER'S MESSAGE\n")[2] for prompt in prompts]
        queries.extend(text.partition("\n===")[0] for text in shown)
        return write(self, prompts, **arguments)

    monkeypatch.setattr(Policy, "write", record)
    for arm in ("ours", "theirs"):
        row = {"prompt_id": "p", "prompt": "a post", "text": arm}
        write_json(tmp_path / arm / "answers-aligned.json", [row])
    monkeypatch.setattr(
        benchmark,
        "arm_run",
        lambda folder, arm, seed: SimpleNamespace(
            recipe=lambda: in_words, folder=folder, evaluation=folder / arm, prepared=folder
        ),
    )
    benchmark.judge_arms(tmp_path, [["ours", "theirs"]], 0)
    contest = Contest.read(contest_path(tmp_path, "ours", "theirs", 0))
    assert contest.verdicts == ["tie"]
    assert contest.prompts == ["p"]
    assert (contest.ours, contest.theirs) == ([4], [6])
    assert queries == [f"{SUMMARIZE}a post"] * 2


# --- the reward-hacking curve


def count_good(selector, comparisons, adapters, share):
    """Log-odds of selectors that count the word 'good', with the sign that is their adapter."""
    counts = [pair.first.count("good") - pair.second.count("good") for pair in comparisons]
    return torch.stack([adapter["sign"] * torch.tensor(counts) for adapter in adapters]).numpy()


def choose_first(selector, comparisons, adapters, share):
    """Log-odds of selectors that always choose the completion that is shown first."""
    return np.ones((len(adapters), len(comparisons)))


@pytest.fixture
def run(tmp_path):
    """A run with three selectors, of which two prefer 'good' and one does not."""
    run = Run("run", tmp_path)
    store = AdapterStore(run.federation / "adapters")
    signs = {"s0": 1.0, "s1": 1.0, "s2": -1.0}
    adapters = {name: store.put({"sign": torch.tensor([sign])}) for name, sign in signs.items()}
    outcome = Outcome(trained_model="selector", votes=True, adapters=adapters)
    federation_result(outcome=outcome).write(run.federation / RESULT)
    return run


def write_answers(run, policy, texts):
    rows = [{"prompt_id": f"p{i}", "prompt": f"q{i}", "text": text} for i, text in enumerate(texts)]
    write_json(run.evaluation / f"answers-{policy}.json", rows)


@pytest.fixture
def curve(debug, run, monkeypatch):
    """The curve of the AlphabetJudge; the last prompt has an answer of the base policy only."""
    monkeypatch.setattr(selector_training, "compare", count_good)
    write_answers(run, "step-4", ["good a", "bad", "m"])
    write_answers(run, "step-8", ["good z", "good z", "good z"])
    write_answers(run, "base", ["m", "good m", "m", "a prompt of no checkpoint"])
    return judging.draw_reward_hacking_curve(run, with_judge(debug, AlphabetSection()), [4, 8])


def test_the_curve_has_the_share_of_prompts_that_most_selectors_prefer_at_each_checkpoint(curve):
    assert [(point.step, point.prompts) for point in curve] == [(4, 3), (8, 3)]
    # At step 8 the second answer has as many 'good' as the base policy's: no preference.
    assert [point.proxy for point in curve] == [(1 + 0 + 0.5) / 3, (1 + 0 + 1) / 3]


@pytest.mark.parametrize("orders", ["single", "both"])
def test_selectors_that_always_choose_one_position_prefer_half_of_the_answers(
    debug, run, monkeypatch, orders
):
    monkeypatch.setattr(selector_training, "compare", choose_first)
    recipe = with_section(debug, "selector", orders=orders)
    pairs = {str(n): Comparison(f"q{n}", f"ours {n}", f"theirs {n}") for n in range(2)}
    assert judging._selector_scores(run, recipe, {4: pairs, 8: pairs}) == {4: 0.5, 8: 0.5}


def test_a_run_without_selectors_compares_no_completions(debug, run):
    shared = Outcome()
    federation_result(outcome=shared).write(run.federation / RESULT)
    with pytest.raises(UserError, match="did not end with selectors"):
        compare_by_selectors(run, debug, [Comparison("p", "a", "b")])


def test_the_judges_share_counts_a_tie_half(curve):
    assert [point.judge for point in curve] == [(1 + 1 + 0.5) / 3, (1 + 0 + 1) / 3]
