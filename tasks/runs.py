"""The run folder, which holds the inputs and results of all phases of a run.

    runs/<run>/
        recipe.yaml      the whole recipe, with defaults, the texts of its templates, and the day that
                         chat templates print
        inputs/          copies of the other files that it names, and commits of models of the hub
                         (components/recipes/inputs.py)
        run.json         ids of the MLflow run and of the Prefect run, commits of the code, versions of
                         plug-ins and of the libraries that compute, overrides
        .lock            locked by the process that works on the run
        salt             of published digests of clients' pairs (federation.privacy)
        <phase>.done     empty; the phase is complete and logged (report.done: the whole run is)
        prepared/        data (components/data/records.py)
        federation/      adapters/, updates/, commits/, rewards/ (where trained rewards are),
                         final/ (PEFT folders), result.json
        federation-server/    the server's secret, and noise (components/federation/private_sums.py)
        federation-clients/   the clients' private stores (components/federation/clients/private.py)
        owners/          homes of owners that are processes, with rows and private stores
                         (runtime.transport: processes; components/owners/run_folder.py)
        exchange/        adapters and updates of jobs after the rounds, until these are answered
        alignment/       completions.json, pairs.parquet, epoch-1/ ..., final/ (PEFT folders), result.json
        evaluation/      answers.json, contests/ (components/evaluation/contests.py), judgements.json
                         (of a judge that writes), questions/ (answers), result.json
        report/          report.html, metrics.json, summary.txt, tables for `dvc plots`

A phase's result.json (components/results.py) is written when its work is complete, and <phase>.done
when the result is logged too. A resumed run skips phases that are done, logs those that are only
complete, and resumes the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import Recipe, RecipeError
from components.config.loading import Tree, dump_yaml
from components.data.data_report import REPORT_FILE
from components.io import read_json, read_mapping, write_atomically, write_json
from components.paths import PACKAGE, is_file, runs_root
from components.privacy import secrets
from components.recipes import load_recipe
from components.recipes.inputs import open_inputs, pin_models, set_chat_dates, store_inputs
from components.recipes.load import dump_recipe

if TYPE_CHECKING:
    from components.results import AlignmentResult, EvaluationResult, FederationResult

RESULT = "result.json"
PHASES = ("prepare", "federate", "align", "evaluate")
RESULTS = {
    "prepare": f"prepared/{REPORT_FILE}",
    "federate": f"federation/{RESULT}",
    "align": f"alignment/{RESULT}",
    "evaluate": f"evaluation/{RESULT}",
    "report": "report/report.html",
}
"""The file that each phase, and the report, writes when it is complete."""
COMPUTING = ("accelerate", "numpy", "peft", "tokenizers", "torch", "transformers", "trl")
"""Libraries whose versions may change what a run computes."""
FIRST_DAY = "first-day"
"""File of the pipeline's folder with the day that its chat templates print."""
RECIPES: dict[Path, tuple[tuple[int, ...], Recipe]] = {}
"""Recipes of runs that this process has written or read, by their files, with what tells a changed file."""
LATEST = "latest"
"""In place of the id of a run: the one that was started last."""
MAX_LISTED = 5
"""Number of ids that a message on an ambiguous name lists."""
HELD: list[Run] = []
"""Runs and benchmarks that this process works on or was stopped in; a benchmark is before its run."""


