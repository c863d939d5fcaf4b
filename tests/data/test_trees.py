"""Trees of thoughts in their file, their best paths and pairs worked out by hand, and the source that reads them."""

import json
from dataclasses import replace

import pytest

from components.config import DataConfig
from components.data import sources
from components.data.prepare import prepare
from components.data.records import DataError, read_rows
from components.data.trees import Node, Tree, append_tree, best_path, read_trees, thought_pairs, thought_template, tree_pairs
from tasks.reporting import margins_line

TEMPLATE = thought_template("csqa")
#  t0 (6) -> t4 (5), t5 (5);   t1 (8) -> t2 (4), t3 (9)
TREE = Tree("csqa/x", "csqa", "key", "What is x?\nA) this\nB) that", (
    Node(0, -1, 1, "t0", 6, 1), Node(1, -1, 1, "t1", 8, 1), Node(2, 1, 2, "t2", 4, 1), Node(3, 1, 2, "t3", 9, 1), Node(4, 0, 2, "t4", 5, 1), Node(5, 0, 2, "t5", 5, 1)), (1, 3))


def test_a_longer_path_is_better_than_a_shorter_one_with_more_points_and_ties_go_to_the_first():
    nodes = [Node(0, -1, 1, "a", 10, 1), Node(1, -1, 1, "b", 1, 1), Node(2, 1, 2, "c", 1, 1), Node(3, 1, 2, "d", 1, 1)]
    assert best_path(nodes) == (1, 2) and best_path([]) == () and best_path([replace(n, score=None) for n in nodes]) == ()


def test_at_each_step_the_kept_thought_is_preferred_over_its_pruned_siblings_given_the_same_prefix():
    rows, left_out = tree_pairs(TREE, TEMPLATE)
    assert [(r["chosen"], r["rejected"], r["margin"], r["depth"]) for r in rows] == [("t1", "t0", 2, 1), ("t3", "t2", 5, 2)] and not left_out
    assert rows[0]["prompt"] == TEMPLATE.render(question=TREE.question, thoughts="(none yet)") and "1. t1" in rows[1]["prompt"] and "t3" not in rows[1]["prompt"]
    assert {r["group"] for r in rows} == {r["tree"] for r in rows} == {"csqa/x"} and {r["domain"] for r in rows} == {"csqa"}


def test_the_best_path_may_keep_the_worse_of_two_thoughts_which_is_then_preferred_over_none():
    #  t0 (7) -> t2 (1);   t1 (6) -> t3 (9):  15 against 8
    nodes = (Node(0, -1, 1, "t0", 7, 1), Node(1, -1, 1, "t1", 6, 1), Node(2, 0, 2, "t2", 1, 1), Node(3, 1, 2, "t3", 9, 1))
    assert best_path(nodes) == (1, 3) and tree_pairs(Tree("q", "csqa", "k", "Q", nodes, (1, 3)), TEMPLATE) == ([], {"sibling scored higher": 1})


def test_siblings_that_give_no_pair_are_counted_by_their_reason():
    nodes = (Node(0, -1, 1, "a", 6, 1), Node(1, -1, 1, "b", 6, 1), Node(2, 0, 2, "c", 9, 1), Node(3, 0, 2, "d", None, 3), Node(4, 2, 3, "e", 5, 1), Node(5, 2, 3, "e", 4, 1),
             Node(6, 2, 3, "", None, 0), Node(7, 2, 3, "f", 7, 1), Node(8, 2, 3, "g", 1, 1))
    rows, left_out = tree_pairs(Tree("q", "csqa", "k", "Q", nodes, (0, 2, 4)), TEMPLATE)
    assert [r["rejected"] for r in rows] == ["g"]
    assert left_out == {"same score": 1, "unreadable score": 1, "same thought": 1, "empty thought": 1, "sibling scored higher": 1}


@pytest.mark.parametrize(("min_margin", "rejected", "ties"), [(0.0, ["a", "c"], 0), (0.24, ["a", "c"], 0), (0.25, ["c"], 1), (0.5, ["c"], 1), (1.5, [], 2)])
def test_scores_that_are_no_further_apart_than_a_margin_are_the_same(min_margin, rejected, ties):
    nodes = (Node(0, -1, 1, "a", 6.25, 1), Node(1, -1, 1, "b", 6.5, 1), Node(2, 1, 2, "c", 3.0, 1), Node(3, 1, 2, "d", 4.5, 1))
    rows, left_out = tree_pairs(Tree("q", "csqa", "k", "Q", nodes, (1, 3)), TEMPLATE, min_margin)
    assert [row["rejected"] for row in rows] == rejected and left_out["same score"] == ties
    higher = (Node(0, -1, 1, "a", 6.5, 1), Node(1, -1, 1, "b", 6.25, 1))
    _, left_out = tree_pairs(Tree("q", "csqa", "k", "Q", higher, (1,)), TEMPLATE, min_margin)
    assert left_out == {"same score" if min_margin >= 0.25 else "sibling scored higher": 1}


