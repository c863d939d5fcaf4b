"""The tables of a benchmark: figures of each arm and seed, their means, and win rates pooled over seeds."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from components.benchmarks import FIGURES, OF_OBJECTIVE, RAW, figure_label
from components.evaluation.length_control import LengthControlled, control_lengths
from components.evaluation.winrate import Verdict, WinRate, win_rate
from components.federation.firm import TRAJECTORY
from components.federation.graph import own_group_share
from components.federation.grouping import rand_index


@dataclass(frozen=True)
class Contest:
    """A judge's verdicts on the answers of two policies, with one seed.

    Attributes:
        prompts: ids of the prompts.
        verdicts: Verdict values, one a prompt.
        ours, theirs: lengths of the answers (characters), one a prompt.
        consistency: on how many of the pairs the judge's two orders agree, in [0, 1]; None where that was not kept.
    """

    prompts: list[str]
    verdicts: list[str]
    ours: list[int]
    theirs: list[int]
    consistency: float | None = None


@dataclass(frozen=True)
class Pooled:
    """A contest over the answers of all seeds.

    Attributes:
        rate: over all answers; the interval is over them too, which is for these policies and says nothing of other seeds.
        even: the rate at equal length, a tie half a win; its interval likewise.
        by_seed: the rate of each seed alone.
        answers: how many there are.
        prompts: how many different prompts they answer.
        ours, theirs: mean lengths (characters).
    """

    rate: WinRate
    even: LengthControlled
    by_seed: dict[int, WinRate]
    answers: int
    prompts: int
    ours: float
    theirs: float


class Table(NamedTuple):
    """A part of the report; the caption says what the figures cover."""

    title: str
    header: list[str]
    rows: list[list[str]]
    caption: str = ""


class Picture(NamedTuple):
    """A part of the report that only the HTML page has."""

    title: str
    path: Path
    caption: str = ""


def arm_figures(
    federated: dict[str, Any], aligned: dict[str, Any], evaluated: dict[str, Any], known: dict[str, str | None], local_steps: int,
    curve: Sequence[dict[str, float]] = (), answers: Sequence[str] = (),
) -> dict[str, float]:
    """The figures of one run.

    Args:
        federated, aligned, evaluated: the result.json of its phases.
        known: the clients' true groups.
        local_steps: optimiser steps of a training job, for runs of before each job's were kept.
        curve: of a policy, see reward_curve.
        answers: of the aligned policy to the held-out prompts.

    Returns:
        those of FIGURES that the run has.
    """
    after, records = federated["after"], federated["records"]
    trained = [client for record in records if record["phase"] == "train" for client in record["clients"].values()]
    figures = {
        "common": after["domains"].get("common"), "own": after["domains"].get("own"), "worst": after["worst"],
        "own_assigned": after.get("assigned", after)["domains"].get("own"), "common_assigned": after.get("assigned", after)["domains"].get("common"), "kl": aligned["metrics"].get("kl_sequence"),
        "implicit_reward": evaluated.get("implicit_reward", {}).get("mean"),
        "client_steps": sum(client.get("steps", local_steps) for client in trained), "train_seconds": sum(client.get("seconds", 0.0) for record in records for client in record["clients"].values())}
    timed = [record for record in records if "seconds" in record]  # not in runs of before it was kept
    if timed:
        figures["aggregation_seconds"] = sum(record["seconds"] for record in timed) / len({record["round"] for record in timed})
    for by, found in after.get("by", {}).items():
        figures |= {by: found["mean"]} | ({f"{by}_worst": found["worst"]} if by != "explicit" else {})
    if any("bytes_sent" in client for client in trained):
        kept = {name: client.get("bytes_kept", 0) for record in records if record["phase"] == "train" for name, client in record["clients"].items()}
        figures |= {"sent": sum(client.get("bytes_sent", 0) for record in records for client in record["clients"].values()) / 1e6, "kept": float(np.mean(list(kept.values()))) / 1e6 if any(kept.values()) else None}
    if "objectives" in after:
        scores = scores_of(after["objectives"])
        figures |= {f"{OF_OBJECTIVE}{name}": score for name, score in scores.items()} | {"mean_reward": float(np.mean(list(scores.values()))), "sampled_kl": after["objectives"]["kl"]}
        for key in ("lambda_drift", "mean_lambda_drift", "update_drift"):
            figures[key] = float(np.mean([record["server"][key] for record in records if record["phase"] == "train"]))
    if curve:
        figures |= {"accuracy": after["mean"], "margin": curve[-1]["margin"], "reward": curve[-1]["reward"], "best_reward": max(point["reward"] for point in curve)}
    weights = [record["memory"]["weights"] for record in records if "weights" in record.get("memory", {})]
    if weights and any(known.values()):
        shares = [own_group_share(given, known) for given in weights]
        for name, key in (("neighbours", "neighbours"), ("neighbours_chance", "chance")):
            found = [share[key] for share in shares if not math.isnan(share[key])]
            figures[name] = float(np.mean(found)) if found else None
    figures |= answer_figures(evaluated, "aligned", answers)
    if federated["assigned"] and not federated.get("personal") and any(known.values()):
        figures["adjusted_rand_index"] = rand_index(federated["assigned"], known)
    return {name: float(value) for name, value in figures.items() if value is not None}


def scores_of(measured: Mapping[str, float]) -> dict[str, float]:
    """Mean score by objective, of what the flow has measured of a policy."""
    return {name: value for name, value in measured.items() if name not in ("kl", "prompts")}


def front_figures(points: Mapping[str, Mapping[str, float]], preferences: Mapping[str, Mapping[str, float]], worst: Mapping[str, float]) -> dict[str, float]:
    """Hypervolume and rank correlation of one method's policies with one seed.

    Args:
        points: rewards by objective, by arm.
        preferences: weight of each objective, by arm; an arm's are compared by their shares.
        worst: by objective, above which the volume is taken.

    Returns:
        hypervolume; and rank, the least of Spearman's correlations between an arm's share of preference and its reward, over the objectives whose shares differ; 0 of one whose reward is the same in all arms.
    """
    from scipy.stats import spearmanr

    from components.evaluation.pareto import hypervolume

    arms, objectives = list(points), list(worst)
    rewards = np.array([[points[arm][name] for name in objectives] for arm in arms])
    liked = np.array([[preferences[arm][name] for name in objectives] for arm in arms])
    shares = np.round(liked / liked.sum(axis=1, keepdims=True), 9)  # equal ones are not told apart by their rounding
    figures = {"hypervolume": hypervolume(rewards, np.array([worst[name] for name in objectives]))}
    varied = [j for j in range(len(objectives)) if np.ptp(shares[:, j]) > 0]
    return figures | ({"rank": min(float(spearmanr(shares[:, j], rewards[:, j]).statistic) if np.ptp(rewards[:, j]) > 0 else 0.0 for j in varied)} if varied else {})


def answer_figures(evaluated: dict[str, Any], name: str, answers: Sequence[str]) -> dict[str, float]:
    """Those of FIGURES that are of what a policy writes; all that there is to say of the raw one.

    Args:
        evaluated: result.json of the phase.
        name: aligned or raw.
        answers: the policy's, to the held-out prompts.
    """
    questions = evaluated.get("questions", {}).get(name, {}).get("mean", {})
    figures = {"rougeLsum": evaluated["rouge"].get(name, {}).get("rougeLsum"), "characters": float(np.mean([len(text) for text in answers])) if answers else None,
               "answer_accuracy": questions.get("accuracy"), "success": questions.get("success")}
    return {key: value for key, value in figures.items() if value is not None}


def rand_curve(records: Sequence[dict[str, Any]], known: Mapping[str, str | None]) -> list[dict[str, float]]:
    """Adjusted Rand index of each grouping, with the rounds that were done by then; empty where the true groups are not known.

    Args:
        records: of committed steps.
        known: the clients' true groups.
    """
    return [{"round": record["rounds_done"], "index": rand_index(record["assigned"], known)} for record in records if record["phase"] == "group"] if any(known.values()) else []


def reward_curve(measured: dict[int, dict[str, Any]], beta: float) -> list[dict[str, float]]:
    """Implicit reward of the chosen completions, its margin, and the accuracies, by round (DRIFT section 7.1, figures 6 and 7; FedPDPO figures 3 and 4).

    Args:
        measured: clients' accuracy by the number of rounds done, see accuracy.client_accuracy; those of selectors have no reward.
        beta: inverse temperature of the clients' DPO.
    """
    return [{"round": done, "reward": beta * found["reward"], "margin": beta * found["margin"], "accuracy": found["mean"]} | {by: of["mean"] for by, of in found.get("by", {}).items()}
            for done, found in sorted(measured.items()) if "reward" in found]


def objectives_curve(measured: Mapping[int, Mapping[str, float]], records: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Rewards and KL where they were measured, and the clients' disagreement after each round, by the rounds done; empty of methods without objectives."""
    if not measured:
        return []
    apart = {record["rounds_done"]: {"distance of clients' weights": record["server"]["lambda_drift"], "distance of clients' updates": record["server"]["update_drift"]} for record in records if record["phase"] == "train"}
    return [{"round": done} | {f"reward, {name}": value for name, value in scores_of(measured.get(done, {})).items()} | ({"KL (nats)": measured[done]["kl"]} if done in measured else {}) | apart.get(done, {})
            for done in sorted({*measured, *apart})]


