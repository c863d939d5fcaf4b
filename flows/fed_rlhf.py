"""The pipeline: private preferences -> federated rounds -> aligned policy -> evaluation -> report.

fed-rlhf run summarization/demo [key.path=value ...]
python -m flows.fed_rlhf [--recipe NAME] [--resume RUN] [--check] [key.path=value ...]
prefect deployment run 'fed-rlhf/summarization' [-p recipe=NAME]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import wraps
from typing import Any

# Before Prefect is imported, which reads its settings then.
if __name__ == "__main__":
    import runpy

    runpy.run_module("flows.module", run_name="__main__")

from prefect import Flow, flow, get_run_logger, tags
from prefect.context import TagsContext

from components.config import FederationConfig, Recipe
from components.data.sources.owners import has_owners
from components.environment import configure_libraries
from components.federation.commits import Commits
from components.federation.outcome import export_policy
from components.federation.protocol import ServerState
from components.federation.rounds import run_rounds
from components.federation.spending import begin_private_rounds
from components.federation.transport import Transport
from components.models.policy import check_prompts
from components.progress import ROUNDS, Milestone, PhaseStarted, Work, progress
from components.recipes import check_recipe, load_recipe
from components.recipes.inputs import original_names, verify_inputs
from components.recipes.model_checks import required_backbones
from components.reporting.lines import (
    accuracy_label,
    accuracy_line,
    margins_line,
    measure_line,
    partition_line,
    questions_line,
    round_line,
)
from components.results import (
    AlignmentResult,
    EvaluationResult,
    FederationResult,
    LabellingResult,
    RoundEvaluation,
    SamplingResult,
    StepRecord,
)
from flows.api import pipeline_flow
from tasks import alignment, data, federation, owners, rewards
from tasks.devices import POOL, choose_workers, run_on_worker, task_runner
from tasks.evaluation import answers, judging, questions
from tasks.flow_runs import ProgressBar, claim_flow_run, recipe_tags, retried_run, without_plan_tags
from tasks.policies import FINAL, record_files
from tasks.prefect_transport import TRANSPORTS, close_exchange, rounds_contexts
from tasks.report import link_artifacts, phase_line, write_report
from tasks.runs import RESULT, Run, find_run, lock, open_run, package_versions, trees_root
from tasks.tracking.federate import FederationLog, log_federation, log_round_evaluation, log_steps
from tasks.tracking.phases import log_alignment, log_data, log_evaluation, register_policy
from tasks.tracking.report import log_report
from tasks.tracking.run_tree import ending, open_run_tracking, phase_tracking


@pipeline_flow("fed-rlhf")
def fed_rlhf(
    recipe: str = "summarization/demo", overrides: list[str] | None = None, resume: str | None = None
) -> str:
    """Run a recipe from its data to its report, or resume a stopped run; a retry resumes its own run.

    Args:
        recipe: name or path.
        overrides: 'key.path=value' settings on top of it.
        resume: id or folder of a run that was stopped, or that the command has opened; its own recipe is
            used.

    Returns:
        the folder of the run.
    """
    configure_libraries()
    run = retried_run() if resume is None else find_run(resume)
    if run is not None:
        verify_inputs(run.recipe())
        if warning := data.changed_clients_warning(run, run.recipe()):
            get_run_logger().warning("%s", warning)
    else:
        checked = check_recipe(load_recipe(recipe, overrides or []))
        run = open_run(choose_workers(checked.recipe), overrides or [])
    with lock(run):
        run_pipeline(run)
    return str(run.folder)


def run_pipeline(
    run: Run, benchmark: str | None = None, last: str = "report", flow_tags: Sequence[str] = ()
) -> None:
    """Run all phases of a run that are not complete, and write its report.

    Args:
        run: the run.
        benchmark: MLflow run of the benchmark that the run belongs to, if it belongs to one.
        last: the phase that is the last one for now.
        flow_tags: further tags of the flow runs of the phases.
    """
    run.pin_models()
    recipe = run.recipe()
    log = get_run_logger()
    log.info("run %s: recipe %s, folder %s", run.id, recipe.name, run.folder, extra=progress(Milestone()))
    for warning in run.record_versions(package_versions(recipe)):
        log.warning("%s", warning)
    link = claim_flow_run(run, is_named=benchmark is None, plan_tags=recipe_tags(recipe))
    parent = open_run_tracking(run, recipe, link, benchmark)
    with ending(run, is_finished=last == "report"):
        link_artifacts(run, recipe.name)
        for phase in (prepare, federate, align, evaluate):
            if not run.is_done(phase.name):
                run_phase(phase, run, recipe, f"{run.folder.name}, " if benchmark else "", flow_tags)
                run.mark_done(phase.name)
            if phase.name == last:
                return
        log.info("report ...", extra=progress(PhaseStarted("report")))
        write_report(run, recipe)
        log_report(parent, run)
        link_artifacts(run, recipe.name)
    run.mark_done("report")


def run_phase(
    phase: Flow[[Run, Recipe], None],
    run: Run,
    recipe: Recipe,
    prefix: str = "",
    flow_tags: Sequence[str] = (),
) -> None:
    """Run a phase; its line says how long it took, and its main figure, after a prefix."""
    log = get_run_logger()
    name = f"{prefix}{phase.name}"
    log.info("%s ...", name, extra=progress(PhaseStarted(name)))
    own = phase.with_options(
        flow_run_name=lambda: f"{run.folder.name}, {phase.name}", task_runner=task_runner(recipe.runtime)
    )
    with original_names(recipe), run.timed(phase.name), tags(*recipe_tags(recipe), *flow_tags):
        own(run, recipe)
    line = phase_line(run, phase.name)
    log.info("%s: %s", name, line, extra=progress(Milestone()))


def phase_flow(function: Callable[[Run, Recipe], None]) -> Flow[[Run, Recipe], None]:
    """Declare the flow of a phase, whose flow run is tagged by what it runs, and whose task runs are not.

    Before a task run with tags starts, Prefect asks the server for slots of their concurrency limits, also
    where there are no limits. Tags of the caller stay, since they may have limits.
    """

    @wraps(function)
    def run_untagged(run: Run, recipe: Recipe) -> None:
        with TagsContext(current_tags=without_plan_tags(TagsContext.get().current_tags)):
            function(run, recipe)

    return flow(name=function.__name__, persist_result=False)(run_untagged)


@phase_flow
def prepare(run: Run, recipe: Recipe) -> None:
    """Fetch the backbones, and prepare and validate the data before anything trains."""
    data.check_eight_bit(recipe)
    for name in required_backbones(recipe):
        data.fetch_backbone(name)
    if recipe.thoughts is not None and not (run.trees / "done").is_file():
        grow_trees(run, recipe)
    if has_owners(recipe):
        owners.show_owners(recipe)
        report = owners.prepare_at_owners(run, recipe)
    else:
        report = data.prepare_data(recipe, run.prepared, run.trees)
    log = get_run_logger()
    log.info("partition: %s", partition_line(report))
    if report.margins is not None:
        log.info("thoughts: %s", margins_line(report))
    for warning in report.warnings:
        log.warning("%s", warning)
    with phase_tracking(run, recipe.tracking, "prepare") as child:
        log_data(child, run, recipe, report)


def grow_trees(run: Run, recipe: Recipe) -> None:
    """Grow the recipe's trees of thoughts; trees that any run has grown before are read."""
    arguments = {"recipe": recipe, "folder": run.trees, "shared": trees_root()}
    counts_by_set = run_on_worker(data.grow_trees, recipe.runtime, run.folder, **arguments)
    counts = [f"{name} {count} questions" for name, count in counts_by_set.items()]
    get_run_logger().info("trees: %s", ", ".join(counts) or "none")
    (run.trees / "done").touch()


