"""Pictures are drawn from what a run records; their pixels follow the numbers."""

import pytest

from components.evaluation.plots import accuracy_picture, learning_curves


def record(number, **losses):
    return {"rounds_done": number, "clients": {name: {"loss": sum(pair) / 2, "loss_first": pair[0], "loss_last": pair[1]} for name, pair in losses.items()}}


RECORDS = [record(1, ada=(0.70, 0.65), bea=(0.69, 0.60)), {"rounds_done": 1, "clients": {"ada": {"losses": [0.4]}}}, record(2, ada=(0.6, 0.4), cyd=(0.55, 0.3))]
BEFORE = {"clients": {"ada": 0.5, "bea": 0.4}, "domains": {"common": 0.45, "own": 0.5}}
AFTER = {"clients": {"ada": 0.9, "bea": 1.0}, "domains": {"common": 0.97, "own": 0.5}}


def pixels(path):
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG")
    return imread(path)


def drawn(monkeypatch):
    """Keeps the figures that are drawn, so that what is on their axes can be read."""
    from matplotlib import pyplot

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    return kept


def test_learning_curves_show_the_rounds_that_trained_with_their_means(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    learning_curves(RECORDS, tmp_path / "curves.png")
    first, last, chance = figures[0].axes[0].get_lines()
    assert list(first.get_xdata()) == [1, 2]
    assert list(first.get_ydata()) == pytest.approx([0.695, 0.575]) and list(last.get_ydata()) == pytest.approx([0.625, 0.35])
    assert chance.get_ydata()[0] == pytest.approx(0.6931, abs=1e-3)
    image = pixels(tmp_path / "curves.png")
    assert image.shape[0] > 300 and image.shape[1] > 500 and 0.01 < (image[..., :3] < 0.9).any(-1).mean() < 0.5


def test_the_accuracy_picture_has_a_bar_before_and_after_for_each_client_and_domain(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    accuracy_picture(BEFORE, AFTER, tmp_path / "accuracy.png")
    clients, domains = ([bar.get_height() for bar in axes.patches] for axes in figures[0].axes)
    assert clients == [0.5, 0.4, 0.9, 1.0] and domains == [0.45, 0.5, 0.97, 0.5]
    assert [label.get_text() for label in figures[0].axes[0].get_xticklabels()] == ["ada", "bea"]
    before = pixels(tmp_path / "accuracy.png")
    accuracy_picture(BEFORE, BEFORE, tmp_path / "other.png")
    assert (pixels(tmp_path / "other.png") != before).any()


def test_pictures_of_many_clients_are_drawn_without_their_names(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    many = {"clients": {f"client-{i}": i / 60 for i in range(60)}, "domains": {"d": 0.5}}
    accuracy_picture(many, many, tmp_path / "many.png")
    assert {label.get_text() for label in figures[0].axes[0].get_xticklabels()} == {""}


def test_no_figure_is_left_open(tmp_path):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    learning_curves(RECORDS, tmp_path / "a.png")
    accuracy_picture(BEFORE, AFTER, tmp_path / "b.png")
    assert pyplot.get_fignums() == before


def test_the_heat_map_has_a_column_for_every_selector_in_the_order_of_the_losses_also_one_without_clients(tmp_path, monkeypatch):
    from matplotlib import pyplot

    from components.evaluation.plots import loss_heatmap

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    slots = [f"selector-{u}" for u in range(12)]
    losses = {"ada": [0.1 * u for u in range(12)], "bea": [float("nan")] * 12}
    loss_heatmap(slots, losses, {"ada": "selector-10", "bea": "selector-2", "cyd": "selector-2"}, {"ada": "x", "bea": None}, tmp_path / "heat.png")
    axes = kept[0].axes[0]
    assert axes.images[0].get_array().shape == (3, 12) and [t.get_text() for t in axes.get_xticklabels()] == slots
    assert {tuple(point) for point in axes.collections[0].get_offsets().tolist()} == {(2.0, 0.0), (2.0, 1.0), (10.0, 2.0)}
    assert [t.get_text() for t in axes.get_yticklabels()] == ["bea", "cyd", "ada (x)"] and (tmp_path / "heat.png").stat().st_size > 1000


def test_the_reward_hacking_picture_starts_where_the_policy_is_the_raw_one(tmp_path, monkeypatch):
    from matplotlib import pyplot

    from components.evaluation.plots import hacking_picture

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    hacking_picture([{"step": 4, "proxy": 0.8, "judge": 0.6}, {"step": 8, "proxy": 0.9, "judge": 0.4}], tmp_path / "curve.png")
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in kept[0].axes[0].lines if line.get_label()[0] != "_"}
    assert lines == {"selectors (proxy)": ([0, 4, 8], [0.5, 0.8, 0.9]), "judge (gold)": ([0, 4, 8], [0.5, 0.6, 0.4])}
