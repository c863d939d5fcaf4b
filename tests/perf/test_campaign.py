"""The campaign: what it runs and leaves out, failures, kills, choices, and its published lines."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml
from typer.testing import CliRunner

from components.benchmarks import arm_recipe
from components.config import RecipeError
from components.io import read_json
from perf.campaign import commands
from perf.campaign.lines import CampaignError, is_complete, own_lines, publish, read_lines, read_results
from perf.campaign.plan import LIST, read_campaign
from perf.commands import app
from tests.support.pipeline import ROOT, environment_without

PLAN = {"recipe": "debug", "seeds": [0], "arms": {"FedBis": [], "FedDPO": ["federation.method=feddpo"]}}
RATES = {
    "recipe": "debug",
    "seeds": [5],
    "arms": {"FedBis-low": ["federation.optimizer.lr=1e-3"], "FedBis-high": ["federation.optimizer.lr=1e-1"]},
    "choices": {"FedBis": {"among": ["FedBis-low", "FedBis-high"], "figure": "accuracy"}},
}
CHOSEN = {
    "rates": {"benchmark": "rates.yaml", "seeds": [5]},
    "final": {
        "benchmark": "plan.yaml",
        "seeds": [0],
        "chosen_from": "rates",
        "based_on": {"FedDPO": "FedBis"},
    },
}


@pytest.fixture
def write_list(tmp_path):
    """A function that writes a list of families, and benchmarks beside it, and reads the list."""

    def write(families=None, **benchmarks):
        for name, content in ({"plan": PLAN} | benchmarks).items():
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        path = tmp_path / "families.yaml"
        path.write_text(
            yaml.safe_dump(families or {"all": {"benchmark": "plan.yaml", "seeds": [0, 1]}}, sort_keys=False)
        )
        return read_campaign(path, tmp_path / "home")

    return write


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A function that publishes lines of a family in a checkout that the campaign works in."""
    checkout = tmp_path / "checkout"
    (checkout / "docs" / "results").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    monkeypatch.setattr(commands, "PUBLISHED", checkout / "docs" / "results" / "data")

    def write(family, *lines):
        return publish(checkout, family, lines)

    write.checkout = checkout
    return write


@pytest.fixture
def work(published, tmp_path, monkeypatch):
    """A function that works through a campaign whose processes end at once; gives what they were.

    Its last argument maps a family to the exit status of its processes.
    """
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr(commands.os, "nice", lambda _: 0)
    monkeypatch.setattr(commands.os, "setpgid", lambda *_: None)
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)

    class Process:
        says = "error: it broke\n"

        def __init__(self, command, stdout, env, **_):
            self.family = Path(stdout.name).stem
            assert env["FED_RLHF_HOME"] == str(tmp_path / "home")
            assert "PREFECT_API_URL" not in env
            done.append(" ".join([self.family, *command[2:]]).replace(str(tmp_path / "home"), "~"))
            stdout.write(self.says.encode())

        def wait(self):
            return failing.get(self.family, 0)

        def terminate(self):
            pass

    done = []
    failing = {}
    monkeypatch.setattr(commands.subprocess, "Popen", Process)

    def run(campaign, fails=None):
        done.clear()
        failing.clear()
        failing.update(fails or {})
        try:
            commands.run(campaign.path, campaign.home)
            run.status = 0
        except typer.Exit as ended:
            run.status = ended.exit_code
        return list(done)

    return run


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


def resume(family, seeds):
    return f"{family} flows.cli benchmark --resume ~/runs/{family} seeds={seeds}"


# --- The list of the project


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """The families of the list, each with the recipe of every arm for its first seed."""
    campaign = read_campaign(LIST, tmp_path_factory.mktemp("campaign"))
    recipes = {}
    for name in campaign.families:
        benchmark = campaign.benchmark(name)
        recipes[name] = {arm: arm_recipe(benchmark, arm, benchmark.seeds[0]) for arm in benchmark.arms}
    return recipes


def test_every_arm_of_the_list_has_a_recipe_that_can_be_run(families):
    assert next(iter(families)) == "summarization-decisive"
    assert all(families.values())


def test_all_arms_of_a_family_have_the_same_number_of_gradient_evaluations(families):
    from components.federation.method import method_of

    for name in families.keys() - {"summarization-early"}:  # it compares runs of different lengths
        budgets = set()
        for recipe in families[name].values():
            federation = recipe.federation
            gradients = method_of(federation).gradient_evaluations(federation, rows=64)
            budgets.add(federation.rounds * federation.clients_per_round * gradients)
        assert len(budgets) == 1, name


def test_the_decisive_recipe_uses_all_papers(families):
    options = families["summarization-decisive"]["FedBis"].data.options
    sets = ("train", "validation", "test", "judge")
    assert sum(getattr(options, f"{name}_papers") for name in sets) + options.align_prompts == 250