@phase_flow
def federate(run: Run, recipe: Recipe) -> None:
    """Run the federated rounds; a stopped run resumes from its last committed step."""
    check_prompts(recipe.policy)
    transport_type = TRANSPORTS.load(recipe.runtime.transport)  # an unknown one is refused before any work
    if has_owners(recipe):
        owners.show_owners(recipe)
    with phase_tracking(run, recipe.tracking, "federate") as child:
        target = FederationLog.of_run(child, run, recipe)
        with closing(transport_type.open(recipe, rounds_contexts(run))) as transport:
            rewards.prepare_rewards(run, recipe, transport)
            log_federation(target, run, federate_rounds(run, recipe, target, transport))
    POOL.release()


def federate_rounds(
    run: Run, recipe: Recipe, target: FederationLog, transport: Transport
) -> FederationResult:
    """All rounds, with their measurements before, between and after them, which are logged to `target`."""
    log = get_run_logger()
    method = recipe.federation.options
    rounds = method.local().rounds(recipe.federation)
    commits = federation.open_commits(run, recipe)
    if recipe.data.unseen_clients:
        federation.check_unseen(run, recipe)
    state, records = start_rounds(run, recipe, commits)
    bar = ProgressBar("rounds", f"Rounds of {run.id}")
    if records:  # a run that was stopped after a commit may not have logged that step
        log_steps(target, records, len(records) - 1)

    def measure(state: ServerState[Any]) -> RoundEvaluation:
        measured = federation.evaluate_state(run, recipe, state, transport)
        label = accuracy_label(method.outcome(state))
        log.info("%s after %d rounds: %s", label, state.round, accuracy_line(measured.accuracy))
        for name, figures in measured.measures.items():
            log.info("%s", measure_line(name, figures))
        return measured

    def after_step(state: ServerState[Any], record: StepRecord) -> None:
        records.append(record)
        log_steps(target, records, len(records) - 1)
        bar.report(record.rounds_done, rounds)
        done = Work(ROUNDS, record.rounds_done, rounds, record.client_means().get("loss"))
        line = round_line(record)
        log.info("round %d of %d: %s", record.round + 1, rounds, line, extra=progress(done))
        if is_eval_round(recipe.federation, record):
            log_round_evaluation(target, measure(state))
        measure_unseen_clients(run, recipe, commits, state)

    warnings = method.warnings(state.federation, recipe.seed, recipe.federation)
    for warning in (*warnings, *begin_private_rounds(recipe.federation, state, commits.store)):
        log.warning("%s", warning)
    measure(method.start(state.federation, recipe.seed))
    # A run may have been stopped between a step and its measurement.
    if records and is_eval_round(recipe.federation, records[-1]):
        log_round_evaluation(target, measure(state))
    elif state.round == rounds:  # before run_rounds removes what clients have measured of it
        measure(state)
    measure_unseen_clients(run, recipe, commits, state)  # a run may have been stopped before this
    state = run_rounds(method, state, transport, commits, recipe.federation, after_step)
    measure(state)
    commits.discard(keep_every=recipe.federation.keep_every)  # the updates of this measurement
    return federation.store_result(run, recipe, method.outcome(state), records)


