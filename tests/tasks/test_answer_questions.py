"""The task that answers questions: who answers, and how answers are stored, shared and logged."""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.alignment.thoughts import stored_trees
from components.config import QuestionsConfig
from components.config.evaluation import QuestionAnswersConfig
from components.data import prepare
from components.data.questions import load_questions, render
from components.data.records import DataError
from components.data.templates import load as load_template
from components.data.trees import Tree, append_trees
from components.evaluation.answers import load_evaluation_questions
from components.io import read_json, write_json
from components.models.adapters import AdapterSlot, attach_lora, export_adapter
from components.models.backbone import load_backbone
from components.models.policy import Policy
from components.models.samples import Completion
from components.models.store import AdapterStore
from components.recipes import load_recipe
from components.reporting.lines import questions_line
from components.reporting.run_page import questions_table
from components.results import EvaluationResult, Outcome, QuestionFigures, QuestionResult
from tasks import data
from tasks.benchmark import share_generations
from tasks.evaluation import questions as questions_task
from tasks.flow_runs import FlowRunLink
from tasks.policies import EvaluatedPolicy
from tasks.prefect_transport import TRANSPORTS
from tasks.runs import Run, create_run
from tasks.tracking.client import mlflow_client
from tasks.tracking.phases import log_evaluation
from tasks.tracking.run_tree import open_run_tracking, phase_tracking
from tests.support.adapters import random_tensors
from tests.support.policies import without_prefect

SETS = ("csqa", "aqua")
CSQA = [
    {
        "id": f"q{n}",
        "answerKey": "AB"[n % 2],
        "question": {
            "stem": f"Where is thing {n}?",
            "choices": [{"label": "A", "text": "here"}, {"label": "B", "text": f"there {n}"}],
        },
    }
    for n in range(8)
]
AQUA = [
    {
        "question": f"What is {n} + {n}?",
        "options": [f"A){2 * n}", f"B){2 * n + 1}", f"C){2 * n + 2}"],
        "rationale": "",
        "correct": "A",
    }
    for n in range(5)
]


