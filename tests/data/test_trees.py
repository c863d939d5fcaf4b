"""Trees of thoughts: their file, hand-computed best paths and pairs, and the source."""

from collections import Counter
from dataclasses import replace

import pytest

from components.config import DataConfig
from components.data import sources
from components.data.data_report import MarginSummary, TreeCounts, read_report
from components.data.prepare import prepare
from components.data.records import DataError
from components.data.trees import (
    Node,
    Tree,
    append_trees,
    best_path,
    read_trees,
    thought_pairs,
    thought_template,
    tree_pairs,
)
from components.reporting.lines import margins_line
from tests.support.sources import prepared_rows

TEMPLATE = thought_template("csqa")
#  t0 (6) -> t4 (5), t5 (5);   t1 (8) -> t2 (4), t3 (9)
TREE = Tree(
    "csqa/x",
    "csqa",
    "key",
    "What is x?\nA) this\nB) that",
    (
        Node(0, -1, 1, "t0", 6, 1),
        Node(1, -1, 1, "t1", 8, 1),
        Node(2, 1, 2, "t2", 4, 1),
        Node(3, 1, 2, "t3", 9, 1),
        Node(4, 0, 2, "t4", 5, 1),
        Node(5, 0, 2, "t5", 5, 1),
    ),
    (1, 3),
)


def test_a_longer_path_is_better_than_a_shorter_one_with_more_points_and_ties_go_to_the_first():
    nodes = [
        Node(0, -1, 1, "a", 10, 1),
        Node(1, -1, 1, "b", 1, 1),
        Node(2, 1, 2, "c", 1, 1),
        Node(3, 1, 2, "d", 1, 1),
    ]
    assert best_path(nodes) == (1, 2)
    assert best_path([]) == ()
    assert best_path([replace(n, score=None) for n in nodes]) == ()


def test_at_each_step_the_chosen_thought_is_preferred_over_its_pruned_siblings():
    rows, left_out = tree_pairs(TREE, TEMPLATE)
    assert [(pair.chosen, pair.rejected, pair.margin, pair.depth) for pair in rows] == [
        ("t1", "t0", 2, 1),
        ("t3", "t2", 5, 2),
    ]
    assert not left_out
    assert rows[0].prompt == TEMPLATE.render(question=TREE.question, thoughts="(none yet)")
    assert "1. t1" in rows[1].prompt
    assert "t3" not in rows[1].prompt
    assert {pair.group for pair in rows} == {pair.tree for pair in rows} == {"csqa/x"}
    assert {pair.domain for pair in rows} == {"csqa"}


def test_a_thought_of_the_best_path_is_not_preferred_over_a_sibling_with_a_higher_score():
    #  t0 (7) -> t2 (1);   t1 (6) -> t3 (9):  15 against 8
    nodes = (
        Node(0, -1, 1, "t0", 7, 1),
        Node(1, -1, 1, "t1", 6, 1),
        Node(2, 0, 2, "t2", 1, 1),
        Node(3, 1, 2, "t3", 9, 1),
    )
    assert best_path(nodes) == (1, 3)
    assert tree_pairs(Tree("q", "csqa", "k", "Q", nodes, (1, 3)), TEMPLATE) == (
        [],
        {"sibling scored higher": 1},
    )


def test_siblings_without_a_pair_are_counted_by_reason():
    nodes = (
        Node(0, -1, 1, "a", 6, 1),
        Node(1, -1, 1, "b", 6, 1),
        Node(2, 0, 2, "c", 9, 1),
        Node(3, 0, 2, "d", None, 3),
        Node(4, 2, 3, "e", 5, 1),
        Node(5, 2, 3, "e", 4, 1),
        Node(6, 2, 3, "", None, 0),
        Node(7, 2, 3, "f", 7, 1),
        Node(8, 2, 3, "g", 1, 1),
    )
    rows, left_out = tree_pairs(Tree("q", "csqa", "k", "Q", nodes, (0, 2, 4)), TEMPLATE)
    assert [pair.rejected for pair in rows] == ["g"]
    assert left_out == {
        "same score": 1,
        "unreadable score": 1,
        "same thought": 1,
        "empty thought": 1,
        "sibling scored higher": 1,
    }