# --- Reading a list


def test_settings_of_a_family_name_the_campaigns_folder(write_list, tmp_path):
    family = {"benchmark": "plan.yaml", "seeds": [0], "settings": ["data.path='{home}/pairs.jsonl'"]}
    recipe = arm_recipe(write_list({"all": family}).benchmark("all"), "FedBis", 0)
    assert recipe.data.path.name == str(tmp_path / "home" / "pairs.jsonl")


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ({"benchmark": "plan.yaml"}, "seeds"),
        ({"benchmark": "plan.yaml", "seeds": [0], "benchmrk": ""}, "benchmark"),
        ({"benchmark": "plan.yaml", "seeds": [0], "chosen_from": "none"}, "name a family above it"),
        ({"benchmark": "plan.yaml", "seeds": [0], "based_on": {"FedBis": "x"}}, "set chosen_from"),
    ],
)
def test_a_wrong_family_is_refused_by_name(write_list, family, part):
    with pytest.raises(RecipeError, match=part) as error:
        write_list({"mine": family})
    assert "mine" in str(error.value)


def test_a_choice_that_is_no_arm_is_refused(write_list):
    final = CHOSEN["final"] | {"based_on": {"no": "FedBis"}}
    with pytest.raises(RecipeError, match="family final: no:"):
        write_list(CHOSEN | {"final": final}, rates=RATES)


def test_a_wrong_recipe_of_any_family_is_refused_before_anything_runs(write_list):
    with pytest.raises(RecipeError, match="federation.round"):
        write_list({"all": {"benchmark": "plan.yaml", "seeds": [0], "settings": ["federation.round=9"]}})


# --- Working through it


def test_a_family_is_a_benchmark_that_is_created_and_resumed(work, write_list):
    campaign = write_list()
    assert work(campaign) == [resume("all", [0, 1])]
    recipes = sorted(path.parent.name for path in campaign.folder("all").glob("*/recipe.yaml"))
    assert recipes == ["FedBis-seed-0", "FedBis-seed-1", "FedDPO-seed-0", "FedDPO-seed-1"]
    more = write_list({"all": {"benchmark": "plan.yaml", "seeds": [2, 0, 1]}})
    assert work(more) == [resume("all", [0, 1, 2])]


def test_seeds_that_are_published_are_left_out(work, write_list, published):
    plan = PLAN | {"contests": [["FedBis", "FedDPO"]]}
    contests = {"kind": "contests", "arm": "", "seed": 0, "commits": ["c"], "contests": {}}
    published("all", run_line("FedBis", 0), run_line("FedDPO", 0), run_line("FedBis", 1))
    assert work(write_list(plan=plan)) == [resume("all", [0, 1])]
    published("all", contests)
    other = write_list({"all": {"benchmark": "plan.yaml", "seeds": [0]}}, plan=plan)
    assert work(other) == []
    assert work(write_list(plan=PLAN)) == []  # that was started with other contests


def test_a_family_that_fails_is_tried_twice_and_does_not_stop_the_others(
    work, write_list, capsys, monkeypatch
):
    families = {name: {"benchmark": "plan.yaml", "seeds": [0]} for name in ("first", "second")}
    campaign = write_list(families)
    log = campaign.home / "logs" / "second.log"
    done = work(campaign, {"first": 1})
    assert work.status == 1
    assert done == [resume("first", [0]), resume("first", [0]), resume("second", [0])]
    assert "first: exit status 1, see " in (printed := capsys.readouterr().out)
    assert "first.log: error: it broke" in printed
    log.write_text("error: of an earlier day\n")
    monkeypatch.setattr(commands.subprocess.Popen, "says", "")
    assert work(campaign, {"second": 2})[1:] == [resume("second", [0])]  # a refusal is not repeated
    assert f"second: exit status 2, see {log}\n" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["federation/result.json", "evaluation/answers.json"])
def test_a_damaged_file_of_a_family_does_not_stop_the_others(work, write_list, monkeypatch, capsys, path):
    families = {name: {"benchmark": "plan.yaml", "seeds": [0]} for name in ("first", "second")}
    campaign = write_list(families)
    work(campaign)
    run = campaign.folder("first") / "FedBis-seed-0"
    (run / "report.done").touch()
    (run / path).parent.mkdir()
    (run / path).write_text("{")
    if path == "evaluation/answers.json":  # read after the results
        monkeypatch.setattr("tasks.benchmark_report.read_run", lambda run, _: read_json(run.folder / path))
    assert work(campaign) == [resume("second", [0])]
    assert work.status == 1
    assert f"first: {run / path}" in capsys.readouterr().out


