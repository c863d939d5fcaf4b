"""The partitions margin and column, from a file to the prepared folder."""

from collections import Counter
from itertools import product

import pyarrow as pa
import pyarrow.parquet
import pytest

from components.data.prepare import prepare
from components.data.records import DataError, read_clients
from components.data.sources import load
from tests.support.sources import WHOLE, WHOLE_FILE, data_config, prepared_rows, write_jsonl

REGIONS = ("north", "south", "east")


def pair(i, **more):
    return {
        "prompt": f"question {i}",
        "chosen": f"yes {i}" + " indeed" * (i % 2),
        "rejected": f"no {i}" + " not at all" * (i % 3),
        "domain": f"d{i % 4}",
        "region": REGIONS[i % 3],
    } | more


def written(path, rows):
    return {"source": "jsonl", "path": write_jsonl(path, rows)}


def prepared(data, folder, seed=0, **more):
    values = {"options": WHOLE_FILE} | data | more
    report = prepare(data_config(**values), seed, folder)
    return report, prepared_rows(folder)


# --- margin


def test_the_partition_margin_assigns_the_easiest_pairs_to_the_first_client_and_whole_groups(tmp_path):
    data = written(
        tmp_path / "p.jsonl",
        [
            pair(i, margin=i + j / 10, chosen=f"yes {i} {j}" + " so" * (i % 4))
            for i, j in product(range(60), range(2))
        ],
    )
    report, rows = prepared(data, tmp_path / "data", partition="margin", clients=3)
    means = {
        client: sum(r["margin"] for r in rows if r["client_id"] == client) / 40
        for client in read_clients(tmp_path / "data")
    }
    assert [round(means[f"client-0{i}"], 2) for i in range(3)] == [49.55, 29.55, 9.55]
    assert len({(r["group"], r["client_id"]) for r in rows}) == 60
    assert "no group in two clients" in {outcome.expectation for outcome in report.expectations.expectations}
    assert (
        prepared(data, tmp_path / "again", seed=5, partition="margin", clients=3)[0].partition
        == report.partition
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {},
            r"partition 'margin': 60 of 60 rows have no margin .*: 60 of source jsonl; .*data.partition",
        ),
        ({"margin": 1.0}, r"partition 'margin': 59 of 60 rows have no margin"),
        ({"margin": float("inf")}, r"row 1: column 'margin' must be a finite number, but is inf"),
    ],
)
def test_rows_without_a_margin_are_refused_with_their_source_and_number(tmp_path, row, words):
    data = written(tmp_path / "p.jsonl", [pair(0) | row, *(pair(i) for i in range(1, 60))])
    with pytest.raises(DataError, match=words):
        prepared(data, tmp_path / "data", partition="margin", clients=3)


def test_the_partition_margin_refuses_more_clients_than_prompts(tmp_path):
    with pytest.raises(DataError, match="partition 'margin': 61 clients cannot each own one of 60 groups"):
        prepared(
            written(tmp_path / "p.jsonl", [pair(i, margin=1) for i in range(60)]),
            tmp_path / "data",
            partition="margin",
            clients=61,
        )


# --- column


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_of_the_users_own_file_names_the_clients_and_is_kept(tmp_path, kind):
    rows = [pair(i) for i in range(90)]
    data = written(tmp_path / "p.jsonl", rows)
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
        data = {"source": "parquet", "path": str(tmp_path / "p.parquet")}
    report, prepared_pairs = prepared(data, tmp_path / "data", partition="column", column="region")
    regions = {r["prompt"]: r["region"] for r in rows}
    assert len(prepared_pairs) == 90
    assert all(r["client_id"] == r["column"] == regions[r["prompt"]] for r in prepared_pairs)
    assert list(prepared_pairs[0])[-3:] == ["split", "group", "column"]
    assert report.rows.left_out == {}
    unnamed = load(data_config(**data, options=WHOLE_FILE), 0)
    assert {row.column for row in unnamed.pairs} == {None}, "it is read only where the recipe names it"


def test_a_column_of_the_record_names_the_clients_of_any_source(fixtures, tmp_path):
    data = {
        "source": "auto-j",
        "path": str(fixtures / "auto_j.jsonl"),
        "options": WHOLE,
    }
    _, rows = prepared(data, tmp_path / "data", partition="column", column="domain")
    assert {(r["client_id"], r["domain"]) for r in rows} == {
        (name, name) for name in ("chitchat", "planning", "text_correction")
    }