@dataclass(frozen=True)
class Run:
    """A run folder."""

    id: str  # name of the run
    folder: Path  # its folder

    @property
    def prepared(self) -> Path:
        """Folder of the prepared data."""
        return self.folder / "prepared"

    @property
    def trees(self) -> Path:
        """Folder of the trees of thoughts that the run grew."""
        return self.folder / "trees"

    @property
    def federation(self) -> Path:
        """Folder of the phase federate."""
        return self.folder / "federation"

    @property
    def alignment(self) -> Path:
        """Folder of the phase align."""
        return self.folder / "alignment"

    @property
    def evaluation(self) -> Path:
        """Folder of the phase evaluate."""
        return self.folder / "evaluation"

    @property
    def exchange(self) -> Path:
        """Folder of what clients exchange with the server after the rounds; it is removed then."""
        return self.folder / "exchange"

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return self.folder / "report"

    @property
    def inputs(self) -> Path:
        """Folder of the copies of the files that the recipe names."""
        return self.folder / "inputs"

    @property
    def is_benchmark(self) -> bool:
        """Whether the folder is that of a benchmark, which has runs in it."""
        return (self.folder / "benchmark.yaml").is_file()

    @property
    def is_in_benchmark(self) -> bool:
        """Whether the run is one of a benchmark's."""
        return (self.folder.parent / "benchmark.yaml").is_file()

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "benchmark" if self.is_benchmark else "run"

    @property
    def plan_name(self) -> str:
        """Name of the file that the run was started with."""
        return "benchmark.yaml" if self.is_benchmark else "recipe.yaml"

    def recipe(self) -> Recipe:
        """The recipe that the run was started with; its files are read as they were then."""
        path = (self.folder / "recipe.yaml").resolve()
        known = RECIPES.get(path)
        if known is None or known[0] != _stamp(path):
            return self.keep_recipe(load_recipe(str(path)))
        return known[1]

    def keep_recipe(self, recipe: Recipe) -> Recipe:
        """Keep the recipe of recipe.yaml for this process, with the places of its files."""
        path = (self.folder / "recipe.yaml").resolve()
        opened = open_inputs(recipe, path.with_name("inputs"))
        RECIPES[path] = _stamp(path), opened
        return opened

    def pin_models(self) -> None:
        """Record commits of models of the hub that were not to be told when the run started."""
        if pin_models(self.recipe(), self.inputs):
            RECIPES.pop((self.folder / "recipe.yaml").resolve())

    def federation_result(self) -> FederationResult:
        """Result of the phase federate."""
        from components.results import FederationResult

        return FederationResult.read(self.federation / RESULT)

    def alignment_result(self) -> AlignmentResult:
        """Result of the phase align."""
        from components.results import AlignmentResult

        return AlignmentResult.read(self.alignment / RESULT)

    def evaluation_result(self) -> EvaluationResult:
        """Result of the phase evaluate."""
        from components.results import EvaluationResult

        return EvaluationResult.read(self.evaluation / RESULT)

    @property
    def is_pipeline(self) -> bool:
        """Whether the folder is that of dvc.yaml, whose stages are repeated by DVC."""
        return (self.folder / FIRST_DAY).is_file()

    @property
    def resume_command(self) -> str:
        """The command that goes on with a run, a benchmark or the pipeline of dvc.yaml."""
        if self.is_benchmark:
            return f"fed-rlhf benchmark --resume {self.id}"
        return "dvc repro" if self.is_pipeline else f"fed-rlhf resume {self.id}"

    def is_done(self, phase: str) -> bool:
        """Whether a phase, or the report, is complete and logged.

        DVC removes the results of a stage before it repeats it, so in its pipeline they say it.
        """
        if self.is_pipeline:
            return (self.folder / RESULTS[phase]).is_file()
        return (self.folder / f"{phase}.done").is_file()

    def mark_done(self, phase: str) -> None:
        """Record that a phase, or the report, is complete and logged."""
        (self.folder / f"{phase}.done").touch()

    def phase(self) -> str:
        """The first phase that is not done, or the report."""
        return next((phase for phase in PHASES if not self.is_done(phase)), "report")

    def committed_round(self) -> int | None:
        """Number of rounds that are committed; None before the rounds."""
        commits = sorted((self.federation / "commits").glob("[0-9]*.json"))
        return int(read_json(commits[-1])["state"]["round"]) if commits else None

    def metadata(self) -> Tree:
        """The recorded ids and commits.

        Raises:
            RecipeError: run.json is damaged.
        """
        path = self.folder / "run.json"
        try:
            metadata = read_mapping(path) if path.is_file() else {}
        except ValueError as error:
            raise RecipeError(f"{error}: delete it; the run then gets new MLflow runs.") from None
        return metadata

    def update_metadata(self, **values: Any) -> None:
        """Add to the metadata."""
        self.replace_metadata(**self.metadata() | values)

    def replace_metadata(self, **values: Any) -> None:
        """Replace the metadata."""
        write_json(self.folder / "run.json", values)

    def record_commit(self, commit: str) -> None:
        """Add the commit of the code that works on the run, if it is not the last one recorded."""
        commits = self.metadata().get("commits", [])
        if commits[-1:] != [commit]:
            self.update_metadata(commits=[*commits, commit])

    def record_versions(self, versions: Mapping[str, str]) -> list[str]:
        """Add the versions of packages that are new to the run.

        Returns:
            a warning for each package whose version is not the one that the run was started with.
        """
        recorded: dict[str, list[str]] = self.metadata().get("versions", {})
        warnings = []
        for name, installed in versions.items():
            known = recorded.setdefault(name, [installed])
            if installed not in known:
                known.append(installed)
            if installed != known[0]:
                warnings.append(
                    f"the run was started with {name} {known[0]}, but {name} {installed} is installed: to"
                    f" finish it with the same code, stop it, install {name}=={known[0]} and resume it."
                )
        self.update_metadata(versions=recorded)
        return warnings

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the wall time of a phase to the recorded seconds, those of a stopped run included."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = self.metadata().get("seconds", {})
            spent = seconds.get(phase, 0.0) + time.monotonic() - start
            self.update_metadata(seconds=seconds | {phase: spent})


