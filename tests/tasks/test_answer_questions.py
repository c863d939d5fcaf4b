"""The task that asks questions: who answers which, what is kept and not made anew, what is shared, logged and shown."""

import json
import logging

import pytest
import torch

from components.config import QuestionAnswersConfig, QuestionsConfig
from components.data.questions import load_questions, render
from components.data.records import DataError
from components.data.templates import load as load_template
from components.data.trees import Tree, append_tree
from components.evaluation.answers import load_asked
from components.models import policy as policies
from components.models.adapters import AdapterSlot, attach, export_adapter
from components.models.backbone import load_backbone
from components.models.policy import Policy, save_personal
from components.recipes import load_recipe
from tasks import data, evaluation, reporting, tracking
from tasks.runs import Run, claim_folder, read_json, write_json

CSQA = [{"id": f"q{n}", "answerKey": "AB"[n % 2], "question": {"stem": f"Where is thing {n}?",
    "choices": [{"label": "A", "text": "here"}, {"label": "B", "text": f"there {n}"}]}} for n in range(8)]
AQUA = [{"question": f"What is {n} + {n}?", "options": [f"A){2 * n}", f"B){2 * n + 1}", f"C){2 * n + 2}"], "rationale": "", "correct": "A"} for n in range(5)]


@pytest.fixture(autouse=True)
def quiet_log(monkeypatch):
    for module in (evaluation, data):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    for name, rows in (("csqa", CSQA), ("copy", CSQA), ("aqua", AQUA)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def overrides(files, samples=2, **settings):
    sets = ", ".join(f"{{set: {name}, path: {files}/{name}.jsonl}}" for name in ("csqa", "aqua"))
    more = "".join(f", {key}: {value}" for key, value in settings.items())
    return ["policy.template=thoughts/policy", "policy.max_prompt_tokens=600",
        f"evaluation.questions={{questions: [{sets}], samples: {samples}, max_new_tokens: 4{more}}}"]


@pytest.fixture(scope="module")
def recipe(files):
    return load_recipe("debug", overrides(files))


def adapter(recipe, seed):
    slot, numbers = AdapterSlot(attach(load_backbone(recipe.policy.backbone, "cpu"), recipe.policy.lora)), torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=numbers) for name, value in zip(slot.names, slot.parameters, strict=True)}


def asked(recipe, name, adapter, folder):
    figures = evaluation.answer_questions.fn(recipe, name, adapter, folder, folder / "trees")
    return figures, {of: read_json(folder / f"{name}-{of}.json") for of in ("csqa", "aqua")}


@pytest.fixture(scope="module")
def raw(recipe, tmp_path_factory):
    """The raw policy's figures, answers and folder."""
    folder = tmp_path_factory.mktemp("raw")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluation, "get_run_logger", lambda: logging.getLogger("test"))
        return (*asked(recipe, "raw", None, folder), folder)


def test_every_question_has_a_greedy_answer_and_n_samples_and_the_key(recipe, raw, files):
    figures, rows, _ = raw
    questions = {of: load_questions(of, files / f"{of}.jsonl")[0] for of in rows}
    policy = Policy(recipe.policy, "cpu")
    template = load_template("thoughts/answer", "answer")
    for of, given in rows.items():
        assert [(row["set"], row["id"], row["key"], row["question"]) for row in given] == [(of, q.id, q.answer, render(q)) for q in questions[of]]
        expected = policy.generate([template.render(question=render(q)) for q in questions[of]], 0, max_new_tokens=4)
        assert [row["text"] for row in given] == [completion.text for (completion,
            ) in expected], "the question in its template is the prompt of the recipe's policy template"
        assert all(len(row["samples"]) == 2 and row["options"] == dict(q.options) and not row["cut"] and "client_id" not in row for row,
            q in zip(given, questions[of], strict=True))
    assert len({sample["text"] for row in rows["csqa"] for sample in row["samples"]}) > 8, "samples differ"
    assert (figures["all"]["questions"], figures["samples"], list(figures["sets"])) == (13, 2,
        ["aqua", "csqa"]) and figures["sets"]["aqua"]["chance"] == pytest.approx(1 / 3)


def test_what_is_written_is_read_and_only_a_set_that_is_missing_is_asked_with_the_same_result(recipe, raw, monkeypatch, tmp_path):
    figures, rows, folder = raw
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.json")}
    with monkeypatch.context() as patched:
        patched.setattr(policies, "Policy", lambda *_: pytest.fail("the answers were made anew"))
        assert evaluation.answer_questions.fn(recipe, "raw", None, folder, folder) == figures
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.json")} and len(before) == 2
    (tmp_path / "raw-csqa.json").write_bytes((folder / "raw-csqa.json").read_bytes())
    calls, generate = [], Policy.generate
    monkeypatch.setattr(Policy, "generate", lambda self, prompts, *rest, **named: calls.append(prompts) or generate(self, prompts, *rest, **named))
    assert asked(recipe, "raw", None, tmp_path) == (figures, rows), "as if it had not been stopped"
    assert len(calls) == 2 and all(len(prompts) == 5 for prompts in calls), "once greedily and once in samples, and only the five questions that were left"