@pytest.fixture(autouse=True)
def plain_log(monkeypatch):
    without_prefect(monkeypatch)
    monkeypatch.setattr(data, "get_run_logger", lambda: logging.getLogger("test"))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folder of the question sets; `copy` has the questions of csqa in another file."""
    folder = tmp_path_factory.mktemp("questions")
    for name, rows in (("csqa", CSQA), ("copy", CSQA), ("aqua", AQUA)):
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def overrides(files, samples=2):
    sets = ", ".join(f"{{set: {name}, path: {files}/{name}.jsonl}}" for name in SETS)
    return [
        "policy.template=thoughts/policy",
        "policy.max_prompt_tokens=600",
        f"evaluation.questions={{questions: [{sets}], samples: {samples}, max_new_tokens: 4}}",
    ]


@pytest.fixture(scope="module")
def recipe(files):
    return load_recipe("debug", overrides(files))


@dataclass(frozen=True)
class Answered:
    """What a policy answered.

    Attributes:
        result: figures.
        rows: answers by set.
        folder: where they are stored.
    """

    result: QuestionResult
    rows: dict[str, list[dict]]
    folder: Path


BASE = EvaluatedPolicy("base", None)


def answer(recipe, run_folder, policy=BASE):
    """The result of the task for a policy."""
    return questions_task.answer_questions(Run("run", run_folder), recipe, policy)


def answer_all(recipe, run_folder, policy=BASE):
    result = answer(recipe, run_folder, policy)
    folder = run_folder / "evaluation" / "questions"
    rows = {name: read_json(folder / f"{policy.name}-{name}.json") for name in SETS}
    return Answered(result, rows, folder)


@pytest.fixture(scope="module")
def base(recipe, tmp_path_factory):
    """Answers of the base policy."""
    with pytest.MonkeyPatch.context() as patch:
        without_prefect(patch)
        return answer_all(recipe, tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("name", SETS)
def test_every_question_has_its_key_and_its_options(base, files, name):
    questions, _ = load_questions(name, files / f"{name}.jsonl")
    for row, question in zip(base.rows[name], questions, strict=True):
        assert row["set"] == name
        assert row["id"] == question.id
        assert row["key"] == question.answer
        assert row["question"] == render(question)
        assert row["options"] == dict(question.options)
        assert not row["cut"]
        assert "client_id" not in row


@pytest.mark.parametrize("name", SETS)
def test_the_greedy_answer_is_to_the_question_in_its_template(base, recipe, files, name):
    questions, _ = load_questions(name, files / f"{name}.jsonl")
    template = load_template("thoughts/answer", "answer")
    prompts = [template.render(question=render(question)) for question in questions]
    expected = Policy(recipe.policy, "cpu").generate(prompts, 0, max_new_tokens=4)
    assert [row["text"] for row in base.rows[name]] == [completion.text for (completion,) in expected]


def test_every_question_has_samples_that_differ_and_figures_are_over_all_and_by_set(base):
    rows = [*base.rows["csqa"], *base.rows["aqua"]]
    assert {len(row["samples"]) for row in rows} == {2}
    texts = set()
    for row in base.rows["csqa"]:
        texts.update(sample["text"] for sample in row["samples"])
    assert len(texts) > 8
    assert base.result.all.questions == 13
    assert base.result.samples == 2
    assert list(base.result.sets) == ["aqua", "csqa"]
    assert base.result.sets["aqua"].chance == pytest.approx(1 / 3)


def test_stored_answers_are_read_without_a_policy(recipe, base, monkeypatch):
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in base.folder.glob("*.json")}
    monkeypatch.setattr(EvaluatedPolicy, "open", lambda *_: pytest.fail("a policy was loaded"))
    assert answer(recipe, base.folder.parents[1]) == base.result
    assert len(before) == 2
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before}


def test_a_stopped_task_answers_the_missing_set_only_with_the_same_result(
    recipe, base, tmp_path, monkeypatch
):
    stored = tmp_path / "evaluation" / "questions" / "base-csqa.json"
    write_json(stored, read_json(base.folder / "base-csqa.json"))
    calls = []
    generate = Policy.generate

    def count(self, prompts, *arguments, **options):
        calls.append(len(prompts))
        return generate(self, prompts, *arguments, **options)

    monkeypatch.setattr(Policy, "generate", count)
    resumed = answer_all(recipe, tmp_path)
    assert resumed.result == base.result
    assert resumed.rows == base.rows
    assert calls == [5, 5], "the five questions of aqua, greedily and in samples"


def test_answers_are_parsed_and_compared_with_the_key(recipe, tmp_path, monkeypatch):
    def generate(self, prompts, seed, temperature=0.0, count=1, max_new_tokens=None, progress=None):
        assert max_new_tokens == 4
        texts = ["Answer: A", "Hm."] if temperature else ["Answer: B"]
        return [[Completion((1,), text, True) for text in texts] for _ in prompts]

    monkeypatch.setattr(Policy, "generate", generate)
    answered = answer_all(recipe, tmp_path)
    assert {row["answer"] for row in answered.rows["csqa"]} == {"B"}
    assert [sample["answer"] for sample in answered.rows["csqa"][0]["samples"]] == ["A", None]
    figures = {name: (one.right, one.succeeded, one.unparsable) for name, one in answered.result.sets.items()}
    assert figures == {"csqa": (4, 4, 0), "aqua": (0, 5, 0)}


# --- policies with adapters

SEEDS = {"csqa": 1, "zoe": 2}
"""Seeds of the clients' adapters; one client has the name of a question set."""


@pytest.fixture(scope="module")
def adapters(recipe):
    slot = AdapterSlot(attach_lora(load_backbone(recipe.policy.backbone, "cpu"), recipe.policy.lora))
    return {name: random_tensors(slot, seed, scale=1.0) for name, seed in SEEDS.items()}


