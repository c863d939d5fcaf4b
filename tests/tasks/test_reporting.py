"""The lines that a run says of itself."""

from tasks.reporting import accuracy_line, partition_line


def test_the_partition_is_said_in_the_columns_of_table_five_over_all_pairs_and_over_those_to_train_on():
    report = {"partition": {"samples": 92858, "clients": 53, "max": 12985, "min": 1, "std": 2284.33}, "partition_train": {"samples": 65000, "clients": 53, "max": 9100, "min": 0, "std": 1600.5}}
    assert partition_line(report) == "92,858 pairs of 53 clients (max 12,985, min 1, std 2,284.33); to train on 65,000 (max 9,100, min 0, std 1,600.50)"


def test_the_accuracy_of_many_domains_is_not_said_in_a_line():
    measured = {"mean": 0.6, "worst": 0.5, "best": 0.75}
    assert accuracy_line(measured | {"domains": {"common": 0.7, "own": 0.5}}) == "held-out accuracy 0.600 (worst client 0.500, best 0.750); common 0.700, own 0.500"
    assert accuracy_line(measured | {"domains": {f"Question {i}?": 0.5 for i in range(36)}}) == "held-out accuracy 0.600 (worst client 0.500, best 0.750)"