def test_answers_are_read_and_compared_with_the_key(recipe, tmp_path, monkeypatch):
    def generate(self, prompts, seed, temperature=0.0, count=1, max_new_tokens=None, progress=None):
        texts = ["Answer: A", "Hm."] if temperature else ["Answer: B"]
        assert (count, max_new_tokens) == (2 if temperature else 1, 4)
        return [[policies.Completion((1,), text, True) for text in texts] for _ in prompts]

    monkeypatch.setattr(Policy, "generate", generate)
    figures, rows = asked(recipe, "raw", None, tmp_path)
    assert {row["answer"] for row in rows["csqa"]} == {"B"} and [sample["answer"] for sample in rows["csqa"][0]["samples"]] == ["A", None]
    assert {of: (f["right"], f["succeeded"], f["unparsable"]) for of, f in figures["sets"].items()} == {"csqa": (4, 4, 0), "aqua": (0, 5, 0)}


def test_a_global_policy_answers_with_its_adapter_and_personal_ones_their_own_set_or_what_is_dealt(recipe, raw, tmp_path):
    adapters = {"csqa": adapter(recipe, 1), "zoe": adapter(recipe, 2)}
    alone = {name: export_adapter(tensors, recipe.policy.lora, "tiny-random", tmp_path / name) for name, tensors in adapters.items()}
    by = {name: asked(recipe, name, folder, tmp_path / "answers")[1] for name, folder in alone.items()}
    _, personal = asked(recipe, "aligned", save_personal(adapters, recipe.policy, tmp_path / "final"), tmp_path / "answers")
    assert [row["client_id"] for row in personal["csqa"]] == ["csqa"] * 8 and [row["client_id"] for row in personal["aqua"]] == ["csqa", "zoe", "csqa", "zoe",
        "csqa"]
    for of, given in personal.items():
        assert [row["text"] for row in given] == [by[row["client_id"]][of][n]["text"] for n, row in enumerate(given)]
        assert [row["id"] for row in given] == [row["id"] for row in raw[1][of]]
    assert [row["text"] for row in by["csqa"]["csqa"]] != [row["text"] for row in raw[1]["csqa"]] != [row["text"] for row in by["zoe"]["csqa"]]


def test_without_samples_none_are_drawn_and_a_prompt_that_was_cut_is_said(files, tmp_path):
    recipe = load_recipe("debug", [*overrides(files, samples=0), "policy.max_prompt_tokens=150"])
    figures, rows = asked(recipe, "raw", None, tmp_path)
    assert figures["samples"] == 0 and "success" not in figures["mean"] and all(row["samples"] == [] for given in rows.values() for row in given)
    assert figures["all"]["cut"] == 13 and all(row["cut"] for row in rows["csqa"])
    assert "13 questions did not fit policy.max_prompt_tokens" in "\n".join(reporting.question_lines({"raw": figures}))


def test_a_long_context_is_shortened_and_its_question_stays(tmp_path):
    (tmp_path / "pubmedqa.json").write_text(json.dumps({"7": {"QUESTION": "Does it work?", "CONTEXTS": ["A long trial was made. " * 30], "LONG_ANSWER": "Yes.",
        "final_decision": "yes"}}))
    section = f"evaluation.questions={{questions: [{{set: pubmedqa, path: {tmp_path}/pubmedqa.json}}], max_question_tokens: 90, max_new_tokens: 2}}"
    figures = evaluation.answer_questions.fn(load_recipe("debug", ["policy.max_prompt_tokens=600", "policy.template=thoughts/policy", section]), "raw", None,
        tmp_path, tmp_path)
    (row,) = read_json(tmp_path / "raw-pubmedqa.json")
    assert row["question"].startswith("A long trial") and row["question"].endswith("Does it work?\nA) yes\nB) no\nC) maybe") and len(row["question"]) < 130 and figures["all"]["cut"] == 0


# --- questions that trees are grown for

def with_trees(files, *more):
    return load_recipe("debug", [*overrides(files), "data={source: thoughts}",
        f"thoughts={{questions: [{{set: csqa, path: {files}/copy.jsonl, part: [0, 2]}}], depth: 1, evaluator: {{model: tiny-random}}}}", *more])