def _stamp(path: Path) -> tuple[int, ...]:
    """What another content of a file changes."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def contest_file(evaluation: Path, name: str) -> Path:
    """File of a run's own contest, in its folder of the phase evaluate."""
    return evaluation / "contests" / f"{name}.json"


def judges_root() -> Path:
    """Folder of trained judges and rewards of all runs: FED_RLHF_JUDGES, or judges/ beside the runs."""
    return Path(os.environ.get("FED_RLHF_JUDGES", runs_root() / "judges"))


def trees_root() -> Path:
    """Folder of trees of thoughts, shared by runs: FED_RLHF_TREES, or trees/ beside the runs."""
    return Path(os.environ.get("FED_RLHF_TREES", runs_root() / "trees"))


def open_run(recipe: Recipe, overrides: Sequence[str] = ()) -> Run:
    """A new run folder with its recipe in it; run.json has the overrides that the recipe was made with."""
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    run_id = f"{recipe.name.replace('/', '-')}-{moment}-{uuid.uuid4().hex[:4]}"
    run = create_run(recipe, runs_root().resolve() / run_id)
    run.update_metadata(overrides=list(overrides))
    return run


def create_run(
    recipe: Recipe, folder: Path, day: date | None = None, known: dict[Path, Path] | None = None
) -> Run:
    """A run in this folder, with its recipe and the files that it names; an earlier recipe is replaced.

    Args:
        recipe: as its author wrote it.
        folder: of the run.
        day: that chat templates print which ask for the present one, see set_chat_dates; None: today.
        known: see store_inputs.
    """
    run = Run(folder.name, folder)
    pin_models(recipe, run.inputs)
    dated = set_chat_dates(recipe, day or date.today())
    stored = store_inputs(dated, run.inputs, known)
    write_atomically(folder / "recipe.yaml", dump_recipe(stored).encode())
    run.keep_recipe(stored)
    return run


def write_stage_inputs(recipe: Recipe, folder: Path) -> None:
    """Write the recipe into the pipeline's folder, and the parts that stages of dvc.yaml depend on.

    backbone-inputs.yaml holds the backbones and the models whose tokenizers read texts of the data,
    federate-inputs.yaml the seed and the sections that the method names, grow-inputs.yaml those of the
    trees. Chat templates print the day of the pipeline's first run, which has a file that DVC keeps: it
    deletes recipe.yaml before that is written again, and stages that print the day would then be repeated
    on every other day.
    """
    from components.evaluation.control_tokens import reading_models  # these take time to import
    from components.recipes.model_checks import required_backbones

    path = folder / FIRST_DAY
    if not path.is_file():
        write_atomically(path, date.today().isoformat().encode())
    recipe = create_run(recipe, folder, date.fromisoformat(path.read_text(encoding="utf-8"))).recipe()
    write_atomically(folder / "recipe.yaml", dump_recipe(recipe).encode())  # DVC compares commits too
    (folder / "inputs").mkdir(exist_ok=True)  # DVC expects the output
    values = recipe.model_dump(mode="json")
    rounds = {name: values[name] for name in ("seed", *recipe.rounds_sections)}
    trees = {name: values[name] for name in ("seed", "policy", "thoughts")}
    readers = {key: [one.location, one.revision] for key, one in reading_models(recipe)}
    readers |= {f"policy.{key}": values["policy"][key] for key in ("chat", "chat_template_kwargs", "system")}
    if recipe.thoughts is None:
        trees = {"thoughts": None}
    inputs = {
        "backbone-inputs": {"backbones": required_backbones(recipe), "readers": readers},
        "federate-inputs": rounds,
        "grow-inputs": trees,
    }
    for name, content in inputs.items():
        write_atomically(folder / f"{name}.yaml", dump_yaml(content).encode())


def list_runs() -> list[Run]:
    """All runs under the folder of runs, benchmarks' runs included, by their start, the latest last."""
    return _list("*/recipe.yaml", "*/*-seed-*/recipe.yaml")


def list_benchmarks() -> list[Run]:
    """All benchmarks under the folder of runs, by their start or their last new seeds, the latest last."""
    return _list("*/benchmark.yaml")


def list_runs_and_benchmarks() -> list[Run]:
    """The runs and benchmarks of `list_runs` and `list_benchmarks`, the latest last."""
    return _list("*/recipe.yaml", "*/*-seed-*/recipe.yaml", "*/benchmark.yaml")


def _list(*patterns: str) -> list[Run]:
    plans = [plan for pattern in patterns for plan in runs_root().glob(pattern)]
    plans.sort(key=lambda plan: plan.stat().st_mtime)  # they are written once, at the start
    folders = dict.fromkeys(plan.parent.resolve() for plan in plans)  # a link and its target are one run
    return [Run(run_id(folder), folder) for folder in folders]


