"""The campaign: what it runs and skips, failures, pauses, kills, choices, and its collected lines."""

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
import yaml

from components.benchmarks import arm_recipe
from components.config import RecipeError
from perf.campaign import __main__ as command
from perf.campaign import worker as module
from perf.campaign.lines import CampaignError, append_line, collect, read_lines, read_results
from perf.campaign.plan import LIST, check_campaign, items, read_campaign, recipe_hash
from perf.campaign.worker import Place, Worker, is_running, locked, signal_group
from tests.support.pipeline import ROOT, environment_without

PLAN = {"recipe": "debug", "seeds": [0], "arms": {"FedBis": [], "FedDPO": ["federation.method=feddpo"]}}
RATES = {
    "recipe": "debug",
    "seeds": [5],
    "arms": {"FedBis-low": ["federation.optimizer.lr=1e-3"], "FedBis-high": ["federation.optimizer.lr=1e-1"]},
    "choices": {"FedBis": {"among": ["FedBis-low", "FedBis-high"], "figure": "accuracy"}},
}
ARMS = [("FedBis", 0), ("FedDPO", 0), ("FedBis", 1), ("FedDPO", 1)]


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
def work(tmp_path, monkeypatch):
    """A function that works through a campaign whose runs end at once; gives the arms that were run.

    Its last argument maps an arm to what its process ends with.
    """
    place = Place(tmp_path / "home")
    for name in (*module.OWN_PLACES, "FED_RLHF_HOME"):  # set, so that all of them are restored
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(module, "run_results", lambda folder, benchmark, arm, seed, measure: {"metrics": {}})
    monkeypatch.setattr(module, "contest_results", lambda folder, benchmark, seed: {"contests": {}})

    def run(campaign, outcomes=None, **options):
        done = []
        place.enter()

        class Scripted(Worker):
            def _call(self, command, log, session=None):
                name = Path(command[-1]).name if command[:2] == ["flows.cli", "resume"] else command[0]
                done.append(name)
                log.parent.mkdir(parents=True, exist_ok=True)
                log.write_text("error: it broke\n")
                return (outcomes or {}).get(name, lambda: (0, False))()

        with locked(place) as lock:
            Scripted(campaign, place, lock, **options).work()
        return done

    run.place = place
    return run


def statuses(place, family="all"):
    return [
        (line["kind"], line["arm"], line["seed"], line["status"])
        for line in read_lines(place.lines_of(family))
    ]


# --- The list of the project


def test_every_arm_of_the_list_has_a_recipe_that_can_be_run(tmp_path):
    counts = check_campaign(read_campaign(LIST, tmp_path))
    assert next(iter(counts)) == "summarization-decisive"
    assert counts["summarization-decisive"] == 20


def test_all_arms_of_a_family_have_the_same_number_of_gradient_evaluations(tmp_path):
    from components.federation.method import method_of

    campaign = read_campaign(LIST, tmp_path)
    for name in campaign.families.keys() - {"summarization-early"}:  # it compares runs of different lengths
        benchmark = campaign.benchmark(name)
        budgets = set()
        for arm in benchmark.arms:
            federation = arm_recipe(benchmark, arm, benchmark.seeds[0]).federation
            gradients = method_of(federation).gradient_evaluations(federation, rows=64)
            budgets.add(federation.rounds * federation.clients_per_round * gradients)
        assert len(budgets) == 1, name


def test_the_decisive_recipe_uses_all_papers(tmp_path):
    benchmark = read_campaign(LIST, tmp_path).benchmark("summarization-decisive")
    options = arm_recipe(benchmark, "FedBis", 0).data.options
    sets = ("train", "validation", "test", "judge")
    assert sum(getattr(options, f"{name}_papers") for name in sets) + options.align_prompts == 250


# --- Reading a list


def test_runs_are_ordered_by_seed_so_that_a_seed_is_complete_early(write_list):
    campaign = write_list()
    assert [(item.arm, item.seed) for item in items("all", campaign.benchmark("all"))] == ARMS


