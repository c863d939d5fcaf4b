"""The table of a benchmark: figures of each arm and seed, their means, and win rates pooled over seeds."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.evaluation.winrate import Verdict, win_rate
from components.federation.graph import own_group_share
from components.federation.grouping import rand_index

FIGURES = {
    "common": "common taste", "common_assigned": "common taste, own adapter", "own": "own taste", "own_assigned": "own taste, own adapter", "worst": "worst client", "adjusted_rand_index": "adjusted Rand index",
    "accuracy": "pair accuracy", "margin": "reward margin", "reward": "reward", "best_reward": "best reward", "neighbours": "own-group neighbours", "neighbours_chance": "by chance",
    "answer_accuracy": "answers to questions, accuracy", "success": "answers to questions, success",
    "rougeLsum": "ROUGE-L", "kl": "KL (nats)", "implicit_reward": "implicit reward", "client_steps": "client steps", "train_seconds": "training (s)"}
"""What is averaged over seeds, by the name in the table. Accuracies are on held-out pairs, of the selectors' majority or of the trained policy's implicit reward; "own adapter": each
client's pairs by the adapter that it uses (of its group, or its own; where all use the same, that one). Pair accuracy is the clients' mean. Reward and reward
margin are implicit (beta log pi / pi_ref of the chosen completion, and its difference to the rejected one's), the clients' mean on held-out pairs, after the last
round; best reward is the greatest of the rounds that were measured. Own-group neighbours are the mean over rounds."""


def arm_figures(
    federated: dict[str, Any], aligned: dict[str, Any], evaluated: dict[str, Any], known: dict[str, str | None], local_steps: int,
    curve: Sequence[dict[str, float]] = (),
) -> dict[str, float]:
    """The figures of one run.

    Args:
        federated, aligned, evaluated: the result.json of its phases.
        known: the clients' true groups.
        local_steps: optimiser steps of a training job.
        curve: of a policy, see reward_curve.

    Returns:
        those of FIGURES that the run has.
    """
    after, records = federated["after"], federated["records"]
    trained = [client for record in records if record["phase"] == "train" for client in record["clients"].values()]
    figures = {
        "common": after["domains"].get("common"), "own": after["domains"].get("own"), "worst": after["worst"],
        "own_assigned": after.get("assigned", after)["domains"].get("own"), "common_assigned": after.get("assigned", after)["domains"].get("common"), "kl": aligned["metrics"].get("kl_sequence"),
        "rougeLsum": evaluated["rouge"]["aligned"].get("rougeLsum"), "implicit_reward": evaluated.get("implicit_reward", {}).get("mean"),
        "client_steps": local_steps * len(trained), "train_seconds": sum(client["seconds"] for client in trained)}
    if curve:
        figures |= {"accuracy": after["mean"], "margin": curve[-1]["margin"], "reward": curve[-1]["reward"], "best_reward": max(point["reward"] for point in curve)}
    weights = [record["memory"]["weights"] for record in records if "weights" in record.get("memory", {})]
    if weights and any(known.values()):
        shares = [own_group_share(given, known) for given in weights]
        for name, key in (("neighbours", "neighbours"), ("neighbours_chance", "chance")):
            found = [share[key] for share in shares if not math.isnan(share[key])]
            figures[name] = float(np.mean(found)) if found else None
    answered = evaluated.get("questions", {}).get("aligned", {}).get("mean", {})
    figures |= {"answer_accuracy": answered.get("accuracy"), "success": answered.get("success")}
    if federated["assigned"] and not federated.get("personal") and any(known.values()):
        figures["adjusted_rand_index"] = rand_index(federated["assigned"], known)
    return {name: float(value) for name, value in figures.items() if value is not None}


def reward_curve(measured: dict[int, dict[str, Any]], beta: float) -> list[dict[str, float]]:
    """Implicit reward of the chosen completions, its margin, and the accuracy, by round (DRIFT section 7.1, figures 6 and 7).

    Args:
        measured: clients' accuracy by the number of rounds done, see accuracy.client_accuracy; those of selectors have no reward.
        beta: inverse temperature of the clients' DPO.
    """
    return [{"round": done, "reward": beta * found["reward"], "margin": beta * found["margin"], "accuracy": found["mean"]}
            for done, found in sorted(measured.items()) if "reward" in found]


def rewards_picture(curves: dict[str, dict[int, list[dict[str, float]]]], path: Path) -> None:
    """Reward, reward margin and pair accuracy by round, a line for each arm (mean over seeds) in a band from the least to the greatest seed.

    Args:
        curves: by arm and seed, see reward_curve.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    titles = (("reward", "reward of the chosen completions"), ("margin", "reward margin"), ("accuracy", "accuracy on held-out pairs"))
    for axes, (key, title) in zip(panels, titles, strict=True):
        for arm, runs in curves.items():
            by_round: dict[int, list[float]] = {}
            for point in (point for curve in runs.values() for point in curve):
                by_round.setdefault(int(point["round"]), []).append(point[key])
            rounds = sorted(by_round)
            (line,) = axes.plot(rounds, [np.mean(by_round[n]) for n in rounds], marker="o", markersize=3, label=arm)
            axes.fill_between(rounds, [min(by_round[n]) for n in rounds], [max(by_round[n]) for n in rounds], color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(xlabel="round", title=title)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[-1].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation over seeds, as the table shows them."""
    digits = 0 if np.mean(values) >= 100 else 3
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def pooled(verdicts: Sequence[Sequence[str]], resamples: int, seed: int) -> str:
    """Win rate over the prompts of all seeds, with its bootstrap interval and counts."""
    rate = win_rate([Verdict(v) for given in verdicts for v in given], resamples, seed)
    return "-" if math.isnan(rate.rate) else f"{rate} ({rate.wins}/{rate.ties}/{rate.losses})"


def tables(
    figures: dict[str, dict[int, dict[str, float]]], contests: dict[str, dict[int, list[str]]], resamples: int = 2000
) -> list[tuple[str, list[str], list[list[str]]]]:
    """The tables of a report: means over seeds, win rates pooled over seeds, and the figures of each seed.

    Args:
        figures: by arm and seed, see arm_figures.
        contests: verdicts (Verdict values) of each contest by seed.
        resamples: of the bootstrap.

    Returns:
        title, header and rows of each.
    """
    shown = [name for name in FIGURES if any(name in run for runs in figures.values() for run in runs.values())]
    header = ["method", "seeds", *(FIGURES[name] for name in shown)]
    means = [[arm, str(len(runs)), *(mean_and_spread(v) if (v := [run[name] for run in runs.values() if name in run]) else "-" for name in shown)]
             for arm, runs in figures.items()]
    single = [[arm, str(seed), *(mean_and_spread([run[name]]) if name in run else "-" for name in shown)] for arm, runs in figures.items() for seed, run in runs.items()]
    rates = [[name, str(len(by_seed)), pooled(list(by_seed.values()), resamples, 0)] for name, by_seed in contests.items()]
    return [("Means over seeds (± sample standard deviation)", header, means),
            ("Win rates over the prompts of all seeds", ["contest", "seeds", "win rate [95% interval] (wins/ties/losses)"], rates),
            ("Each seed", ["method", "seed", *header[2:]], single)]


def markdown(title: str, parts: Sequence[tuple[str, list[str], list[list[str]]]], notes: Sequence[str]) -> str:
    """The report as markdown, e.g. for a README."""
    lines = [f"# {title}", "", *(f"- {note}" for note in notes)]
    for name, header, rows in parts:
        lines += ["", f"## {name}", "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def page(title: str, parts: Sequence[tuple[str, list[str], list[list[str]]]], notes: Sequence[str], pictures: Sequence[Path]) -> str:
    """The report as one HTML file, pictures included."""
    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    body = [f"<h1>{html.escape(title)}</h1>", "<ul>", *(f"<li>{html.escape(note)}</li>" for note in notes), "</ul>"]
    for name, header, rows in parts:
        body += [f"<h2>{html.escape(name)}</h2>", "<table>", cells("th", header), *(cells("td", row) for row in rows), "</table>"]
    for picture in pictures:
        body.append(f'<p><img alt="{html.escape(picture.stem)}" src="data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"></p>')
    style = "body{font-family:sans-serif;margin:2em;max-width:80em}table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.3em .6em;text-align:left}img{max-width:100%}"
    return f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style></head><body>{"".join(body)}</body></html>\n'


def picture(figures: dict[str, dict[int, dict[str, float]]], contests: dict[str, dict[int, list[str]]], path: Path) -> None:
    """Accuracies by method, a dot a seed, and the pooled win rates with their intervals.

    Args:
        figures, contests: as tables.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    arms, kinds = list(figures), [("common", "tab:grey"), ("own", "tab:blue"), ("own_assigned", "tab:orange")]
    for k, (name, color) in enumerate(kinds):
        values = [[run[name] for run in figures[arm].values() if name in run] for arm in arms]
        places = [i + (k - 1) * 0.25 for i in range(len(arms))]
        left.bar(places, [np.mean(v) if v else 0 for v in values], width=0.23, color=color, alpha=0.6, label=FIGURES[name])
        for place, given in zip(places, values, strict=True):
            left.scatter([place] * len(given), given, color="black", s=10, zorder=3)
    left.axhline(0.5, color="black", linewidth=0.8, linestyle="--")
    left.set(title="Accuracy on held-out pairs (dots: seeds)", ylim=(0, 1))
    left.set_xticks(range(len(arms)), arms)
    left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    names = list(contests)
    for i, name in enumerate(names):
        rate = win_rate([Verdict(v) for given in contests[name].values() for v in given])
        if not math.isnan(rate.rate):
            right.errorbar([rate.rate], [i], xerr=[[rate.rate - rate.low], [rate.high - rate.rate]], fmt="o", color="tab:blue", capsize=3)
            parsed = rate.wins + rate.ties + rate.losses
            right.scatter([rate.losses / parsed], [i], marker="x", color="tab:red", zorder=3)
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.invert_yaxis()
    right.set(title="Win rate with 95% interval (red: loss rate)", xlim=(0, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
