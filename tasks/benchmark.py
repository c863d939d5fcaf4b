"""Tasks of a benchmark: what its runs share, the contests between them, and the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from components.benchmarks import RAW, REFERENCES, Benchmark
from components.config import Recipe
from components.federation.strategy import options_of
from components.models.adapters import write_atomically
from components.seeding import derive
from tasks.devices import POOL
from tasks.reporting import measured_objectives, measured_rounds
from tasks.runs import Run, arm_run, contest_file, git_commit, read_json, write_json
from tasks.uncached import task

OTHERS = {"aligned_vs_raw": RAW, "aligned_vs_human": REFERENCES}


@task(task_run_name="share {run.id}")
def share_generations(run: Run, others: list[Run]) -> list[str]:
    """Take the raw policy's completions, answers and rewards from a run of the same seed, data and policy that has them; gives what was taken."""
    taken = []
    recipe = run.recipe()
    for other in others:
        theirs = other.recipe()
        if recipe.fingerprint("data", "policy") != theirs.fingerprint("data", "policy"):
            continue
        same = (
            ("completions.json", "alignment", [getattr(recipe.alignment, key) == getattr(theirs.alignment, key) for key in ("prompts", "completions", "temperature")]),
            ("answers-raw.json", "evaluation", [recipe.evaluation.prompts == theirs.evaluation.prompts]),
            ("rewards-before.json", "federation", [rewards_measured(recipe) == rewards_measured(theirs)]),
            *((f"questions/{file.name}", "evaluation", [recipe.evaluation.questions == theirs.evaluation.questions])
              for file in sorted((other.evaluation / "questions").glob("raw-*.json"))))
        for name, phase, conditions in same:
            source, target = other.folder / phase / name, run.folder / phase / name
            if all(conditions) and source.is_file() and not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, source.read_bytes())
                taken.append(name)
    return taken


def rewards_measured(recipe: Recipe) -> tuple[Any, ...]:
    """What the rewards of a policy that is not trained yet depend on, beside the seed, the data and the policy: those that measure it, on what, and how it samples."""
    options = options_of(recipe.federation)
    if not hasattr(options, "reward_prompts"):
        return ()
    first = {name: recipe.rewards[given[0]] for name, given in options.objectives.items()}
    return first, options.ppo.temperature, options.reward_prompts, recipe.federation.batch_size


@task(task_run_name="judge {ours} against {theirs}, seed {seed}")
def judge_contest(folder: Path, ours: str, theirs: str, seed: int, judges: Path) -> None:
    """Let the seed's judge compare the answers of two arms' policies, in both orders, where it has not yet."""
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
        write_json(path, {"prompts": asked, "verdicts": [verdict.value for verdict in judged.verdicts], "consistency": judged.consistency})


@dataclass
class Gathered:
    """What the report reads from the runs that are done, by arm (or name of the contest) and seed."""

    figures: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    raw: dict[int, dict[str, float]] = field(default_factory=dict)
    contests: dict[str, dict[int, Any]] = field(default_factory=dict)
    judges: dict[int, dict[str, float]] = field(default_factory=dict)
    rewards: dict[str, dict[int, list[dict[str, float]]]] = field(default_factory=dict)
    groups: dict[str, dict[int, list[dict[str, float]]]] = field(default_factory=dict)
    hacking: dict[str, dict[int, list[dict[str, float]]]] = field(default_factory=dict)
    commits: dict[str, list[str]] = field(default_factory=dict)
    objectives: dict[str, dict[int, list[dict[str, float]]]] = field(default_factory=dict)
    weights: dict[str, dict[int, dict[str, dict[str, list[tuple[float, float]]]]]] = field(default_factory=dict)
    fronts: dict[str, dict[int, dict[str, dict[str, float]]]] = field(default_factory=dict)


def gather(folder: Path, benchmark: Benchmark) -> Gathered:
    """Read the runs and contests of a benchmark that are done."""
    from components.data.records import known_groups
    from components.evaluation import benchmark as report

    found = Gathered()
    for arm in benchmark.arms:
        for seed in benchmark.seeds:
            run = arm_run(folder, arm, seed)
            if not (run.folder / "report.done").is_file():
                continue
            federated, aligned, evaluated = (read_json(part / "result.json") for part in (run.federation, run.alignment, run.evaluation))
            recipe, known, answers = run.recipe(), known_groups(run.prepared), read_json(run.evaluation / "answers.json")
            texts = {name: [row[name]["text"] for row in answers] for name in ("aligned", "raw")}
            rewards = report.reward_curve(measured_rounds(run.federation, federated), beta) if (beta := dpo_beta(recipe)) else []
            curves = {"rewards": rewards, "groups": report.rand_curve(federated["records"], known), "hacking": evaluated.get("curve"),
                      "objectives": report.objectives_curve(measured_objectives(run.federation, federated), federated["records"]), "weights": report.weights_curves(federated["records"])}
            for name, curve in curves.items():
                if curve:
                    getattr(found, name).setdefault(arm, {})[seed] = curve
            found.figures.setdefault(arm, {})[seed] = report.arm_figures(federated, aligned, evaluated, known, recipe.federation.local_steps, rewards, texts["aligned"])
            found.raw.setdefault(seed, report.answer_figures(evaluated, "raw", texts["raw"]))
            found.judges.setdefault(seed, evaluated.get("judge_figures", {}))
            found.commits[f"{arm}-seed-{seed}"] = run.notes().get("commits", [])
            for key, ours, other in (*((key, "aligned", other) for key, other in OTHERS.items()), ("raw_vs_human", "raw", REFERENCES)):
                if key in evaluated["verdicts"]:
                    found.contests.setdefault(f"{RAW if ours == 'raw' else arm} against {other}", {})[seed] = own_contest(evaluated, key, ours, answers)
    for seed in benchmark.seeds:
        add_fronts(found, folder, benchmark, seed)
    for ours, theirs in benchmark.contests:
        for seed in benchmark.seeds:
            if contest_file(folder, ours, theirs, seed).is_file():
                found.contests.setdefault(f"{ours} against {theirs}", {})[seed] = arms_contest(folder, ours, theirs, seed)
    return found