def test_a_benchmark_of_other_settings_is_not_taken_for_this_one(work, write_list, capsys):
    work(write_list())
    changed = {"all": {"benchmark": "plan.yaml", "seeds": [0], "settings": ["federation.rounds=9"]}}
    assert work(write_list(changed)) == []
    assert work.status == 1
    assert "was started with other settings" in capsys.readouterr().out


def test_a_preparation_runs_once_before_the_first_run(work, write_list):
    family = {"benchmark": "plan.yaml", "seeds": [0], "prepare": ["perf", "gold-pairs", "{home}/x"]}
    campaign = write_list({"all": family})
    assert work(campaign, {"all": 2}) == ["all perf gold-pairs ~/x"]
    assert work(campaign) == ["all perf gold-pairs ~/x", resume("all", [0])]
    assert work(campaign) == [resume("all", [0])]


def test_arms_take_the_settings_that_an_earlier_family_chose(work, write_list, published, capsys):
    campaign = write_list(CHOSEN, rates=RATES)
    assert work(campaign) == [resume("rates", [5])]
    assert "final: waits for the choices of rates" in capsys.readouterr().out
    commands.status(campaign.path, campaign.home)
    assert "final: 0 of 2 runs finished, waits for its settings" in capsys.readouterr().out
    for arm, score in {"FedBis-low": 0.6, "FedBis-high": 0.8}.items():
        published("rates", run_line(arm, 5, metrics={"after/accuracy/mean": score}))
    assert work(campaign) == [resume("final", [0])]
    rates = {arm: commands.chosen_benchmark(campaign, "final").arms[arm] for arm in PLAN["arms"]}
    assert rates == {
        "FedBis": ["federation.optimizer.lr=1e-1"],
        "FedDPO": ["federation.optimizer.lr=1e-1", "federation.method=feddpo"],
    }


def test_a_second_process_is_refused_while_one_works(tmp_path):
    with commands.locked(tmp_path):
        assert commands.owner(tmp_path) == os.getpid()
        with pytest.raises(CampaignError, match=f"process {os.getpid()} works"), commands.locked(tmp_path):
            pass
    assert commands.owner(tmp_path) is None


def test_the_status_counts_published_runs(write_list, published, capsys):
    published("all", run_line("FedBis", 0), run_line("FedDPO", 0), run_line("FedBis", 7))
    campaign = write_list()
    with commands.locked(campaign.home):
        commands.status(campaign.path, campaign.home)
    assert capsys.readouterr().out == f"all: 2 of 4 runs finished\nprocess {os.getpid()} works on it\n"


# --- Lines


def test_lines_are_published_once(published):
    first = run_line("FedBis", 0, seconds=float("nan"))
    assert published("all", first) == 1
    assert published("all", first, run_line("FedDPO", 0)) == 1
    assert published("all", run_line("FedBis", 0, commits=["d"])) == 1
    lines = read_lines(published.checkout / "docs" / "results" / "data" / "all.jsonl")
    assert [line["arm"] for line in lines] == ["FedBis", "FedDPO", "FedBis"]
    assert lines[0]["seconds"] is None


def test_a_file_without_a_last_line_break_is_extended(published):
    published("all", run_line("FedBis", 0))
    path = published.checkout / "docs" / "results" / "data" / "all.jsonl"
    path.write_text(path.read_text().rstrip())
    published("all", run_line("FedDPO", 0))
    assert [line["arm"] for line in read_lines(path)] == ["FedBis", "FedDPO"]


def test_lines_are_collected_into_a_checkout_only(tmp_path, write_list):
    campaign = write_list()
    with pytest.raises(CampaignError, match="no checkout"):
        commands.collect(tmp_path, campaign.path, campaign.home)


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "all.jsonl").write_text('{"arm": 1}\n{"ar')
    with pytest.raises(CampaignError, match="all.jsonl, line 2"):
        read_lines(tmp_path / "all.jsonl")


def test_the_last_line_of_a_run_counts_and_other_arms_and_seeds_do_not(write_list):
    arms = {"fronts": {"both": ["FedBis", "FedDPO"]}, "seeds": [0, 1]}
    benchmark = write_list().benchmark("all").model_copy(update=arms)
    lines = [run_line("FedBis", 0), run_line("FedBis", 0, metrics={"after/accuracy/mean": 0.75})]
    contest = {"prompts": ["p"], "verdicts": ["tie"], "ours": [1], "theirs": [1]}
    lines += [run_line("other", 0, contests={"other against base policy": contest}), run_line("FedBis", 7)]
    results = read_results(lines, benchmark)
    assert results.metrics == {"FedBis": {0: {"after/accuracy/mean": 0.75}}}
    assert results.fronts == results.contests == {}
    results = read_results([*lines, run_line("FedDPO", 0)], benchmark)
    assert results.metrics["both"][0]["front/hypervolume"] == pytest.approx(2.0)
    assert math.isnan(results.metrics["FedDPO"][0]["align/kl_sequence"])
    assert is_complete([*lines, run_line("FedDPO", 0)], benchmark, 0)
    assert not is_complete(lines, benchmark, 0)


