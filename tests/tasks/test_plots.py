"""Plots of dvc.yaml as images."""

import pytest
from matplotlib import font_manager

from tasks import plots
from tasks.plots import write_plots

PNG = b"\x89PNG"


@pytest.mark.parametrize("clients", [0, 3, 3000])
def test_each_table_has_an_image(tmp_path, clients):
    rounds = "".join(f"{n},0.7,0.6\n" for n in range(1, 3))
    (tmp_path / "rounds.csv").write_text(f"round,loss_first,loss_last\n{rounds}")
    (tmp_path / "dpo.csv").write_text("step,loss,margin\n")  # of a policy that the clients trained
    lines = "".join(f"the ${n}_$ \\frac{{,0.5,{n / clients}\n" for n in range(clients))
    (tmp_path / "accuracy.csv").write_text(f"client,before,after\n{lines}")
    write_plots(tmp_path)
    for name in ("rounds", "dpo", "accuracy"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG), name


def test_characters_that_no_font_has_are_shown_as_codes(monkeypatch):
    own = [font for font in font_manager.fontManager.ttflist if font.name == plots.DEFAULT_FONT]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    names = ["代理-1", "Zoë", "\N{GRINNING FACE}b"]
    assert plots._drawable(names) == (["\\u4ee3\\u7406-1", "Zoë", "\N{GRINNING FACE}b"], ["DejaVu Sans"])


def test_a_font_that_has_the_characters_of_a_name_draws_it():
    labels, families = plots._drawable(["a", "Ⓐ"])  # the second is in STIX, which Matplotlib brings too
    assert labels == ["a", "Ⓐ"]
    assert families[0] == plots.DEFAULT_FONT
    assert len(families) == 2


@pytest.mark.filterwarnings("error:Glyph")
def test_names_of_any_script_are_drawn_without_a_warning(tmp_path):
    plots._draw_bars(tmp_path / "a.png", ["代理-1", "агент", "سجل"], ["0.1", "0.5", "1"], "accuracy")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
