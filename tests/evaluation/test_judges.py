"""Judges are asked in both orders, and the embedded one is trained once for each recipe."""

import math

import pytest

from components.config import RecipeError
from components.data.records import DataError, read_rows
from components.data.templates import load as load_template
from components.evaluation import judges
from components.evaluation.judges import JUDGES, SelectorJudge, build_judge, check_judge, judge_pairs
from components.evaluation.winrate import Verdict
from components.learning.local import TrainingError
from components.models.backbone import BackboneError
from components.models.selector import Comparison

FIRST, SECOND, TIE, UNPARSABLE = Verdict
PROMPTS = ["p0", "p1", "p2", "p3"]
OURS, THEIRS = ["good 0", "good 1", "bad 2", "good 3"], ["bad 0", "bad 1", "good 2", "bad 3"]


class Scripted:
    """A judge that decides by a function, and remembers what it was asked."""

    description, figures = "scripted", {}

    def __init__(self, decide):
        self.decide, self.asked = decide, []

    def compare(self, comparisons):
        self.asked += comparisons
        return [self.decide(c) for c in comparisons]


def by_quality(c: Comparison) -> Verdict:
    return FIRST if c.first.startswith("good") else SECOND


def judged(decide, ours=OURS, theirs=THEIRS):
    judge = Scripted(decide)
    return judge_pairs(judge, PROMPTS[:len(ours)], ours, theirs, 200, 0), judge


def test_every_pair_is_put_in_both_orders():
    _, judge = judged(by_quality)
    asked = set(judge.asked)
    assert len(judge.asked) == len(asked) == 8
    for p, ours, theirs in zip(PROMPTS, OURS, THEIRS, strict=True):
        assert {Comparison(p, ours, theirs), Comparison(p, theirs, ours)} <= asked


def test_a_judge_that_looks_at_the_text_is_consistent_and_its_wins_are_ours():
    result, _ = judged(by_quality)
    assert result.verdicts == [FIRST, FIRST, SECOND, FIRST] and result.consistency == 1.0
    assert (result.rate.wins, result.rate.losses, result.rate.ties) == (3, 1, 0)


@pytest.mark.parametrize("always", [FIRST, SECOND])
def test_a_judge_that_looks_at_the_position_alone_gives_ties_and_no_consistency(always):
    """In the reference the model always comes first, and such a judge gives it all wins."""
    result, _ = judged(lambda c: always)
    assert result.verdicts == [TIE] * 4 and result.consistency == 0.0
    assert result.rate.rate == 0.0 and result.rate.ties == 4


def test_exchanging_whose_answers_are_ours_exchanges_wins_and_losses():
    result, _ = judged(by_quality, THEIRS, OURS)
    assert result.verdicts == [SECOND, SECOND, FIRST, SECOND] and result.given != judged(by_quality)[0].given


def test_the_same_answers_are_ties_and_are_not_asked():
    result, judge = judged(by_quality, ["good", "same", "bad"], ["bad", " same \n", "good"])
    assert result.verdicts == [FIRST, TIE, SECOND] and len(judge.asked) == 4
    assert "same" not in {c.first.strip() for c in judge.asked} and result.consistency == 1.0


def test_only_same_answers_leave_nothing_to_be_consistent_about():
    result, judge = judged(by_quality, ["x"], ["x"])
    assert result.verdicts == [TIE] and math.isnan(result.consistency) and judge.asked == []


def test_what_cannot_be_parsed_is_counted_and_leaves_consistency_alone():
    result, _ = judged(lambda c: UNPARSABLE if c.prompt == "p1" and c.first == "good 1" else by_quality(c))
    assert result.verdicts == [FIRST, UNPARSABLE, SECOND, FIRST]
    assert result.rate.unparsable == 1 and result.rate.wins == 2 and result.consistency == 1.0
    assert result.given[1] is UNPARSABLE and result.exchanged[1] is SECOND


def test_consistency_is_the_share_of_pairs_on_which_both_orders_agree():
    result, _ = judged(lambda c: FIRST if c.prompt == "p0" else by_quality(c))
    assert result.consistency == 0.75 and result.verdicts[0] is TIE


# --- the selector judge

@pytest.fixture
def config(debug):
    return debug.evaluation.judge


@pytest.fixture
def trainings(monkeypatch):
    from components.learning import selector

    seen, real = [], selector.train_selector
    monkeypatch.setattr(selector, "train_selector", lambda s, pairs, *a: (seen.append(pairs), real(s, pairs, *a))[1])
    return seen


