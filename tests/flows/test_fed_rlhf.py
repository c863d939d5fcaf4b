"""The whole pipeline on the recipe `debug`: output, files and logs of a run, and resuming."""

import functools
import hashlib
import json
import os
import pkgutil
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from prefect import runtime, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter

from components.config import RecipeError
from components.recipes import load_recipe
from components.results import Metrics, StepRecord
from flows import fed_rlhf as flow
from flows import stopping
from flows.fed_rlhf import is_eval_round, log_steps, phase_flow
from tasks.flow_runs import recipe_tags
from tasks.runs import Run, create_run, lock
from tasks.uncached import task
from tests.support.bare_loop import run_bare_loop
from tests.support.pipeline import NOISE, ROOT

ROUNDS = 4
OVERRIDES = [f"federation.rounds={ROUNDS}", "federation.local_steps=3", "seed=3"]
CONTESTS = {"aligned_vs_base", "aligned_vs_human", "base_vs_human"}


def command(arguments):
    """Exit status of `fed-rlhf`, whose output goes to the streams of this process."""
    from flows.cli import app

    return app(arguments, standalone_mode=False)


@pytest.fixture(scope="module")
def place(new_workplace):
    return new_workplace("complete")


COUNTED = {
    "recipes parsed": "components.recipes.load.parse_recipe",
    "recipes checked": "components.recipes.estimates.check_fit",
    "data sets read": "components.data.prepare.sample_pairs",
}
"""Functions that are called once for each of these."""


@pytest.fixture(scope="module")
def calls():
    return Counter()


@pytest.fixture(scope="module")
def complete(place, calls):
    """A run of the command, in this process, from its data to its report."""

    def counted(name, function):
        @functools.wraps(function)
        def call(*arguments, **settings):
            calls[name] += 1
            return function(*arguments, **settings)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("components.recipes.data_preview._last", {})
        for name, path in COUNTED.items():
            patch.setattr(path, counted(name, pkgutil.resolve_name(path)))
        status, output = place.main(command, "run", "debug", *OVERRIDES)
    assert status == 0, output
    return place.newest(output)


def test_a_run_parses_and_checks_its_recipe_once_and_reads_its_data_once(complete, calls):
    assert calls["recipes parsed"] == calls["recipes checked"] == calls["data sets read"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "Selector accuracy on 32 held-out pairs",
        "clients' mean",
        "worst client",
        "best client",
        "common-taste pairs",
        "own-taste pairs",
        "aligned against base policy",
        "aligned against human text",
        "win rate, ties as 1/2 [95%]",
        "both orders agree",
        "length-controlled [95%]",
        "Report:",
        "Adapters",
        "MLflow:",
        "Prefect:",
    ],
)
def test_the_table_at_the_end_of_the_command_has(complete, line):
    assert line in complete.summary


def test_the_command_prints_its_progress_and_the_table_and_no_warning(complete):
    assert complete.summary in complete.output
    assert f"round {ROUNDS} of {ROUNDS}" in complete.output
    assert "DPO step" in complete.output
    report = json.loads((complete.folder / "prepared" / "report.json").read_text())
    assert f"partition: {report['partition']['samples']} pairs of 4 clients (max" in complete.output
    assert not NOISE.findall(complete.output)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_accuracies_of_the_report_are_those_of_the_federation(complete, moment):
    accuracy = getattr(complete.federation, moment).accuracy
    assert complete.metrics[f"{moment}/accuracy/mean"] == accuracy.mean
    assert complete.metrics[f"{moment}/accuracy/worst"] == accuracy.worst


@pytest.mark.parametrize("name", sorted(CONTESTS))
def test_a_contest_counts_all_prompts_and_its_rate_is_within_its_interval(complete, name):
    contest = complete.evaluation.contests[name]
    assert contest.low <= contest.win_rate <= contest.high
    assert contest.wins + contest.ties + contest.losses == 4
    assert complete.metrics[f"{name}/ties_half"] == (contest.wins + contest.ties / 2) / 4


def test_the_report_has_all_contests(complete):
    assert set(complete.evaluation.contests) == CONTESTS
    assert {name.partition("/")[0] for name in complete.metrics if name.endswith("/win_rate")} == CONTESTS


def test_no_file_of_a_run_is_pickled_or_half_written(complete, place):
    files = [path for path in place.runs.rglob("*") if path.is_file()]
    pickles = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}
    assert len(files) > 20
    assert not [path for path in files if path.suffix in pickles]
    assert not [path for path in files if path.name.startswith(".writing-")]


