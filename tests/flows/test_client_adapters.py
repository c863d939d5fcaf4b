"""DRIFT on trees of thoughts, with an adapter for each client, through the whole pipeline."""

import json
import re

import networkx as nx
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException

from components.data.records import read_pairs
from components.data.trees import read_trees
from components.models.policy import client_adapter_folders, has_client_adapters
from tests.support.mlflow_store import global_store

pytestmark = pytest.mark.long

COUNT = 14
"""Questions of each set that trees are grown for."""
ROUNDS = 3
OVERRIDES = [
    "federation.method=drift",
    "federation.options={variant: sp, delta: 0.3}",
    f"federation.rounds={ROUNDS}",
    "federation.local_steps=4",
    "federation.clients_per_round=3",
    "evaluation.preference_pairs=8",
    "data={source: thoughts, options: {judge_share: 0.35}, validation: 0.1, test: 0.3}",
    "policy.template=thoughts/policy",
    "policy.max_prompt_tokens=900",
]


def csqa_row(number, question="Where would you look for thing number"):
    choices = [{"label": "A", "text": "in a box"}, {"label": "B", "text": f"on shelf {number}"}]
    return {
        "id": f"{question} {number}",
        "answerKey": "B",
        "question": {"stem": f"{question} {number}?", "choices": choices},
    }


def aqua_row(number):
    return {
        "question": f"What is {number} + {number}?",
        "options": [f"A){2 * number}", f"B){2 * number + 1}"],
        "rationale": "Add them.",
        "correct": "A",
    }


def pubmedqa_row(number):
    return {
        "QUESTION": f"Does drug {number} work?",
        "CONTEXTS": ["A long trial was made. " * 20],
        "LONG_ANSWER": "It seems so.",
        "final_decision": "yes",
    }


def mathqa_row(number):
    return {
        "Problem": f"what is {number} times 2 ?",
        "options": f"a ) {2 * number} , b ) {number} , c ) 0",
        "Rationale": "",
        "correct": "a",
    }