def test_a_line_that_is_no_tree_is_named(tmp_path):
    path = tmp_path / "trees.jsonl"
    append_tree(path, Tree("q", "s", "k", "Q", (), ()))
    path.write_bytes(path.read_bytes() + b'{"id": 3}\n' + path.read_bytes())
    with pytest.raises(DataError, match=r"trees.jsonl, line 2: this is not a tree of thoughts"):
        read_trees(path)
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(DataError, match=r"trees.jsonl, line 1: this is not a tree of thoughts"):
        read_trees(path)
    assert read_trees(tmp_path / "absent.jsonl") == []


# --- the source

def write(path, sets=("csqa", "aqua"), count=30, nodes=TREE.nodes):
    for name in sets:
        for n in range(count):
            append_tree(path, replace(TREE, id=f"{name}/{n}", set=name, question=f"{name} question {n}?", nodes=nodes))


def test_each_set_is_a_client_and_a_questions_pairs_stay_in_one_split_with_their_tree_and_depth(tmp_path):
    write(tmp_path / "trees.jsonl")
    data = DataConfig(source="thoughts", path=str(tmp_path / "trees.jsonl"), options={"judge_share": 0.1})
    report = prepare(data, 0, tmp_path / "prepared")
    rows = read_rows(tmp_path / "prepared" / "pairs.parquet").to_list()
    assert {row["client_id"] for row in rows} == {row["domain"] for row in rows} == {"csqa", "aqua"}
    by_tree = {}
    for row in rows:
        by_tree.setdefault(row["tree"], []).append(row)
        assert row["tree"].startswith(row["client_id"]) and row["margin"] == {1: 2.0, 2: 5.0}[row["depth"]]
    assert all(len(own) == 2 and len({row["split"] for row in own}) == 1 and {row["depth"] for row in own} == {1, 2} for own in by_tree.values())
    assert {row["split"] for row in rows} == {"train", "validation", "test"} and 0 < report["rows"]["judge"] < 30
    assert "step by step" in next(row["prompt"] for row in rows if row["client_id"] == "aqua"), "each set has its own template"


def test_a_folder_of_files_is_read_whole_and_two_trees_of_a_question_are_refused(tmp_path):
    write(tmp_path / "a.jsonl", ("csqa",))
    write(tmp_path / "b.jsonl", ("aqua",))
    data = DataConfig(source="thoughts", path=str(tmp_path))
    loaded = sources.load(data, 0)
    assert len(loaded.pairs) + len(loaded.judge) == 120
    append_tree(tmp_path / "b.jsonl", replace(TREE, id="aqua/3", set="aqua", key="other"))
    with pytest.raises(DataError, match="question aqua/3 has two trees, grown with different settings"):
        sources.load(data, 0)


def test_questions_that_differ_in_case_and_white_space_only_are_one_group(tmp_path):
    write(tmp_path / "a.jsonl", ("csqa",))
    for n in range(30):
        append_tree(tmp_path / "b.jsonl", replace(TREE, id=f"cose/{n}", set="cose", question=f"CSQA  question {n}?"))
    prepare(DataConfig(source="thoughts", path=str(tmp_path)), 0, tmp_path / "prepared")
    splits = {}
    for name in ("pairs", "judge"):
        for row in read_rows(tmp_path / "prepared" / f"{name}.parquet").to_list():
            splits.setdefault(row["tree"].partition("/")[2], set()).add((name, row["split"]))
    assert len(splits) == 30 and all(len(found) == 1 for found in splits.values())


def test_a_question_of_two_sets_of_a_pool_is_one_group_though_its_texts_differ(tmp_path):
    write(tmp_path / "trees.jsonl", ("csqa", "cose", "aqua"))
    rows, _ = thought_pairs(tmp_path, "data.path")
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], set()).add(row["tree"])
    assert sorted(map(sorted, groups.values())) == sorted([[f"aqua/{n}"] for n in range(30)] + [[f"cose/{n}", f"csqa/{n}"] for n in range(30)])