def weights_curves(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By objective and client, (rounds done, a fraction of one for a step; lambda) of each step that the client took."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for record in records:
        for client, metrics in record["clients"].items() if record["phase"] == "train" else ():
            for name, values in metrics.get(TRAJECTORY, {}).items():
                steps = [(record["rounds_done"] - 1 + (n + 1) / len(values), value) for n, value in enumerate(values)]
                found.setdefault(name, {}).setdefault(client, []).extend(steps)
    return found


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation over seeds, as the table shows them."""
    digits = 0 if np.mean(values) >= 100 else 3
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def pool(by_seed: Mapping[int, Contest], resamples: int = 2000, seed: int = 0) -> Pooled:
    """A contest over the answers of all seeds, with intervals by bootstrap over the answers, and each seed alone."""
    verdicts = [Verdict(v) for contest in by_seed.values() for v in contest.verdicts]
    ours, theirs = ([n for contest in by_seed.values() for n in getattr(contest, side)] for side in ("ours", "theirs"))
    return Pooled(
        win_rate(verdicts, resamples, seed), control_lengths(verdicts, ours, theirs, resamples, seed),
        {s: win_rate([Verdict(v) for v in contest.verdicts], resamples, seed) for s, contest in by_seed.items()},
        len(verdicts), len({prompt for contest in by_seed.values() for prompt in contest.prompts}), float(np.mean(ours or [math.nan])), float(np.mean(theirs or [math.nan])))


def counted(rate: WinRate) -> str:
    """Wins, ties and losses."""
    return f"{rate.wins}/{rate.ties}/{rate.losses}"


def at_equal_length(even: LengthControlled) -> str:
    """Rate and interval, as the tables show them."""
    return "-" if math.isnan(even.rate) else f"{even.rate:.1%} [{even.low:.1%}, {even.high:.1%}]"


def contests_table(pools: Mapping[str, Pooled]) -> Table:
    """Win rates, as they are and at equal length, over the answers of all seeds, and by seed."""
    rows = []
    for name, found in pools.items():
        rate, known = found.rate, not math.isnan(found.rate.rate)
        by_seed = "; ".join(f"{seed}: " + (f"{one.rate:.1%} ({counted(one)})" if not math.isnan(one.rate) else "-") for seed, one in found.by_seed.items())
        rows.append([name, f"{found.answers} ({found.prompts})", f"{rate} ({counted(rate)})" if known else "-", by_seed,
                     f"{found.even.uncontrolled:.1%}" if known else "-", at_equal_length(found.even), f"{found.ours:.0f}, {found.theirs:.0f}" if found.answers else "-"])
    return Table(
        "Win rates over the answers of all seeds", ["contest", "answers (different prompts)", "win rate [95%] (wins/ties/losses)", "by seed", "a tie half", "a tie half, at equal length [95%]", "characters"], rows,
        "A win rate is wins / (wins + ties + losses). Intervals are 95% bootstraps over the answers (the same prompt with two seeds counts as two): they are about these "
        "policies, one a seed, and hold for no other seed. Where the seeds lie further apart than the interval is wide, the seed decides and not the method. At equal length: what a logistic model of the length "
        "difference predicts for answers of the same length (components/evaluation/length_control.py).")


def judges_table(contests: Mapping[str, Mapping[int, Contest]], judges: Mapping[int, Mapping[str, float]]) -> Table:
    """The judge's position consistency in each contest and seed, and its own accuracy.

    Args:
        contests: of each name and seed.
        judges: by seed, the figures of its training; none of a judge that was not trained.
    """
    seeds = sorted({seed for by_seed in contests.values() for seed in by_seed})
    rows = [[f"position consistency, {name}", *(as_share(by_seed[seed].consistency) if seed in by_seed else "-" for seed in seeds)]
            for name, by_seed in contests.items() if any(contest.consistency is not None for contest in by_seed.values())]
    if any(judges.values()):
        domains = sorted({key for figures in judges.values() for key in figures if key.startswith("judge_accuracy/")})
        for key in ("judge_accuracy", *domains):
            rows.append(["own accuracy" + key.removeprefix("judge_accuracy").replace("/", ", pairs of domain "), *(as_share(judges.get(seed, {}).get(key)) for seed in seeds)])
        pairs = [judges.get(seed, {}).get("judge_held_out_pairs") for seed in seeds]
        rows.append(["own accuracy, held-out pairs", *("not recorded" if n is None else f"{n:.0f}" for n in pairs)])
    return Table("The judge", ["", *(f"seed {seed}" for seed in seeds)], rows,
                 "Position consistency: the share of pairs on which its verdicts on both orders agree; contests for which it was not kept are left out. Its own accuracy is on pairs of owners outside the federation that it was not trained on.")


def as_share(value: float | None) -> str:
    """A share in [0, 1] as the tables show it."""
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def figures_tables(figures: Mapping[str, Mapping[int, Mapping[str, float]]], raw: Mapping[int, Mapping[str, float]]) -> tuple[Table, Table]:
    """Means over seeds, and the figures of each seed.

    Args:
        figures: by arm and seed, see arm_figures.
        raw: the raw policy's by seed, see answer_figures.
    """
    every = dict(figures) | ({RAW: raw} if raw else {})
    there = {name for runs in every.values() for run in runs.values() for name in run}
    shown = [*(name for name in FIGURES if name in there), *sorted(name for name in there if name.startswith(OF_OBJECTIVE))]
    header = ["method", "seeds", *map(figure_label, shown)]
    means = [[arm, str(len(runs)), *(mean_and_spread(v) if (v := [run[name] for run in runs.values() if name in run]) else "-" for name in shown)]
             for arm, runs in every.items()]
    single = [[arm, str(seed), *(mean_and_spread([run[name]]) if name in run else "-" for name in shown)] for arm, runs in every.items() for seed, run in runs.items()]
    return (Table("Means over seeds", header, means, "Mean ± sample standard deviation over seeds."), Table("Each seed", ["method", "seed", *header[2:]], single))


def samples_table(name: str, answers: Mapping[str, Sequence[Mapping[str, Any]]], most: int = 4) -> Table:
    """What the policies of a front, one a preference, answer to the same prompts.

    Args:
        name: of the front.
        answers: by arm, rows with prompt_id, prompt, and the texts of aligned and raw, as evaluation keeps them.
        most: prompts that are shown, the first by id of those that all arms answered.
    """
    by_arm = {arm: {row["prompt_id"]: row for row in rows} for arm, rows in answers.items()}
    shared = sorted(set.intersection(*map(set, by_arm.values())))[:most]
    first = next(iter(by_arm.values()))
    rows = [[first[prompt]["prompt"], first[prompt]["raw"]["text"], *(rows[prompt]["aligned"]["text"] for rows in by_arm.values())] for prompt in shared]
    return Table(f"Answers by preference, {name}", ["prompt", RAW, *by_arm], rows, "The same held-out prompts for all, as they come by id; nothing is chosen.")


def markdown(title: str, parts: Sequence[Table | Picture], notes: Sequence[str]) -> str:
    """The report as markdown, e.g. for a README; without pictures."""
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").splitlines()) for cell in cells) + " |"

    lines = [f"# {title}", "", *(f"- {note}" for note in notes)]
    for part in parts:
        if isinstance(part, Table):
            lines += ["", f"## {part.title}", "", *([part.caption, ""] if part.caption else []),
                      line(part.header), f"|{'---|' * len(part.header)}", *map(line, part.rows)]
    return "\n".join(lines) + "\n"


STYLE = (
    "body{font-family:sans-serif;margin:2em auto;padding:0 1em;max-width:100em;line-height:1.4;color:#222}li,p{max-width:75em}.wide{overflow-x:auto}h2{margin-top:2em}"
    "table{border-collapse:collapse;font-size:.85em;font-variant-numeric:tabular-nums}td,th{border:1px solid #ccc;padding:.3em .6em;text-align:left;vertical-align:top}"
    "th{background:#f2f2f2}td:first-child{font-weight:bold;min-width:9em}tr:nth-child(even) td{background:#fafafa}img{max-width:100%}.caption{color:#555}"
    ".n{white-space:nowrap}.holds{color:#176b2c}.partly{color:#8a6100}.fails{color:#a11}")
CLASSES = {"may be chance": "partly", "holds in every seed": "holds", "holds on average": "partly", "does not hold": "fails"}


def page(title: str, parts: Sequence[Table | Picture], notes: Sequence[str]) -> str:
    """The report as one HTML file, pictures included."""
    def cell(tag: str, text: str) -> str:
        kind = next((name for words, name in CLASSES.items() if words in text), "n" if tag == "td" and len(text) <= 20 else None)
        return f"<{tag}{f' class={kind}' if kind else ''}>{html.escape(text)}</{tag}>"

    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(cell(tag, text) for text in row) + "</tr>"

    body = [f"<h1>{html.escape(title)}</h1>", "<ul>", *(f"<li>{html.escape(note)}</li>" for note in notes), "</ul>"]
    for part in parts:
        body += [f"<h2>{html.escape(part.title)}</h2>", *([f'<p class="caption">{html.escape(part.caption)}</p>'] if part.caption else [])]
        if isinstance(part, Table):
            body += ['<div class="wide"><table>', cells("th", part.header), *(cells("td", row) for row in part.rows), "</table></div>"]
        else:
            body.append(f'<p><img alt="{html.escape(part.title)}" src="data:image/png;base64,{base64.b64encode(part.path.read_bytes()).decode()}"></p>')
    return f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style></head><body>{"".join(body)}</body></html>\n'