@pytest.mark.parametrize(
    ("min_margin", "rejected", "ties"),
    [(0.0, ["a", "c"], 0), (0.24, ["a", "c"], 0), (0.25, ["c"], 1), (0.5, ["c"], 1), (1.5, [], 2)],
)
def test_scores_within_the_minimum_margin_are_the_same(min_margin, rejected, ties):
    nodes = (
        Node(0, -1, 1, "a", 6.25, 1),
        Node(1, -1, 1, "b", 6.5, 1),
        Node(2, 1, 2, "c", 3.0, 1),
        Node(3, 1, 2, "d", 4.5, 1),
    )
    rows, left_out = tree_pairs(Tree("q", "csqa", "k", "Q", nodes, (1, 3)), TEMPLATE, min_margin)
    assert [pair.rejected for pair in rows] == rejected
    assert left_out["same score"] == ties
    higher = (Node(0, -1, 1, "a", 6.5, 1), Node(1, -1, 1, "b", 6.25, 1))
    _, left_out = tree_pairs(Tree("q", "csqa", "k", "Q", higher, (1,)), TEMPLATE, min_margin)
    assert left_out == {"same score" if min_margin >= 0.25 else "sibling scored higher": 1}


def test_a_line_that_is_no_tree_is_named(tmp_path):
    path = tmp_path / "trees.jsonl"
    append_trees(path, [Tree("q", "s", "k", "Q", (), ())])
    path.write_bytes(path.read_bytes() + b'{"id": 3}\n' + path.read_bytes())
    with pytest.raises(DataError, match=r"trees.jsonl, line 2: this is not a tree of thoughts"):
        read_trees(path)
    path.unlink()
    append_trees(path, [replace(TREE, nodes=(Node(0, -1, 1, "t0", 10**400, 1),))])  # no float holds it
    with pytest.raises(DataError, match=r"line 1: this is not a tree of thoughts .*less than or equal"):
        read_trees(path)
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(DataError, match=r"trees.jsonl, line 1: this is not a tree of thoughts"):
        read_trees(path)
    assert read_trees(tmp_path / "absent.jsonl") == []


def test_trees_that_cannot_all_be_written_leave_the_file_as_it_was(tmp_path):
    path = tmp_path / "trees.jsonl"
    append_trees(path, [TREE])
    before = path.read_bytes()

    def broken():
        yield replace(TREE, id="csqa/y")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        append_trees(path, broken())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.glob("*.jsonl")] == ["trees.jsonl"]


# --- the source


def write(path, sets=("csqa", "aqua"), count=30, nodes=TREE.nodes):
    for name in sets:
        questions = {n: f"{name} question {n}?" for n in range(count)}
        append_trees(
            path,
            [
                replace(TREE, id=f"{name}/{n}", set=name, question=question, nodes=nodes)
                for n, question in questions.items()
            ],
        )


def test_each_set_is_a_client_and_a_questions_pairs_stay_in_one_split_with_their_tree_and_depth(tmp_path):
    write(tmp_path / "trees.jsonl")
    data = DataConfig(source="thoughts", path=str(tmp_path / "trees.jsonl"), options={"judge_share": 0.1})
    report = prepare(data, 0, tmp_path / "prepared")
    rows = prepared_rows(tmp_path / "prepared")
    assert {row["client_id"] for row in rows} == {row["domain"] for row in rows} == {"csqa", "aqua"}
    by_tree = {}
    for row in rows:
        by_tree.setdefault(row["tree"], []).append(row)
        assert row["tree"].startswith(row["client_id"])
        assert row["margin"] == {1: 2.0, 2: 5.0}[row["depth"]]
    assert all(
        len(own) == 2 and len({row["split"] for row in own}) == 1 and {row["depth"] for row in own} == {1, 2}
        for own in by_tree.values()
    )
    assert {row["split"] for row in rows} == {"train", "validation", "test"}
    assert 0 < report.rows.judge < 30
    assert "step by step" in next(row["prompt"] for row in rows if row["client_id"] == "aqua"), (
        "each set has its own template"
    )


