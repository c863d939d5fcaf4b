"""Shared parts of plots: files, escaped names, and bands over seeds."""

import pytest

from components.evaluation.plotting import integer_ticks, label, plot_bands, save_figure

CURVES = {
    "a$b": {
        0: [{"round": 0, "reward": 1.0}, {"round": 2, "reward": 4.0}],
        1: [{"round": 0, "reward": 3.0}, {"round": 4, "reward": 5.0}],
    },
    "without": {0: [{"round": 0, "margin": 1.0}]},
}


def test_a_dollar_sign_of_a_name_starts_no_formula():
    assert label("a$b") == r"a\$b"


@pytest.fixture(scope="module")
def bands(tmp_path_factory):
    """The axes of the rewards above."""
    path = tmp_path_factory.mktemp("plots") / "bands.png"
    with save_figure(path) as (_, axes):
        plot_bands(axes, CURVES, "reward")
    assert path.read_bytes().startswith(b"\x89PNG")
    return axes


def test_the_line_of_an_arm_is_the_mean_over_the_seeds_that_have_the_round(bands):
    (line,) = bands.get_lines()
    assert list(line.get_xdata()) == [0, 2, 4]
    assert list(line.get_ydata()) == [2.0, 4.0, 5.0]
    assert line.get_label() == r"a\$b"


def test_the_band_of_an_arm_is_from_the_smallest_to_the_largest_seed(bands):
    (band,) = bands.collections
    first_round = {y for x, y in band.get_paths()[0].vertices.tolist() if x == 0}
    assert first_round == {1.0, 3.0}


def test_ticks_of_rounds_are_whole_numbers(bands):
    assert all(float(tick).is_integer() for tick in bands.get_xticks())


def test_a_failing_plot_leaves_no_figure_open_and_no_file(tmp_path):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    with pytest.raises(ZeroDivisionError), save_figure(tmp_path / "plot.png") as (_, axes):
        integer_ticks(axes)
        raise ZeroDivisionError
    assert pyplot.get_fignums() == before
    assert not (tmp_path / "plot.png").exists()
