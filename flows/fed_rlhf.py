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

from components.config import Recipe, RewardTrainingConfig
from components.data.records import known_groups
from components.environment import quiet
from components.evaluation.reward_judge import RewardJudge
from components.federation.commits import Commits
from components.federation.private import rewards_beside
from components.federation.rounds import shards
from components.federation.strategy import ServerState, Strategy, build_strategy, federated_sections
from components.models.policy import check_prompts
from components.recipes import check_surroundings, load_recipe
from flows.runner import placement, task_runner
from tasks import alignment, data, evaluation, federation, reporting, rewards, tracking
from tasks.devices import POOL
from tasks.policies import homes_of
from tasks.runs import Run, file_hash, find_run, hold, judges_root, open_run, read_json, trees_root, write_json


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
    if resume is None:
        asked = load_recipe(recipe, overrides or [])
        check_surroundings(asked)
        run = open_run(asked)
    else:
        run = find_run(resume)
    with hold(run):
        return carry_out(run)


def carry_out(run: Run, benchmark: str | None = None) -> str:
    """All phases of a run that are not done yet, with a parent MLflow run around them (or, in a benchmark, one MLflow run under the benchmark's)."""
    recipe = run.recipe()
    log = get_run_logger()
    log.info("run %s: recipe %s, folder %s", run.id, recipe.name, run.folder)
    parent = tracking.open_tracking(run, recipe, str(runtime.flow_run.id), runtime.flow_run.ui_url, benchmark)
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
    (run.folder / "report.done").touch()
    return str(run.folder)


@flow(name="prepare", flow_run_name="prepare", persist_result=False)
def prepare(run: Run, recipe: Recipe) -> None:
    """Backbones and data; nothing is trained on data that fail their expectations."""
    data.check_eight_bit(recipe)
    for name in backbones(recipe):
        data.fetch_backbone(name)
    if recipe.thoughts and not (run.folder / "trees" / "done").is_file():
        grow(run, recipe)
    report = data.prepare_data(recipe, run.prepared, run.folder / "trees")
    get_run_logger().info("partition: %s", reporting.partition_line(report))
    if "margins" in report:
        get_run_logger().info("thoughts: %s", reporting.margins_line(report))
    child = tracking.open_phase(run, recipe, "prepare")
    tracking.log_data(child, run.prepared, report)
    tracking.close_phase(run, child)


def grow(run: Run, recipe: Recipe) -> None:
    """The trees of thoughts that a recipe asks for; those that were grown before, by any run, are taken as they are."""
    grown = data.grow_trees(recipe, run.folder / "trees", trees_root())
    get_run_logger().info("trees: %s", ", ".join(f"{name} {counts['questions']} questions" for name, counts in grown.items()) or "none")
    (run.folder / "trees" / "done").touch()


@flow(name="federate", flow_run_name="federate", persist_result=False)
def federate(run: Run, recipe: Recipe) -> None:
    """The federated rounds, each committed; goes on from the last commit."""
    log, config = get_run_logger(), recipe.federation
    child = tracking.open_phase(run, recipe, "federate")
    check_prompts(recipe.policy)
    pairs = run.prepared / "pairs.parquet"
    commits = open_commits(run, recipe)
    store, known = commits.store.root, known_groups(run.prepared)
    strategy = build_strategy(config, commits.store)
    objectives = list(config.options.get("objectives", {}))
    ready_rewards(run, recipe, rewards_beside(commits.store), bool(objectives))
    committed = commits.latest()
    if committed is None:
        state, records = strategy.init(federation.form_federation(recipe, strategy.trains, run.prepared, commits), recipe.seed), []
        commits.write(state, {})
    else:
        state, records = committed
        log.info("continuing after round %d of %d", state.round, config.rounds)
        tracking.log_steps(child, recipe, records, store, known, max(len(records) - 1, 0))  # it may not have been logged when the run was stopped

    def measure(state: ServerState, moment: str) -> dict[str, Any]:
        measured = federation.measure_accuracy(
            recipe, strategy.trains, run.prepared, store, state, run.federation / f"accuracy-{moment}.json", strategy.personal, strategy.private)
        log.info("%s, %s: %s", strategy.trains, moment, reporting.accuracy_line(measured))
        if objectives:
            found = rewards.measure_rewards(recipe, strategy.trains, run.prepared, store, state, run.federation / f"rewards-{moment}.json", moment)
            log.info("rewards, %s: %s", moment, reporting.rewards_line(found))
            measured = measured | {"objectives": found}
        return measured

    before = measure(strategy.init(state.federation, recipe.seed), "before")
    if records and measured_now(recipe, records[-1]):  # the run may have been stopped within the measurement
        tracking.log_metrics(child, reporting.accuracy_metrics(measure(state, f"round-{state.round}")), state.round)
    state = federated_rounds(recipe, strategy, state, pairs, commits, child, records, known, measure)
    after = measure(state, "after")
    folders = federation.export_adapters(recipe, strategy.trains, store, state.adapters, run.federation / "final")
    write_json(run.federation / "result.json", {
        "trains": strategy.trains, "personal": strategy.personal, "private": strategy.private, "last": {client.name: state.memory.get("last", {}).get(client.name, "") for client in state.federation.clients}, "before": before, "after": after, "rounds": state.round, "records": records, "assigned": state.assigned,
        "adapters": {name: {"hash": ref.hash, "folder": str(folders[name])} for name, ref in state.adapters.items()}})
    tracking.log_federation(child, recipe, run.federation)
    tracking.close_phase(run, child)
    POOL.release()