def test_a_question_of_a_tree_of_the_run_is_refused_and_nothing_is_asked(files, tmp_path):
    append_tree(tmp_path / "trees" / "csqa.jsonl", Tree("csqa/q5", "csqa", "k", "as it was shown", ()))
    with pytest.raises(DataError, match=r"for 1 of the 8 questions of set csqa, e.g. csqa/q5 \(tree csqa/q5\)"):
        evaluation.answer_questions.fn(with_trees(files), "raw", None, tmp_path / "answers", tmp_path / "trees")
    assert not (tmp_path / "answers").exists()


def test_it_is_refused_before_any_tree_is_grown_and_before_the_data_are_prepared(files, tmp_path, monkeypatch):
    import components.alignment.thoughts as thoughts
    from components.data import prepare

    monkeypatch.setattr(thoughts, "grow_all", lambda *_: pytest.fail("trees were grown"))
    with pytest.raises(DataError, match="trees of thoughts are grown for . of the 8 questions of set csqa"):
        data.grow_trees.fn(with_trees(files), tmp_path / "trees", tmp_path / "shared")
    monkeypatch.setattr(prepare, "prepare", lambda *_: pytest.fail("the data were prepared"))
    append_tree(tmp_path / "before" / "csqa.jsonl", Tree("csqa/q2", "csqa", "k", "as it was shown", ()))
    with pytest.raises(DataError, match="e.g. csqa/q2"):
        data.prepare_data.fn(load_recipe("debug", [*overrides(files), f"data={{source: thoughts, path: {tmp_path}/before}}"]), tmp_path / "prepared",
            tmp_path / "trees")