def question_settings(folder):
    """Settings of a recipe on question sets: three that trees are grown for, two of the evaluation.

    The sets are written in their original schemas.
    """
    files = {
        "csqa.jsonl": "".join(json.dumps(csqa_row(n)) + "\n" for n in range(2 * COUNT)),
        "aqua.jsonl": "".join(json.dumps(aqua_row(n)) + "\n" for n in range(COUNT)),
        "pubmedqa.json": json.dumps({str(n): pubmedqa_row(n) for n in range(COUNT)}),
        "new.jsonl": "".join(json.dumps(csqa_row(n, "Why is there a thing")) + "\n" for n in range(5)),
        "mathqa.json": json.dumps([mathqa_row(n) for n in range(1, 8)]),
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    grown = (
        f"[{{set: csqa, path: {folder}/csqa.jsonl, count: {COUNT}}},"
        f" {{set: aqua, path: {folder}/aqua.jsonl}},"
        f" {{set: pubmedqa, path: {folder}/pubmedqa.json}}]"
    )
    new = f"[{{set: csqa, path: {folder}/new.jsonl}}, {{set: mathqa, path: {folder}/mathqa.json}}]"
    evaluator = "{model: tiny-random, read: expected, max_prompt_tokens: 1500}"
    lengths = "depth: 2, max_thought_tokens: 6, max_question_tokens: 120"
    return [
        f"thoughts={{questions: {grown}, {lengths}, evaluator: {evaluator}}}",
        f"evaluation.questions={{questions: {new}, samples: 2, max_new_tokens: 6}}",
    ]


@pytest.fixture(scope="module")
def complete(new_workplace, tmp_path_factory):
    """A complete run of DRIFT on trees of thoughts."""
    settings = question_settings(tmp_path_factory.mktemp("questions"))
    return new_workplace("drift").run(*OVERRIDES, *settings)


@pytest.fixture(scope="module")
def trees(complete):
    """Trees by question set."""
    names = ("csqa", "aqua", "pubmedqa")
    return {name: read_trees(complete.folder / "trees" / f"{name}.jsonl") for name in names}


@pytest.fixture(scope="module")
def answers(complete):
    """Answers to questions by policy and set."""
    folder = complete.folder / "evaluation" / "questions"
    names = ("base-csqa", "base-mathqa", "aligned-csqa", "aligned-mathqa")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.fixture
def clients(complete):
    return sorted(complete.federation.after.accuracy.clients)


def test_every_client_ends_with_its_own_adapter_and_is_measured_by_it(complete, clients):
    outcome = complete.federation.outcome
    assert outcome.has_client_policies
    assert sorted(outcome.adapters) == clients
    assert sorted(complete.federation.adapters) == clients
    assert len(set(complete.hashes.values())) > 1
    assert complete.federation.before.accuracy.margin == 0
    assert complete.federation.after.accuracy.margin != 0
    assert "each client's own adapter, on its own pairs" in complete.summary


def test_the_aligned_policy_has_and_answers_with_an_adapter_for_each_client(complete, clients):
    final = complete.folder / "alignment" / "final"
    assert has_client_adapters(final)
    assert sorted(client_adapter_folders(final)) == clients
    assert set(complete.evaluation.implicit_reward.clients) <= set(clients)
    assert {row["aligned"]["client_id"] for row in complete.answers} <= set(clients)
    assert all("client_id" not in row["base"] for row in complete.answers)


def test_trees_of_truncated_questions_are_stored_and_their_pairs_belong_to_the_client_of_the_set(
    complete, trees
):
    assert {name: len(grown) for name, grown in trees.items()} == dict.fromkeys(trees, COUNT)
    for grown in trees.values():
        assert {len(tree.nodes) for tree in grown} == {6}
    shared = complete.folder.parent / "trees"
    for name in trees:
        own = complete.folder / "trees" / f"{name}.jsonl"
        assert (shared / f"{name}.jsonl").read_bytes() == own.read_bytes()
    for tree in trees["pubmedqa"]:
        assert "trial" in tree.question
        assert len(tree.question) < 200
    rows = read_pairs(complete.folder / "prepared" / "pairs.parquet")
    assert {row.client_id for row in rows} == set(trees)
    assert {row.depth for row in rows} == {1, 2}
    assert all(row.tree.split("/")[0] == row.client_id for row in rows)


def test_clients_answer_the_questions_of_their_set_and_take_turns_with_those_of_other_sets(answers, trees):
    assert {row["client_id"] for row in answers["aligned-csqa"]} == {"csqa"}
    in_turn = [row["client_id"] for row in answers["aligned-mathqa"][:4]]
    assert in_turn == ["aqua", "csqa", "pubmedqa", "aqua"]
    grown = {tree.question for tree in trees["csqa"]}
    assert not {row["question"] for row in answers["aligned-csqa"]} & grown


@pytest.mark.parametrize("policy", ["base", "aligned"])
def test_the_figures_of_questions_are_those_of_the_answers_and_are_in_the_report(complete, answers, policy):
    result = complete.evaluation.questions[policy]
    assert {name: figures.questions for name, figures in result.sets.items()} == {"csqa": 5, "mathqa": 7}
    assert result.samples == 2
    rows = [*answers[f"{policy}-csqa"], *answers[f"{policy}-mathqa"]]
    assert result.all.right == sum(row["answer"] == row["key"] for row in rows)
    for name, figures in (("mathqa", result.sets["mathqa"]), ("mean", result.mean)):
        for key, value in figures.model_dump(exclude_none=True).items():
            assert complete.metrics[f"questions/{policy}/{name}/{key}"] == value


def test_trees_questions_and_answers_are_in_the_log_in_the_table_and_in_mlflow(complete):
    pattern = r"thoughts: \d+ pairs \(margin min \S+, median \S+, max \S+\); \d+ tied"
    assert re.search(pattern, complete.output)
    for line in ("Answers to questions", "csqa (5), base", "mathqa (7), aligned", "success at 2"):
        assert line in complete.summary, line
    evaluate = complete.phase_run("evaluate")
    accuracy = complete.evaluation.questions["aligned"].sets["csqa"].accuracy
    assert evaluate.data.metrics["questions/aligned/csqa/accuracy"] == accuracy
    assert "questions/base/mathqa/success" in evaluate.data.metrics
    assert "question_answers.json" in complete.artifacts(evaluate.info.run_id)


def test_the_graph_of_each_round_is_in_mlflow_as_json_and_all_as_one_page(complete):
    federate = complete.phase_run("federate")
    records = complete.federation.records
    names = {f"graphs/{record.step:05d}.json" for record in records}
    assert len(names) == ROUNDS
    assert complete.artifacts(federate.info.run_id, "graphs") == names | {"graphs/graphs.html"}
    path = complete.mlflow.download_artifacts(federate.info.run_id, min(names))
    with open(path) as file:
        graph = nx.node_link_graph(json.load(file), edges="edges")
    assert sorted(graph) == sorted(records[0].clients)
    assert nx.density(graph) == 1
    assert federate.data.metrics["round/aggregation_seconds"] > 0
    assert federate.data.metrics["train/seconds"] > 0


@pytest.fixture
def registered(complete):
    """The registered model, as a user loads it."""
    import mlflow

    with global_store(complete.tracking):
        yield mlflow.pyfunc.load_model(complete.alignment.model_uri)


def test_the_registered_model_answers_as_the_named_client_and_needs_a_known_one(complete, registered):
    clients = sorted(complete.hashes)[:2]
    answers = registered.predict(pd.DataFrame({"prompt": ["a question"] * 2, "client_id": clients}))
    assert list(answers.columns) == ["completion"]
    assert len(answers) == 2
    with pytest.raises(MlflowException, match="client_id"):
        registered.predict(pd.DataFrame({"prompt": ["a question"]}))
    with pytest.raises(Exception, match="client_id 'nobody'"):
        registered.predict(pd.DataFrame({"prompt": ["a question"], "client_id": ["nobody"]}))
