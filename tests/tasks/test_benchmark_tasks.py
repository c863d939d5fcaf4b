"""What a benchmark's report reads from its runs: commits, contests of both forms, answers."""

import json

import pytest

from components.benchmarks import Benchmark
from components.recipes import load_recipe
from tasks.benchmark import arms_contest, commits_line, short, write_benchmark_report
from tasks.runs import Run, arm_run, claim_folder, contest_file, write_json

ABC, DEF = "abc" * 13 + "a", "def" * 13 + "d-dirty"
PLAN = Benchmark(recipe="debug", seeds=[0, 1], arms={"FedBis": [], "FedDPO": ["federation.method=feddpo"]}, contests=[["FedBis", "FedDPO"]],
                 claims=[{"arm": "FedBis", "figure": "common", "at_least": 0.9}, {"arm": "FedBis", "figure": "wins", "against": ["FedDPO"], "above": 0.5}])


def test_a_run_notes_every_commit_that_it_is_opened_with_once_in_a_row(tmp_path):
    run = Run("r", tmp_path)
    run.note(mlflow_run_id="x")
    for commit in (ABC, ABC, DEF, ABC):
        run.note_commit(commit)
    assert run.notes() == {"mlflow_run_id": "x", "commits": [ABC, DEF, ABC]}


def test_the_commits_are_those_of_the_runs_and_named_by_run_where_they_differ():
    assert short(DEF) == "defdefdefdef-dirty" and commits_line({"a": [ABC], "b": [ABC]}) == "commit of the runs: abcabcabcabc"
    assert commits_line({"a": [ABC], "b": [ABC, DEF], "c": []}) == "commits of the runs: abcabcabcabc (a); abcabcabcabc, then defdefdefdef-dirty (b); not recorded (c)"
    assert commits_line({"a": [], "b": []}) == "commit of the runs: not recorded"


@pytest.fixture
def finished(tmp_path):
    """A benchmark's folder as its runs leave it, one seed of two done; the contest is of the older form."""
    return as_left(tmp_path / "benchmark-x", PLAN, {"FedBis": 8, "FedDPO": 4}, dict.fromkeys(PLAN.arms, (MEASURED, MEASURED)), [["FedBis", "FedDPO"]])


MEASURED = {"mean": 0.9, "worst": 0.5, "domains": {"common": 0.95, "own": 0.5}, "reward": 1.0, "margin": 1.0}


def as_left(folder, plan, lengths, measured, contests=(), server=None):
    """Its runs of seed 0, with answers of so many characters and what was measured before and after the rounds, by arm."""
    for arm, long in lengths.items():
        run = arm_run(folder, arm, 0)
        claim_folder(load_recipe("debug", [*plan.settings, *plan.arms[arm]]), run.folder)
        run.note_commit(ABC)
        before, after = measured[arm]
        write_json(run.federation / "result.json", {"before": before, "after": after, "rounds": 1, "assigned": {}, "records": [
            {"phase": "train", "rounds_done": 1, "assigned": {}, "clients": {"a": {"seconds": 1.0}}, "server": server or {}}]})
        write_json(run.alignment / "result.json", {"metrics": {"kl_sequence": 1.0}})
        write_json(run.evaluation / "result.json", {
            "rouge": {"raw": {"rougeLsum": 0.1}, "aligned": {"rougeLsum": 0.2}}, "judge_figures": {"judge_accuracy": 0.7, "judge_held_out_pairs": 84},
            "contests": {"aligned_vs_raw": {"consistency": 0.75}}, "verdicts": {"aligned_vs_raw": {"p2": "response 1", "p1": "tie"}},
            "curve": [{"step": 1, "prompts": 2, "proxy": 0.7, "judge": 0.6}]})
        rows = [{"prompt_id": prompt, "references": ["human"], "aligned": {"text": "x" * long}, "raw": {"text": "r" * n}} for prompt, n in (("p1", 1), ("p2", 2))]
        write_json(run.evaluation / "answers.json", rows)
        write_json(run.evaluation / "answers-aligned.json", [{"prompt_id": row["prompt_id"], "text": row["aligned"]["text"]} for row in rows])
        (run.folder / "report.done").touch()
        run.prepared.mkdir()
    for ours, theirs in contests:
        write_json(contest_file(folder, ours, theirs, 0), ["response 2", "tie"])
    return folder