def test_settings_of_a_family_name_the_campaigns_folder(write_list, tmp_path):
    family = {"benchmark": "plan.yaml", "seeds": [0], "settings": ["data.path='{home}/pairs.jsonl'"]}
    recipe = arm_recipe(write_list({"all": family}).benchmark("all"), "FedBis", 0)
    assert recipe.data.path.name == str(tmp_path / "home" / "pairs.jsonl")


def test_a_hash_tells_recipes_apart_but_not_how_they_are_run(debug):
    runtime = debug.model_copy(update={"runtime": debug.runtime.model_copy(update={"cpu_workers": 2})})
    assert recipe_hash(runtime) == recipe_hash(debug)
    assert recipe_hash(debug.model_copy(update={"seed": 1})) != recipe_hash(debug)


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
    families = {
        "rates": {"benchmark": "rates.yaml", "seeds": [5]},
        "final": {
            "benchmark": "plan.yaml",
            "seeds": [0],
            "chosen_from": "rates",
            "based_on": {"no": "FedBis"},
        },
    }
    with pytest.raises(RecipeError, match="family final: no:"):
        check_campaign(write_list(families, rates=RATES))


# --- Working through it


def test_all_runs_are_run_one_after_the_other_and_recorded(work, write_list):
    done = work(write_list())
    assert done == [f"{arm}-seed-{seed}" for arm, seed in ARMS]
    assert statuses(work.place) == [("run", arm, seed, "finished") for arm, seed in ARMS]
    line = read_lines(work.place.lines_of("all"))[1]
    assert line["settings"] == ["federation.method=feddpo"]
    assert {"commit", "recipe", "started", "ended", "seconds"} <= set(line)


def test_finished_runs_are_skipped(work, write_list):
    work(write_list())
    assert work(write_list()) == []


def test_a_run_that_ended_before_its_line_was_written_is_not_repeated(work, write_list):
    folder = work.place.family("all") / "FedBis-seed-0"

    def end_without_line():
        (folder / "report.done").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(write_list(), {"FedBis-seed-0": end_without_line})
    assert statuses(work.place) == []
    assert work(write_list())[0] == "FedDPO-seed-0"
    assert statuses(work.place)[0] == ("run", "FedBis", 0, "finished")


def test_a_run_that_was_interrupted_is_resumed_in_its_folder(work, write_list):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(write_list(), {"FedBis-seed-0": interrupt})
    recipe = work.place.family("all") / "FedBis-seed-0" / "recipe.yaml"
    moment = recipe.stat().st_mtime_ns
    assert work(write_list())[0] == "FedBis-seed-0"
    assert recipe.stat().st_mtime_ns == moment


def test_a_failed_run_is_recorded_with_its_error_and_does_not_stop_the_others(work, write_list):
    done = work(write_list(), {"FedDPO-seed-0": lambda: (1, False)})
    assert len(done) == 4
    assert statuses(work.place)[1] == ("run", "FedDPO", 0, "failed")
    assert "it broke" in read_lines(work.place.lines_of("all"))[1]["error"]


def test_a_failed_run_is_resumed_on_request_only_and_once(work, write_list):
    fails = {"FedDPO-seed-0": lambda: (1, False)}
    work(write_list(), fails)
    assert work(write_list()) == []
    assert work(write_list(), fails, retry_failed=True) == ["FedDPO-seed-0"]
    assert work(write_list(), retry_failed=True) == ["FedDPO-seed-0"]
    assert statuses(work.place)[-1] == ("run", "FedDPO", 0, "finished")


def test_a_run_that_fails_after_its_process_was_stopped_is_tried_again(work, write_list):
    results = iter([(1, True), (0, False)])
    done = work(write_list(), {"FedBis-seed-0": lambda: next(results)})
    assert done[:2] == ["FedBis-seed-0", "FedBis-seed-0"]
    assert statuses(work.place)[0] == ("run", "FedBis", 0, "finished")


def test_a_run_of_other_settings_is_not_taken_for_this_one(work, write_list):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(write_list(), {"FedBis-seed-0": interrupt})
    changed = {"all": {"benchmark": "plan.yaml", "seeds": [0], "settings": ["federation.rounds=9"]}}
    assert work(write_list(changed)) == ["FedDPO-seed-0"]
    assert "other settings" in read_lines(work.place.lines_of("all"))[0]["error"]


