"""The pages of results are what the collected lines give; `make lint` compares them."""

import json
import math
from xml.etree import ElementTree

import pytest

from components.config import UserError
from components.recipes.benchmarks import arm_recipe, settings_of
from components.reporting.changes import choose_arms
from components.reporting.claims import FAILS, HOLDS, UNDECIDED, Finding
from docs.generate_results import (
    CURVE,
    FLOWER,
    FOLDER,
    PAPERS,
    RATES,
    SAMPLING,
    SPEED,
    TRL,
    Published,
    Results,
    choices,
    claims,
    counts_sentence,
    curve,
    draw_claims,
    draw_speed,
    load_benchmarks,
    methods,
    own_settings,
    policies,
    references,
    speed,
)

DECISIVE = "summarization-decisive"


@pytest.fixture(scope="module")
def results():
    """The project's published results."""
    return Results()


def federation(benchmark, arm):
    """What `federation` of an arm's recipe says."""
    return arm_recipe(benchmark, arm, benchmark.seeds[0]).federation


def finding(verdict, value=0.5, low=0.4, high=0.6, figure="wins", limit=0.5):
    return Finding(f"A: {figure} above {limit}", figure, limit, verdict, value, low, high, "", "-", "-", "-")


def test_a_picture_follows_the_opening_sentence_of_every_page():
    for page in ("index.md", *(page for page, _ in PAPERS.values())):
        _, mark, _, picture, *_ = (FOLDER / page).read_text(encoding="utf-8").split("\n\n")
        assert mark.startswith("<!-- results: ")
        assert (FOLDER / picture.partition("(")[2].rstrip(")")).is_file()


def test_every_claim_is_on_a_page(results):
    pages = ("federating.md", *(page for page, _ in PAPERS.values()))
    texts = {page: (FOLDER / page).read_text(encoding="utf-8") for page in pages}
    for name, own in results.benchmarks.items():
        mark = f"<!-- results: claims {name} -->"
        marked = [page for page, text in texts.items() if mark in text]
        assert len(marked) == bool(own.benchmark.claims), name
    for page, names in PAPERS.values():
        assert all(f"<!-- results: claims {name} -->" in texts[page] for name in names)


def test_a_sentence_counts_the_verdicts():
    findings = [finding(HOLDS), finding(FAILS), finding(FAILS), finding(UNDECIDED, None, None, None)]
    words = counts_sentence("claims", findings)
    assert words == "Of 4 claims, 1 holds, 2 fail, 0 are undecided and 1 is not measured."
    assert counts_sentence("claims", [finding(HOLDS)]) == "Of 1 claims, 1 holds, 0 fail and 0 are undecided."


def test_ratios_are_given_for_each_machine_and_the_last_ones_count(tmp_path):
    lines = [("A", [1.0]), ("B", [2.0, 3.0, 7.0]), ("A", [4.0])]
    conditions = {"recipe": "debug", "cores": "2", "commit": "0123456789abcdef"}
    ratios = [
        conditions | {"processor": processor, "ratios": dict.fromkeys((FLOWER, TRL, SAMPLING), values)}
        for processor, values in lines
    ]
    (tmp_path / SPEED).write_text("\n".join(map(json.dumps, ratios)), encoding="utf-8")
    sentence, _, *tables = speed(Results(tmp_path), []).split("\n\n")
    assert sentence == (
        "A round of FedBis is 4.0 and 3.0 times as fast as in a tuned Flower app, a client of FedDPO 4.0 and"
        " 3.0 times as fast as with TRL's trainer, and sampling 4.0 and 3.0 times as fast as by transformers'"
        " batches (A, 2 cores; B, 2 cores)."
    )
    assert tables[0] == "Recipe `debug`, A, 2 cores, commit 0123456789ab:"
    picture = draw_speed(Results(tmp_path))
    assert all(f"<!-- {machine}, 2 cores -->".encode() in picture for machine in "AB")
    assert f"| `{TRL}` | 3.00 | 2.00, 3.00, 7.00 |" in tables[3]
    del ratios[1]["ratios"][TRL]
    (tmp_path / SPEED).write_text("\n".join(map(json.dumps, ratios)), encoding="utf-8")
    with pytest.raises(
        UserError, match=f"lacks {TRL} of B, 2 cores: record it there by python -m perf peers"
    ):
        speed(Results(tmp_path), [])
    (tmp_path / SPEED).unlink()
    with pytest.raises(UserError, match=f"lacks {FLOWER} of any machine"):
        speed(Results(tmp_path), [])