def add_fronts(found: Gathered, folder: Path, benchmark: Benchmark, seed: int) -> None:
    """The figures of each front of a seed whose arms are done, under the front's name, and its points, with the raw policy's."""
    from components.evaluation import benchmark as report

    measured = {}
    for arm in benchmark.arms:
        run = arm_run(folder, arm, seed)
        if seed in found.figures.get(arm, {}) and "objectives" in (federated := read_json(run.federation / "result.json"))["after"]:
            measured[arm] = {moment: report.scores_of(federated[moment]["objectives"]) for moment in ("before", "after")}
    complete = {name: arms for name, arms in benchmark.fronts.items() if all(arm in measured for arm in arms)}
    points = [scores for arm in {arm for arms in complete.values() for arm in arms} for scores in measured[arm].values()]
    for name, arms in complete.items():
        worst = {objective: min(scores[objective] for scores in points) for objective in points[0]}
        liked = {arm: preference_of(arm_run(folder, arm, seed).recipe(), list(worst)) for arm in arms}
        found.figures.setdefault(name, {})[seed] = report.front_figures({arm: measured[arm]["after"] for arm in arms}, liked, worst)
        found.fronts.setdefault(name, {})[seed] = {arm: measured[arm]["after"] for arm in arms} | {report.RAW: measured[arms[0]]["before"]}


def preference_of(recipe: Recipe, objectives: list[str]) -> dict[str, float]:
    """How much a recipe likes each objective: its fixed weights, or its preference, 1 where it has none."""
    options = recipe.federation.options
    if options.get("weights"):
        return {name: options["weights"].get(name, 0.0) for name in objectives}
    return {name: (options.get("preference") or {}).get(name, 1.0) for name in objectives}


def own_contest(evaluated: dict[str, Any], key: str, ours: str, answers: list[dict[str, Any]]) -> Any:
    """A contest that a run's own evaluation had, with the raw policy or the references (benchmark.Contest)."""
    from components.evaluation.benchmark import Contest

    rows, verdicts = {row["prompt_id"]: row for row in answers}, evaluated["verdicts"][key]
    theirs = [rows[prompt]["references"][0] if key.endswith("_vs_human") else rows[prompt]["raw"]["text"] for prompt in verdicts]
    return Contest(list(verdicts), list(verdicts.values()), [len(rows[prompt][ours]["text"]) for prompt in verdicts], [len(text) for text in theirs],
                   evaluated["contests"][key].get("consistency"))


def arms_contest(folder: Path, ours: str, theirs: str, seed: int) -> Any:
    """A contest between two arms' policies (benchmark.Contest); files of older benchmarks have the verdicts alone.

    Raises:
        ValueError: there are not as many verdicts as prompts that both answered.
    """
    from components.evaluation.benchmark import Contest

    path = contest_file(folder, ours, theirs, seed)
    given = read_json(path)
    first, second = ({row["prompt_id"]: len(row["text"]) for row in read_json(arm_run(folder, arm, seed).evaluation / "answers-aligned.json")} for arm in (ours, theirs))
    if isinstance(given, list):
        given = {"prompts": sorted(set(first) & set(second)), "verdicts": given}
    prompts, verdicts = given["prompts"], given["verdicts"]
    if len(prompts) != len(verdicts):
        raise ValueError(f"{path}: {len(verdicts)} verdicts, but both policies answered {len(prompts)} prompts; delete the file and resume the benchmark")
    return Contest(prompts, verdicts, [first[prompt] for prompt in prompts], [second[prompt] for prompt in prompts], given.get("consistency"))


def short(commit: str) -> str:
    """The first 12 digits of a commit, and whether files differed from it."""
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def commits_line(commits: dict[str, list[str]]) -> str:
    """Which commits the runs are of, and which run is of which where they differ.

    Args:
        commits: by run, those that it was opened with (several, where it was resumed with another); empty where none was recorded.
    """
    runs_of: dict[str, list[str]] = {}
    for run, given in commits.items():
        runs_of.setdefault(", then ".join(map(short, given)) or "not recorded", []).append(run)
    if len(runs_of) == 1:
        return f"commit of the runs: {next(iter(runs_of))}"
    return "commits of the runs: " + "; ".join(f"{commit} ({', '.join(runs)})" for commit, runs in runs_of.items())


