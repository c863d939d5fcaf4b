"""Plots of dvc.yaml as images."""

import pytest

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