def test_a_set_is_divided_evenly_among_clients_by_questions(tmp_path):
    write(tmp_path / "trees.jsonl")
    options = {"judge_share": 0.0, "clients_per_set": 3}
    data = DataConfig(source="thoughts", path=str(tmp_path / "trees.jsonl"), options=options)
    prepare(data, 0, tmp_path / "prepared")
    owners = {}
    for row in prepared_rows(tmp_path / "prepared"):
        assert row["client_id"].rpartition("-")[0] == row["domain"]
        owners.setdefault((row["domain"], row["split"], row["tree"]), set()).add(row["client_id"])
    assert {next(iter(own)) for own in owners.values()} == {
        f"{s}-{n}" for s in ("csqa", "aqua") for n in range(3)
    }
    assert all(len(own) == 1 for own in owners.values())
    for part in {key[:2] for key in owners}:
        counts = Counter(next(iter(own)) for key, own in owners.items() if key[:2] == part)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_all_files_of_a_folder_are_read_and_two_trees_of_a_question_are_refused(tmp_path):
    write(tmp_path / "a.jsonl", ("csqa",))
    write(tmp_path / "b.jsonl", ("aqua",))
    data = DataConfig(source="thoughts", path=str(tmp_path))
    loaded = sources.load(data, 0)
    assert len(loaded.pairs) + len(loaded.judge) == 120
    append_trees(tmp_path / "b.jsonl", [replace(TREE, id="aqua/3", set="aqua", key="other")])
    with pytest.raises(DataError, match="question aqua/3 has two trees, grown with different settings"):
        sources.load(data, 0)


def test_questions_that_differ_in_case_and_white_space_only_are_one_group(tmp_path):
    write(tmp_path / "a.jsonl", ("csqa",))
    for n in range(30):
        tree = replace(TREE, id=f"cose/{n}", set="cose", question=f"CSQA  question {n}?")
        append_trees(tmp_path / "b.jsonl", [tree])
    prepare(DataConfig(source="thoughts", path=str(tmp_path)), 0, tmp_path / "prepared")
    splits = {}
    for name in ("pairs", "judge"):
        for row in prepared_rows(tmp_path / "prepared", name):
            splits.setdefault(row["tree"].partition("/")[2], set()).add((name, row["split"]))
    assert len(splits) == 30
    assert all(len(places) == 1 for places in splits.values())


def test_a_question_of_two_sets_of_a_pool_is_one_group_even_with_different_texts(tmp_path):
    write(tmp_path / "trees.jsonl", ("csqa", "cose", "aqua"))
    rows, _ = thought_pairs(tmp_path, "data.path")
    groups = {}
    for row in rows:
        groups.setdefault(row.group, set()).add(row.tree)
    assert sorted(map(sorted, groups.values())) == sorted(
        [[f"aqua/{n}"] for n in range(30)] + [[f"cose/{n}", f"csqa/{n}"] for n in range(30)]
    )


def test_trees_without_a_pair_are_refused_with_the_reason(tmp_path):
    with pytest.raises(DataError, match="give their file, or a folder of them, as data.path"):
        sources.load(DataConfig(source="thoughts"), 0)
    with pytest.raises(DataError, match="there is no file of trees"):
        sources.load(DataConfig(source="thoughts", path=str(tmp_path)), 0)
    append_trees(tmp_path / "t.jsonl", [replace(TREE, nodes=TREE.nodes[:2], path=())])
    with pytest.raises(DataError, match="none of the 1 trees gives a pair .path ends early: 1"):
        sources.load(DataConfig(source="thoughts", path=str(tmp_path / "t.jsonl")), 0)


