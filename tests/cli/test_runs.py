"""The command `fed-rlhf` on the folders of real runs: one run of the recipe `debug` serves all tests."""

import fcntl
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.config import UserError
from components.io import file_hash
from components.recipes import load_recipe
from components.recipes.inputs import store_inputs
from tasks import chat
from tasks.run_table import format_headline
from tasks.runs import Run, create_run, lock
from tests.support.command_line import fed_rlhf, refusal
from tests.support.pipeline import ROOT, Workplace

OVERRIDES = ["federation.rounds=1", "seed=3"]
CHATS = [("--temperature", "1"), ("--temperature", "1"), ()]


@dataclass(frozen=True)
class FinishedRun:
    """A run that the command has finished.

    Attributes:
        place: its folder of runs, and its MLflow store.
        folder: of the run.
        output: what the command printed.
    """

    place: Workplace
    folder: Path
    output: str


def run_command(place, *arguments):
    """Output of a command that runs a flow, with the settings of a workplace."""
    result, _ = place.call(lambda: fed_rlhf(*arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def finished(new_workplace):
    """A finished run of the recipe `debug` with one round."""
    place = new_workplace("cli")
    output = run_command(place, "run", "debug", *OVERRIDES)
    (recipe,) = place.runs.glob("*/recipe.yaml")
    return FinishedRun(place, recipe.parent, output)


@pytest.fixture
def runs(runs):
    """The folder of runs, which exists."""
    runs.mkdir()
    return runs


@pytest.fixture
def copied(finished, runs):
    """A copy of the finished run in a folder of runs of the test's own."""
    return shutil.copytree(finished.folder, runs / finished.folder.name)


@pytest.fixture
def opened(runs):
    """A run that has its recipe only."""
    return create_run(load_recipe("debug"), runs / "debug-1")


@pytest.fixture
def benchmark(runs):
    """The folder of a benchmark with one run."""
    folder = runs / "benchmark-1"
    create_run(load_recipe("debug"), folder / "plain-seed-0")
    (folder / "benchmark.yaml").write_text("recipe: debug\n")
    return folder


def against_base(**figures):
    """Metrics of the contest against the base policy."""
    return {f"aligned_vs_base/{name}": value for name, value in figures.items()}


def table_row(run_id):
    """The row of a run in the table of runs, by column."""
    header, *rows = fed_rlhf("runs").stdout.splitlines()
    (row,) = [row for row in rows if row.split()[0] == run_id]
    names = re.split(" {2,}", header)
    starts = [header.index(name) for name in names]
    ends = [*starts[1:], None]
    return {name: row[start:end].strip() for name, start, end in zip(names, starts, ends, strict=True)}


def folder_size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_finished_run_prints_its_report(finished):
    summary = (finished.folder / "report" / "summary.txt").read_text().strip()
    assert summary
    assert summary in finished.output


def test_a_run_has_its_recipe_with_the_overrides(finished, tmp_path):
    recipe = Run("run", finished.folder).recipe()
    chosen = ["runtime.cpu_workers=1", "runtime.task_runner=threads"]
    assert recipe == store_inputs(load_recipe("debug", [*OVERRIDES, *chosen]), tmp_path)


def test_a_finished_run_is_listed_and_shown_with_its_report_and_its_mlflow_run(copied):
    row = table_row(copied.name)
    assert row["recipe"] == "debug"
    assert row["method"] == "fedbis"
    assert row["state"] == "finished"
    assert re.fullmatch("now|(a|[0-9]+) (second|minute)s? ago", row["last written"])
    assert table_row(copied.name)["size"] == f"{folder_size(copied) / 1e6:.1f} MB"
    shown = fed_rlhf("show", copied.name).stdout
    assert f"{copied.name}: debug, fedbis, finished" in shown
    assert str(copied) in shown
    assert Run("run", copied).metadata()["mlflow_run_id"] in shown
    assert (copied / "report" / "summary.txt").read_text().rstrip() in shown


def test_the_headline_figures_are_those_of_the_report(finished, copied):
    from components.io import read_json

    metrics = read_json(finished.folder / "report" / "metrics.json")
    headline = table_row(copied.name)["headline"]
    before, after = (metrics[f"{moment}/accuracy/mean"] for moment in ("before", "after"))
    assert f"accuracy {before:.3f} -> {after:.3f}" in headline
    wins, ties, losses = (metrics[f"aligned_vs_base/{name}"] for name in ("wins", "ties", "losses"))
    rate = (wins + ties / 2) / (wins + ties + losses)
    assert f"wins/ties/losses {wins:.0f}/{ties:.0f}/{losses:.0f}, ties as 1/2: {rate:.1%}" in headline


def test_the_headline_has_the_worst_client_and_the_spread_and_leaves_out_what_is_unknown():
    metrics = {"before/accuracy/mean": 0.5, "after/accuracy/mean": 0.75}
    clients = {"after/accuracy/worst": 0.6, "after/accuracy/spread": 0.1}
    assert format_headline(metrics | clients) == "accuracy 0.500 -> 0.750 (worst client 0.600, sd 0.100)"
    assert format_headline(against_base(wins=3, ties=1, losses=0, ties_half=0.875)) == (
        "wins/ties/losses 3/1/0, ties as 1/2: 87.5%"
    )


def test_the_headline_has_the_interval_of_the_rate_or_that_all_are_ties():
    figures = {"wins": 21, "ties": 9, "losses": 2, "ties_half": 51 / 64}
    interval = {"ties_half_low": 0.676, "ties_half_high": 0.895}
    assert format_headline(against_base(**figures, **interval)).endswith(": 79.7% [67.6%, 89.5%]")
    all_ties = against_base(wins=0, ties=34, losses=0, ties_half=0.5)
    assert format_headline(all_ties | {"aligned_vs_base/ties_half": None}) == format_headline(all_ties)
    assert format_headline(all_ties) == "wins/ties/losses 0/34/0, ties as 1/2: 50.0% (undecided: all ties)"


def test_a_stopped_run_is_resumed_with_its_own_recipe(finished):
    place = finished.place
    folder = shutil.copytree(finished.folder, place.runs / "stopped-1")
    shutil.rmtree(folder / "report")
    for phase in ("evaluate", "report"):
        (folder / f"{phase}.done").unlink()
    output = run_command(place, "resume", "stopped")  # the beginning of its id
    assert (folder / "report.done").is_file()
    assert (folder / "report" / "summary.txt").read_text().strip() in output
    shutil.rmtree(folder)


def test_run_ids_are_completed(copied):
    variables = {"_FED_RLHF_COMPLETE": "complete_bash", "_TYPER_COMPLETE_ARGS": "fed-rlhf show debug"}
    variables |= {"COMP_WORDS": "fed-rlhf show debug", "COMP_CWORD": "2"}
    assert fed_rlhf(variables=variables).stdout.split() == [copied.name]


def test_a_run_is_listed_as_running_or_with_the_first_phase_that_is_not_complete(opened):
    with lock(opened):
        assert table_row("debug-1")["state"] == "running: prepare"
    opened.mark_done("prepare")
    assert table_row("debug-1")["state"] == "stopped: federate"
    assert table_row("debug-1")["headline"] == "-"


def test_a_stopped_run_is_shown_with_the_command_that_resumes_it(opened):
    (opened.federation / "commits").mkdir(parents=True)
    (opened.federation / "commits" / "00004.json").write_text('{"state": {"round": 2}}')
    shown = fed_rlhf("show", "debug-1").stdout
    assert "stopped: prepare" in shown
    assert "2 rounds" in shown
    assert "fed-rlhf resume debug-1" in shown


def test_a_run_of_another_version_is_listed_with_what_its_recipe_tells(opened):
    path = opened.folder / "recipe.yaml"
    path.write_text(path.read_text().replace("  method: fedbis\n", "  method: gone\n  cycles: 3\n"))
    assert (table_row("debug-1")["recipe"], table_row("debug-1")["method"]) == ("debug", "gone")
    (opened.folder / "recipe.yaml").write_text("federation: {method: gone}\n")
    row = table_row("debug-1")
    assert row["recipe"] == "?"
    assert row["state"] == "stopped: prepare"


WRONG_TYPES = [
    json.dumps({"before/accuracy/mean": [0.5], "after/accuracy/mean": 0.7}),
    json.dumps({f"aligned_vs_base/{name}": "one" for name in ("wins", "ties", "losses")}),
]


@pytest.mark.parametrize("content", ["{}", "[]", '{"accuracy": {"before": {}}}', "{", *WRONG_TYPES])
def test_a_run_with_a_report_of_another_version_is_listed(opened, content):
    opened.report.mkdir()
    (opened.report / "metrics.json").write_text(content)
    assert table_row("debug-1")["headline"] == "?"


def test_a_run_with_damaged_metadata_is_refused_by_its_file(opened):
    (opened.folder / "run.json").write_text("{")
    assert str(opened.folder / "run.json") in refusal("show", "debug-1")


def test_a_link_to_a_file_that_is_gone_does_not_stop_the_table(opened):
    (opened.folder / "link").symlink_to(opened.folder / "gone")
    assert table_row("debug-1")["state"] == "stopped: prepare"


def test_runs_of_a_benchmark_are_listed_under_its_name(benchmark):
    assert table_row("benchmark-1/plain-seed-0")["recipe"] == "debug"


def test_the_latest_run_is_the_last_row(opened):
    earlier = create_run(load_recipe("debug"), opened.folder.parent / "debug-2")
    os.utime(earlier.folder / "recipe.yaml", (1, 1))
    rows = fed_rlhf("runs").stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["debug-2", "debug-1"]


def test_a_running_run_is_neither_resumed_nor_deleted_by_another_process(opened):
    from tasks.runs import find_run

    with lock(opened), pytest.raises(ValueError, match="another process"), lock(find_run("debug-1")):
        pass
    with (opened.folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "debug-1" in refusal("delete", "debug-1", "--yes")
    assert opened.folder.is_dir()


def test_deletion_names_the_folder_and_asks_for_confirmation(opened):
    result = fed_rlhf("delete", "debug-1", answer="y\n")
    assert result.exit_code == 0
    assert f"Delete {opened.folder}?" in result.stdout
    assert not opened.folder.exists()


@pytest.mark.parametrize("answer", ["n\n", "\n", ""], ids=["no", "default", "end of input"])
def test_nothing_is_deleted_without_a_confirmation(opened, answer):
    result = fed_rlhf("delete", "debug-1", answer=answer)
    assert result.exit_code == 1
    assert "Aborted" in result.stderr
    assert (opened.folder / "recipe.yaml").is_file()


def test_yes_deletes_without_a_question(opened):
    other = create_run(load_recipe("debug"), opened.folder.parent / "debug-2")
    result = fed_rlhf("delete", "debug-1", "--yes")
    assert result.exit_code == 0
    assert result.stdout == f"deleted {opened.folder}\n"
    assert other.folder.is_dir()


def test_a_benchmark_is_deleted_as_a_whole_and_none_of_its_runs_alone(benchmark):
    error = refusal("delete", "benchmark-1/plain-seed-0", "--yes")
    assert "benchmark-1" in error
    assert (benchmark / "plain-seed-0").is_dir()
    assert fed_rlhf("delete", "benchmark-1", "--yes").exit_code == 0
    assert not benchmark.exists()


@pytest.mark.parametrize("kind", ["run", "benchmark"])
@pytest.mark.parametrize("spelling", ["path", "relative path", "parent of the runs", "link"])
def test_nothing_outside_of_the_folder_of_runs_is_deleted(tmp_path, runs, monkeypatch, kind, spelling):
    outside = tmp_path / "outside"
    create_run(load_recipe("debug"), outside)
    if kind == "benchmark":
        (outside / "benchmark.yaml").write_text("recipe: debug\n")
    (runs / "link").symlink_to(outside)
    monkeypatch.chdir(tmp_path)
    names = {"path": str(outside), "relative path": "outside", "parent of the runs": "../outside"}
    error = refusal("delete", names.get(spelling, "link"), "--yes")
    assert str(outside) in error
    assert str(runs) in error
    assert (outside / "recipe.yaml").is_file()


@pytest.mark.parametrize("name", [".", ""])
def test_the_folder_of_runs_itself_is_not_deleted(runs, name):
    create_run(load_recipe("debug"), runs)
    assert str(runs) in refusal("delete", name, "--yes")
    assert runs.is_dir()


def test_the_aligned_policy_of_a_run_is_exported(copied, tmp_path):
    printed = fed_rlhf("export", copied.name, str(tmp_path / "policy")).stdout
    assert printed == f"exported to {tmp_path / 'policy'}; its README.md says how to use it\n"
    exported = (tmp_path / "policy" / "adapter_model.safetensors").read_bytes()
    assert exported == (copied / "alignment" / "final" / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "policy" / "tokenizer.json").is_file()
    readme = (tmp_path / "policy" / "README.md").read_text()
    pairs = file_hash(copied / "prepared" / "pairs.parquet")
    words = [
        "| method | fedbis |",
        f"| sha256 of pairs.parquet | {pairs} |",
        "Nothing is encrypted or noised.",
    ]
    words += ["Selector accuracy on ", "| aligned against base policy |", "Apache-2.0 (made by fed-rlhf)"]
    assert [text for text in words if text not in readme] == []


def test_the_base_and_the_aligned_policy_answer_prompts_side_by_side(copied):
    rows = json.loads((copied / "evaluation" / "answers.json").read_text())[:2]
    assert all("\n" in row["prompt"] for row in rows)
    texts = [f'"""{row["prompt"]}"""' for row in rows]
    limit = Run("run", copied).recipe().policy.max_new_tokens
    expected = ""
    for row in rows:
        shown = {"prompt": row["prompt"]}
        for name in ("base", "aligned"):
            cut = "" if row[name]["finished"] else f" [cut at {limit} tokens]"
            shown[name] = (row[name]["text"] or "(empty)") + cut
        for name, text in shown.items():
            expected += f"{name:9}{text}\n".replace("\n", "\n" + 9 * " ").rstrip(" ")
    assert " [cut at " in expected
    result = fed_rlhf("chat", copied.name, answer="\n\n".join(texts) + "\n")
    assert result.stdout == expected
    assert result.exit_code == 0


def test_samples_of_a_chat_are_the_same_again(copied):
    answers = [fed_rlhf("chat", copied.name, *options, answer="a line\n").stdout for options in CHATS]
    assert answers[0] == answers[1] != answers[2]
    assert [answer.count("aligned  ") for answer in answers] == [1, 1, 1]


def test_a_chat_refuses_an_infinite_temperature(copied):
    result = fed_rlhf("chat", copied.name, "--temperature", "inf", answer="a line\n")
    assert result.exit_code == 2
    assert "'--temperature': Input should be less than or equal to 100" in result.stderr


def test_a_chat_says_what_is_cut_off_and_goes_on_after_a_prompt_that_is_refused(copied, monkeypatch):
    surplus = chat.Chat.surplus

    def refuse(self, prompt):
        if prompt == "refused":
            raise UserError("this template takes no such turn")
        return surplus(self, prompt)

    monkeypatch.setattr(chat.Chat, "surplus", refuse)
    result = fed_rlhf("chat", copied.name, answer="refused\n" + "word " * 500)
    assert result.exit_code == 2
    _, refused, cut = result.stderr.splitlines()
    assert refused == "prompt 1: this template takes no such turn"
    assert re.fullmatch(r"prompt 2: \d+ tokens are cut off, since policy.max_prompt_tokens is \d+", cut)
    assert "aligned  " in result.stdout


def test_a_chat_refuses_what_it_cannot_read(copied):
    error = refusal("chat", copied.name, answer=b"caf\xe9\n")
    assert error.startswith("error: the prompts of the standard input are not UTF-8")


@pytest.mark.long
def test_a_sweep_is_a_benchmark_of_all_combinations(new_workplace):
    place = new_workplace("sweep")
    output = run_command(place, "sweep", "debug", "federation.rounds=1,2", "alignment.prompts=2")
    (folder,) = place.runs.glob("benchmark-sweep-debug-*")
    runs = [Run(path.name, path) for path in sorted(folder.glob("*-seed-0"))]
    assert [run.recipe().federation.rounds for run in runs] == [1, 2]
    assert {run.recipe().alignment.prompts for run in runs} == {2}
    assert "rounds-2" in output
    assert (folder / "report" / "report.html").is_file()


def test_a_run_that_is_not_evaluated_is_exported_without_figures(copied, tmp_path):
    (copied / "evaluate.done").unlink()
    fed_rlhf("export", copied.name, str(tmp_path / "policy"))
    assert "before its evaluation, and has no figures yet" in (tmp_path / "policy" / "README.md").read_text()


def test_an_adapter_of_the_federation_is_exported_by_its_name_and_an_unknown_one_refused(copied, tmp_path):
    fed_rlhf("export", copied.name, str(tmp_path / "selector"), "--adapter", "selector", "--merge")
    prompt_format = json.loads((tmp_path / "selector" / "prompt_format.json").read_text())
    assert "{response_a}" in prompt_format["template"]
    assert (tmp_path / "selector" / "model.safetensors").is_file()
    readme = (tmp_path / "selector" / "README.md").read_text()
    assert "They are of the run as a whole, of which this adapter is a part." in readme
    error = refusal("export", copied.name, str(tmp_path / "x"), "--adapter", "judge")
    assert error == f"error: run {copied.name} has no adapter 'judge': there are selector.\n"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("options", [(), ("--adapter", "selector")])
def test_an_unfinished_run_is_not_exported(options, opened, tmp_path):
    error = refusal("export", "debug-1", str(tmp_path / "x"), *options)
    assert error == (
        "error: run debug-1 is not finished, it is stopped: prepare: finish it with `fed-rlhf resume"
        " debug-1`.\n"
    )


def test_nothing_is_exported_into_a_folder_with_files(copied):
    error = refusal("export", copied.name, str(copied))
    assert "is not an empty folder" in error


def change_result(path, key, **values):
    """Change values of an object in a result file."""
    result = json.loads(path.read_text())
    result[key] |= values
    path.write_text(json.dumps(result))


def test_a_run_whose_clients_have_their_own_policies_needs_the_name_of_an_adapter(copied, tmp_path):
    change_result(
        copied / "federation" / "result.json", "outcome", votes=False, assignment={"ada": "selector"}
    )
    aligned = copied / "alignment" / "result.json"
    adopted = json.loads(aligned.read_text()) | {"labelling": None}  # the policies of the rounds
    aligned.write_text(json.dumps(adopted))
    error = refusal("export", copied.name, str(tmp_path / "x"))
    assert "has no single policy" in error
    assert "--adapter NAME` writes one of them (selector)" in error
    assert refusal("chat", copied.name) == error


def test_an_adapter_that_is_completed_by_private_modules_is_not_merged(copied, tmp_path):
    change_result(copied / "federation" / "result.json", "outcome", own="modules")
    error = refusal("export", copied.name, str(tmp_path / "x"), "--adapter", "selector", "--merge")
    assert "cannot be merged into a model" in error
    assert fed_rlhf("export", copied.name, str(tmp_path / "x"), "--adapter", "selector").exit_code == 0


def test_the_page_of_the_run_folder_names_every_file_of_a_run(finished):
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8")
    paths = [*finished.folder.glob("*"), *finished.folder.glob("*/*")]
    by_content = re.compile(r"[0-9a-f]{64}")
    names = {path.name for path in paths if path.parent.name != "inputs" and not by_content.match(path.name)}
    missing = [name for name in names if re.sub(r"\d+", "N", name) not in re.sub(r"\d+", "N", page)]
    assert missing == []
    assert len(names) > 20
