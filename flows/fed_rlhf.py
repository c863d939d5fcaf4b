"""The pipeline, top to bottom: private preferences -> federated selectors -> labelled pairs -> aligned policy -> figures.

    python -m flows.fed_rlhf --recipe summarization/demo [key.path=value ...] [--resume RUN]
    prefect deployment run 'fed-rlhf/summarization' [-p recipe=NAME]
"""

from __future__ import annotations

if __name__ == "__main__":  # --help and a bad recipe are answered before Prefect is imported, which takes seconds
    from flows.cli import main

    raise SystemExit(main())

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime, unmapped

from components.config import Recipe
from components.environment import quiet
from components.federation.commits import Commits
from components.federation.rounds import shards
from components.federation.strategy import ServerState, Strategy, build_strategy
from components.recipes import load_recipe
from flows.runner import placement, task_runner
from tasks import alignment, data, evaluation, federation, reporting, tracking
from tasks.devices import POOL
from tasks.runs import Run, file_hash, find_run, judges_root, open_run, read_json, write_json


@flow(name="fed-rlhf", flow_run_name="{recipe}", persist_result=False)
def fed_rlhf(recipe: str = "summarization/demo", overrides: list[str] | None = None, resume: str | None = None) -> str:
    """Run a recipe from its data to its figures, or go on with a run that was stopped.

    Args:
        recipe: name or path.
        overrides: 'key.path=value' settings on top of it.
        resume: id or folder of an earlier run; its own recipe is used then.

    Returns:
        the folder of the run.
    """
    quiet()
    run = find_run(resume) if resume is not None else open_run(load_recipe(recipe, overrides or []))
    return carry_out(run)


def carry_out(run: Run) -> str:
    """All phases of a run that are not done yet, with a parent MLflow run around them."""
    recipe = run.recipe()
    log = get_run_logger()
    log.info("run %s: recipe %s, folder %s", run.id, recipe.name, run.folder)
    parent = tracking.open_tracking(run, recipe, str(runtime.flow_run.id), runtime.flow_run.ui_url)
    reporting.link_artifacts(run, recipe)
    try:
        for phase in (prepare, federate, align, evaluate):
            done = run.folder / f"{phase.name}.done"
            if not done.is_file():
                phase.with_options(task_runner=task_runner(recipe))(run, recipe)
                done.touch()
        reporting.write_report(run, recipe)
        tracking.log_report(parent, run.report)
        reporting.link_artifacts(run, recipe)
    except BaseException:
        tracking.close_failed(run)
        raise
    tracking.close_run(parent)
    return str(run.folder)


@flow(name="prepare", flow_run_name="prepare", persist_result=False)
def prepare(run: Run, recipe: Recipe) -> None:
    """Backbones and data; nothing is trained on data that fail their expectations."""
    for name in backbones(recipe):
        data.fetch_backbone(name)
    report = data.prepare_data(recipe, run.prepared)
    child = tracking.open_phase(run, recipe, "prepare")
    tracking.log_data(child, run.prepared, report)
    tracking.close_run(child)


@flow(name="federate", flow_run_name="federate", persist_result=False)
def federate(run: Run, recipe: Recipe) -> None:
    """The federated rounds, each committed; goes on from the last commit."""
    log, config = get_run_logger(), recipe.federation
    child = tracking.open_phase(run, recipe, "federate")
    pairs = run.prepared / "pairs.parquet"
    commits = open_commits(run, recipe)
    store = commits.store.root
    strategy = build_strategy(config, commits.store)
    committed = commits.latest()
    if committed is None:
        state, records = strategy.init(federation.form_federation(recipe, run.prepared, commits), recipe.seed), []
        commits.write(state, {})
    else:
        state, records = committed
        log.info("continuing after round %d of %d", state.round, config.rounds)
        tracking.log_steps(child, recipe, records[-1:], store)  # it may not have been logged when the run was stopped

    before = federation.measure_selector(recipe, run.prepared, store, {"initial": state.federation.initial}, run.federation / "accuracy-before.json")
    log.info("selector before: %s", reporting.accuracy_line(before))
    state = federated_rounds(recipe, strategy, state, pairs, commits, child, records, lambda state: federation.measure_selector(
        recipe, run.prepared, store, state.adapters, run.federation / f"accuracy-{state.round}.json"))
    after = federation.measure_selector(recipe, run.prepared, store, state.adapters, run.federation / "accuracy-after.json")
    log.info("selector after: %s", reporting.accuracy_line(after))
    folders = federation.export_selectors(recipe, store, state.adapters, run.federation / "selectors")
    write_json(run.federation / "result.json", {
        "before": before, "after": after, "rounds": state.round, "records": records,
        "selectors": {name: {"hash": ref.hash, "folder": str(folders[name])} for name, ref in state.adapters.items()}})
    tracking.log_federation(child, recipe, run.federation)
    tracking.close_run(child)
    POOL.release()