def test_the_run_is_one_parent_in_mlflow_with_phases_losses_and_a_registered_policy(complete):
    runs = complete.mlflow_runs()
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(runs) == 5
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {run.data.tags.get("phase") for run in runs} == {None, "prepare", "federate", "align", "evaluate"}
    assert parent.data.tags["fed_rlhf.folder"] == str(complete.folder)
    assert "/flow-run/" in parent.data.tags["prefect.flow_run_url"]
    losses = complete.history(complete.mlflow_id, "train/loss")
    assert list(losses) == list(range(1, ROUNDS + 1))
    version = complete.mlflow.get_model_version_by_alias("debug-policy", "latest-aligned")
    assert version.run_id == complete.phase_run("align").info.run_id
    version = complete.mlflow.get_model_version_by_alias("debug-policy", "latest-aligned")
    after = complete.metrics["after/accuracy/mean"]
    assert version.tags["after.accuracy.mean"] == f"{after:.4g}"
    figures = {f"aligned_vs_base/{name}" for name in ("wins", "ties", "losses", "ties_half")}
    assert figures < parent.data.metrics.keys()
    assert {name.replace("/", ".") for name in figures} < version.tags.keys()
    assert "aligned_vs_base.win_rate" not in version.tags, "34 ties would be a rate of 0"
    assert complete.summary.splitlines()[0] in version.description
    model = complete.mlflow.get_logged_model(version.source.removeprefix("models:/"))
    assert {metric.key: metric.value for metric in model.metrics}["after/accuracy/mean"] == after


def test_flow_runs_are_found_by_the_run_its_recipe_its_method_and_its_seed(complete, prefect_session):
    filters = FlowRunFilter(tags={"all_": ["recipe:debug", "method:fedbis", "seed:3"]})
    with get_client(sync_client=True) as client:
        names = {one.name for one in client.read_flow_runs(flow_run_filter=filters)}
    run = complete.run.id
    assert {run, *(f"{run}, {phase}" for phase in ("prepare", "federate", "align", "evaluate"))} <= names


def test_tasks_of_a_phase_have_the_tags_of_its_caller_but_not_those_that_say_what_runs(
    complete, prefect_session
):
    seen = []
    own_tags = task()(lambda: seen.append(runtime.task_run.tags))

    @phase_flow
    def example(run, recipe):
        seen.append(sorted(runtime.flow_run.tags))
        own_tags()

    recipe = load_recipe("debug")
    with tags("gpu", "arm:one", *recipe_tags(recipe)):
        example(complete.run, recipe)
    assert seen == [["arm:one", "gpu", "method:fedbis", "recipe:debug", "seed:0"], ["gpu"]]


def test_the_flow_gives_the_bytes_of_the_bare_loop(complete, tmp_path):
    """Prefect's mapping, retries and logs change no bit of the result."""
    bare = run_bare_loop(load_recipe("debug", OVERRIDES), complete.folder / "prepared", tmp_path)
    assert bare.hashes == complete.hashes


def test_the_phases_of_a_complete_run_are_not_repeated(complete, place):
    paths = [*(complete.folder / "federation").rglob("*"), *(complete.folder / "alignment").rglob("*")]
    before = {path: path.read_bytes() for path in paths if path.is_file()}
    output = place.resume(complete).output
    assert not re.findall(r"round \d+ of|DPO step|sampled|answers", output)
    assert not NOISE.findall(output)
    assert before == {path: path.read_bytes() for path in before}


# --- kills


COMMITS = {
    "a commit": lambda run, number: run.commits >= number,
    "an update of the step after a commit": lambda run, number: (
        run.commits >= number and any((run.folder / "federation" / "updates").glob("*.json"))
    ),
}
ALIGNMENT = {
    "the completions": lambda run: (run.folder / "alignment" / "completions.json").is_file(),
    "the labels": lambda run: (run.folder / "alignment" / "pairs.parquet").is_file(),
}
"""Events at which a process is killed, and whether a run has reached them."""


@pytest.fixture(scope="module")
def kill_moments():
    """The events at which the two processes are killed, drawn from the seed FED_RLHF_KILL_SEED."""
    seed = int(os.environ.get("FED_RLHF_KILL_SEED", "0"))
    chance = random.Random(seed)
    moments = chance.choice([*COMMITS]), chance.randint(0, 2), chance.choice([*ALIGNMENT])
    return f"FED_RLHF_KILL_SEED={seed}", *moments


def test_the_step_that_a_killed_run_had_committed_and_not_logged_is_logged_when_it_resumes(new_workplace):
    place = new_workplace("unlogged")

    class KilledError(Exception):
        """The process ends between the commit and the log of a step."""

    def log_one(target, records, start):
        if len(records) == 2:
            raise KilledError
        log_steps(target, records, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "log_steps", log_one)
        place.fail(*OVERRIDES)
    killed = place.newest()
    assert killed.commits == 2
    assert list(killed.history(killed.mlflow_id, "train/loss")) == [1]
    resumed = place.resume(killed)
    assert list(resumed.history(resumed.mlflow_id, "train/loss")) == [1, 2, 3, 4]