@pytest.fixture(scope="module")
def answers_by_client(recipe, adapters, tmp_path_factory):
    """Answers of each client's policy to all questions, as a policy for all clients."""
    run = Run("single", tmp_path_factory.mktemp("single"))
    answered = {}
    with pytest.MonkeyPatch.context() as patch:
        without_prefect(patch)
        for name, adapter in adapters.items():
            export_adapter(adapter, recipe.policy.lora, recipe.policy.backbone, run.alignment / name)
            policy = EvaluatedPolicy(name, run.alignment / name)
            answered[name] = answer_all(recipe, run.folder, policy)
    return answered


def test_a_shared_policy_answers_with_its_adapter(base, answers_by_client):
    texts = [[row["text"] for row in one.rows["csqa"]] for one in (base, *answers_by_client.values())]
    assert texts[0] != texts[1]
    assert texts[1] != texts[2]


@pytest.fixture
def personal(files, adapters, prepared, tmp_path, monkeypatch):
    """Answers of a policy for each client, as jobs in this process."""
    monkeypatch.setitem(TRANSPORTS.builtin, "here", "components.federation.transport:InProcessTransport")
    recipe = load_recipe("debug", ["federation.method=drift", "runtime.transport=here", *overrides(files)])
    (tmp_path / "prepared").symlink_to(prepared)
    store = AdapterStore(tmp_path / "federation" / "adapters")
    hashes = {name: store.put(adapter) for name, adapter in adapters.items()}
    record = Outcome(adapters=hashes, assignment={name: name for name in hashes}, folder="final")
    return answer_all(recipe, tmp_path, EvaluatedPolicy("aligned", tmp_path / "final", record))


def test_a_client_answers_the_set_of_its_name_and_clients_take_turns_with_other_sets(personal):
    assert [row["client_id"] for row in personal.rows["csqa"]] == ["csqa"] * 8
    assert [row["client_id"] for row in personal.rows["aqua"]] == ["csqa", "zoe", "csqa", "zoe", "csqa"]


@pytest.mark.parametrize("name", SETS)
def test_a_client_answers_with_its_own_adapter(personal, answers_by_client, name):
    for n, row in enumerate(personal.rows[name]):
        assert row["text"] == answers_by_client[row["client_id"]].rows[name][n]["text"]


def test_questions_are_of_the_shared_policy_or_of_the_clients_of_their_set_in_turn():
    assert questions_task.assign_questions([], 2, "csqa") == ["", ""]
    clients = ["aqua-0", "csqa-0", "csqa-1", "csqa-x"]
    assert questions_task.assign_questions(clients, 3, "csqa") == ["csqa-0", "csqa-1", "csqa-0"]
    assert questions_task.assign_questions(clients, 1, "aqua") == ["aqua-0"]


# --- long prompts


@pytest.fixture
def truncated(files, tmp_path):
    recipe = load_recipe("debug", [*overrides(files, samples=0), "policy.max_prompt_tokens=150"])
    return answer_all(recipe, tmp_path)


def test_truncated_prompts_are_counted_and_without_samples_there_is_no_success_rate(truncated):
    assert truncated.result.samples == 0
    assert truncated.result.mean.success is None
    assert all(row["samples"] == [] for row in truncated.rows["csqa"])
    assert truncated.result.all.cut == 13
    assert all(row["cut"] for row in truncated.rows["csqa"])
    caption = questions_table({"base": truncated.result}).caption
    assert re.search(r"\b13 questions .*policy.max_prompt_tokens", caption)