def test_results_do_not_depend_on_the_order_of_lines(write_list):
    benchmark = write_list().benchmark("all")
    lines = [run_line(arm, seed) for arm in benchmark.arms for seed in (0, 1)]
    first, other = (read_results(own, benchmark).metrics for own in (lines, lines[::-1]))
    assert (
        [[*by_seed] for by_seed in first.values()]
        == [[*by_seed] for by_seed in other.values()]
        == [[0, 1]] * 2
    )


# --- Real processes


def start(folder):
    inherited = environment_without("PREFECT_", "MLFLOW_", "FED_RLHF_")
    if "FED_RLHF_BACKBONES" in os.environ:
        inherited["FED_RLHF_BACKBONES"] = os.environ["FED_RLHF_BACKBONES"]
    arguments = ["--list", str(folder / "families.yaml"), "--home", str(folder / "home")]
    return subprocess.Popen(
        [sys.executable, "-m", "perf", "campaign", "run", *arguments],
        cwd=ROOT,
        env=inherited | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(is_reached, process):
    deadline = time.monotonic() + 400
    while not is_reached():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_a_stopped_campaign_resumes_its_run_and_publishes_it_once(
    write_list, published, tmp_path, monkeypatch, fill_home
):
    plan = {
        "recipe": "debug",
        "seeds": [0],
        "settings": [
            "evaluation.answers_per_prompt=2",
            "alignment.completions=4",
            "alignment.pairs_per_prompt=1",
        ],
        "arms": {"FedBis": [], "FedDPO": ["federation.method=feddpo"]},
        "contests": [["FedBis", "FedDPO"]],
    }
    campaign = write_list({"all": {"benchmark": "plan.yaml", "seeds": [0]}}, plan=plan)
    benchmark, folder = campaign.benchmark("all"), campaign.folder("all")
    run = folder / "FedBis-seed-0"
    fill_home(campaign.home)
    stopped = start(tmp_path)
    wait_until(lambda: list(run.glob("federation/commits/0*1.json")), stopped)
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + signal.SIGTERM
    assert commands.owner(campaign.home) is None  # its process has ended, too
    assert list(own_lines(folder, benchmark)) == []
    again = start(tmp_path)
    output, _ = again.communicate(timeout=500)
    assert again.returncode == 0, output
    log = (campaign.home / "logs" / "all.log").read_text()
    assert "Stopped" in log
    assert "resuming after round" in log
    with monkeypatch.context() as patch, commands.locked(campaign.home) as lock:
        patch.setattr(commands, "call", lambda *_: pytest.fail("a finished family is run again"))
        commands.run_family(campaign, "all", lock)
    commands.collect(published.checkout, campaign.path, campaign.home)
    commands.collect(published.checkout, campaign.path, campaign.home)
    lines = read_lines(published.checkout / "docs" / "results" / "data" / "all.jsonl")
    assert [(line["kind"], line["arm"], line["seed"]) for line in lines] == [
        ("run", "FedBis", 0),
        ("run", "FedDPO", 0),
        ("contests", "", 0),
    ]
    first = lines[0]
    assert first["metrics"] == json.loads((run / "report" / "metrics.json").read_text())
    assert first["settings"] == plan["settings"]
    base = first["contests"]["FedBis against base policy"]
    assert sum(base["counts"].values()) == len(base["prompts"]) == 8
    assert len({answer.partition("#")[0] for answer in base["prompts"]}) == 4
    assert len(first["units"]["answers/aligned_characters"]["groups"][""]) == 4
    assert first["seconds"] > 0
    assert len(lines[2]["contests"]["FedBis against FedDPO"]["verdicts"]) == 8
    assert (folder / "report" / "report.md").is_file()
    assert_lines_have_the_results(lines, folder, benchmark)


def assert_lines_have_the_results(lines, folder, benchmark):
    """Lines have all that claims and tables are functions of."""
    from tasks.benchmark_report import read_results as read_folder

    collected, measured = read_results(lines, benchmark), read_folder(folder, benchmark)
    for name in ("metrics", "units", "base", "judges", "commits", "fronts"):
        np.testing.assert_equal(getattr(collected, name), getattr(measured, name), err_msg=name)
    assert collected.contests.keys() == measured.contests.keys()
    for name, by_seed in collected.contests.items():
        for seed, contest in by_seed.items():
            expected = measured.contests[name][seed]
            assert contest.verdicts == expected.verdicts
            assert contest.prompts == expected.prompts
            assert contest.win_rate() == expected.win_rate()


def test_the_commands_are_those_of_perf():
    assert {"run", "status", "collect"} <= set(CliRunner().invoke(app, ["campaign", "--help"]).output.split())