def backbones(recipe: Recipe) -> list[str]:
    """Names of the backbones that a recipe uses."""
    return sorted({recipe.selector.backbone.name, recipe.policy.backbone.name, recipe.evaluation.judge.selector.backbone.name})


def open_commits(run: Run, recipe: Recipe) -> Commits:
    """The commits of a run; they belong to its recipe's selector and federation, and to its pairs."""
    pairs = file_hash(run.prepared / "pairs.parquet")
    return Commits(run.federation, f"{recipe.fingerprint('selector', 'federation')}-{pairs[:16]}")


def federated_rounds(
    recipe: Recipe, strategy: Strategy, state: ServerState, pairs: Path, commits: Commits, tracked: str,
    records: list[dict[str, Any]], measure: Callable[[ServerState], dict[str, Any]] | None = None,
) -> ServerState:
    """The spine: plan, map the clients to devices, aggregate, commit, log; until all rounds are done.

    Args:
        recipe, strategy, state, pairs, commits: what is run, from where, on which data, and where it is committed.
        tracked: MLflow run of the phase.
        records: the record of each step is added to it.
        measure: held-out accuracy of a state, asked for every federation.evaluate_every rounds.
    """
    log, config, store = get_run_logger(), recipe.federation, commits.store.root
    clients = federation.run_clients.with_options(retries=recipe.runtime.retries, retry_delay_seconds=1)
    while state.round < config.rounds:
        jobs = strategy.plan(state, state.round)
        parts = shards(jobs, config.clients_per_task)
        with placement(recipe):
            futures = clients.map(parts, recipe=unmapped(recipe), pairs=unmapped(pairs), store=unmapped(store))
        outcomes = federation.gather(futures, parts, commits.store)
        state, record = federation.close_step(strategy, state, jobs, outcomes, recipe, commits)
        records.append(record)
        tracking.log_steps(tracked, recipe, [record], store)
        log.info("round %d of %d: %s", state.round, config.rounds, reporting.round_line(record))
        if measure and config.evaluate_every and state.round % config.evaluate_every == 0 and state.round < config.rounds:
            reached = measure(state)
            tracking.log_metrics(tracked, reporting.accuracy_metrics(reached), state.round)
            log.info("selector after round %d: %s", state.round, reporting.accuracy_line(reached))
    return state


@flow(name="align", flow_run_name="align", persist_result=False)
def align(run: Run, recipe: Recipe) -> None:
    """Sample completions, label their pairs by the selectors, and align the policy by DPO."""
    child = tracking.open_phase(run, recipe, "align")
    if not (run.alignment / "result.json").is_file():
        align_once(run, recipe, child)
    tracking.log_alignment(child, recipe, run.alignment)
    tracking.close_run(child)
    POOL.release()


def align_once(run: Run, recipe: Recipe, child: str) -> None:
    """The work of the phase align; result.json is its last word."""
    log = get_run_logger()
    selectors = {name: selector["hash"] for name, selector in read_json(run.federation / "result.json")["selectors"].items()}
    sampled = alignment.sample_completions(recipe, run.prepared, run.alignment / "completions.json")
    labelled = alignment.label_completions(recipe, run.alignment / "completions.json", run.federation / "adapters", selectors, run.alignment / "pairs.parquet")
    log.info("labelled %d pairs (%d identical completions dropped)", labelled["pairs"], labelled["dropped_identical"])
    POOL.release()
    trained = alignment.train_dpo(recipe, run.alignment / "pairs.parquet", run.prepared, run.alignment)
    log.info("aligned: reference %s, KL %.3f nats a completion", recipe.alignment.dpo.reference, trained["metrics"].get("kl_sequence", float("nan")))
    model = tracking.register_policy(child, recipe, run.alignment / "final")
    write_json(run.alignment / "result.json", {"sampling": sampled, "labelling": labelled, **trained, **model})


@flow(name="evaluate", flow_run_name="evaluate", persist_result=False)
def evaluate(run: Run, recipe: Recipe) -> None:
    """Answers of the raw and the aligned policy to held-out prompts, judged in both orders."""
    child = tracking.open_phase(run, recipe, "evaluate")
    if not (run.evaluation / "result.json").is_file():
        answered = evaluation.answer_prompts(recipe, run.prepared, run.alignment / "final", run.evaluation / "answers.json")
        POOL.release()
        judged = evaluation.judge_answers(recipe, run.prepared, judges_root(), run.evaluation / "answers.json")
        if recipe.evaluation.alpaca_eval:
            judged["alpaca_eval"] = evaluation.annotate_answers(recipe, run.evaluation / "answers.json", run.evaluation / "alpaca_eval")
        write_json(run.evaluation / "result.json", {"answers": answered, **judged})
    tracking.log_evaluation(child, run.evaluation)
    tracking.close_run(child)
    POOL.release()