def test_a_long_context_is_truncated_and_its_question_is_not(tmp_path):
    row = {
        "QUESTION": "Does it work?",
        "CONTEXTS": ["A long trial was made. " * 30],
        "LONG_ANSWER": "Yes.",
        "final_decision": "yes",
    }
    (tmp_path / "pubmedqa.json").write_text(json.dumps({"7": row}))
    sets = f"[{{set: pubmedqa, path: {tmp_path}/pubmedqa.json}}]"
    settings = f"{{questions: {sets}, max_question_tokens: 90, max_new_tokens: 2}}"
    recipe = load_recipe(
        "debug",
        [
            "policy.max_prompt_tokens=600",
            "policy.template=thoughts/policy",
            f"evaluation.questions={settings}",
        ],
    )
    result = answer(recipe, tmp_path)
    (answered,) = read_json(tmp_path / "evaluation" / "questions" / "base-pubmedqa.json")
    assert answered["question"].startswith("A long trial")
    assert answered["question"].endswith("Does it work?\nA) yes\nB) no\nC) maybe")
    assert len(answered["question"]) < 130
    assert result.all.cut == 0


# --- questions that trees are grown for


def with_trees(files):
    grown = f"[{{set: csqa, path: {files}/copy.jsonl, part: [0, 2]}}]"
    return load_recipe(
        "debug",
        [
            *overrides(files),
            "data={source: thoughts}",
            f"thoughts={{questions: {grown}, depth: 1, evaluator: {{model: tiny-random}}}}",
        ],
    )


def tree_of(question_id):
    return Tree(f"csqa/{question_id}", "csqa", "k", "as it was shown", (), ())


def test_a_question_with_a_tree_of_the_run_is_refused_before_any_answer(files, tmp_path):
    append_trees(tmp_path / "trees" / "csqa.jsonl", [tree_of("q5")])
    with pytest.raises(DataError, match=r"1 of the 8 questions of set csqa.* csqa/q5 .*csqa/q5"):
        answer(with_trees(files), tmp_path)
    assert not list(tmp_path.glob("evaluation/questions/*.json"))


def test_a_question_with_a_tree_is_refused_before_trees_are_grown_or_data_prepared(
    files, tmp_path, monkeypatch
):
    monkeypatch.setattr(stored_trees, "grow_missing_trees", lambda *_: pytest.fail("trees were grown"))
    with pytest.raises(DataError, match=". of the 8 questions of set csqa"):
        data.grow_trees.fn(with_trees(files), tmp_path / "trees", tmp_path / "shared")
    monkeypatch.setattr(prepare, "prepare", lambda *_: pytest.fail("the data were prepared"))
    append_trees(tmp_path / "before" / "csqa.jsonl", [tree_of("q2")])
    source = f"data={{source: thoughts, path: {tmp_path}/before}}"
    with pytest.raises(DataError, match="csqa/q2"):
        data.prepare_data.fn(
            load_recipe("debug", [*overrides(files), source]), tmp_path / "prepared", tmp_path / "trees"
        )


@pytest.fixture
def grow_two_sets(files, tmp_path, monkeypatch):
    """Grows trees for parts of csqa and cose, which have the same questions; gives their names."""
    rows = [
        {
            "id": row["id"],
            "question": row["question"]["stem"],
            "choices": ["here", f"there {n}", "nowhere"],
            "answer": "here",
            "abstractive_explanation": "it is near",
        }
        for n, row in enumerate(CSQA)
    ]
    cose_path = write_rows(tmp_path / "cose.jsonl", rows)
    names = []

    def record(questions, *_):
        names.extend(f"{question.set}/{question.id}" for question in questions)
        return []

    monkeypatch.setattr(stored_trees, "grow_missing_trees", record)

    def grow(csqa, cose):
        sets = (
            f"{{set: csqa, path: {files}/csqa.jsonl, part: {csqa}}},"
            f" {{set: cose, path: {cose_path}, part: {cose}}}"
        )
        section = f"thoughts={{questions: [{sets}], evaluator: {{model: tiny-random}}}}"
        recipe = load_recipe("debug", ["data={source: thoughts}", section])
        data.grow_trees.fn(recipe, tmp_path / "trees", tmp_path / "shared")
        return names

    return grow


