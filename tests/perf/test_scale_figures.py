"""The simulation of eq. 8's weights, in its smallest form."""

import pytest

from perf import weight_scale


def test_the_shares_of_the_clients_sum_to_one():
    sizes = weight_scale.draw_sizes(0)
    assert len(sizes) == weight_scale.CLIENTS
    assert sum(sizes.values()) == pytest.approx(1)
    assert min(sizes.values()) > 0


@pytest.mark.parametrize(("sums", "factor"), [([1, 1, 1], 3), ([0.5, 2.0], 3), ([0.5], 0.5)])
def test_each_rounds_weights_scale_all_that_was_moved_before(sums, factor):
    assert weight_scale.movement(sums) == pytest.approx(factor * weight_scale.MOVEMENT)


def test_the_table_has_the_sums_their_product_and_both_movements(capsys):
    weight_scale.show_scales(draws=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert "53 clients, 5 a round, 500 rounds, 2 draws" in lines[0]
    assert [line.strip().split("  ")[0] for line in lines[3:]] == [
        "sum of a round's weights",
        "log10 of their product",
        "movement by eq. 8",
        "movement by means",
    ]
    assert lines[-1].split()[-5:] == ["0.15", "0.15", "0.15", "0.15", "0"]
