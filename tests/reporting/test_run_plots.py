"""Plots of a run show its numbers."""

import math

import pytest

from components.reporting.run_plots import plot_accuracy, plot_learning_curves
from tests.support.plots import drawn_figure
from tests.support.results import accuracy_report, client_record, step_record


def trained(round_index, **losses):
    """A round with the losses of each client's first and last local step."""
    clients = {
        name: client_record(
            {
                "loss": sum(pair) / 2,
                "loss_first": pair[0],
                "loss_last": pair[1],
            }
        )
        for name, pair in losses.items()
    }
    return step_record(round_index, clients)


RECORDS = [
    trained(0, ada=(0.70, 0.65), bea=(0.69, 0.60)),
    step_record(1, {"ada": client_record(losses=[0.4])}, rounds_done=1),
    trained(1, ada=(0.6, 0.4), cyd=(0.55, 0.3)),
]
BEFORE = accuracy_report(clients={"ada": 0.5, "bea": 0.4}, domains={"common": 0.45, "own": 0.5})
AFTER = accuracy_report(clients={"ada": 0.9, "bea": 1.0}, domains={"common": 0.97, "own": 0.5})


@pytest.fixture(scope="module")
def learning_curves(tmp_path_factory):
    """The axes of the learning curves."""
    figure = drawn_figure(
        lambda: plot_learning_curves(RECORDS, tmp_path_factory.mktemp("plots") / "curves.png")
    )
    return figure.axes[0]


def test_learning_curves_are_means_over_clients_at_the_rounds_that_trained(learning_curves):
    first, last, _ = learning_curves.get_lines()
    assert list(first.get_xdata()) == [1, 2]
    assert list(first.get_ydata()) == pytest.approx([0.695, 0.575])
    assert list(last.get_ydata()) == pytest.approx([0.625, 0.35])


@pytest.mark.slow
def test_clients_that_report_a_loss_without_its_steps_have_no_learning_curve(tmp_path):
    records = [step_record(0, {"ada": client_record({"loss": 0.5})})]
    figure = drawn_figure(lambda: plot_learning_curves(records, tmp_path / "curves.png"))
    first, last, _ = figure.axes[0].get_lines()
    assert list(first.get_xdata()) == []
    assert list(last.get_xdata()) == []


def test_learning_curves_show_the_loss_by_chance(learning_curves):
    assert learning_curves.get_lines()[2].get_ydata()[0] == pytest.approx(math.log(2))


@pytest.fixture(scope="module")
def accuracy_axes(tmp_path_factory):
    """The axes of the accuracies, by client and by domain."""
    figure = drawn_figure(
        lambda: plot_accuracy(
            BEFORE, AFTER, "Of the policy", tmp_path_factory.mktemp("plots") / "accuracy.png"
        )
    )
    return figure.axes


def test_accuracies_have_a_bar_before_and_after_for_each_client_and_domain(accuracy_axes):
    by_client, by_domain = ([bar.get_height() for bar in axes.patches] for axes in accuracy_axes)
    assert by_client == [0.5, 0.4, 0.9, 1.0]
    assert by_domain == [0.45, 0.5, 0.97, 0.5]


def test_the_bars_of_a_few_clients_are_named(accuracy_axes):
    names = [text.get_text() for text in accuracy_axes[0].get_xticklabels()]
    assert names == ["ada", "bea"]


@pytest.mark.slow
def test_the_bars_of_many_clients_are_not_named(tmp_path):
    many = accuracy_report(clients={f"client-{n}": n / 60 for n in range(60)})
    figure = drawn_figure(lambda: plot_accuracy(many, many, "Of the policy", tmp_path / "many.png"))
    names = {text.get_text() for text in figure.axes[0].get_xticklabels()}
    assert names == {""}


@pytest.mark.slow
def test_the_files_are_png_images_whose_pixels_follow_the_numbers(tmp_path):
    from matplotlib.image import imread

    plot_accuracy(BEFORE, AFTER, "Of the policy", tmp_path / "one.png")
    plot_accuracy(BEFORE, BEFORE, "Of the policy", tmp_path / "other.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert (imread(tmp_path / "one.png") != imread(tmp_path / "other.png")).any()


def test_no_figure_stays_open(tmp_path):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    plot_learning_curves(RECORDS, tmp_path / "a.png")
    assert pyplot.get_fignums() == before


def test_a_name_with_a_dollar_sign_is_shown_as_it_is(tmp_path):
    report = accuracy_report(clients={"a$b$c": 0.5}, domains={"d": 0.5})
    figure = drawn_figure(lambda: plot_accuracy(report, report, "Of the policy", tmp_path / "dollar.png"))
    names = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert names == [r"a\$b\$c"]
