"""The sources auto-j and hh-rlhf on the real samples."""

from components.config import DataConfig
from components.data.prepare import prepare
from tests.support.sources import prepared_rows


def test_the_real_sample_is_prepared_by_scenario_and_loses_no_row_uncounted(samples, tmp_path):
    path = samples / "auto_j" / "pairwise_human_even.jsonl"
    report = prepare(
        DataConfig(source="auto-j", path=str(path), partition="dirichlet", clients=10), 0, tmp_path / "data"
    )
    rows = report.rows
    dropped = rows.dropped
    assert rows.pairs + rows.judge + sum(dropped.values()) == 696
    assert dropped == {"tie": 183, "both responses the same": 1, "prompt given to the server": 68}
    assert rows.pairs == 408
    assert report.partition.clients == 10
    assert report.clients_without_train == []
    pairs = prepared_rows(tmp_path / "data")
    assert len({r["domain"] for r in pairs}) == 58
    assert len({(r["group"], r["client_id"]) for r in pairs}) == len({r["group"] for r in pairs})


def test_the_real_harmlessness_sample_is_prepared_and_loses_no_row_uncounted(samples, tmp_path):
    path = samples / "hh_rlhf" / "harmless_base_even.jsonl.gz"
    report = prepare(
        DataConfig(source="hh-rlhf", path=str(path), partition="iid", clients=10), 0, tmp_path / "data"
    )
    rows = report.rows
    assert rows.pairs + rows.judge + sum(rows.dropped.values()) == 1156
    assert rows.pairs == 905
    assert rows.dropped["empty answer"] == 2
    assert "dialogues without a common prompt" not in rows.dropped
    assert report.splits == {"train": 592, "validation": 103, "test": 210}