def test_a_question_of_two_sets_is_refused_before_any_tree_is_grown(files, tmp_path, monkeypatch):
    import components.alignment.thoughts as thoughts

    rows = [{"id": row["id"], "question": row["question"]["stem"], "choices": ["here", f"there {n}", "nowhere"], "answer": "here", "abstractive_explanation": "it is near"} for n, row in enumerate(CSQA)]
    (tmp_path / "cose.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    grown = []
    monkeypatch.setattr(thoughts, "grow_all", lambda questions, *_: grown.extend(f"{q.set}/{q.id}" for q in questions) or [])

    def grow(csqa, cose):
        sets = f"{{set: csqa, path: {files}/csqa.jsonl, part: {csqa}}}, {{set: cose, path: {tmp_path}/cose.jsonl, part: {cose}}}"
        data.grow_trees.fn(load_recipe("debug", ["data={source: thoughts}", f"thoughts={{questions: [{sets}], evaluator: {{model: tiny-random}}}}"]), tmp_path / "trees", tmp_path / "shared")

    for parts in ([[0, 1], [0, 1]], [[0, 2], [0, 2]], [[0, 2], [1, 3]]):
        with pytest.raises(DataError, match=r"thoughts.questions: sets csqa and cose share \d questions, e.g. csqa/(q\d) and cose/\1, so that .*: give each set a part of its own"):
            grow(*parts)
    assert not grown
    grow([0, 2], [1, 2])
    assert len(grown) == len({name.partition("/")[2] for name in grown}) == 8


def test_a_file_that_is_not_there_is_said_with_the_key_that_names_it(files, tmp_path):
    own, empty = load_recipe("debug", ["data={source: thoughts}", f"thoughts={{questions: [{{set: csqa, path: {files}/csqa.jsonl}}, {{set: aqua, path: {tmp_path}/none.jsonl}}]}}"]), tmp_path / "empty"
    with pytest.raises(DataError, match=r"/none.jsonl: there is no such file \(thoughts.questions\[1\].path\)$"):
        data.grow_trees.fn(own, tmp_path / "trees", tmp_path / "shared")
    empty.mkdir()
    asked = [QuestionsConfig(set="aqua", path=f"{files}/aqua.jsonl"), QuestionsConfig(set="csqa", path=str(empty))]
    with pytest.raises(DataError, match=r"in this folder \(evaluation.questions.questions\[1\].path\)$"):
        load_asked(asked, 0, {})


# --- what becomes of the answers

def test_runs_of_a_benchmark_share_the_raw_answers_to_the_same_questions(raw, files, tmp_path):
    from tasks.benchmark import share_generations

    other = claim_folder(load_recipe("debug", overrides(files)), tmp_path / "other")
    for path in raw[2].glob("raw-*.json"):
        write_json(other.evaluation / "questions" / path.name, read_json(path))
    write_json(other.evaluation / "questions" / "aligned-csqa.json", [])
    both = ["questions/raw-aqua.json", "questions/raw-csqa.json"]
    changed = [([], both), (["federation.rounds=9"], both), (["evaluation.prompts=2"], both), (["evaluation.questions.samples=3"], []), (["seed=1"], []),
        (["policy.max_prompt_tokens=400"], []), (["evaluation.questions=null"], [])]
    for n, (changes, taken) in enumerate(changed):
        run = claim_folder(load_recipe("debug", [*overrides(files), *changes]), tmp_path / f"run-{n}")
        assert share_generations.fn(run, [other]) == taken, changes
        assert sorted(path.name for path in (run.evaluation / "questions").glob("*")) == [name.split("/")[1] for name in taken]


def test_the_figures_and_the_answers_are_logged(raw, debug, tmp_path, mlflow_store):
    figures, rows, folder = raw
    run = Run("run-1", tmp_path / "run")
    run.folder.mkdir()
    (run.folder / "recipe.yaml").write_text("name: debug\n")
    for path in folder.glob("raw-*.json"):
        write_json(run.evaluation / "questions" / path.name, read_json(path))
        write_json(run.evaluation / "questions" / path.name.replace("raw", "aligned"), [row | {"client_id": "zoe", "answer": None} for row in read_json(path)])
    write_json(run.evaluation / "answers.json", [])
    write_json(run.evaluation / "result.json", {"contests": {}, "verdicts": {}, "rouge": {}, "judge_figures": {}, "answers": {}, "judge": "j",
        "questions": {"raw": figures, "aligned": figures}})
    tracking.open_tracking.fn(run, debug, "flow-run", None)
    child = tracking.open_phase.fn(run, debug, "evaluate")
    tracking.log_evaluation.fn(child, run.evaluation)
    client = tracking.mlflow_client()
    logged = client.get_run(child).data.metrics
    for policy in ("raw", "aligned"):
        for of in ("csqa", "aqua"):
            assert {name: logged[f"questions/{policy}/{of}/{name}"] for name in ("accuracy", "unparsable",
                "success")} == {name: figures["sets"][of][name] for name in ("accuracy", "unparsable", "success")}
        assert logged[f"questions/{policy}/mean/accuracy"] == figures["mean"]["accuracy"] and logged[f"questions/{policy}/all/success"] == figures["all"]["success"]
    table = json.loads(open(client.download_artifacts(child, "question_answers.json")).read())
    assert table["columns"] == ["set", "id", "question", "key", "raw", "raw answer", "aligned", "aligned answer", "aligned client"] and len(table["data"]) == 13
    given = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (given["raw"], given["aligned answer"], given["aligned client"]) == (rows[given["set"]][0]["text"], "", "zoe")
    assert {info.path for info in client.list_artifacts(child, "evaluation/questions")} == {f"evaluation/questions/{policy}-{of}.json" for policy in ("raw",
        "aligned") for of in ("csqa", "aqua")}


def test_the_table_shows_each_set_with_both_policies_and_what_guessing_would_give():
    one = {"questions": 40, "right": 10, "accuracy": 0.25, "low": 0.125, "high": 0.4, "unparsable": 4, "unparsable_share": 0.1, "cut": 0, "chance": 0.2,
        "succeeded": 30, "success": 0.75, "success_low": 0.6, "success_high": 0.875, "success_chance": 0.672}
    mean = {key: one[key] for key in ("accuracy", "unparsable_share", "chance", "success", "success_chance")}
    several = {"samples": 5, "sets": {"aqua": one, "csqa": one | {"accuracy": 0.5}}, "all": one, "mean": mean}
    lines = reporting.question_lines({"raw": several, "aligned": several})
    assert [line.split("  ")[1] for line in lines[1:]] == [f"{name}, {policy}" for name in ("aqua (40)", "csqa (40)", "all questions (40)",
        "mean over the sets") for policy in ("raw", "aligned")]
    assert lines[1].split() == ["aqua", "(40),", "raw", "25.0%", "[12.5%,", "40.0%]", "20.0%", "10.0%", "75.0%", "[60.0%,", "87.5%]",
        "67.2%"] and "success at 5" in lines[0]
    assert lines[-1].split()[-5:] == ["25.0%", "20.0%", "10.0%", "75.0%", "67.2%"]
    assert reporting.questions_line({"raw": several}) == "raw accuracy 0.250 (by chance 0.200), success at 5 0.750 (0.672), unparsable 0.100"
    alone = {"samples": 0, "sets": {"aqua": one}, "all": one, "mean": mean}
    assert len(reporting.question_lines({"raw": alone, "aligned": alone})) == 3 and "success" not in "\n".join(reporting.question_lines({"raw": alone}))


def test_the_defaults_ask_greedily_in_the_template_of_the_project():
    config = QuestionAnswersConfig(questions=[{"set": "csqa"}])
    assert (config.samples, config.temperature, config.template, config.max_question_tokens) == (0, 0.8, "thoughts/answer", None)
