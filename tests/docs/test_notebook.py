"""The notebook of the tutorials: its cells run one after the other, on the recipe `debug`."""

import json
from pathlib import Path

import matplotlib as mpl
import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "demo.ipynb"
CHOICE = 'RECIPE, OVERRIDES = "summarization/demo", ["seed=0"]'


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_has_five_cells_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len(code_cells()) == 5
    assert CHOICE in code_cells()[0]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.long
@pytest.mark.pipeline
def test_the_cells_of_the_notebook_run(new_workplace, capsys, monkeypatch):
    monkeypatch.setattr(mpl, "rcParams", mpl.rcParams.copy())
    mpl.use("Agg")
    first, *others = code_cells()
    cells = [first.replace(CHOICE, 'RECIPE, OVERRIDES = "debug", ["federation.rounds=2"]'), *others]
    names: dict = {}

    def run():
        for number, cell in enumerate(cells, 1):
            exec(compile(cell, f"cell {number}", "exec"), names)

    new_workplace("notebook").call(run)
    printed = capsys.readouterr().out
    assert "fedbis 2 rounds, 4 clients" in printed
    assert "clients' mean" in printed
    assert "aligned against base: " in printed
    assert list(names["losses"]) == [1, 2]