def run_id(folder: Path) -> str:
    """Id of a run by its folder: the path under the folder of all runs, or the name elsewhere."""
    root = runs_root().resolve()
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else folder.name


def find_run(name: str) -> Run:
    """A run by its id, its folder, the beginning of its id, or `latest`.

    The latest run is the one that was started last; runs of benchmarks are not counted.

    Raises:
        RecipeError: there is none, and the message has the latest ones; or several ids begin with the name.
    """
    return _by_path(name, "recipe.yaml") or _by_beginning(name, "run", list_runs())


def find_benchmark(name: str) -> Path:
    """The folder of a benchmark, named as a run is in `find_run`.

    Raises:
        RecipeError: as find_run.
    """
    found = _by_path(name, "benchmark.yaml") or _by_beginning(name, "benchmark", list_benchmarks())
    return found.folder


def find_run_or_benchmark(name: str, is_whole: bool = False) -> Run:
    """A run or a benchmark, named as a run is in `find_run`; `latest` is a run if there is one.

    Args:
        name: of it.
        is_whole: whether a whole id or a folder is required.

    Raises:
        RecipeError: as find_run, or the name is not whole.
    """
    exact = _by_path(name, "benchmark.yaml") or _by_path(name, "recipe.yaml")
    if exact is not None:
        return exact
    known = list_runs_and_benchmarks()
    if name == LATEST:
        known.sort(key=lambda run: not run.is_benchmark)
    found = _by_beginning(name, "run or benchmark", known)
    if is_whole:
        raise RecipeError(f"'{name}' is not a whole id: give '{found.id}', if you mean it.")
    return found


def _by_path(name: str, plan: str) -> Run | None:
    for folder in (runs_root() / name, Path(name)):
        if is_file(folder / plan):
            return Run(run_id(folder.resolve()), folder.resolve())
    return None


def _by_beginning(name: str, kind: str, known: Sequence[Run]) -> Run:
    started = [run for run in known if "/" not in run.id]
    if name == LATEST and started:
        return started[-1]
    # The name of a benchmark does not stand for its runs.
    matches = [run for run in known if name and run.id.startswith(name) and "/" not in run.id[len(name) :]]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(run.id for run in matches[:MAX_LISTED])
        others = f" and {len(matches) - MAX_LISTED} others" if len(matches) > MAX_LISTED else ""
        raise RecipeError(f"'{name}' is the beginning of several ids: {ids}{others}. Give more of one.")
    latest = ", ".join(run.id for run in known[-3:]) or "none"
    raise RecipeError(f"there is no {kind} '{name}' under {runs_root()}. Latest: {latest}.")


@contextlib.contextmanager
def lock(run: Run) -> Iterator[None]:
    """Lock a run, or a benchmark, for this process; the lock ends with the process, however it ends.

    Raises:
        RecipeError: another process works on the run.
    """
    with (run.folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(
                f"another process works on run {run.id}: wait for it, or stop it, and then resume the run."
            ) from None
        if run not in HELD:
            HELD.append(run)
        try:
            yield
        except Exception as error:
            if not is_stop(error):
                HELD.remove(run)
            raise
        HELD.remove(run)


def is_stop(error: BaseException) -> bool:
    """Whether an exception stops a run, in place of a failure.

    SIGTERM raises TerminationSignal wherever Prefect is. Where Prefect handles it by code that fails for that
    reason, it is the context or the cause of an ordinary exception.
    """
    from prefect.exceptions import TerminationSignal

    related: list[BaseException] = [error]
    for each in related:
        causes = (each.__cause__, each.__context__)
        related += [one for one in causes if one is not None and one not in related]
    is_signal = any(isinstance(one, TerminationSignal) for one in related)
    return is_signal or not isinstance(error, Exception)


def git_commit() -> str:
    """Commit of the checkout, with '-dirty' where files differ from it; 'unknown' outside git."""
    try:
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changes else commit


def package_versions(recipe: Recipe) -> dict[str, str]:
    """Versions of the libraries that compute, and of the packages whose entry points a recipe names."""
    text = recipe.model_dump_json()
    versions = {name: version(name) for name in COMPUTING}
    for package in distributions():  # in the order of the path, on which the first of a name is imported
        entries = [entry for entry in package.entry_points if entry.group.startswith("fed_rlhf.")]
        if any(f'"{entry.name}"' in text for entry in entries):
            versions.setdefault(package.name, package.version)
    return versions


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def published_digest(run: Run, recipe: Recipe, digest: str) -> str:
    """A digest of clients' pairs as it may be published: with federation.privacy by the run's own salt.

    Without the salt, nobody can confirm a guess of a client's pairs by it.
    """
    if recipe.federation.privacy is None:
        return digest
    return secrets.digest(secrets.kept_secret(run.folder / "salt"), digest).hex()