@pytest.mark.long
def test_a_run_that_ends_before_dpo_continues_with_its_completions_and_labels(complete, new_workplace):
    place = new_workplace("stopped in alignment")

    def end(_):
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow.alignment, "train_by_dpo", end)
        place.fail(*OVERRIDES)
    stopped = place.newest()
    labels = stopped.folder / "alignment" / "pairs.parquet"
    written = labels.stat().st_mtime_ns
    resumed = place.resume(stopped)
    assert labels.stat().st_mtime_ns == written
    name = "alignment/final/adapter_model.safetensors"
    assert (resumed.folder / name).read_bytes() == (complete.folder / name).read_bytes()
    assert not re.findall(r"round \d+ of|sampled", resumed.output)


@pytest.fixture(scope="module")
def killed_place(new_workplace):
    return new_workplace("killed")


@pytest.fixture(scope="module")
def killed_in_rounds(killed_place, kill_moments):
    """A run whose process got SIGKILL within the rounds."""
    _, event, commit, _ = kill_moments
    run = killed_place.kill_when(lambda run: COMMITS[event](run, commit), "--verbose", *OVERRIDES)
    assert not (run.folder / "federation" / "result.json").exists(), f"{kill_moments}: killed too late"
    return run


@pytest.fixture(scope="module")
def resumed(killed_place, killed_in_rounds):
    """The same run, resumed to its end."""
    return killed_place.resume(killed_in_rounds)


def test_a_run_killed_within_the_rounds_continues_and_ends_with_the_bytes_of_one_that_was_not(
    complete, resumed, kill_moments
):
    run = resumed
    assert "resuming after round" in run.output, kill_moments
    assert not NOISE.findall(run.output), kill_moments
    assert run.hashes == complete.hashes, kill_moments
    digest = complete.hashes["selector"]
    stored = f"federation/adapters/{digest}.safetensors"
    for name in (stored, "federation/final/selector/adapter_model.safetensors"):
        assert (run.folder / name).read_bytes() == (complete.folder / name).read_bytes(), kill_moments
    assert hashlib.sha256((run.folder / stored).read_bytes()).hexdigest() == digest


def test_a_verbose_run_prints_the_log_of_prefect_and_no_live_line_and_no_warning(killed_in_rounds):
    output = killed_in_rounds.output
    assert "Finished in state Completed()" in output
    assert "partition: 80 pairs of 4 clients" in output
    assert "\x1b" not in output
    assert not NOISE.findall(output)


def test_a_run_killed_within_the_rounds_has_a_record_and_a_loss_of_each_round(resumed, kill_moments):
    rounds = list(range(1, ROUNDS + 1))
    assert [record.rounds_done for record in resumed.federation.records] == rounds, kill_moments
    losses = resumed.history(resumed.mlflow_id, "train/loss")
    assert list(losses) == rounds, kill_moments


@pytest.mark.long
def test_a_run_killed_within_the_alignment_ends_with_the_policy_of_one_that_was_not(
    complete, new_workplace, kill_moments
):
    place = new_workplace("killed in alignment")
    *_, event = kill_moments
    killed = place.kill_when(ALIGNMENT[event], *OVERRIDES)
    assert not (killed.folder / "alignment" / "result.json").exists(), f"{kill_moments}: killed too late"
    resumed = place.resume(killed)
    name = "alignment/final/adapter_model.safetensors"
    assert (resumed.folder / name).read_bytes() == (complete.folder / name).read_bytes(), kill_moments
    assert resumed.alignment.metrics == complete.alignment.metrics, kill_moments
    for contest in CONTESTS:
        name = f"evaluation/contests/{contest}.json"
        assert (resumed.folder / name).read_bytes() == (complete.folder / name).read_bytes(), kill_moments
    assert "round 1 of" not in resumed.output, kill_moments
    assert not NOISE.findall(resumed.output), kill_moments


def test_a_resumed_run_leaves_no_flow_run_and_no_mlflow_run_without_an_end(resumed):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": [resumed.folder.name]}))
        parents = {"any_": [run.id for run in runs]}
        phases = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parents))
    assert len(phases) > 4
    assert all(phase.state.is_final() for phase in phases)
    assert sorted(run.state.type.value for run in runs) == ["COMPLETED", "CRASHED"]
    assert {run.info.status for run in resumed.mlflow_runs()} == {"FINISHED"}


