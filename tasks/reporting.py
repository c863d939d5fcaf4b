"""What a run says about itself: lines while it goes on, the table at its end, and the links between the two UIs."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

from components.config import Recipe
from components.models.adapters import write_atomically
from tasks.runs import PROJECT, Run, read_json, write_json
from tasks.uncached import task

DOMAINS = 20
"""SHP has 18 (FedBiscuit section 6); the 36 opening questions of the embedded conversations are sentences."""
LENGTH_CONTROLLED = ("length_controlled", "length_controlled_low", "length_controlled_high")
CONTESTS = {"aligned_vs_raw": "aligned against raw policy", "aligned_vs_human": "aligned against {references}", "raw_vs_human": "raw against {references}"}


def measured_rounds(folder: Path, federated: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Held-out accuracies of a finished federation by the rounds done: before the first, every federation.evaluate_every, after the last.

    Args:
        folder: of the federation.
        federated: its result.
    """
    return _by_rounds(folder, "accuracy") | {0: federated["before"], federated["rounds"]: federated["after"]}


def measured_objectives(folder: Path, federated: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Rewards of its policy, likewise; empty of methods without objectives."""
    if "objectives" not in federated["after"]:
        return {}
    return _by_rounds(folder, "rewards") | {0: federated["before"]["objectives"], federated["rounds"]: federated["after"]["objectives"]}


def _by_rounds(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    return {int(path.stem.rsplit("-", 1)[1]): read_json(path) for path in folder.glob(f"{kind}-round-*.json")}


def accuracy_metrics(measured: dict[str, Any]) -> dict[str, float]:
    """Held-out accuracy as metrics: of the majority, and of the adapter that each client is assigned."""
    rewards = {f"rewards/{name}": value for name, value in measured.get("objectives", {}).items() if name != "prompts"}
    return rewards | {f"{prefix}/{name}": value for prefix, part in (("accuracy", measured), ("accuracy_assigned", measured.get("assigned"))) if part
            for name, value in [(key, part[key]) for key in ("mean", "worst", "best", "margin", "reward") if key in part] + [(f"domain/{d or 'all'}", v) for d, v in part["domains"].items()]
            + [(f"{by}/{key}", figures[key]) for by, figures in part.get("by", {}).items() for key in ("mean", "worst", "best")]}


BY = {"summed": "by log-likelihood, summed", "per_token": "by log-likelihood a token", "explicit": "by the reward head"}
"""What preference accuracy is measured by beside the implicit reward, as in a table."""


def accuracy_line(measured: dict[str, Any]) -> str:
    """Held-out accuracy as a line."""
    def part(values: dict[str, Any]) -> str:
        shown = ", ".join(f"{name or 'all pairs'} {value:.3f}" for name, value in _shown(values["domains"]).items())
        return f"{values['mean']:.3f} (worst client {values['worst']:.3f}, best {values['best']:.3f})" + (f"; {shown}" if shown else "")

    return f"held-out accuracy {part(measured)}" + (f" | with the assigned adapter {part(measured['assigned'])}" if "assigned" in measured else "")


def rewards_line(found: dict[str, float]) -> str:
    """The policy's rewards as a line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in found.items() if name not in ("kl", "prompts")) + f" on {found['prompts']} held-out prompts; KL {found['kl']:.2f} nats a completion"


def questions_line(answered: dict[str, Any]) -> str:
    """The answers to questions as a line: means over the sets."""
    def part(figures: dict[str, Any]) -> str:
        mean = figures["mean"]
        success = f", success at {figures['samples']} {mean['success']:.3f} ({mean['success_chance']:.3f})" if figures["samples"] else ""
        return f"accuracy {mean['accuracy']:.3f} (by chance {mean['chance']:.3f}){success}, unparsable {mean['unparsable_share']:.3f}"

    return " | ".join(f"{policy} {part(figures)}" for policy, figures in answered.items())


def partition_line(report: dict[str, Any]) -> str:
    """The partition as a line: the row of FedBiscuit's table 5, over all the clients' pairs and over those they train on."""
    def row(kept: dict[str, Any]) -> str:
        return f"max {kept['max']:,}, min {kept['min']:,}, std {kept['std']:,.2f}"

    every, train = report["partition"], report["partition_train"]
    return f"{every['samples']:,} pairs of {every['clients']:,} clients ({row(every)}); to train on {train['samples']:,} ({row(train)})"


def margins_line(report: dict[str, Any]) -> str:
    """How far apart the scores of the pairs of thoughts are, and how many siblings were tied."""
    margins, rows = report["margins"], report["rows"]
    ties = (rows.get("trees") or rows)["dropped"].get("same score", 0)
    return f"{margins['pairs']:,} pairs (margin min {margins['min']:.3g}, median {margins['median']:.3g}, max {margins['max']:.3g}); {ties:,} ties gave none"


def round_line(record: dict[str, Any]) -> str:
    """A step of the federation as a line."""
    if record["phase"] == "group":
        sizes = ", ".join(f"{name.removesuffix('/size')} {value}" for name, value in record["server"].items() if name.endswith("/size"))
        line = f"grouped {len(record['assigned'])} clients ({sizes}), {record['server']['moved']} moved, {record['server']['without_vote']} without a vote"
        return line + "".join(f"; failed: {name} ({reason})" for name, reason in record["failed"].items())
    losses = [client["loss"] for client in record["clients"].values() if "loss" in client]
    parts = [f"{len(record['clients'])} clients"]
    if losses:
        parts.append(f"training loss {sum(losses) / len(losses):.3f}")
    steps = [f"{value:.3f}" for name, value in record["server"].items() if name.split("/")[-1] == "server_step"]
    if steps:
        parts.append(f"server moved {', '.join(steps)}")
    for what in ("failed", "refused"):
        if record[what]:
            parts.append(f"{what}: " + "; ".join(f"{name} ({reason})" for name, reason in record[what].items()))
    return ", ".join(parts)


@task()
def write_report(run: Run, recipe: Recipe) -> None:
    """Write report/metrics.json, summary.txt, and the curves for `dvc plots`."""
    federation, alignment, evaluation = (read_json(folder / "result.json") for folder in (run.federation, run.alignment, run.evaluation))
    contests = evaluation["contests"]
    metrics = {
        "accuracy": {moment: {k.removeprefix("accuracy/"): v for k, v in accuracy_metrics(federation[moment]).items()} for moment in ("before", "after")},
        "win_rate": {name: {key: contest[key] for key in ("win_rate", "low", "high", "consistency", "ties_half", *LENGTH_CONTROLLED)} for name, contest in contests.items()},
        "judge": {name.removeprefix("judge_"): value for name, value in evaluation["judge_figures"].items() if "accuracy" in name},
        "kl": {name.removeprefix("kl_"): value for name, value in alignment["metrics"].items() if name.startswith("kl_")},
        "rouge": evaluation["rouge"]} | ({"alpaca_eval": evaluation["alpaca_eval"]["contests"]} if "alpaca_eval" in evaluation else {})
    metrics |= {"questions": {policy: question_figures(figures) for policy, figures in evaluation["questions"].items()}} if "questions" in evaluation else {}
    run.report.mkdir(parents=True, exist_ok=True)
    write_json(run.report / "metrics.json", _finite(metrics))
    trained = [record for record in federation["records"] if any("loss" in c for c in record["clients"].values())]
    _write_csv(run.report / "rounds.csv", ["round", "loss_first", "loss_last"], [
        [record["rounds_done"], *(_mean([c[key] for c in record["clients"].values()]) for key in ("loss_first", "loss_last"))] for record in trained])
    _write_csv(run.report / "dpo.csv", ["step", "loss", "margin"], [
        [entry["step"], entry["loss"], entry.get("rewards/margins", "")] for entry in alignment["history"]])
    _write_csv(run.report / "accuracy.csv", ["client", "before", "after"], [
        [name, federation["before"]["clients"][name], value] for name, value in federation["after"]["clients"].items()])
    write_atomically(run.report / "summary.txt", summary(run, recipe, federation, alignment, evaluation).encode())


def summary(run: Run, recipe: Recipe, federation: dict[str, Any], alignment: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """The table that a run ends with."""
    before, after = federation["before"], federation["after"]
    pairs, what = after["pairs"], ("Selector accuracy" if federation["trains"] == "selector" else "Implicit reward")
    lines = [f"{recipe.name}, seed {recipe.seed}: {recipe.federation.method}, {federation['rounds']} rounds", "",
             f"{f'{what} on {pairs} held-out pairs':<39}{'before':>8} {'after':>8}"]
    lines += _accuracy_rows(before, after)
    for by, figures in after.get("by", {}).items():
        lines += [f"  {BY[by]:<36} {before['by'][by]['mean']:>8.3f} {figures['mean']:>8.3f}", f"  {'  worst client':<36} {before['by'][by]['worst']:>8.3f} {figures['worst']:>8.3f}"]
    if federation.get("personal") or federation.get("private"):
        what = "each client's own adapter, on its own pairs" if federation["personal"] else "each client's own parts with the server's adapter, on its own pairs"
        lines += [f"  {what}", f"  {'reward margin over beta, mean (nats)':<36} {before['margin']:>8.3f} {after['margin']:>8.3f}"]
    if "objectives" in after:
        lines += ["", f"{'Rewards on ' + str(after['objectives']['prompts']) + ' held-out prompts':<39}{'before':>8} {'after':>8}"]
        lines += [f"  {'KL to the reference (nats)' if name == 'kl' else name:<36} {before['objectives'][name]:>8.3f} {value:>8.3f}" for name, value in after["objectives"].items() if name != "prompts"]
    if "assigned" in after:
        lines += ["  with the selector of each client's own group", *_accuracy_rows(before, after["assigned"])]
    report = read_json(run.prepared / "report.json")
    author = report["prompts"].get("test", {}).get("references") or "human text"
    contests = {name: label.format(references=author) for name, label in CONTESTS.items()}
    lines += ["", f"Win rate on {len(read_json(run.evaluation / 'answers.json'))} held-out prompts         rate  [95% interval]  wins/ties/losses  consistency"]
    for name, c in evaluation["contests"].items():
        counts = f"{c['wins']}/{c['ties']}/{c['losses']}" + (f" ({c['unparsable']} unparsable)" if c["unparsable"] else "")
        lines.append(f"  {contests[name]:<36} {c['win_rate']:>6.1%}  [{c['low']:.1%}, {c['high']:.1%}]  {counts:>12}  {_percent(c['consistency']):>10}")
    figures = evaluation["judge_figures"]
    own = f"; its own accuracy {figures['judge_accuracy']:.3f} on {figures.get('judge_held_out_pairs', 'its')} held-out pairs" if "judge_accuracy" in figures else ""
    lines.append(f"  judge: {evaluation['judge']}{own}")
    kl = alignment["metrics"].get("kl_sequence")
    if kl is not None:
        lines.append(f"  KL to the reference ({alignment['reference']}): {kl:.2f} nats a completion")
    if "implicit_reward" in evaluation:
        lines.append(f"  implicit reward of the aligned policy on {evaluation['implicit_reward']['pairs']} held-out pairs: {accuracy_line(evaluation['implicit_reward'])}")
    if "curve" in evaluation:
        lines.append("  preferred to raw over DPO (step: selectors / judge): " + ", ".join(f"{p['step']}: {p['proxy']:.2f} / {p['judge']:.2f}" for p in evaluation["curve"]))
    rouge = evaluation["rouge"]
    if rouge["aligned"]:
        lines.append(f"  ROUGE-L against {author}: " + ", ".join(f"{policy} {values['rougeLsum']:.3f}" for policy, values in rouge.items()))
    lines += ["", "Win rate at equal length (a tie is half a win)  as it is  at equal length  [95% interval]"]
    for name, c in evaluation["contests"].items():
        rate, low, high = (_percent(c[key]) for key in LENGTH_CONTROLLED)
        lines.append(f"  {contests[name]:<43} {_percent(c['ties_half']):>8}  {rate:>15}  [{low}, {high}]")
    lines += ["", *question_lines(evaluation["questions"])] if "questions" in evaluation else []
    lines += ["", *alpaca_lines(evaluation["alpaca_eval"])] if "alpaca_eval" in evaluation else []
    lines += ["", "Adapters", *(f"  {name:<10}  {_relative(entry['folder'])}  (sha256 {entry['hash'][:12]})" for name, entry in federation["adapters"].items()),
              f"  {'aligned':<10}  {_relative(alignment['adapter'])}  (registered as {alignment['model_uri']})"]
    return "\n".join([*lines, "", *ui_commands(run)]) + "\n"


def question_figures(figures: dict[str, Any]) -> dict[str, dict[str, float]]:
    """A policy's figures by set, and those over all questions and over the sets, side by side."""
    return figures["sets"] | {"all": figures["all"], "mean": figures["mean"]}


def question_lines(answered: dict[str, Any]) -> list[str]:
    """The part of the table with the answers to questions (DRIFT section 7.1)."""
    samples = next(iter(answered.values()))["samples"]
    lines = [f"{'Answers to questions':<30} {'accuracy':>8}  {'[95% interval]':<16} {'chance':>6} {'unparsable':>10}"
             + (f"  {f'success at {samples}':>13}  {'[95% interval]':<16} {'chance':>6}" if samples else "")]

    def row(label: str, f: dict[str, Any]) -> str:
        intervals = [f"[{f[f'{name}low']:.1%}, {f[f'{name}high']:.1%}]" if "low" in f else "" for name in ("", "success_")[: 1 + bool(samples)]]
        line = f"  {label:<28} {f['accuracy']:>8.1%}  {intervals[0]:<16} {f['chance']:>6.1%} {f['unparsable_share']:>10.1%}"
        return (line + (f"  {f['success']:>13.1%}  {intervals[1]:<16} {f['success_chance']:>6.1%}" if samples else "")).rstrip()

    tables = {policy: question_figures(figures) for policy, figures in answered.items()}
    for name in next(iter(tables.values())):
        several = {"all": "all questions", "mean": "mean over the sets"}
        if name in several and len(next(iter(answered.values()))["sets"]) == 1:
            continue
        for policy, figures in tables.items():
            count = f" ({figures[name]['questions']})" if "questions" in figures[name] else ""
            lines.append(row(f"{several.get(name, name)}{count}, {policy}", figures[name]))
    cut = max(figures["all"]["cut"] for figures in answered.values())
    return [*lines, *([f"  {cut} questions did not fit policy.max_prompt_tokens and lost their ends: raise it, or set evaluation.questions.max_question_tokens"] if cut else [])]


def alpaca_lines(annotated: dict[str, Any]) -> list[str]:
    """AlpacaEval's part of the table, in the units of its leaderboard (percent)."""
    lines = [f"{'AlpacaEval (percent)':<40} {'win rate':>8}  {'s.e.':>5}  {'discrete':>8}  {'length-controlled':>17}  at equal length  [95% interval]"]
    for name, c in annotated["contests"].items():
        controlled, even, low, high = (_two_digits(c.get(key)) for key in ("length_controlled_winrate", "equal_length_win_rate", "equal_length_low", "equal_length_high"))
        contest = f"{name.split('_')[0]} against {c['baseline']}"
        lines.append(f"  {contest:<38} {c['win_rate']:>8.2f}  {_two_digits(c['standard_error']):>5}  {c['discrete_win_rate']:>8.2f}  {controlled:>17}  {even:>15}  [{low}, {high}]")
        missing = f", {c['n_missing']} without a preference" if c["n_missing"] else ""
        lines.append(f"    {c['n_wins']} wins, {c['n_draws']} draws, {c['n_wins_base']} losses{missing}; {c['avg_length']:,} characters on average")
    return [*lines, f"  annotator: {annotated['annotator']}", *([f"  {annotated['missing']}"] if annotated["missing"] else [])]


def ui_commands(run: Run) -> list[str]:
    """The commands that open both UIs on a run."""
    from tasks.tracking import mlflow_client, tracking_uri

    notes = run.notes()
    uri, run_id = tracking_uri(), notes["mlflow_run_id"]
    page = f"#/experiments/{mlflow_client().get_run(run_id).info.experiment_id}/runs/{run_id}"
    if uri.startswith("http"):
        mlflow = [f"  MLflow:   {uri}/{page}"]
    else:
        mlflow = [f"  MLflow:   make mlflow-ui      then open http://127.0.0.1:5000/{page}"]
    url = notes.get("flow_run_url") or ""
    if os.environ.get("FED_RLHF_PRIVATE_PREFECT"):  # that server ends with the run; its database stays
        url = "make prefect-ui     then open http://127.0.0.1:4200/" + url.split("/", 3)[-1]
    return ["Open this run", *mlflow, f"  Prefect:  {url}"]


@task()
def link_artifacts(run: Run, recipe: Recipe) -> None:
    """Prefect artifacts of the flow run: a link to its MLflow run, and its table once there is one."""
    from prefect.artifacts import create_link_artifact, create_markdown_artifact

    from tasks.tracking import mlflow_client, tracking_uri

    run_id = run.notes()["mlflow_run_id"]
    experiment = mlflow_client().get_run(run_id).info.experiment_id
    base = tracking_uri() if tracking_uri().startswith("http") else "http://127.0.0.1:5000"
    create_link_artifact(f"{base}/#/experiments/{experiment}/runs/{run_id}", link_text=f"MLflow run of {run.id}", key="mlflow-run", description=recipe.name)
    table = run.report / "summary.txt"
    if table.is_file():
        create_markdown_artifact(f"```\n{table.read_text(encoding='utf-8')}\n```", key="report", description=recipe.name)


def _accuracy_rows(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    rows = [("clients' mean", before["mean"], after["mean"]), ("worst client", before["worst"], after["worst"]), ("best client", before["best"], after["best"])]
    rows += [(_domain(name), before["domains"][name], value) for name, value in _shown(after["domains"]).items()]
    return [f"  {name:<36} {first:>8.3f} {last:>8.3f}" for name, first, last in rows]


def _shown(domains: dict[str, float]) -> dict[str, float]:
    """The domains that a line or a table shows: all, or none where there are too many to read (metrics.json has them)."""
    return domains if len(domains) <= DOMAINS else {}


def _domain(name: str) -> str:
    return {"common": "common-taste pairs", "own": "own-taste pairs"}.get(name, f"domain {name}" if name else "all pairs")


def _finite(tree: Any) -> Any:
    """The same numbers with null for what is not one, as JSON has it."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _percent(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "-"


def _two_digits(number: float | None) -> str:
    return f"{number:.2f}" if number is not None and math.isfinite(number) else "-"


def _relative(path: str) -> str:
    try:
        return str(Path(path).relative_to(PROJECT))
    except ValueError:
        return path


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