def ready_rewards(run: Run, recipe: Recipe, folder: Path, score_completions: bool) -> None:
    """The recipe's rewards, before any client trains: those of objectives score completions in the rounds, another one scores the clients' pairs now."""
    log = get_run_logger()
    for name in recipe.rewards:
        if score_completions:
            figures = rewards.ready_reward(recipe, name, folder, run.prepared, judges_root())
            log.info("reward %s: %s", name, ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))
        else:
            figures = rewards.score_pairs(recipe, name, run.prepared, folder, judges_root())
            log.info("reward %s: right on %.3f of %d training pairs, mean difference %.3f", name, figures["accuracy"], figures["pairs"], figures["margin"])


def backbones(recipe: Recipe) -> list[str]:
    """Names of the backbones that a recipe uses."""
    judge = recipe.evaluation.judge
    scores = [recipe.thoughts.evaluator.model] if recipe.thoughts and recipe.thoughts.evaluator.base_url is None else []
    given = [*recipe.rewards.values(), *([RewardJudge.Options.model_validate(judge.options).reward] if judge.kind == "reward" else [])]
    trained = [(reward.training or RewardTrainingConfig()).backbone.name for reward in given if reward.kind == "trained"]
    return sorted({*scores, *trained, recipe.selector.backbone.name, recipe.policy.backbone.name, *([judge.selector.backbone.name] if judge.kind == "selector" else [])})


def open_commits(run: Run, recipe: Recipe) -> Commits:
    """The commits of a run; they belong to the sections of its recipe that the rounds depend on, and to its pairs."""
    pairs = file_hash(run.prepared / "pairs.parquet")
    return Commits(run.federation, f"{recipe.fingerprint(*federated_sections(recipe))}-{pairs[:16]}{rewards.judges_rows(recipe, run.prepared)}{rewards.prompts_asked(recipe, run.prepared)}")