@own_settings()
def test_a_picture_has_the_measured_claims_on_each_figure():
    """Equal claims give equal files, and another interval another one."""
    findings = [finding(HOLDS), finding(FAILS, figure="KL", limit=2.0), finding(UNDECIDED, None, None, None)]
    picture = draw_claims(findings)
    groups = [each.get("id", "") for each in ElementTree.fromstring(picture).iter()]
    assert sum(name.startswith("axes_") for name in groups) == 2
    assert draw_claims(findings) == picture
    assert draw_claims([finding(HOLDS, low=0.45), *findings[1:]]) != picture
    assert draw_claims([finding(HOLDS, low=0.40004), *findings[1:]]) == picture


def test_missing_hours_follow_from_finished_runs_of_the_arm_or_of_the_others(results):
    benchmark = results.benchmarks[DECISIVE].benchmark.model_copy(update={"seeds": [0, 1]})
    lines = [
        {"kind": "run", "arm": arm, "seed": 0, "seconds": 3600 * n}
        for arm, n in (("FedBis", 2), ("FedAvg", 1))
    ]
    own = Published("all", benchmark, lines)
    arms = len(benchmark.arms)
    assert len(own.missing) == len(own.runs) - 2 == 2 * arms - 2
    assert own.missing_hours == pytest.approx(2 + 1 + (2 * arms - 4) * 1.5)
    assert math.isnan(Published("all", benchmark, []).missing_hours)