@pytest.mark.parametrize("beside", [False, True])
def test_the_minimum_margin_is_applied_and_the_remaining_margins_are_reported(tmp_path, fixtures, beside):
    write(tmp_path / "trees.jsonl", count=15)
    other = tuple(replace(node, thought=f"t{9 - node.number}") for node in TREE.nodes)
    write(tmp_path / "trees.jsonl", sets=("piqa", "medqa"), count=15, nodes=other)
    data = (
        DataConfig(
            source="jsonl",
            path=str(fixtures / "pairs.jsonl"),
            partition="iid",
            clients=4,
            trees=str(tmp_path),
        )
        if beside
        else DataConfig(source="thoughts", path=str(tmp_path))
    )
    report = prepare(data, 0, tmp_path / "prepared")
    assert report.margins == MarginSummary(pairs=120, min=2.0, median=3.5, max=5.0)
    assert "min 2, median 3.5, max 5" in margins_line(report)
    assert report.tied_siblings() == 0
    report = prepare(data.model_copy(update={"min_margin": 2.0}), 0, tmp_path / "prepared")
    assert report.margins == MarginSummary(pairs=60, min=5.0, median=5.0, max=5.0)
    assert read_report(tmp_path / "prepared") == report
    assert (report.rows.trees if beside else report.rows).dropped == {"same score": 60}
    assert report.tied_siblings() == 60
    assert "; 60 " in margins_line(report)


def test_pairs_that_are_not_of_thoughts_have_no_margins_to_report(tmp_path, fixtures):
    data = DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl"), partition="iid", clients=4)
    assert prepare(data, 0, tmp_path / "prepared").margins is None


# --- beside another source


def test_trees_beside_a_source_are_assigned_to_its_clients_question_by_question(tmp_path, fixtures):
    write(tmp_path / "trees.jsonl")
    data = DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl"), partition="iid", clients=4)
    alone = prepare(data, 0, tmp_path / "alone")
    report = prepare(
        data.model_copy(update={"trees": str(tmp_path / "trees.jsonl")}), 0, tmp_path / "prepared"
    )
    rows = prepared_rows(tmp_path / "prepared")
    thoughts = [row for row in rows if row["source"] == "thoughts"]
    assert [row for row in rows if row["source"] == "jsonl"] == [
        row | {"tree": None, "depth": None} for row in prepared_rows(tmp_path / "alone")
    ]
    assert report.rows.trees == TreeCounts(pairs=120, questions=60, dropped={})
    assert report.rows.pairs == alone.rows.pairs + 120
    assert len(thoughts) == 120
    assert (
        len({row["tree"] for row in thoughts})
        == len({(row["tree"], row["client_id"], row["split"]) for row in thoughts})
        == 60
    ), "a question has one owner and one split"


@pytest.mark.parametrize("seed", range(4))
def test_the_questions_of_each_split_are_assigned_evenly(tmp_path, fixtures, seed):
    write(tmp_path / "trees.jsonl")
    prepare(
        DataConfig(
            source="jsonl",
            path=str(fixtures / "pairs.jsonl"),
            partition="iid",
            clients=4,
            trees=str(tmp_path),
        ),
        seed,
        tmp_path / "prepared",
    )
    thoughts = [row for row in prepared_rows(tmp_path / "prepared") if row["source"] == "thoughts"]
    clients = {row["client_id"] for row in prepared_rows(tmp_path / "prepared")}
    for split in ("train", "test"):
        held = [
            len({row["tree"] for row in thoughts if (row["client_id"], row["split"]) == (client, split)})
            for client in sorted(clients)
        ]
        assert len(held) == 4
        assert min(held) >= 1
        assert max(held) - min(held) <= 1, (split, held)


def test_fewer_questions_than_clients_go_to_some_of_them(tmp_path, fixtures):
    write(tmp_path / "trees.jsonl", sets=("csqa",), count=3)
    data = DataConfig(
        source="jsonl", path=str(fixtures / "pairs.jsonl"), partition="iid", clients=6, trees=str(tmp_path)
    )
    assert prepare(data, 0, tmp_path / "prepared").rows.trees.questions == 3


def test_missing_trees_are_refused_with_their_key(tmp_path, fixtures):
    data = DataConfig(
        source="jsonl",
        path=str(fixtures / "pairs.jsonl"),
        partition="iid",
        clients=4,
        trees=str(tmp_path / "none"),
    )
    with pytest.raises(
        DataError, match=r"none: there is no file of trees \(\*\.jsonl\) here \(data\.trees\)"
    ):
        prepare(data, 0, tmp_path / "prepared")