def test_a_judge_is_trained_once_on_the_judges_training_rows_alone(config, prepared, tmp_path, trainings):
    first = build_judge(config, prepared, tmp_path, 0, "cpu")
    again = build_judge(config, prepared, tmp_path, 0, "cpu")
    assert len(trainings) == 1 and {(r["client_id"], r["split"]) for r in trainings[0]} == {("judge", "train")}
    questions = [Comparison(f"p {i}", "one", "another") for i in range(5)]
    assert (first.selector.logits(questions) == again.selector.logits(questions)).all()
    assert first.figures == again.figures and 0 <= first.figures["judge_accuracy"] <= 1
    assert {"judge_accuracy/common", "judge_accuracy/own", "judge_pairs"} <= set(first.figures) and first.figures["judge_pairs"] == 6
    assert first.figures["judge_held_out_pairs"] == len(read_rows(prepared / "judge.parquet", split="test")) > 0
    assert "tiny-random" in first.description


def test_the_policys_template_changes_neither_what_a_selector_judge_reads_nor_its_cache(config, prepared, tmp_path, trainings, monkeypatch):
    plain = build_judge(config, prepared, tmp_path, 0, "cpu")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    told = build_judge(config, prepared, tmp_path, 0, "cpu", policy=load_template("summarization/policy", "policy"))
    assert len(trainings) == 1 and files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    read, questions = [], [Comparison(f"p {i}", "a " * i, "bb") for i in range(1, 5)]
    for judge in (plain, told):
        encode = judge.selector.encode
        monkeypatch.setattr(judge.selector, "encode", lambda c, *rest, encode=encode: (read.append(ids := encode(c, *rest)), ids)[1])
    assert plain.compare(questions) == told.compare(questions) and len(read) >= 8 and read[: len(read) // 2] == read[len(read) // 2:]


@pytest.mark.parametrize("change", ["steps", "lr", "seed", "layers", "rows"])
def test_a_judge_is_trained_anew_when_its_recipe_or_its_rows_change(config, prepared, tmp_path, trainings, change):
    import shutil

    from datasets import Dataset

    build_judge(config, prepared, tmp_path / "cache", 0, "cpu")
    seed, folder, changed = 0, prepared, config
    if change == "steps":
        changed = config.model_copy(update={"steps": 2})
    elif change == "lr":
        changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 0.02})})
    elif change == "layers":
        backbone = config.selector.backbone.model_copy(update={"layers": 1})
        changed = config.model_copy(update={"selector": config.selector.model_copy(update={"backbone": backbone})})
    elif change == "seed":
        seed = 1
    else:
        folder = tmp_path / "prepared"
        shutil.copytree(prepared, folder)
        rows = Dataset.from_parquet(str(folder / "judge.parquet")).to_list()
        Dataset.from_list([*rows[:-1], rows[-1] | {"rejected": "other"}]).to_parquet(folder / "judge.parquet")
    build_judge(changed, folder, tmp_path / "cache", seed, "cpu")
    assert len(trainings) == 2


def test_a_judges_accuracy_is_measured_on_rows_that_it_was_not_trained_on(config, prepared, tmp_path, monkeypatch):
    from components.learning import selector

    seen, real = [], selector.score_pairs
    monkeypatch.setattr(selector, "score_pairs", lambda s, pairs: (seen.extend(pairs), real(s, pairs))[1])
    build_judge(config, prepared, tmp_path, 0, "cpu")
    assert {r["split"] for r in seen} == {"test"} and len(seen) == 4


def test_the_judges_word_is_the_larger_logit_in_the_order_given(config, prepared, tmp_path):
    judge = build_judge(config, prepared, tmp_path, 0, "cpu")
    questions = [Comparison("p", "a " * i, "bb") for i in range(1, 9)]
    logits = judge.selector.logits(questions)
    assert judge.compare(questions) == [FIRST if a > b else SECOND if a < b else TIE for a, b in logits]


def test_a_judge_without_rows_or_of_an_unknown_kind_is_refused_before_anything_is_trained(config, prepared, tmp_path):
    import shutil

    from datasets import Dataset

    with pytest.raises(RecipeError, match=r"evaluation.judge.kind 'selectr' is not known.*Did you mean 'selector'\?"):
        check_judge(config.model_copy(update={"kind": "selectr"}), prepared)
    folder = tmp_path / "prepared"
    shutil.copytree(prepared, folder)
    rows = Dataset.from_parquet(str(folder / "judge.parquet")).to_list()
    Dataset.from_list([r for r in rows if r["split"] == "train"]).to_parquet(folder / "judge.parquet")
    for refuse in (lambda: check_judge(config, folder), lambda: build_judge(config, folder, tmp_path / "cache", 0, "cpu")):
        with pytest.raises(DataError, match="6 training and 0 held-out pairs, but a 'selector' judge needs both"):
            refuse()
    check_judge(config, prepared)


