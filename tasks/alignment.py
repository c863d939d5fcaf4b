"""Labeling, and the alignment by DPO or by the policy of the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from prefect import get_run_logger

from components.config import Recipe
from components.data.records import choose_prompts, read_rows
from components.federation.outcome import kl_jobs
from components.federation.protocol import Generation
from components.io import read_json, stored
from components.models.policy import assign_round_robin
from components.progress import Work, progress
from components.results import AlignmentResult, LabellingResult, Outcome, SamplingResult
from components.seeding import derive
from tasks.devices import POOL, run_on_worker, run_on_workers
from tasks.flow_runs import ProgressBar
from tasks.policies import FINAL, EvaluatedPolicy, compare_by_selectors, generate_on_server
from tasks.prefect_transport import ask_after_rounds
from tasks.runs import Run
from tasks.uncached import task


def sample_completions(run: Run, recipe: Recipe) -> SamplingResult:
    """Sample completions of the server's prompts from the policy before the alignment.

    They are stored as completions.json, and read if they are stored.
    """
    rows = stored(run.alignment / "completions.json", lambda: _completion_rows(run, recipe))
    finished: list[bool] = []
    for row in rows:
        finished += [completion["finished"] for completion in row["completions"]]
    share = sum(finished) / len(finished) if finished else float("nan")
    return SamplingResult(prompts=len(rows), finished_share=share)


def _completion_rows(run: Run, recipe: Recipe) -> list[dict[str, Any]]:
    prompts = choose_prompts(run.prepared, "align", recipe.alignment.prompts, recipe.seed)
    generation = Generation(
        prompts=tuple(row.prompt for row in prompts),
        seed=derive(recipe.seed, "completions"),
        temperature=recipe.alignment.temperature,
        count=recipe.alignment.completions,
    )
    base = EvaluatedPolicy("base", None)
    completions = generate_on_server(run, recipe, base, generation, "sample completions")
    POOL.release()
    return [
        asdict(row) | {"completions": [asdict(completion) for completion in answers]}
        for row, answers in zip(prompts, completions, strict=True)
    ]


def label_completions(run: Run, recipe: Recipe) -> LabellingResult:
    """Label all pairs of distinct completions by the selectors, and choose those that are trained on.

    The latter are stored as pairs.parquet, a row per pair, and the result as labelling.json, which is read if
    it is stored.
    """
    path = run.alignment / "labelling.json"
    values = stored(path, lambda: _label_completions(run, recipe).model_dump(mode="json"))
    return LabellingResult.model_validate(values)


def _label_completions(run: Run, recipe: Recipe) -> LabellingResult:
    from datasets import Dataset

    from components.alignment.label import candidate_pairs, choose_ranked_pairs, label_pairs, label_shares
    from components.models.samples import Completion
    from components.models.selector import Comparison

    prompts = {}
    texts = {}
    for row in read_json(run.alignment / "completions.json"):
        prompts[row["prompt_id"]] = row["prompt"]
        texts[row["prompt_id"]] = [
            Completion(tuple(completion["ids"]), completion["text"], completion["finished"])
            for completion in row["completions"]
        ]
    candidates, counts = candidate_pairs(prompts, texts)
    comparisons = [
        Comparison(candidate.prompt, candidate.first.text, candidate.second.text) for candidate in candidates
    ]
    labeled = label_pairs(compare_by_selectors(run, recipe, comparisons), candidates)
    if recipe.alignment.pairs_per_prompt is not None:
        labeled = choose_ranked_pairs(labeled, recipe.alignment.pairs_per_prompt)
    if labeled:
        Dataset.from_list([dict(row) for row in labeled]).to_parquet(run.alignment / "pairs.parquet")
    return LabellingResult.model_validate(counts | label_shares(labeled))


def train_by_dpo(runs: Sequence[tuple[Run, Recipe]]) -> list[AlignmentResult]:
    """Align the policies of runs by DPO on their labeled pairs, side by side where there are several workers.

    The result of each is stored as dpo.json, and read if it is stored.
    """
    calls = [{"run": run, "recipe": recipe} for run, recipe in runs if not _dpo_result(run).is_file()]
    if calls:
        run, recipe = runs[0]
        run_on_workers(train_dpo, calls, recipe.runtime, run.folder)
    return [AlignmentResult.read(_dpo_result(run)) for run, _ in runs]


def _dpo_result(run: Run) -> Path:
    return run.alignment / "dpo.json"


@task(name="align by DPO")
def train_dpo(run: Run, recipe: Recipe) -> None:
    """Align the policy by DPO on the labeled pairs, and store the result."""
    from components.alignment.dpo import align_policy
    from components.models.policy import Policy

    log = get_run_logger()
    folder = run.alignment
    pairs = folder / "pairs.parquet"
    prompts = choose_prompts(run.prepared, "test", recipe.alignment.dpo.kl_prompts, recipe.seed)
    rows = read_rows(pairs) if pairs.is_file() else []
    bar = ProgressBar("dpo-steps", "Steps of DPO")

    def log_step(step: int, steps: int, logs: Mapping[str, float]) -> None:
        bar.report(step, steps)
        loss, margin = logs["loss"], logs.get("rewards/margins", float("nan"))
        work = Work("DPO step", step, steps, loss)
        line = "DPO step %d of %d: loss %.4f, reward margin %.4f"
        log.info(line, step, steps, loss, margin, extra=progress(work))

    with POOL.borrow(recipe.runtime) as device:
        policy = Policy(recipe.policy, device)
        kl_prompts = [row.prompt for row in prompts]
        seed = derive(recipe.seed, "dpo")
        result = align_policy(policy, recipe.alignment.dpo, rows, folder, kl_prompts, seed, log_step)
    AlignmentResult(
        policy=Outcome(is_aligned=True, folder=result.adapter.relative_to(folder).as_posix()),
        reference=recipe.alignment.dpo.reference,
        metrics=result.metrics,
        history=result.history,
        checkpoints={path.relative_to(folder).as_posix(): step for path, step in result.checkpoints.items()},
    ).write(_dpo_result(run))


def adopt_policy(run: Run, recipe: Recipe, outcome: Outcome) -> AlignmentResult:
    """Adopt the policy of the rounds as the aligned one, and measure its KL to the backbone.

    The KL is measured at the temperature at which the policy was trained. With policies of their own,
    clients complete the prompts round-robin, and it is the mean over the prompts of those that answer.
    """
    rows = choose_prompts(run.prepared, "test", recipe.alignment.dpo.kl_prompts, recipe.seed)
    prompts = [row.prompt for row in rows]
    seed = derive(recipe.seed, "dpo")
    sampling = recipe.federation.options.sampling
    temperature = sampling.temperature if sampling else 1.0
    if not outcome.clients:
        arguments = {"run": run, "recipe": recipe, "prompts": prompts, "seed": seed}
        arguments["temperature"] = temperature
        metrics = run_on_worker(measure_kl, recipe.runtime, run.folder, **arguments)
    else:
        clients = assign_round_robin(len(prompts), outcome.clients)
        jobs = kl_jobs(outcome, prompts, clients, seed, temperature)
        answers, missing = ask_after_rounds(run, recipe, jobs, recipe.federation.quorum)
        remaining = {name: iter(cast("list[float]", values)) for name, values in answers.items()}
        values = [next(remaining[client]) for client in clients if client not in missing]
        metrics = {"kl_sequence": sum(values) / len(values)} if values else {}
    policy = outcome.model_copy(update={"folder": FINAL})
    return AlignmentResult(policy=policy, reference="base", metrics=metrics)


@task()
def measure_kl(
    run: Run, recipe: Recipe, prompts: Sequence[str], seed: int, temperature: float
) -> dict[str, float]:
    """KL of the policy that all clients share to the backbone, see kl_to_reference."""
    from components.learning.kl import kl_to_reference
    from components.models.policy import Policy

    with POOL.borrow(recipe.runtime) as device:
        policy = Policy(recipe.policy, device, run.alignment / FINAL)
        return kl_to_reference(policy, prompts, seed, temperature)
