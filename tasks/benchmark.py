"""Tasks of a benchmark: what its runs share, the contests between them, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.benchmarks import Benchmark
from components.config import Recipe
from components.federation.strategy import options_model
from components.models.adapters import write_atomically
from components.seeding import derive
from tasks.devices import POOL
from tasks.runs import Run, arm_run, contest_file, git_commit, read_json, write_json
from tasks.uncached import task

OTHERS = {"aligned_vs_raw": "raw policy", "aligned_vs_human": "the references"}


@task(task_run_name="share {run.id}")
def share_generations(run: Run, others: list[Run]) -> list[str]:
    """Take the raw policy's completions and answers from a run of the same seed, data and policy that has them; gives what was taken."""
    taken = []
    recipe = run.recipe()
    for other in others:
        theirs = other.recipe()
        if recipe.fingerprint("data", "policy") != theirs.fingerprint("data", "policy"):
            continue
        same = (
            ("completions.json", "alignment", [getattr(recipe.alignment, key) == getattr(theirs.alignment, key) for key in ("prompts", "completions", "temperature")]),
            ("answers-raw.json", "evaluation", [recipe.evaluation.prompts == theirs.evaluation.prompts]),
            *((f"questions/{file.name}", "evaluation", [recipe.evaluation.questions == theirs.evaluation.questions])
              for file in sorted((other.evaluation / "questions").glob("raw-*.json"))))
        for name, phase, conditions in same:
            source, target = other.folder / phase / name, run.folder / phase / name
            if all(conditions) and source.is_file() and not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, source.read_bytes())
                taken.append(name)
    return taken


@task(task_run_name="judge {ours} against {theirs}, seed {seed}")
def judge_contest(folder: Path, ours: str, theirs: str, seed: int, judges: Path) -> list[str]:
    """Verdicts of the seed's judge on the answers of two arms' policies, in both orders; read where they are there already."""
    from components.data.templates import load as load_template
    from components.evaluation.judges import build_judge, judge_pairs

    path = contest_file(folder, ours, theirs, seed)
    if not path.is_file():
        runs = [arm_run(folder, arm, seed) for arm in (ours, theirs)]
        recipe: Recipe = runs[0].recipe()
        first, second = ({row["prompt_id"]: row for row in read_json(run.evaluation / "answers-aligned.json")} for run in runs)
        asked = sorted(set(first) & set(second))
        with POOL.borrow(recipe) as device:
            judge = build_judge(recipe.evaluation.judge, runs[0].prepared, judges, recipe.seed, device, policy=load_template(recipe.policy.template, "policy"))
            judged = judge_pairs(
                judge, [first[p]["prompt"] for p in asked], [first[p]["text"] for p in asked], [second[p]["text"] for p in asked],
                recipe.evaluation.bootstrap, derive(seed, "bootstrap", ours, theirs))
        write_json(path, [verdict.value for verdict in judged.verdicts])
    return read_json(path)


@task()
def write_benchmark_report(folder: Path, benchmark: Benchmark) -> Path:
    """Write report.html, report.md, figures.json and the picture; gives the report's folder."""
    from components.data.records import known_groups
    from components.evaluation import benchmark as report

    figures: dict[str, dict[int, dict[str, float]]] = {}
    curves: dict[str, dict[int, list[dict[str, float]]]] = {}
    contests: dict[str, dict[int, list[str]]] = {}
    for arm in benchmark.arms:
        for seed in benchmark.seeds:
            run = arm_run(folder, arm, seed)
            if not (run.folder / "report.done").is_file():
                continue
            federated, aligned, evaluated = (read_json(part / "result.json") for part in (run.federation, run.alignment, run.evaluation))
            recipe = run.recipe()
            curve = report.reward_curve(measured_rounds(run, federated), beta) if (beta := dpo_beta(recipe)) else []
            if curve:
                curves.setdefault(arm, {})[seed] = curve
            figures.setdefault(arm, {})[seed] = report.arm_figures(federated, aligned, evaluated, known_groups(run.prepared), recipe.federation.local_steps, curve)
            for contest, other in OTHERS.items():
                if contest in evaluated["verdicts"]:
                    contests.setdefault(f"{arm} against {other}", {})[seed] = list(evaluated["verdicts"][contest].values())
            if "raw_vs_human" in evaluated["verdicts"]:
                contests.setdefault("raw policy against the references", {})[seed] = list(evaluated["verdicts"]["raw_vs_human"].values())
    for ours, theirs in benchmark.contests:
        for seed in benchmark.seeds:
            path = contest_file(folder, ours, theirs, seed)
            if path.is_file():
                contests.setdefault(f"{ours} against {theirs}", {})[seed] = read_json(path)
    out = folder / "report"
    out.mkdir(exist_ok=True)
    title, notes = folder.name, [f"recipe {benchmark.recipe}, seeds {', '.join(map(str, benchmark.seeds))}, git {git_commit()[:12]}"]
    notes += ["accuracies are of the selectors' majority (FedBis, FedBiscuit) or of the trained policy's implicit reward (the others); a client step is an optimiser step of the arm's own batch size"]
    notes += [f"{arm}: {'; '.join(settings)}" for arm, settings in benchmark.arms.items()]
    parts = report.tables(figures, contests)
    report.picture(figures, contests, out / "benchmark.png")
    pictures = [out / "benchmark.png"]
    if curves:
        report.rewards_picture(curves, out / "rewards.png")
        pictures.append(out / "rewards.png")
    write_json(out / "figures.json", {"figures": figures, "contests": contests, "curves": curves})
    (out / "report.md").write_text(report.markdown(title, parts, notes), encoding="utf-8")
    (out / "report.html").write_text(report.page(title, parts, notes, pictures), encoding="utf-8")
    return out


def measured_rounds(run: Run, federated: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Held-out accuracies of a finished run by the rounds done: before the first, every federation.evaluate_every, after the last."""
    between = {int(path.stem.rsplit("-", 1)[1]): read_json(path) for path in run.federation.glob("accuracy-round-*.json")}
    return between | {0: federated["before"], federated["rounds"]: federated["after"]}


def dpo_beta(recipe: Recipe) -> float | None:
    """The beta of the clients' DPO; None where they train something else."""
    options = options_model(recipe.federation.method, recipe.name).model_validate(recipe.federation.options)
    return getattr(options, "beta", None)


@task()
def log_benchmark(run_id: str, out: Path) -> None:
    """Log the report, and the means over seeds as metrics, at the benchmark's own MLflow run."""
    from tasks.tracking import log_numbers, mlflow_client

    figures: dict[str, Any] = read_json(out / "figures.json")["figures"]
    means = [(f"{arm}/{name}", sum(v) / len(v), 0) for arm, runs in figures.items() for name in {n for run in runs.values() for n in run}
             if (v := [run[name] for run in runs.values() if name in run])]
    client = mlflow_client()
    log_numbers(client, run_id, means)
    client.log_artifacts(run_id, str(out), "report")