@pytest.mark.long
@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_run_that_is_interrupted_says_where_it_stopped_and_ends_as_killed(new_workplace, number):
    place = new_workplace("interrupted")
    if number == signal.SIGINT:
        run = place.kill_when(lambda run: run.commits >= 2, "federation.rounds=40", number=number)
    else:
        before = signal.signal(number, signal.SIG_DFL)  # a process inherits what is ignored, as under nohup
        try:
            run = place.kill_when(lambda run: run.commits >= 2, "federation.rounds=40", number=number)
        finally:
            signal.signal(number, before)
    (line,) = [line for line in run.output.splitlines() if line.startswith("Stopped")]
    stopped = re.fullmatch(
        rf"Stopped after round (\d+) of 40; resume with: fed-rlhf resume {run.folder.name}", line
    )
    said, committed = int(stopped[1]), Run(run.folder.name, run.folder).committed_round()
    assert said <= committed <= said + 1  # a round may end between the sentence and the process
    assert "Traceback" not in run.output
    statuses = {each.data.tags.get("phase"): each.info.status for each in run.mlflow_runs()}
    assert statuses == {None: "KILLED", "prepare": "FINISHED", "federate": "KILLED"}


# --- data


def test_data_that_fail_their_expectations_stop_the_command_with_a_sentence_before_any_training(
    new_workplace, tmp_path
):
    from components.data.validation import label_free_first  # imports Great Expectations

    place = new_workplace("bad-data")
    pairs = []
    for n in range(80):
        answers = (f"an answer {n}", f"no answer {n}")
        chosen, rejected = answers if label_free_first(*answers) else answers[::-1]
        pairs.append({"prompt": f"question {n}?", "chosen": chosen, "rejected": rejected})
    file = tmp_path / "always-first.jsonl"
    file.write_text("\n".join(json.dumps(pair) for pair in pairs), encoding="utf-8")
    own = ["data.source=jsonl", f"data.path={file}", "data.options={}", "data.partition=iid"]
    overrides = [*own, "runtime.data_docs=true"]
    status, output = place.main(command, "run", "debug", *overrides)
    docs = place.newest().folder / "prepared.rejected" / "docs" / "index.html"
    assert status == 2
    assert "chosen comes first in a label-free order" in output
    assert str(docs) in output
    assert docs.is_file()
    assert not list(place.runs.glob("*/federation"))


# --- one process at a time

HOLDER = """
import pathlib, sys
from tasks.runs import Run, lock
with lock(Run('run', pathlib.Path(sys.argv[1]))):
    print('locked', flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run_folder(tmp_path):
    return create_run(load_recipe("debug"), tmp_path / "run")


@pytest.fixture
def holder(run_folder):
    """A process that holds the lock of a run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_folder.folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_a_run_serves_one_process_at_a_time_until_that_process_ends(run_folder, holder):
    with (
        pytest.raises(RecipeError, match="run run.*another process|another process.*run run"),
        lock(run_folder),
    ):
        pass
    holder.kill()
    holder.wait()
    with lock(run_folder):
        pass


# --- seconds of phases


def test_the_seconds_of_a_phase_are_those_of_all_processes_that_worked_on_it(run_folder, monkeypatch):
    moments = iter([10.0, 14.0, 100.0, 101.5, 7.0, 9.0])
    monkeypatch.setattr("tasks.runs.time", SimpleNamespace(monotonic=lambda: next(moments)))
    with pytest.raises(KeyboardInterrupt), run_folder.timed("federate"):
        raise KeyboardInterrupt
    with run_folder.timed("federate"):
        pass
    with run_folder.timed("align"):
        pass
    assert run_folder.metadata()["seconds"] == {"federate": 5.5, "align": 2.0}


# --- when accuracy is measured


def record(round_number, rounds_done):
    return StepRecord(
        step=1,
        round=round_number,
        phase="train",
        rounds_done=rounds_done,
        logged_at=rounds_done,
        clients={},
        failed={},
        refused={},
        adapters={},
        memory={},
        server=Metrics(),
        aggregation_seconds=0.0,
    )


@pytest.mark.parametrize(
    ("before", "after", "is_measured"),
    [(0, 1, False), (1, 2, True), (2, 2, False), (3, 4, True), (5, 6, False)],
    ids=["odd round", "even round", "grouping within a round", "another even round", "last round"],
)
def test_accuracy_is_measured_after_every_nth_complete_round_but_the_last(before, after, is_measured):
    recipe = load_recipe("debug", ["federation.rounds=6", "federation.evaluate_every=2"])
    assert is_eval_round(recipe.federation, record(before, after)) == is_measured


def test_accuracy_is_not_measured_between_the_rounds_by_default():
    assert not is_eval_round(load_recipe("debug").federation, record(1, 2))
