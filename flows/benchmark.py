"""Methods side by side: all arms with all seeds, contests between their policies, one report.

fed-rlhf benchmark [NAME] [key.path=value ...]
fed-rlhf benchmark --resume FOLDER ['seeds=[...]']
prefect deployment run 'benchmark/nightly'
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prefect import State, flow, get_run_logger

from components.config.benchmark import Benchmark
from components.environment import configure_libraries
from components.progress import Milestone, PhaseStarted, progress
from components.recipes.benchmarks import load_benchmark, read_benchmark
from components.recipes.inputs import verify_inputs
from flows.api import pipeline_flow
from flows.fed_rlhf import run_pipeline, sample_and_label
from tasks.alignment import train_by_dpo
from tasks.benchmark import judge_arms, share_generations
from tasks.benchmark_folder import add_seeds, arm_run, extend_plan, open_benchmark
from tasks.benchmark_report import write_benchmark_report
from tasks.devices import POOL, server_workers, task_runner
from tasks.flow_runs import claim_flow_run, retried_run, superseded
from tasks.runs import Run, find_benchmark, lock
from tasks.tracking.report import earlier_means, log_benchmark_report
from tasks.tracking.run_tree import ending, open_run_tracking


@pipeline_flow("benchmark")
def benchmark(
    benchmark: str = "summarization", overrides: list[str] | None = None, resume: str | None = None
) -> str | State[Any]:
    """Run a benchmark, or resume a stopped one.

    Args:
        benchmark: name or path, see flows/benchmarks.
        overrides: 'key.path=value' settings on top of the recipe for all arms; an arm's own
            settings win. A resumed benchmark takes more seeds only, see extend_plan.
        resume: folder of an earlier benchmark, whose own arms and seeds are used; complete runs are
            not repeated.

    Returns:
        the folder of the report; a cancelled state where a later night is due too.
    """
    configure_libraries()
    if resume is None and (retried := retried_run()) is not None:
        resume, overrides = str(retried.folder), None
    elif resume is None and (cancelled := superseded()) is not None:
        return cancelled
    if resume is not None:
        folder = find_benchmark(resume)
        verify_arms(folder)
    else:
        folder = open_benchmark(benchmark, load_benchmark(benchmark, overrides or []))
    with lock(Run(folder.name, folder)):
        if resume is not None and overrides:
            add_seeds(folder, extend_plan(read_benchmark(str(folder / "benchmark.yaml")), overrides))
        return compare_arms(folder)


def verify_arms(folder: Path) -> None:
    """Refuse to resume with local models that have changed; the arms of a benchmark may share them."""
    plan = read_benchmark(str(folder / "benchmark.yaml"))
    for arm in plan.arms:
        verify_inputs(arm_run(folder, arm, plan.seeds[0]).recipe())


def compare_arms(folder: Path) -> str:
    """Run all arms and contests that are not complete; the report is rewritten after each seed."""
    plan = read_benchmark(str(folder / "benchmark.yaml"))
    log = get_run_logger()
    sizes = (len(plan.arms), len(plan.seeds))
    log.info("benchmark: %d arms, %d seeds, folder %s", *sizes, folder, extra=progress(Milestone()))
    whole = Run(folder.name, folder)
    recipe = arm_run(folder, next(iter(plan.arms)), plan.seeds[0]).recipe()
    parent = open_run_tracking(whole, recipe, claim_flow_run(whole))
    earlier = earlier_means(parent, plan)
    out = folder
    with ending(whole):
        for seed in plan.seeds:
            run_seed(folder, plan, seed, parent)
            is_last = seed == plan.seeds[-1]
            report = write_benchmark_report(folder, plan, earlier if is_last else None)
            log_benchmark_report(parent, plan, *report)
            out, *_, changes = report
            for change in changes:
                if change.is_regression:
                    log.warning("regression: %s", change)
    return str(out)


def run_seed(folder: Path, plan: Benchmark, seed: int, parent: str) -> None:
    """Run all arms with one seed, and the contests between them.

    Args:
        folder: of the benchmark.
        plan: the benchmark.
        seed: the seed.
        parent: MLflow run of the benchmark.
    """
    log = get_run_logger()
    run_alignments(folder, plan, seed, parent)
    runs: list[Run] = []
    for arm in plan.arms:
        run = arm_run(folder, arm, seed)
        if not run.is_done("report"):
            share_generations(run, runs)
            with lock(run):
                run_pipeline(run, parent, flow_tags=[f"arm:{arm}"])
            summary = (run.report / "summary.txt").read_text(encoding="utf-8")
            log.info("%s, seed %d:\n%s", arm, seed, summary)
        runs.append(run)
    if plan.contests:
        name = f"contests, seed {seed}"
        log.info("%s ...", name, extra=progress(PhaseStarted(name)))
        runner = task_runner(runs[0].recipe().runtime)
        contests.with_options(flow_run_name=name, task_runner=runner)(folder, plan, seed)
    POOL.release()


def run_alignments(folder: Path, plan: Benchmark, seed: int, parent: str) -> None:
    """Run all arms with one seed up to DPO where several GPUs can train the arms' policies side by side."""
    runs = {arm: arm_run(folder, arm, seed) for arm in plan.arms}
    left = {arm: run for arm, run in runs.items() if not run.is_done("align")}
    runtime = next(iter(runs.values())).recipe().runtime
    if len(left) < 2 or runtime.task_runner != "ray":
        return
    runner = task_runner(runtime)
    if server_workers(runtime, folder) < 2:
        return
    for n, (arm, run) in enumerate(left.items()):
        share_generations(run, list(left.values())[:n])
        with lock(run):
            run_pipeline(run, parent, last="federate", flow_tags=[f"arm:{arm}"])
    name = f"align all arms, seed {seed}"
    align_arms.with_options(flow_run_name=name, task_runner=runner)(list(left.values()))


@flow(name="align all arms", persist_result=False)
def align_arms(runs: list[Run]) -> None:
    """Train the policies of the arms that are aligned by DPO, each by a worker."""
    own = [run for run in runs if run.federation_result().outcome.labels_pairs]
    with ExitStack() as stack:
        for n, run in enumerate(own):
            for context in (lock(run), ending(run, is_finished=False), run.timed("align")):
                stack.enter_context(context)
            share_generations(run, own[:n])
            sample_and_label(run, run.recipe())
        train_by_dpo([(run, run.recipe()) for run in own])
    POOL.release()


@flow(name="contests", persist_result=False)
def contests(folder: Path, plan: Benchmark, seed: int) -> None:
    """Judge the contests between the arms with one seed."""
    judge_arms(folder, plan.contests, seed)
