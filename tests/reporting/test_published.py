"""Published lines of a benchmark, and what follows from them for the runs that are missing."""

import math

import pytest

from components.config import UserError, check_section
from components.config.benchmark import Benchmark
from components.recipes.benchmarks import select_lines, settings_of_contests
from components.reporting.benchmark_results import BenchmarkResults
from components.reporting.claims import check_claims
from components.reporting.published import (
    expected_minutes,
    power_lines,
    publish,
    read_lines,
    read_results,
    runs_of,
    seconds_of,
    time_line,
)

PLAN = {"recipe": "debug", "seeds": [0, 1], "arms": {"FedBis": [], "FedDPO": ["federation.method=feddpo"]}}


def benchmark_of(**changes):
    return check_section(Benchmark, PLAN | changes, "the benchmark")


def run_line(arm, seed, **changes):
    """A line of a finished run of two objectives."""
    front = {
        "scores": {"a": seed + 1.0, "b": 2.0},
        "base_scores": {"a": 0.0, "b": 0.0},
        "preferences": {"a": 1.0, "b": 1.0},
    }
    line = {"kind": "run", "arm": arm, "seed": seed, "seconds": 60, "commits": ["c"]}
    line |= {"metrics": {"after/accuracy/mean": 0.5, "align/kl_sequence": None}}
    return line | {"units": {}, "base": {}, "judge": {}, "contests": {}, "front": front} | changes


# --- Lines


def test_lines_are_published_once(tmp_path):
    path = tmp_path / "all.jsonl"
    first = run_line("FedBis", 0, seconds=float("nan"))
    assert publish(path, [first]) == 1
    assert publish(path, [first, run_line("FedDPO", 0)]) == 1
    assert publish(path, [run_line("FedBis", 0, commits=["d"])]) == 1
    lines = read_lines(path)
    assert [line["arm"] for line in lines] == ["FedBis", "FedDPO", "FedBis"]
    assert lines[0]["seconds"] is None


def test_a_file_without_a_last_line_break_is_extended(tmp_path):
    path = tmp_path / "all.jsonl"
    publish(path, [run_line("FedBis", 0)])
    path.write_text(path.read_text().rstrip())
    publish(path, [run_line("FedDPO", 0)])
    assert [line["arm"] for line in read_lines(path)] == ["FedBis", "FedDPO"]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "all.jsonl").write_text('{"arm": 1}\n{"ar')
    with pytest.raises(UserError, match="all.jsonl, line 2"):
        read_lines(tmp_path / "all.jsonl")


def test_the_base_policy_of_a_seed_is_that_of_the_run_with_the_most_answers():
    def line(arm, answers, base):
        contest = {
            "prompts": answers,
            "verdicts": ["tie"] * len(answers),
            "ours": [1] * len(answers),
            "theirs": [1] * len(answers),
        }
        return run_line(arm, 0, base={"rouge/aligned/rougeLsum": base}, contests={f"{arm}-base": contest})

    lines = [line("FedBis", ["p", "q"], 0.2), line("FedDPO", ["p"], 0.9)]
    assert read_results(lines, benchmark_of()).base == {0: {"rouge/aligned/rougeLsum": 0.2}}
    assert read_results(lines[::-1], benchmark_of()).base == {0: {"rouge/aligned/rougeLsum": 0.2}}


def test_a_run_with_other_settings_is_published_beside_it_and_does_not_count(tmp_path):
    benchmark = benchmark_of(settings=["federation.rounds=2"], contests=[["FedBis", "FedDPO"]])
    own = run_line("FedBis", 0, settings=["federation.rounds=2"], seconds=60)
    other = run_line("FedBis", 0, settings=["federation.rounds=1"], seconds=9, metrics={"after/kl": 1.0})
    contests = {"kind": "contests", "arm": "", "seed": 0, "commits": ["c"], "contests": {}}
    old = contests | {"settings": {"FedBis": [], "FedDPO": ["federation.method=fedbis"]}}
    assert publish(tmp_path / "all.jsonl", [own, other, old]) == 3
    lines = read_lines(tmp_path / "all.jsonl")
    assert seconds_of(select_lines(lines, benchmark)) == {"FedBis": [60]}
    assert (
        read_results(select_lines(lines, benchmark), benchmark).metrics["FedBis"][0]["after/accuracy/mean"]
        == 0.5
    )
    assert select_lines([old], benchmark) == []
    spelled = run_line("FedDPO", 0, settings=["federation.method=feddpo", "federation.rounds=2"])
    assert select_lines([spelled], benchmark) == [spelled]  # the same recipe
    assert select_lines([contests | {"settings": settings_of_contests(benchmark)}], benchmark)


@pytest.mark.parametrize("line", ['{"ratios": {}}', "[1]", '"text"'])
def test_lines_of_something_else_are_not_extended(tmp_path, line):
    path = tmp_path / "performance.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match="lines that are no results of a benchmark"):
        publish(path, [run_line("FedBis", 0)])
    assert path.read_text() == f"{line}\n"