def test_what_gives_no_pair_is_said(tmp_path):
    with pytest.raises(DataError, match="give their file, or a folder of them, as data.path"):
        sources.load(DataConfig(source="thoughts"), 0)
    with pytest.raises(DataError, match="there is no file of trees"):
        sources.load(DataConfig(source="thoughts", path=str(tmp_path)), 0)
    append_tree(tmp_path / "t.jsonl", replace(TREE, nodes=TREE.nodes[:2], path=()))
    with pytest.raises(DataError, match="none of the 1 trees gives a pair .path ends early: 1"):
        sources.load(DataConfig(source="thoughts", path=str(tmp_path / "t.jsonl")), 0)


@pytest.mark.parametrize("beside", [False, True])
def test_the_margin_is_that_of_the_data_and_what_is_left_is_reported(tmp_path, fixtures, beside):
    write(tmp_path / "trees.jsonl", count=15)
    other = tuple(replace(node, thought=f"t{9 - node.number}") for node in TREE.nodes)
    write(tmp_path / "trees.jsonl", sets=("piqa", "medqa"), count=15, nodes=other)
    data = DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl"), partition="iid", clients=4, trees=str(tmp_path)) if beside else DataConfig(source="thoughts", path=str(tmp_path))
    report = prepare(data, 0, tmp_path / "prepared")
    assert report["margins"] == {"pairs": 120, "min": 2.0, "median": 3.5, "max": 5.0} and margins_line(report) == "120 pairs (margin min 2, median 3.5, max 5); 0 ties gave none"
    report = prepare(data.model_copy(update={"min_margin": 2.0}), 0, tmp_path / "prepared")
    assert report["margins"] == {"pairs": 60, "min": 5.0, "median": 5.0, "max": 5.0} == json.loads((tmp_path / "prepared" / "report.json").read_text())["margins"]
    assert (report["rows"]["trees"] if beside else report["rows"])["dropped"] == {"same score": 60} and margins_line(report).endswith("; 60 ties gave none")


def test_pairs_that_are_not_of_thoughts_have_no_margins_to_report(tmp_path, fixtures):
    assert "margins" not in prepare(DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl"), partition="iid", clients=4), 0, tmp_path / "prepared")


# --- beside another source

def test_trees_beside_a_source_are_dealt_among_its_clients_question_by_question(tmp_path, fixtures):
    write(tmp_path / "trees.jsonl")
    data = DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl"), partition="iid", clients=4)
    alone = prepare(data, 0, tmp_path / "alone")
    report = prepare(data.model_copy(update={"trees": str(tmp_path / "trees.jsonl")}), 0, tmp_path / "prepared")
    rows = read_rows(tmp_path / "prepared" / "pairs.parquet").to_list()
    thoughts = [row for row in rows if row["source"] == "thoughts"]
    assert [row for row in rows if row["source"] == "jsonl"] == [row | {"tree": None, "depth": None} for row in read_rows(tmp_path / "alone" / "pairs.parquet").to_list()]
    assert report["rows"]["trees"] == {"pairs": 120, "questions": 60, "dropped": {}} and report["rows"]["pairs"] == alone["rows"]["pairs"] + 120 and len(thoughts) == 120
    assert len({row["tree"] for row in thoughts}) == len({(row["tree"], row["client_id"], row["split"]) for row in thoughts}) == 60, "a question has one owner and one split"


@pytest.mark.parametrize("seed", range(4))
def test_the_questions_of_each_split_are_dealt_evenly(tmp_path, fixtures, seed):
    write(tmp_path / "trees.jsonl")
    prepare(DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl"), partition="iid", clients=4, trees=str(tmp_path)), seed, tmp_path / "prepared")
    thoughts = [row for row in read_rows(tmp_path / "prepared" / "pairs.parquet").to_list() if row["source"] == "thoughts"]
    clients = {row["client_id"] for row in read_rows(tmp_path / "prepared" / "pairs.parquet").to_list()}
    for split in ("train", "test"):
        held = [len({row["tree"] for row in thoughts if (row["client_id"], row["split"]) == (client, split)}) for client in sorted(clients)]
        assert len(held) == 4 and min(held) >= 1 and max(held) - min(held) <= 1, (split, held)


def test_fewer_questions_than_clients_go_to_some_of_them(tmp_path, fixtures):
    write(tmp_path / "trees.jsonl", sets=("csqa",), count=3)
    data = DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl"), partition="iid", clients=6, trees=str(tmp_path))
    assert prepare(data, 0, tmp_path / "prepared")["rows"]["trees"]["questions"] == 3


def test_trees_that_are_not_there_are_said_with_their_key(tmp_path, fixtures):
    data = DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl"), partition="iid", clients=4, trees=str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"none: there is no file of trees \(\*\.jsonl\) here \(data\.trees\)"):
        prepare(data, 0, tmp_path / "prepared")