def test_a_disabled_family_is_not_run(work, write_list):
    family = {"benchmark": "plan.yaml", "seeds": [0], "disabled": "it is too large"}
    assert work(write_list({"all": family})) == []


def test_contests_follow_when_all_arms_of_a_seed_are_finished(work, write_list):
    plan = PLAN | {"contests": [["FedBis", "FedDPO"]]}
    done = work(write_list(plan=plan), {"FedBis-seed-1": lambda: (1, False)})
    assert done == ["FedBis-seed-0", "FedDPO-seed-0", "flows.cli", "FedBis-seed-1", "FedDPO-seed-1"]
    written = yaml.safe_load((work.place.family("all") / "benchmark.yaml").read_text())
    assert written["seeds"] == [0]
    assert ("contests", "", 0, "finished") in statuses(work.place)


def test_a_preparation_runs_once_before_the_first_run(work, write_list):
    family = {"benchmark": "plan.yaml", "seeds": [0], "prepare": ["perf.gold_pairs", "{home}/x"]}
    assert work(write_list({"all": family})) == ["perf.gold_pairs", "FedBis-seed-0", "FedDPO-seed-0"]
    assert work(write_list({"all": family | {"seeds": [0, 1]}}))[0] == "FedBis-seed-1"


def test_a_family_whose_preparation_fails_does_not_stop_the_others(work, write_list):
    families = {
        "first": {"benchmark": "plan.yaml", "seeds": [0], "prepare": ["perf.gold_pairs"]},
        "all": {"benchmark": "plan.yaml", "seeds": [0]},
    }
    done = work(write_list(families), {"perf.gold_pairs": lambda: (2, False)})
    assert done == ["perf.gold_pairs", "FedBis-seed-0", "FedDPO-seed-0"]
    assert statuses(work.place, "first") == [("run", "", -1, "failed")]


def test_arms_take_the_settings_that_an_earlier_family_chose(work, write_list, monkeypatch):
    scores = {"FedBis-low": 0.6, "FedBis-high": 0.8}
    monkeypatch.setattr(
        module,
        "run_results",
        lambda folder, plan, arm, *rest: {"metrics": {"after/accuracy/mean": scores.get(arm, 0.0)}},
    )
    final = PLAN | {"arms": {"FedBis": [], "ablation": ["federation.local_steps=1"]}}
    families = {
        "rates": {"benchmark": "rates.yaml", "seeds": [5]},
        "final": {
            "benchmark": "final.yaml",
            "seeds": [0],
            "chosen_from": "rates",
            "based_on": {"ablation": "FedBis"},
        },
    }
    work(write_list(families, rates=RATES, final=final))
    settings = {line["arm"]: line["settings"] for line in read_lines(work.place.lines_of("final"))}
    assert settings == {
        "FedBis": ["federation.optimizer.lr=1e-1"],
        "ablation": ["federation.optimizer.lr=1e-1", "federation.local_steps=1"],
    }


def test_a_family_waits_until_its_settings_are_chosen(work, write_list, capsys):
    families = {
        "rates": {"benchmark": "rates.yaml", "seeds": [5]},
        "final": {"benchmark": "final.yaml", "seeds": [0], "chosen_from": "rates"},
    }
    campaign = write_list(families, rates=RATES, final=PLAN | {"arms": {"FedBis": []}})
    done = work(campaign, {"FedBis-low-seed-5": lambda: (1, False)})
    assert done == ["FedBis-low-seed-5", "FedBis-high-seed-5"]
    assert "final: waits for the choices of rates" in capsys.readouterr().out
    assert "final: 0 of 1 runs finished, 0 failed, waits" in command.status(campaign, work.place)


# --- Pause, lock and status


def test_no_run_is_started_while_the_campaign_is_paused(work, write_list, monkeypatch):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        work.place.pause.unlink()

    monkeypatch.setattr(module.time, "sleep", sleep)
    home = ["--home", str(work.place.home)]
    assert command.main(["pause", *home]) == 0
    assert len(work(write_list())) == 4
    assert len(waits) == 1
    command.main(["pause", *home])
    command.main(["continue", *home])
    assert not work.place.pause.exists()