@task()
def write_benchmark_report(folder: Path, benchmark: Benchmark) -> Path:
    """Write report.html, report.md, figures.json and the pictures; gives the report's folder."""
    from components.evaluation import benchmark as report
    from components.evaluation import benchmark_pictures as pictures
    from components.evaluation.claims import check_claims, claims_table

    found = gather(folder, benchmark)
    out = folder / "report"
    out.mkdir(exist_ok=True)
    title, notes = folder.name, [f"recipe {benchmark.recipe}, seeds {', '.join(map(str, benchmark.seeds))}", commits_line(found.commits), f"report written by commit {short(git_commit())}"]
    notes += ["accuracies are of the selectors' majority (FedBis, FedBiscuit) or of the trained policy's implicit reward (the others); a client step is an optimiser step of the arm's own batch size"]
    notes += [f"all arms: {'; '.join(benchmark.settings)}"] * bool(benchmark.settings)
    notes += [f"{arm}: {'; '.join(settings)}" for arm, settings in benchmark.arms.items()]
    pools = {name: report.pool(by_seed) for name, by_seed in found.contests.items()}
    findings = check_claims(benchmark.claims, found.figures, pools, benchmark.seeds)
    means, single = report.figures_tables(found.figures, found.raw)
    pictures.picture(found.figures, pools, out / "benchmark.png")
    parts: list[report.Table | report.Picture] = [*([claims_table(findings)] if findings else []), means, report.contests_table(pools)]
    parts.append(report.Picture("Accuracies and win rates", out / "benchmark.png", "Dots: seeds."))
    parts.append(report.judges_table(found.contests, found.judges))
    for curves, draw, name, heading, caption in (
            (found.groups, pictures.rand_picture, "groups.png", "Groups over the rounds", "Every grouping of all clients."),
            (found.rewards, pictures.rewards_picture, "rewards.png", "Rewards over the rounds", "Mean over seeds, in a band from the least to the greatest."),
            (found.hacking, pictures.hacking_grid, "reward-hacking.png", "Proxy and judge over the alignment",
             "Share of prompts on which the policy's answer is preferred to the raw policy's, a tie half; where the judge's falls while the selectors' rises, the reward is hacked.")):
        if curves:
            draw(curves, out / name)
            parts.append(report.Picture(heading, out / name, caption))
    parts += [*objective_parts(found, out), *sample_tables(folder, benchmark, found)]
    parts.append(single)
    write_json(out / "figures.json", asdict(found) | {"pooled": {name: asdict(pooled) for name, pooled in pools.items()}, "claims": [asdict(finding) for finding in findings]})
    (out / "report.md").write_text(report.markdown(title, parts, notes), encoding="utf-8")
    (out / "report.html").write_text(report.page(title, parts, notes), encoding="utf-8")
    return out


def objective_parts(found: Gathered, out: Path) -> list[Any]:
    """Pictures of methods with several objectives (benchmark.Picture)."""
    from components.evaluation import objective_pictures as pictures
    from components.evaluation.benchmark import Picture

    parts = []
    if found.objectives:
        pictures.objectives_picture(found.objectives, out / "objectives.png")
        parts.append(Picture("Rewards and disagreement over the rounds", out / "objectives.png", "Rewards of sampled answers to held-out prompts. Mean over seeds, in a band from the least to the greatest."))
    if found.weights:
        seed = min(seed for runs in found.weights.values() for seed in runs)
        pictures.weights_picture({arm: runs[seed] for arm, runs in found.weights.items() if seed in runs}, out / "weights.png")
        parts.append(Picture(f"Weights of the objectives, seed {seed}", out / "weights.png", "A line is a client, a point a step."))
    if found.fronts and len(next(iter(next(iter(next(iter(found.fronts.values())).values())).values()))) > 1:
        pictures.fronts_picture(found.fronts, out / "fronts.png")
        parts.append(Picture("Fronts", out / "fronts.png", "A point is an arm's policy; a hollow one is dominated by another of its front."))
    return parts


def sample_tables(folder: Path, benchmark: Benchmark, found: Gathered) -> list[Any]:
    """Answers of the policies of each front, of the first seed that it is complete with (benchmark.Table)."""
    from components.evaluation.benchmark import samples_table

    return [samples_table(f"{name}, seed {min(by_seed)}", {arm: read_json(arm_run(folder, arm, min(by_seed)).evaluation / "answers.json") for arm in benchmark.fronts[name]})
            for name, by_seed in found.fronts.items()]


def dpo_beta(recipe: Recipe) -> float | None:
    """The beta of the clients' DPO; None where they train something else."""
    options = options_of(recipe.federation)
    return None if hasattr(options, "objectives") else getattr(options, "beta", None)


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