def test_a_new_judge_needs_no_more_than_its_name_in_the_registry(config, prepared, tmp_path, monkeypatch):
    monkeypatch.setitem(JUDGES, "scripted", lambda *_: Scripted(by_quality))
    judge = build_judge(config.model_copy(update={"kind": "scripted"}), prepared, tmp_path, 0, "cpu")
    assert judge_pairs(judge, PROMPTS, OURS, THEIRS, 200, 0).rate.wins == 3
    assert JUDGES["selector"] is SelectorJudge is judges.SelectorJudge


# --- the reward judge

def by_reward(config, **reward):
    return config.model_copy(update={"kind": "reward", "options": {"reward": reward}})


@pytest.fixture
def brief(monkeypatch):
    import numpy as np

    from components.models.reward_functions import REWARD_FUNCTIONS

    asked = []
    monkeypatch.setitem(REWARD_FUNCTIONS, "brief", lambda prompts, responses: (asked.extend(responses), np.array([-float(len(text)) for text in responses]))[1])
    return asked


def test_a_reward_judges_by_the_higher_score_and_says_the_same_in_both_orders(config, prepared, tmp_path, brief):
    judge = build_judge(by_reward(config, kind="function", name="brief"), prepared, tmp_path, 0, "cpu")
    assert judge.compare([Comparison("p", "a", "bb"), Comparison("p", "aaa", "bb"), Comparison("p", "aa", "bb")]) == [FIRST, SECOND, TIE] and judge.compare([]) == []
    result = judge_pairs(judge, PROMPTS[:3], ["a", "aaa", "aa"], ["bb", "bb", "bb"], 200, 0)
    assert (result.rate.wins, result.rate.losses, result.rate.ties, result.consistency) == (1, 1, 1, 1.0)
    assert judge.description == "reward model, function brief" and judge.figures == {}
    assert brief[:5] == ["an answer", "a", "bb", "aaa", "aa"] and len(brief) == 5 + 6       # the check's; and each response to a prompt once, in whatever order it is asked for


def test_a_reward_that_the_recipe_trains_is_trained_once_for_its_objective_and_the_judge(config, prepared, tmp_path, monkeypatch):
    from components.config import RewardConfig
    from components.learning import reward

    given = {"kind": "trained", "template": "{prompt}|{response}", "max_length": 32, "training": {"backbone": {"name": "tiny-random", "layers": 1}, "lora": {"dropout": 0.0}, "steps": 2, "batch_size": 2}}
    score, figures = reward.build_reward(RewardConfig(**given), prepared, tmp_path / "rewards", 0, "cpu")
    monkeypatch.setattr(reward, "train_reward", lambda *_: pytest.fail("trained again"))
    judge = build_judge(by_reward(config, **given), prepared, tmp_path, 0, "cpu")
    first, second = score(["p", "q"], ["a b c", "d"]), score(["p", "q"], ["e f", "g h i"])
    assert judge.compare([Comparison("p", "a b c", "e f"), Comparison("q", "d", "g h i")]) == [FIRST if a > b else SECOND for a, b in zip(first, second, strict=True)]
    assert judge.figures == {"judge_accuracy": figures["accuracy"], "judge_pairs": 6, "judge_held_out_pairs": 4}
    assert judge.description == "reward model, tiny-random, first 1 layers, trained centrally on owners outside the federation"


def test_a_reward_judge_that_could_not_be_had_is_refused_before_anything_is_trained(config, prepared, tmp_path, brief):
    import shutil

    from datasets import Dataset

    for given, error, words in (
            ({"kind": "judge"}, RecipeError, "is the recipe's judge itself"), ({}, RecipeError, "a classifier needs a name"), ({"kind": "function", "name": "brif"}, RecipeError, "Did you mean 'brief'"),
            ({"kind": "function", "name": "math:sqrt"}, TrainingError, "evaluation.judge.options.reward failed"), ({"name": "/no/such/folder"}, BackboneError, "'/no/such/folder'.*could not be loaded")):
        with pytest.raises(error, match=words) as found:
            check_judge(by_reward(config, **given), prepared)
        assert ".." not in str(found.value)
    with pytest.raises(RecipeError, match="evaluation.judge.options"):
        check_judge(config.model_copy(update={"kind": "reward", "options": {}}), prepared)
    folder = tmp_path / "prepared"
    shutil.copytree(prepared, folder)
    rows = Dataset.from_parquet(str(folder / "judge.parquet")).to_list()
    Dataset.from_list([r for r in rows if r["split"] == "train"]).to_parquet(folder / "judge.parquet")
    with pytest.raises(DataError, match="6 training and 0 held-out pairs, but a 'reward' judge that is trained here needs both"):
        check_judge(by_reward(config, kind="trained", template="{prompt}|{response}"), folder)
    check_judge(by_reward(config, kind="function", name="brief"), folder)