def test_a_second_process_is_refused_while_one_works(work):
    work.place.enter()
    with locked(work.place):
        assert is_running(work.place)
        with pytest.raises(CampaignError, match="already works"), locked(work.place, patience=0.0):
            pass
    assert not is_running(work.place)


def test_a_signal_is_sent_to_no_process_group_but_that_of_a_running_campaign(work):
    work.place.enter()
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        work.place.state.write_text(json.dumps({"pid": other.pid}))
        with pytest.raises(CampaignError, match="no process works"):
            signal_group(work.place, signal.SIGTERM)
        work.place.state.write_text(json.dumps({"pid": 2**30}))
        with locked(work.place), pytest.raises(CampaignError, match="no process works"):
            signal_group(work.place, signal.SIGTERM)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_status_counts_runs_and_says_whether_a_process_works(work, write_list):
    campaign = write_list()
    work(campaign, {"FedDPO-seed-0": lambda: (1, False)})
    text = command.status(campaign, work.place)
    assert "all: 3 of 4 runs finished, 1 failed" in text
    assert "no process works on it" in text


# --- Lines


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    (folder / "docs" / "results").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    return folder


def test_finished_lines_are_collected_once(tmp_path, checkout):
    lines = tmp_path / "lines"
    append_line(lines / "all.jsonl", {"arm": "a", "status": "finished", "seconds": float("nan")})
    append_line(lines / "all.jsonl", {"arm": "b", "status": "failed"})
    assert collect(lines, checkout) == {"all": 1}
    append_line(lines / "all.jsonl", {"arm": "b", "status": "finished"})
    assert collect(lines, checkout) == {"all": 1}
    assert collect(lines, checkout) == {"all": 0}
    collected = read_lines(checkout / "docs" / "results" / "data" / "all.jsonl")
    assert [line["arm"] for line in collected] == ["a", "b"]
    assert collected[0]["seconds"] is None


def test_lines_of_several_campaigns_are_collected_side_by_side(tmp_path, checkout):
    for name in ("one", "two"):
        append_line(tmp_path / name / "all.jsonl", {"arm": name, "status": "finished"})
        collect(tmp_path / name, checkout)
    collected = read_lines(checkout / "docs" / "results" / "data" / "all.jsonl")
    assert [line["arm"] for line in collected] == ["one", "two"]


def test_lines_are_collected_into_a_checkout_only(tmp_path):
    with pytest.raises(CampaignError, match="no checkout"):
        collect(tmp_path, tmp_path)


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "all.jsonl").write_text('{"arm": 1}\n{"ar')
    with pytest.raises(CampaignError, match="all.jsonl, line 2"):
        read_lines(tmp_path / "all.jsonl")


# --- Real processes