@pytest.mark.parametrize("parts", [([0, 1], [0, 1]), ([0, 2], [0, 2]), ([0, 2], [1, 3])])
def test_a_question_of_two_sets_is_refused_before_any_tree_is_grown(grow_two_sets, parts):
    pattern = r"thoughts.questions: .*csqa.*cose.* \d questions.*csqa/(q\d) .*cose/\1.*part: \[0, 2\]"
    with pytest.raises(DataError, match=pattern):
        grow_two_sets(*parts)


def test_trees_are_grown_for_different_parts_of_sets_that_share_questions(grow_two_sets):
    names = grow_two_sets([0, 2], [1, 2])
    assert len(names) == 8
    assert len({name.partition("/")[2] for name in names}) == 8


def test_missing_questions_for_trees_or_the_evaluation_are_reported_with_their_key(files, tmp_path):
    sets = f"[{{set: csqa, path: {files}/csqa.jsonl}}, {{set: aqua, path: {tmp_path}/none.jsonl}}]"
    recipe = load_recipe("debug", ["data={source: thoughts}", f"thoughts={{questions: {sets}}}"])
    with pytest.raises(DataError, match=r"/none.jsonl.*thoughts.questions\[1\].path"):
        data.grow_trees.fn(recipe, tmp_path / "trees", tmp_path / "shared")
    sections = [
        QuestionsConfig(set="aqua", path=f"{files}/aqua.jsonl"),
        QuestionsConfig(set="csqa", path=str(tmp_path)),
    ]
    with pytest.raises(DataError, match=r"evaluation.questions.questions\[1\].path"):
        load_evaluation_questions(sections, 0, {})


# --- shared, logged and shown answers