def federated_rounds(
    recipe: Recipe, strategy: Strategy, state: ServerState, pairs: Path, commits: Commits, tracked: str,
    records: list[dict[str, Any]], known: dict[str, str | None], measure: Callable[[ServerState, str], dict[str, Any]] | None = None,
) -> ServerState:
    """The spine: plan, map the clients to devices, aggregate, commit, log; until all rounds are done.

    Args:
        recipe, strategy, state, pairs, commits: what is run, from where, on which data, and where it is committed.
        tracked: MLflow run of the phase.
        records: the record of each step is added to it.
        known: the clients' groups where the source knows them, for the log of a grouping.
        measure: held-out accuracy of a state, by the moment's name, asked for every federation.evaluate_every rounds.
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
        tracking.log_steps(tracked, recipe, records, store, known, len(records) - 1)
        log.info("round %d of %d: %s", record["round"] + 1, config.rounds, reporting.round_line(record))
        if measure and measured_now(recipe, record):
            tracking.log_metrics(tracked, reporting.accuracy_metrics(measure(state, f"round-{state.round}")), state.round)
    return state


def measured_now(recipe: Recipe, record: dict[str, Any]) -> bool:
    """Whether accuracy is measured after a step: every federation.evaluate_every rounds; after the last round it is measured anyway."""
    done, every = record["rounds_done"], recipe.federation.evaluate_every
    return every is not None and done > record["round"] and done % every == 0 and done < recipe.federation.rounds


@flow(name="align", flow_run_name="align", persist_result=False)
def align(run: Run, recipe: Recipe) -> None:
    """The aligned policy: by DPO on completions that the selectors have labelled, or the one that the clients trained."""
    child = tracking.open_phase(run, recipe, "align")
    if not (run.alignment / "result.json").is_file():
        align_once(run, recipe, child)
    tracking.log_alignment(child, recipe, run.alignment)
    tracking.close_phase(run, child)
    POOL.release()


def align_once(run: Run, recipe: Recipe, child: str) -> None:
    """The work of the phase align; result.json is its last word."""
    log, federated = get_run_logger(), read_json(run.federation / "result.json")
    digests = {name: adapter["hash"] for name, adapter in federated["adapters"].items()}
    store, pairs = run.federation / "adapters", run.alignment / "pairs.parquet"
    if federated["trains"] == "selector":
        sampled = alignment.sample_completions(recipe, run.prepared, run.alignment / "completions.json")
        labelled = alignment.label_completions(recipe, run.alignment / "completions.json", store, digests, pairs)
        log.info("labelled %d pairs (%d identical completions dropped)", labelled["pairs"], labelled["dropped_identical"])
        POOL.release()
        result = {"sampling": sampled, "labelling": labelled, **alignment.train_dpo(recipe, pairs, run.prepared, run.alignment)}
    else:
        result = alignment.adopt_policy(recipe, store, digests, run.prepared, run.alignment, federated.get("personal", False), homes_of(run))
    log.info("aligned: KL to the reference (%s) %.3f nats a completion", result["reference"], result["metrics"].get("kl_sequence", float("nan")))
    write_json(run.alignment / "result.json", result | tracking.register_policy(child, recipe, run.alignment / "final"))


@flow(name="evaluate", flow_run_name="evaluate", persist_result=False)
def evaluate(run: Run, recipe: Recipe) -> None:
    """Answers of the raw and the aligned policy to held-out prompts, judged in both orders."""
    child = tracking.open_phase(run, recipe, "evaluate")
    if not (run.evaluation / "result.json").is_file():
        answered, files = {}, {name: run.evaluation / f"answers-{name}.json" for name in ("aligned", "raw")}
        for name, adapter in (("aligned", run.alignment / "final"), ("raw", None)):
            answered |= evaluation.answer_prompts(recipe, run.prepared, name, adapter, files[name], homes=homes_of(run))
        evaluation.join_answers(files, run.evaluation / "answers.json")
        POOL.release()
        judged = evaluation.judge_answers(recipe, run.prepared, judges_root(), run.evaluation / "answers.json")
        if recipe.evaluation.alpaca_eval:
            judged["alpaca_eval"] = evaluation.annotate_answers(recipe, run.evaluation / "answers.json", run.evaluation / "alpaca_eval")
        judged |= more_measures(run, recipe)
        write_json(run.evaluation / "result.json", {"answers": answered, **judged})
    tracking.log_evaluation(child, run.evaluation)
    tracking.close_phase(run, child)
    POOL.release()


def more_measures(run: Run, recipe: Recipe) -> dict[str, Any]:
    """What a recipe may ask for beside the win rates: the implicit reward's accuracy, the answers to questions, and the reward-hacking curve.

    The curve is drawn over DPO's steps on the server, so a policy that the clients have trained has none; the log says so.
    """
    config, aligned, federated = recipe.evaluation, read_json(run.alignment / "result.json"), read_json(run.federation / "result.json")
    measured: dict[str, Any] = {}
    POOL.release()
    if config.preference_pairs:
        measured["implicit_reward"] = evaluation.measure_policy(recipe, run.prepared, run.alignment / "final", run.evaluation / "implicit-reward.json", homes_of(run))
    if config.questions:
        measured["questions"] = {
            name: evaluation.answer_questions(recipe, name, adapter, run.evaluation / "questions", run.folder / "trees", homes_of(run))
            for name, adapter in (("raw", None), ("aligned", run.alignment / "final"))}
        get_run_logger().info("questions: %s", reporting.questions_line(measured["questions"]))
    if config.curve_prompts and not aligned["checkpoints"]:
        get_run_logger().info("no reward-hacking curve (evaluation.curve_prompts): federation.method '%s' trains the policy itself, so there are no steps of DPO", recipe.federation.method)
    if config.curve_prompts and aligned["checkpoints"]:
        answers = {step: run.evaluation / f"answers-step-{step}.json" for step in sorted(set(aligned["checkpoints"].values()))}
        for folder, step in aligned["checkpoints"].items():
            evaluation.answer_prompts(recipe, run.prepared, f"step {step}", Path(folder), answers[step], config.curve_prompts)
        digests = {name: adapter["hash"] for name, adapter in federated["adapters"].items()}
        measured["curve"] = evaluation.reward_hacking_curve(
            recipe, run.prepared, judges_root(), run.federation / "adapters", digests, run.evaluation, answers, run.evaluation / "answers-raw.json")
    return measured