def measure_unseen_clients(run: Run, recipe: Recipe, commits: Commits, state: ServerState[Any]) -> None:
    """Measure clients that take part in no round, once the server has what it sends them."""
    method = recipe.federation.options
    after = method.joining(recipe.federation, recipe.data.unseen_pairs).after
    if recipe.data.unseen_clients and state.round == after:
        measured = federation.measure_unseen(run, recipe, commits, state)
        get_run_logger().info("clients in no round: %s", accuracy_line(measured.accuracy))


def start_rounds(run: Run, recipe: Recipe, commits: Commits) -> tuple[ServerState[Any], list[StepRecord]]:
    """The last committed state and the records of its steps, or the initial state, which is committed."""
    method = recipe.federation.options
    committed = commits.latest(method.memory_type)
    if committed is not None:
        federation.check_secrets(run, recipe, committed[1])
        resumed = "resuming after round %d of %d"
        rounds = (committed[0].round, recipe.federation.rounds)
        get_run_logger().info(resumed, *rounds, extra=progress(Milestone()))
        return committed
    arguments = {"run": run, "recipe": recipe, "commits": commits}
    formed = run_on_worker(federation.form_federation, recipe.runtime, run.folder, **arguments)
    state = method.start(formed, recipe.seed)
    commits.write(state, None)
    return state, []