def write_lines(folder, name, values):
    """Runs of the arms of a benchmark with these accuracies by arm, seed by seed."""
    benchmark = load_benchmarks()[name]
    head = {"kind": "run", "seconds": 60, "commits": ["c"], "units": {}, "base": {}, "judge": {}}
    lines = [
        head
        | {
            "arm": arm,
            "seed": seed,
            "settings": settings_of(benchmark, arm),
            "contests": {},
            "metrics": {f"after/accuracy/domain/{taste}": value for taste in ("common", "own")},
        }
        for arm, own in values.items()
        for seed, value in enumerate(own)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def test_the_verdict_on_the_best_method_is_corrected_for_those_that_it_is_chosen_from(tmp_path):
    better = {"DRIFT-SP": [0.64, 0.66, 0.62], "local": [0.60, 0.61, 0.59]}
    others = {arm: [0.55, 0.61, 0.58] for arm in ("DRIFT-MST", "FedAvg", "FedProx", "FedOPT", "FedCDA")}
    for values, count in ((better, 2), (better | others, 0)):
        write_lines(tmp_path, "reasoning", values)
        text = references(Results(tmp_path), [])
        assert f"is better in {count} of 2 comparisons and worse in 0" in text
        assert "DRIFT-SP: 0.640" in text


def test_verdicts_of_the_curve_are_corrected_for_its_cells(tmp_path):
    alone = {"alone-8": [0.60, 0.61, 0.59]}
    better = {"federated-8x3": [0.64, 0.66, 0.62]}
    for values, verdict in (
        (alone | better, HOLDS),
        (alone | better | {f"federated-8x{n}": [0.55, 0.61, 0.58] for n in (6, 12)}, UNDECIDED),
    ):
        write_lines(tmp_path, CURVE, values)
        row = next(line for line in curve(Results(tmp_path), []).splitlines() if line.startswith("| 8 | 3 "))
        assert row.endswith(f"**{verdict}** |")


def test_clients_alone_are_compared_over_the_owners_of_the_federation(tmp_path):
    """Alone, owners a, b and c have 0.6, 0.8 and 0.1; the federation is of a and b."""
    write_lines(tmp_path, CURVE, {"alone-8": [0.6], "federated-8x12": [0.9]})
    path = tmp_path / f"{CURVE}.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line, groups in zip(lines, ({"a": 0.6, "b": 0.8, "c": 0.1}, {"a": 0.5, "b": 0.7}), strict=True):
        line["metrics"]["after/accuracy/mean"] = sum(groups.values()) / len(groups)
        line["units"] = {"after/accuracy/mean": {"unit": "clients", "groups": {"": groups}}}
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    text = curve(Results(tmp_path), [])
    assert "| 8 | 12 | 1 | 0.700 | 0.600 | - | - | -0.100 | - | **undecided** |" in text
    assert "share from 0.600 to 0.900 (undecided)" in (words := references(Results(tmp_path), []))
    assert "all pairs of an owner from 0.700 to 0.600 (undecided), by 1 seed." in words


def test_a_row_of_the_curve_has_the_seeds_of_both_arms(tmp_path):
    write_lines(tmp_path, CURVE, {"alone-8": [0.6, 0.8], "federated-8x12": [0.9]})
    assert "| 8 | 12 | 1 | 0.600 | 0.900 | - | - | 0.300 |" in curve(Results(tmp_path), [])
    write_lines(tmp_path, CURVE, {"alone-8": [0.6, 0.8], "federated-8x12": [0.9, 0.9], "pooled-8x12": [0.7]})
    assert "| 8 | 12 | 2 | 0.700 | 0.900 | - | 0.700 (1 of 2 seeds) | 0.200 |" in curve(Results(tmp_path), [])


def test_the_sentence_on_the_curve_has_its_verdicts(tmp_path):
    values = {"alone-8": [0.600, 0.601, 0.599], "federated-8x12": [0.640, 0.642, 0.638]}
    write_lines(tmp_path, CURVE, values)
    path = tmp_path / f"{CURVE}.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["metrics"]["after/accuracy/mean"] = 1 - line["metrics"]["after/accuracy/domain/own"]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    opening, _, sentence, _ = references(Results(tmp_path), []).split("\n\n")
    assert opening.endswith(
        "; one selector for 12 owners with 8 pairs each is better in what owners share and what they"
        " contradict each other in, and worse in all pairs of an owner."
    )
    assert "share from 0.600 to 0.640 (better)" in sentence
    assert "all pairs of an owner from 0.400 to 0.360 (worse), by 3 seeds." in sentence


@pytest.mark.parametrize("values", [{"alone-8": [0.6]}, {"federated-8x12": [0.9]}])
def test_the_curve_has_no_row_and_no_sentence_of_one_arm(tmp_path, values):
    write_lines(tmp_path, CURVE, values)
    assert "| 8 | 12 |" not in curve(Results(tmp_path), [])
    assert "With 8 pairs" not in references(Results(tmp_path), [])


def test_claims_without_figures_have_no_verdict(tmp_path):
    """Two seeds decide nothing, and of the claims on other arms there are no figures."""
    write_lines(tmp_path, CURVE, {"alone-8": [0.6, 0.7], "federated-8x12": [0.9, 0.8]})
    verdicts = [line.split(" | ")[1] for line in claims(Results(tmp_path), [CURVE]).splitlines()[2:]]
    assert verdicts.count("not measured") == len(verdicts) - 2
    assert verdicts[0].startswith("**undecided** (")


def test_pair_accuracy_is_compared_where_a_method_and_clients_alone_have_it(tmp_path):
    write_lines(tmp_path, "reasoning", {"DRIFT-SP": [0.64, 0.66, 0.62], "local": [0.60, 0.61, 0.59]})
    assert "pair accuracy" not in references(Results(tmp_path), [])
    path = tmp_path / "reasoning.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["metrics"]["after/accuracy/mean"] = 1 - line["metrics"]["after/accuracy/domain/own"]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    text = references(Results(tmp_path), [])
    assert "is better in 2 of 3 comparisons and worse in 1" in text
    assert "`reasoning` | pair accuracy | 3 | DRIFT-SP: 0.360" in text


def test_the_untrained_model_is_that_of_local_over_the_seeds_of_the_row(tmp_path):
    """Few-shot's model has read examples before the rounds, and seed 3 has no best method."""
    write_lines(tmp_path, "reasoning", {"DRIFT-SP": [0.9] * 3, "few-shot": [0.8] * 3, "local": [0.7] * 4})
    path = tmp_path / "reasoning.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    starts = {"DRIFT-SP": [0.5] * 3, "few-shot": [0.8] * 3, "local": [0.50, 0.51, 0.52, 0.9]}
    for line in lines:
        line["metrics"]["before/accuracy/domain/own"] = starts[line["arm"]][line["seed"]]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    row = next(line for line in references(Results(tmp_path), []).splitlines() if "reasoning` | own" in line)
    assert "| 0.800 [0.800, 0.800] | 0.510 [0.485, 0.535] | 0.200" in row


def test_a_reference_of_fewer_seeds_than_its_row_says_how_many(tmp_path):
    write_lines(tmp_path, "reasoning", {"DRIFT-SP": [0.9] * 3, "local": [0.7] * 3, "pooled": [0.6]})
    row = next(line for line in references(Results(tmp_path), []).splitlines() if "reasoning` | own" in line)
    assert "| 3 | DRIFT-SP: 0.900 [0.900, 0.900] | 0.700 [0.700, 0.700] | 0.600 (1 of 3 seeds) | - |" in row


def test_policies_of_a_page_are_beside_their_pairs(tmp_path):
    write_lines(tmp_path, "reasoning", {"FedAvg": [0.5], "FedProx": [0.5], "local": [0.5]})
    path = tmp_path / "reasoning.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line, (pairs, policy) in zip(lines, ((0.6, 0.7), (0.7, 0.6), (0.8, 0.8)), strict=True):
        line["metrics"] |= {"after/accuracy/mean": pairs, "implicit_reward/per_token/mean": policy}
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    text = policies(Results(tmp_path), ["reasoning"])
    assert "| FedProx | 0.700 |" in text
    assert text.endswith("(tau-b): policy's accuracy per token: 0.333.")


def test_the_table_of_choices_has_the_figure_of_each_arm_and_the_chosen_one(tmp_path):
    """Of equal ones the smaller rate; no choice without all arms; a rate may be of one method alone."""
    rates = {"3e-5": 0.7, "1e-4": 0.7, "3e-4": 0.8, "1e-3": 0.8, "3e-3": 0.6}
    values = {f"FedAvg-{rate}": [value] for rate, value in rates.items()}
    values["FedAMP-1e-4"] = [0.9]
    write_lines(tmp_path, "personalized-rates", values)
    path = tmp_path / "personalized-rates.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line |= {"seed": 10, "metrics": {"after/accuracy/mean": line["metrics"]["after/accuracy/domain/own"]}}
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    text = choices(Results(tmp_path), ["personalized-rates"])
    assert text.startswith("|  | 3e-5 | 1e-4 | 3e-4 | 1e-3 | 3e-3 | 1e-2 | chosen |\n")
    assert "\n| FedAvg | 0.700 | 0.700 | 0.800 | 0.800 | 0.600 |  | 3e-4 |\n" in text
    assert "\n| FedAMP |  | 0.900 | - | - | - |  | not measured |\n" in text


@pytest.mark.parametrize("name", RATES)
def test_a_benchmark_has_the_rates_that_were_chosen_for_it(results, name):
    search, reported = (load_benchmarks()[each] for each in (name, name.removesuffix("-rates")))
    chosen = choose_arms(search.choices, results.benchmarks[name].results.metrics, search.seeds)
    assert all(chosen.values()) == (name != "personalized-ppo-rates"), "that one was not run"
    for method, arm in chosen.items():
        if arm:
            tried, own = federation(search, arm), federation(reported, method)
            assert tried.options == own.options, method
            assert tried.options.local().learning_rate(tried) == own.options.local().learning_rate(own), (
                method
            )


def test_ablations_have_the_rates_of_the_whole_method():
    benchmark = load_benchmarks()["personalized"]
    ablations = [arm for arm in benchmark.arms if arm.startswith("A")]
    assert len(ablations) == 2
    for arm in ablations:
        own, whole = (federation(benchmark, each).options for each in (arm, "FedPDPO"))
        assert (own.lr, own.personal.lr) == (whole.lr, whole.personal.lr), arm


def test_the_table_of_methods_has_what_was_measured_and_names_what_fails(tmp_path):
    text = methods(Results(tmp_path), [])
    assert text == "Nothing is measured yet.\n\nNo measured claim fails."
    write_lines(tmp_path, "reasoning", {"DRIFT-SP": [0.5, 0.51, 0.49], "FedAvg": [0.9, 0.91, 0.89]})
    path = tmp_path / "reasoning.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["metrics"]["after/reward_margin"] = 1.0 if line["arm"] == "FedAvg" else 0.5 + line["seed"] / 100
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    text = methods(Results(tmp_path), [])
    assert "| benchmark | method | seeds | common taste, own adapter | own taste, own adapter |\n" in text
    assert (
        "| [`reasoning`](reasoning.md) | FedAvg | 3 | 0.900 [0.875, 0.925] | 0.900 [0.875, 0.925] |" in text
    )
    assert "\n- [reasoning](reasoning.md): DRIFT-SP less FedAvg: reward margin above 0: -0.490" in text
    assert "local" not in text
    contest = {"prompts": [f"p{n}" for n in range(40)], "verdicts": ["response 1"] * 30 + ["response 2"] * 10}
    contest |= {"ours": [5] * 40, "theirs": [5] * 40}
    for line in lines:
        line["contests"] = {f"{line['arm']} against base policy": contest}
        line["judge"] = {"judge_accuracy": 0.9, "judge_held_out_pairs": 20.0}
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    text = methods(Results(tmp_path), [])
    assert "| win rate against base policy | of all lengths, corrected for the judge's errors |\n" in text
    row = next(line for line in text.splitlines() if "| FedAvg | 3 |" in line)  # q = 55 / 62
    assert [cell.partition(" ")[0] for cell in row.split(" | ")[-2:]] == ["75.0%", "82.3%"]
    write_lines(tmp_path, CURVE, {"alone-8": [0.9, 0.91, 0.89], "federated-8x12": [0.5, 0.51, 0.49]})
    assert "\n- [federating](federating.md): federated-8x12 less alone-8: " in methods(Results(tmp_path), [])