def test_the_last_line_of_a_run_counts_and_other_arms_and_seeds_do_not():
    benchmark = benchmark_of(fronts={"both": ["FedBis", "FedDPO"]})
    lines = [run_line("FedBis", 0), run_line("FedBis", 0, metrics={"after/accuracy/mean": 0.75})]
    contest = {"prompts": ["p"], "verdicts": ["tie"], "ours": [1], "theirs": [1]}
    lines += [run_line("other", 0, contests={"other against base policy": contest}), run_line("FedBis", 7)]
    results = read_results(select_lines(lines, benchmark), benchmark)
    assert results.metrics == {"FedBis": {0: {"after/accuracy/mean": 0.75}}}
    assert results.fronts == results.contests == {}
    results = read_results(select_lines([*lines, run_line("FedDPO", 0)], benchmark), benchmark)
    assert results.metrics["both"][0]["front/hypervolume"] == pytest.approx(2.0)
    assert math.isnan(results.metrics["FedDPO"][0]["align/kl_sequence"])


def test_how_clients_differ_is_read_from_their_accuracies_where_a_line_does_not_have_it():
    units = {"after/accuracy/mean": {"unit": "clients", "groups": {"": {"ada": 0.5, "bea": 0.9}}}}
    earlier = run_line("FedBis", 0, metrics={"after/accuracy/mean": 0.7}, units=units)
    metrics = {"after/accuracy/mean": 0.7, "after/accuracy/worst_tenth": 0.4, "after/accuracy/jain": 0.3}
    lines = [earlier, run_line("FedDPO", 0, metrics=metrics, units=units), run_line("FedDPO", 1)]
    results = read_results(lines, benchmark_of()).metrics
    assert results["FedBis"][0] == {
        "after/accuracy/mean": 0.7,
        "after/accuracy/worst_tenth": 0.5,
        "after/accuracy/jain": pytest.approx(1.4**2 / (2 * (0.25 + 0.81))),
    }
    assert results["FedDPO"][0] == metrics
    assert "after/accuracy/jain" not in results["FedDPO"][1]


def test_results_do_not_depend_on_the_order_of_lines():
    benchmark = benchmark_of()
    lines = [run_line(arm, seed) for arm in benchmark.arms for seed in (0, 1)]
    first, other = (
        read_results(select_lines(own, benchmark), benchmark).metrics for own in (lines, lines[::-1])
    )
    assert (
        [[*by_seed] for by_seed in first.values()]
        == [[*by_seed] for by_seed in other.values()]
        == [[0, 1]] * 2
    )


# --- Runs that are missing


def test_runs_take_the_time_of_earlier_runs_of_their_arm_or_else_the_mean_of_the_arms():
    runs = runs_of(benchmark_of())
    assert runs == [("FedBis", 0), ("FedDPO", 0), ("FedBis", 1), ("FedDPO", 1)]
    seconds = seconds_of([run_line("FedBis", 0, seconds=60), run_line("FedBis", 1, seconds=180)])
    assert expected_minutes(runs, seconds) == (8.0, ["FedDPO"])
    by_time = "by the time of earlier runs"
    assert time_line(runs, seconds) == (
        f"estimated time: about 8 minutes for 4 runs, {by_time} (FedDPO: the mean of the other arms)"
    )
    assert time_line(runs[:1], seconds) == f"estimated time: about 2 minutes for 1 runs, {by_time}"
    assert "not known for 4 runs before one of them is finished" in time_line(runs, {})


def test_the_power_of_a_claim_is_that_of_the_benchmarks_number_of_seeds():
    """By the variance of two seeds; six seeds decide less than two."""
    claim = {"arm": "FedBis", "figure": "accuracy", "at_least": 0.5}
    values = {0: 0.6, 1: 0.7, 2: 0.8}
    results = BenchmarkResults(
        [0, 1, 2], {"FedBis": {n: {"after/accuracy/mean": one} for n, one in values.items()}}
    )
    differences = {}
    for seeds in ([0, 1, 2], [0, 1, 2, 3, 4, 5]):
        head, line = power_lines(benchmark_of(claims=[claim], seeds=seeds), results)
        assert head.startswith(f"what {len(seeds)} seeds decide")
        differences[len(seeds)] = float(line.rpartition(": ")[2].split()[0])
    (finding,) = check_claims(benchmark_of(claims=[claim]).claims, results)
    assert differences[3] == pytest.approx(finding.estimate.detectable(), abs=0.005)
    assert differences[6] == pytest.approx(finding.estimate.with_seeds(6).detectable(), abs=0.005)
    assert differences[6] < differences[3] / 2
    assert power_lines(benchmark_of(), results) == []


@pytest.mark.parametrize(
    ("figure", "values", "seeds", "reason"),
    [
        ("after/accuracy/mean", {0: 0.6, 1: 0.6, 2: 0.6}, 3, "equal with all seeds"),
        ("cost/sent_mb", {0: 5.0, 1: 5.0, 2: 5.0}, 3, "it is a count"),
        ("after/accuracy/mean", {0: 0.6}, 3, "one seed"),
        ("after/accuracy/mean", {}, 3, "not measured: FedBis"),
        ("after/accuracy/mean", {0: 0.6, 1: 0.7, 2: 0.8}, 1, "one seed decides no difference"),
    ],
)
def test_a_power_that_is_not_known_has_its_reason(figure, values, seeds, reason):
    claim = {
        "arm": "FedBis",
        "figure": {"after/accuracy/mean": "accuracy", "cost/sent_mb": "sent"}[figure],
        "at_least": 0.5,
    }
    results = BenchmarkResults([*values], {"FedBis": {n: {figure: one} for n, one in values.items()}})
    _, line = power_lines(benchmark_of(claims=[claim], seeds=[*range(seeds)]), results)
    assert f": not known ({reason}" in line