def test_pairs_with_values_of_no_client_are_left_out_and_counted(tmp_path):
    data = written(tmp_path / "p.jsonl", [pair(i) for i in range(80)])
    report, rows = prepared(
        data,
        tmp_path / "data",
        partition="column",
        column="domain",
        column_clients={"b": ["d2"], "a": ["d0", "d3"]},
    )
    assert Counter((r["client_id"], r["domain"]) for r in rows) == {
        ("b", "d2"): 20,
        ("a", "d0"): 20,
        ("a", "d3"): 20,
    }
    assert report.rows.source == 80
    assert report.rows.left_out == {"value of data.column not among the clients": 20}


def test_fewer_clients_than_values_of_a_column_are_the_largest_ones(tmp_path):
    data = written(
        tmp_path / "p.jsonl", [pair(i, domain="large" if i % 2 else f"small{i % 3}") for i in range(60)]
    )
    report, rows = prepared(data, tmp_path / "data", partition="column", column="domain", clients=2)
    assert {r["client_id"] for r in rows} == {"large", "small0"}
    assert report.rows.left_out == {"owner not among the clients": 20}
    with pytest.raises(
        DataError,
        match=r"partition 'column': data.clients is 5, but data.column 'domain' gives only 4 clients",
    ):
        prepared(data, tmp_path / "data", partition="column", column="domain", clients=5)


def test_rows_of_one_question_may_be_with_two_clients_of_a_column(tmp_path):
    data = written(
        tmp_path / "p.jsonl",
        [pair(i // 2, domain=f"d{i % 2}", chosen=f"yes {i}" + " so" * (i % 5)) for i in range(120)],
    )
    _, rows = prepared(data, tmp_path / "data", partition="column", column="domain")
    assert len({(r["prompt"], r["client_id"]) for r in rows}) == 2 * len({r["prompt"] for r in rows}) == 120


def test_the_judges_rows_are_separate_from_the_clients_of_a_column(tmp_path):
    data = written(tmp_path / "p.jsonl", [pair(i) for i in range(120)])
    _, rows = prepared(
        data,
        tmp_path / "data",
        options={"align_share": 0.0, "judge_clients": 0.2},
        partition="column",
        column="region",
    )
    judged = prepared_rows(tmp_path / "data", "judge")
    assert {r["client_id"] for r in judged} == {"judge"}
    assert len(rows) + len(judged) == 120
    assert not {r["prompt"] for r in rows} & {r["prompt"] for r in judged}
    with pytest.raises(DataError, match=r"owners are clients and the judge's too \(judge\)"):
        prepared(
            data,
            tmp_path / "data",
            options={"judge_clients": 0.2},
            partition="column",
            column="region",
            column_clients={"judge": ["north"]},
        )


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        (
            {"region": ""},
            {"column": "region"},
            r"partition 'column': 1 of 60 rows have no value in the column 'region': 1 of source jsonl",
        ),
        ({"region": "  "}, {"column": "region"}, r"1 of 60 rows have no value in the column 'region'"),
        ({"region": None}, {"column": "region"}, r"1 of 60 rows have no value in the column 'region'"),
        ({"domain": None}, {"column": "domain"}, r"1 of 60 rows have no value in the column 'domain'"),
        (
            {"region": 0.5},
            {"column": "region"},
            r"p.jsonl, row 1: column 'region' must be text, but is a number",
        ),
        (
            {},
            {"column": "regoin"},
            r"p.jsonl, row 1: column 'regoin' is missing; .*, region; did you mean 'region'\?$",
        ),
        (
            {},
            {"column": "region", "column_clients": {"a": ["nort"]}},
            r"data.column_clients.a: value 'nort' .* east, north, south. Did you mean 'north'\?",
        ),
    ],
)
def test_a_column_without_an_owner_for_each_row_is_refused(tmp_path, change, more, words):
    data = written(tmp_path / "p.jsonl", [pair(0) | change, *(pair(i) for i in range(1, 60))])
    with pytest.raises(DataError, match=words):
        prepared(data, tmp_path / "data", partition="column", **more)


def test_a_column_without_any_value_is_refused(tmp_path):
    with pytest.raises(DataError, match="60 of 60 rows have no value in the column 'region'"):
        prepared(
            written(tmp_path / "p.jsonl", [pair(i, region=None) for i in range(60)]),
            tmp_path / "data",
            partition="column",
            column="region",
        )


def test_an_unknown_column_of_a_source_is_refused_with_the_existing_ones(fixtures, tmp_path):
    data = {
        "source": "auto-j",
        "path": str(fixtures / "auto_j.jsonl"),
        "options": WHOLE,
    }
    for column in ("tree", "scenario", "column"):
        with pytest.raises(
            DataError,
            match=rf"data.column '{column}' is not known; there are: chosen, client_id, domain, group",
        ):
            prepared(data, tmp_path / "data", partition="column", column=column)