@pytest.mark.parametrize(
    ("changes", "is_shared"),
    [
        ([], True),
        (["federation.rounds=9"], True),
        (["evaluation.prompts=2"], True),
        (["evaluation.questions.samples=3"], False),
        (["seed=1"], False),
        (["policy.max_prompt_tokens=400"], False),
        (["evaluation.questions=null"], False),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else None,
)
def test_runs_of_a_benchmark_share_the_base_policys_answers_to_the_same_questions(
    base, files, tmp_path, changes, is_shared
):
    other = create_run(load_recipe("debug", overrides(files)), tmp_path / "other")
    for path in base.folder.glob("base-*.json"):
        write_json(other.evaluation / "questions" / path.name, read_json(path))
    write_json(other.evaluation / "questions" / "aligned-csqa.json", [])
    run = create_run(load_recipe("debug", [*overrides(files), *changes]), tmp_path / "run")
    names = ["base-aqua.json", "base-csqa.json"] if is_shared else []
    assert share_generations(run, [other]) == [f"evaluation/questions/{name}" for name in names]
    assert sorted(path.name for path in (run.evaluation / "questions").glob("*")) == names


@pytest.fixture
def logged(base, debug, tmp_path, mlflow_store):
    """MLflow run of an evaluation; client zoe gave the aligned answers, which name no option."""
    run = create_run(debug, tmp_path / "run")
    for path in base.folder.glob("base-*.json"):
        rows = read_json(path)
        aligned = [row | {"client_id": "zoe", "answer": None} for row in rows]
        write_json(run.evaluation / "questions" / path.name, rows)
        write_json(run.evaluation / "questions" / path.name.replace("base", "aligned"), aligned)
    write_json(run.evaluation / "answers.json", [])
    result = EvaluationResult(
        answers={},
        judge="a judge",
        judge_figures={},
        contests={},
        rouge={},
        questions={"base": base.result, "aligned": base.result},
    )
    result.write(run.evaluation / "result.json")
    open_run_tracking.fn(run, debug, FlowRunLink("flow-run", None))
    with phase_tracking(run, debug.tracking, "evaluate") as child:
        log_evaluation.fn(child, run, result)
    return child


def test_the_figures_of_questions_are_metrics_by_policy_and_set(logged, base):
    metrics = mlflow_client().get_run(logged).data.metrics
    for policy in ("base", "aligned"):
        for name, figures in base.result.sets.items():
            for key in ("accuracy", "unparsable", "success"):
                assert metrics[f"questions/{policy}/{name}/{key}"] == getattr(figures, key)
        assert metrics[f"questions/{policy}/mean/accuracy"] == base.result.mean.accuracy
        assert metrics[f"questions/{policy}/all/success"] == base.result.all.success


def test_the_answers_of_both_policies_are_logged_side_by_side(logged, base):
    table = json.loads(Path(mlflow_client().download_artifacts(logged, "question_answers.json")).read_text())
    question = ["set", "id", "question", "key"]
    assert table["columns"] == [
        *question,
        "base",
        "base answer",
        "aligned",
        "aligned answer",
        "aligned client",
    ]
    assert len(table["data"]) == 13
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert row["base"] == base.rows[row["set"]][0]["text"]
    assert row["aligned answer"] == ""
    assert row["aligned client"] == "zoe"
    paths = {info.path for info in mlflow_client().list_artifacts(logged, "evaluation/questions")}
    stored = ("base-csqa", "base-aqua", "aligned-csqa", "aligned-aqua")
    assert paths == {f"evaluation/questions/{name}.json" for name in stored}


FIGURES = QuestionFigures(
    accuracy=0.25,
    chance=0.2,
    unparsable_share=0.1,
    low=0.125,
    high=0.4,
    questions=40,
    right=10,
    unparsable=4,
    cut=0,
    succeeded=30,
    success=0.75,
    success_chance=0.672,
    success_low=0.6,
    success_high=0.875,
)
MEAN = QuestionFigures(accuracy=0.25, chance=0.2, unparsable_share=0.1, success=0.75, success_chance=0.672)
TWO_SETS = QuestionResult(
    samples=5,
    sets={"aqua": FIGURES, "csqa": FIGURES.model_copy(update={"accuracy": 0.5})},
    all=FIGURES,
    mean=MEAN,
)


@pytest.fixture
def table():
    return questions_table({"base": TWO_SETS, "aligned": TWO_SETS})


def test_the_table_has_a_row_for_each_set_and_policy_and_the_totals_with_intervals_and_chances(table):
    labels = ["aqua (40)", "csqa (40)", "all questions (40)", "mean over the sets"]
    rows = []
    for label in labels:
        rows += [f"{label}, base", f"{label}, aligned"]
    assert [row[0] for row in table.rows] == rows
    shares = ["25.0% [12.5%, 40.0%]", "20.0%", "10.0%"]
    success = ["75.0% [60.0%, 87.5%]", "67.2%"]
    assert table.rows[0] == ["aqua (40), base", *shares, *success]
    assert table.header[4] == "success at 5 [95%]"
    assert table.rows[-1][1:] == ["25.0%", "20.0%", "10.0%", "75.0%", "67.2%"]


def test_a_table_of_one_set_without_samples_has_neither_totals_nor_success():
    figures = without_success(FIGURES)
    alone = QuestionResult(samples=0, sets={"aqua": figures}, all=figures, mean=without_success(MEAN))
    table = questions_table({"base": alone, "aligned": alone})
    assert len(table.rows) == 2
    assert "success" not in " ".join(table.filled().header)


def without_success(figures):
    names = ("succeeded", "success", "success_chance", "success_low", "success_high")
    return figures.model_copy(update=dict.fromkeys(names))


def test_the_line_of_the_log_has_the_means_over_the_sets():
    numbers = re.findall(r"0\.\d+", questions_line({"base": TWO_SETS}))
    assert numbers == ["0.250", "0.200", "0.750", "0.672", "0.100"]


def test_the_defaults_answer_greedily_in_the_template_of_the_project():
    config = QuestionAnswersConfig(questions=[{"set": "csqa"}])
    assert config.samples == 0
    assert config.temperature == 0.8
    assert config.template.name == "thoughts/answer"
    assert config.max_question_tokens is None