def is_eval_round(config: FederationConfig, record: StepRecord) -> bool:
    """Whether accuracy is measured after a step: every nth round but the last (evaluate_every)."""
    every = config.evaluate_every
    done = record.rounds_done
    return every is not None and record.ends_round and done % every == 0 and done < config.rounds


@phase_flow
def align(run: Run, recipe: Recipe) -> None:
    """Align the policy by DPO on pairs that the selectors label, or adopt the clients' policy."""
    with phase_tracking(run, recipe.tracking, "align") as child:
        path = run.alignment / RESULT
        log_alignment(child, run, AlignmentResult.stored(path, lambda: align_policy(run, recipe, child)))
    close_exchange(run)
    POOL.release()


def align_policy(run: Run, recipe: Recipe, child: str) -> AlignmentResult:
    """The aligned policy, registered by MLflow run `child` where the recipe names a model."""
    log = get_run_logger()
    outcome = run.federation_result().outcome
    if outcome.labels_pairs:
        sampling, labelling = sample_and_label(run, recipe)
        (result,) = alignment.train_by_dpo([(run, recipe)])
        result = result.model_copy(update={"sampling": sampling, "labelling": labelling})
    else:
        export_policy(outcome, run.alignment / FINAL, recipe, rounds_contexts(run).adapters)
        result = alignment.adopt_policy(run, recipe, outcome)
    kl = result.metrics.get("kl_sequence", float("nan"))
    log.info("aligned: KL to the reference (%s) %.3f nats per completion", result.reference, kl)
    if (name := recipe.tracking.registered_model) is not None:
        uri, version = register_policy(child, recipe, name, run.alignment / result.policy.folder)
        result = result.model_copy(update={"model_uri": uri, "model_version": version})
    return record_files(run, result)


def sample_and_label(run: Run, recipe: Recipe) -> tuple[SamplingResult, LabellingResult]:
    """Sample completions, and label pairs of them by the selectors."""
    sampling = alignment.sample_completions(run, recipe)
    labelling = alignment.label_completions(run, recipe)
    counts = (labelling.pairs, labelling.dropped_identical)
    get_run_logger().info("labeled %d pairs (%d identical completions dropped)", *counts)
    POOL.release()
    return sampling, labelling


@phase_flow
def evaluate(run: Run, recipe: Recipe) -> None:
    """Answers of the base and the aligned policy to held-out prompts, judged in both orders."""
    with phase_tracking(run, recipe.tracking, "evaluate") as child:
        path = run.evaluation / RESULT
        log_evaluation(child, run, EvaluationResult.stored(path, lambda: evaluate_policies(run, recipe)))
    close_exchange(run)
    POOL.release()


def evaluate_policies(run: Run, recipe: Recipe) -> EvaluationResult:
    """The evaluations of the recipe: answers, contests, and the optional ones."""
    config = recipe.evaluation
    policies = answers.evaluated_policies(run)
    for policy in policies:
        answers.answer_prompts(run, recipe, policy)
    answers.join_answers(run)
    POOL.release()
    optional: dict[str, Any] = {}
    result = judging.judge_answers(run, recipe)
    if config.alpaca_eval is not None:
        optional["alpaca_eval"] = judging.annotate_answers(run, recipe)
    POOL.release()
    if config.preference_pairs:
        optional["implicit_reward"] = answers.measure_implicit_reward(run, recipe)
    if config.questions is not None:
        results = {
            policy.name: questions.answer_questions(run, recipe, policy) for policy in reversed(policies)
        }
        get_run_logger().info("questions: %s", questions_line(results))
        optional["questions"] = results
    if steps := judging.answer_at_checkpoints(run, recipe):
        optional["curve"] = judging.draw_reward_hacking_curve(run, recipe, steps)
    return result.model_copy(update=optional)