def test_fronts_are_measured_above_the_worst_of_all_their_policies_the_raw_one_included_and_ranked_by_what_each_arm_prefers(tmp_path, monkeypatch):
    monkeypatch.setattr("components.data.records.known_groups", lambda prepared: {})
    of = "federation.options={{objectives: {{x: [one], y: [two]}}, beta: 1, preference: {{x: {}, y: {}}}}}"
    plan = Benchmark(
        recipe="debug", seeds=[0], fronts={"good": ["a", "b"], "poor": ["c", "d"]}, contests=[], claims=[{"arm": "good", "figure": "hypervolume", "against": ["poor"], "at_least": 0.0}],
        settings=["federation.method=firm", "policy.lora.dropout=0", "rewards={one: {kind: function, name: clean}, two: {kind: function, name: clean}}"],
        arms={arm: [of.format(*liked)] for arm, liked in {"a": (1.8, 0.2), "b": (0.2, 1.8), "c": (1.8, 0.2), "d": (0.2, 1.8)}.items()})
    points = {"a": (4.0, 2.0), "b": (2.0, 5.0), "c": (1.0, 1.5), "d": (3.0, 1.0)}
    measured = {arm: tuple(MEASURED | {"objectives": {"x": x, "y": y, "kl": 0.5, "prompts": 2}} for x, y in ((1.5, 0.5), point)) for arm, point in points.items()}
    folder = as_left(tmp_path / "benchmark-x", plan, dict.fromkeys("abcd", 4), measured, server={"lambda_drift": 0.1, "mean_lambda_drift": 0.1, "update_drift": 1.0})
    monkeypatch.setattr("tasks.benchmark.sample_tables", lambda *_: [])
    numbers = json.loads((write_benchmark_report.fn(folder, plan) / "figures.json").read_text())
    # the worst x is 1 (of c), the worst y 0.5 (of the raw policy): (4 - 1)(2 - 0.5) + (2 - 1)(5 - 2), and (3 - 1)(1 - 0.5), to which (1, 1.5) adds nothing
    assert {name: numbers["figures"][name]["0"] for name in plan.fronts} == {"good": {"hypervolume": pytest.approx(7.5), "rank": pytest.approx(1.0)}, "poor": {"hypervolume": pytest.approx(1.0), "rank": pytest.approx(-1.0)}}
    assert numbers["fronts"]["good"]["0"] == {"a": {"x": 4.0, "y": 2.0}, "b": {"x": 2.0, "y": 5.0}, "raw policy": {"x": 1.5, "y": 0.5}} and numbers["claims"][0]["says"] == "holds in every seed"


def test_the_report_has_the_runs_commit_the_judge_the_raw_policy_and_what_the_file_claims(finished, monkeypatch):
    monkeypatch.setattr("tasks.benchmark.git_commit", lambda: DEF)
    monkeypatch.setattr("components.data.records.known_groups", lambda prepared: {})
    out = write_benchmark_report.fn(finished, PLAN)
    text, page, numbers = (out / "report.md").read_text(), (out / "report.html").read_text(), json.loads((out / "figures.json").read_text())
    assert "- commit of the runs: abcabcabcabc\n- report written by commit defdefdefdef-dirty\n" in text
    assert "| FedBis: common taste at least 0.9 | holds in every seed (1 of 2 seeds) |" in text and "| FedBis against FedDPO: share of wins among wins and losses above 0.5 | does not hold" in text
    assert "| position consistency, FedBis against raw policy | 0.750 |" in text and "| own accuracy, held-out pairs | 84 |" in text and "| raw policy | 1 |" in text
    assert page.count("data:image/png") == 3 and "Proxy and judge" in page and "Rewards over" in page
    raw = numbers["contests"]["FedBis against raw policy"]["0"]
    assert raw == {"prompts": ["p2", "p1"], "verdicts": ["response 1", "tie"], "ours": [8, 8], "theirs": [2, 1], "consistency": 0.75}, "lengths are of the prompts' own answers"
    assert numbers["pooled"]["FedBis against FedDPO"]["rate"]["losses"] == 1 and numbers["raw"] == {"0": {"rougeLsum": 0.1, "characters": 1.5}}


def test_a_contests_lengths_are_of_its_own_prompts_in_both_forms_of_the_file(finished):
    old = arms_contest(finished, "FedBis", "FedDPO", 0)
    assert (old.prompts, old.verdicts, old.ours, old.theirs, old.consistency) == (["p1", "p2"], ["response 2", "tie"], [8, 8], [4, 4], None)
    path = contest_file(finished, "FedBis", "FedDPO", 0)
    write_json(path, {"prompts": ["p2"], "verdicts": ["tie"], "consistency": 0.5})
    new = arms_contest(finished, "FedBis", "FedDPO", 0)
    assert (new.prompts, new.ours, new.consistency) == (["p2"], [8], 0.5)
    write_json(path, ["tie"])
    with pytest.raises(ValueError, match="1 verdicts, but both policies answered 2 prompts; delete the file"):
        arms_contest(finished, "FedBis", "FedDPO", 0)