def start(folder):
    inherited = environment_without("PREFECT_", "MLFLOW_", "FED_RLHF_")
    if "FED_RLHF_BACKBONES" in os.environ:
        inherited["FED_RLHF_BACKBONES"] = os.environ["FED_RLHF_BACKBONES"]
    arguments = ["--list", str(folder / "families.yaml"), "--home", str(folder / "home")]
    return subprocess.Popen(
        [sys.executable, "-m", "perf.campaign", "run", *arguments],
        cwd=ROOT,
        env=inherited | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def state_of(process):
    """The kernel's letter for the state of a process: T is stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(is_reached, process):
    deadline = time.monotonic() + 400
    while not is_reached():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_campaign_resumes_its_run_and_records_it_once(write_list, tmp_path):
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
    benchmark = write_list({"all": {"benchmark": "plan.yaml", "seeds": [0]}}, plan=plan).benchmark("all")
    run = tmp_path / "home" / "runs" / "all" / "FedBis-seed-0"
    killed = start(tmp_path)
    wait_until(lambda: list(run.glob("federation/commits/0*1.json")), killed)
    killed.kill()
    killed.communicate()
    place = Place(tmp_path / "home")
    assert read_lines(place.lines_of("all")) == []
    again = start(tmp_path)
    output, _ = again.communicate(timeout=500)
    assert again.returncode == 0, output
    lines = read_lines(place.lines_of("all"))
    assert statuses(place) == [
        ("run", "FedBis", 0, "finished"),
        ("run", "FedDPO", 0, "finished"),
        ("contests", "", 0, "finished"),
    ]
    assert "resuming after round" in place.log("all", "FedBis-seed-0").read_text()
    first = lines[0]
    assert first["metrics"] == json.loads((run / "report" / "metrics.json").read_text())
    base = first["contests"]["FedBis against base policy"]
    assert sum(base["counts"].values()) == len(base["prompts"]) == 8
    assert len({answer.partition("#")[0] for answer in base["prompts"]}) == 4
    assert len(first["units"]["answers/aligned_characters"]["groups"][""]) == 4
    assert first["seconds"] > 0
    assert len(lines[2]["contests"]["FedBis against FedDPO"]["verdicts"]) == 8
    assert (place.family("all") / "report" / "report.md").is_file()
    assert_lines_have_the_results(lines, place.family("all"), benchmark)


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


def run_line(arm, seed, **changes):
    """A line of a finished run of two objectives."""
    front = {
        "scores": {"a": seed + 1.0, "b": 2.0},
        "base_scores": {"a": 0.0, "b": 0.0},
        "preferences": {"a": 1.0, "b": 1.0},
    }
    line = {"kind": "run", "family": "all", "arm": arm, "seed": seed, "status": "finished", "seconds": 60}
    line |= {"commits": ["c"], "metrics": {"after/accuracy/mean": 0.5, "align/kl_sequence": None}}
    return line | {"units": {}, "base": {}, "judge": {}, "contests": {}, "front": front} | changes


def test_the_last_line_of_a_run_counts_and_failed_ones_and_other_arms_do_not(write_list):
    arms = {"fronts": {"both": ["FedBis", "FedDPO"]}, "seeds": [0, 1]}
    benchmark = write_list().benchmark("all").model_copy(update=arms)
    lines = [run_line("FedBis", 0), run_line("FedBis", 0, metrics={"after/accuracy/mean": 0.75})]
    contest = {"prompts": ["p"], "verdicts": ["tie"], "ours": [1], "theirs": [1]}
    lines += [run_line("other", 0, contests={"other against base policy": contest})]
    lines += [run_line("FedBis", 1, status="failed"), run_line("FedBis", 7)]
    results = read_results(lines, benchmark)
    assert results.metrics == {"FedBis": {0: {"after/accuracy/mean": 0.75}}}
    assert results.fronts == results.contests == {}
    results = read_results([*lines, run_line("FedDPO", 0)], benchmark)
    assert results.metrics["both"][0]["front/hypervolume"] == pytest.approx(2.0)
    assert math.isnan(results.metrics["FedDPO"][0]["align/kl_sequence"])


def test_results_do_not_depend_on_the_order_of_lines(write_list):
    benchmark = write_list().benchmark("all")
    lines = [run_line(arm, seed) for arm in benchmark.arms for seed in (0, 1)]
    first, other = (read_results(own, benchmark).metrics for own in (lines, lines[::-1]))
    assert (
        [[*by_seed] for by_seed in first.values()]
        == [[*by_seed] for by_seed in other.values()]
        == [[0, 1]] * 2
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")
def test_a_campaign_is_stopped_and_continued_in_the_middle_of_a_run(write_list, tmp_path):
    write_list({"all": {"benchmark": "plan.yaml", "seeds": [0]}})
    home = ["--home", str(tmp_path / "home")]
    run = tmp_path / "home" / "runs" / "all" / "FedBis-seed-0"
    process = start(tmp_path)
    try:
        wait_until(lambda: (run / "recipe.yaml").is_file(), process)
        assert command.main(["pause", "--now", *home]) == 0
        wait_until(lambda: state_of(process) == "T", process)
        assert command.main(["continue", *home]) == 0
        wait_until(lambda: state_of(process) != "T", process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert not is_running(Place(tmp_path / "home"))
