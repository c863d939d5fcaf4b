"""The files that DVC, Prefect, make, pip and compose read agree with the code that they name."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages

from components.config import Recipe
from components.recipes import load_recipe
from components.recipes.benchmarks import benchmark_names
from components.recipes.load import recipe_names
from flows.cli import Stage
from infra import install, servers
from tasks.runs import write_stage_inputs
from tests.support.pipeline import environment_without

ROOT = Path(__file__).resolve().parents[2]
TREES = ["data={source: thoughts}", "thoughts={questions: [{set: csqa}]}"]
LATER_STAGES = {"align", "evaluate", "report"}
AFTER_PREPARE = {"federate", *LATER_STAGES}
AFTER_TREES = {"prepare", *AFTER_PREPARE}


@cache
def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def recipe_sections(recipe) -> list[str]:
    """The sections of a recipe that determine its rounds."""
    return recipe.rounds_sections


def stage_params(folder: Path, overrides: list[str]) -> dict[str, list]:
    """The values of the recipe `debug` that DVC compares for each stage, read from the written inputs.

    Raises:
        KeyError: a key that a stage names is in no recipe.
    """
    write_stage_inputs(load_recipe("debug", overrides), folder)
    written = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.glob("*.yaml")}
    values: dict[str, list] = {}
    for name, stage in read("dvc.yaml")["stages"].items():
        values[name] = []
        for entry in stage.get("params", []):
            for file, keys in entry.items():
                content = written[Path(file).name]
                values[name] += [content] if keys is None else [value_of(content, key) for key in keys]
    return values


def value_of(content: dict, key: str) -> object:
    """The value of a dotted key."""
    for part in key.split("."):
        content = content[part]
    return content


def paths(stage: dict, *kinds: str) -> list[str]:
    """The files and folders that a stage lists under some of its keys."""
    listed = []
    for kind in kinds:
        for entry in stage.get(kind, []):
            listed.append(next(iter(entry)) if isinstance(entry, dict) else entry)
    return listed


def stale_stages(folder: Path, recipe: list[str], change: str) -> set[str]:
    """The stages that are repeated when the recipe changes, with those that depend on their outputs."""
    stages = read("dvc.yaml")["stages"]
    before = stage_params(folder, recipe)
    after = stage_params(folder, [*recipe, change])
    stale = {name for name in stages if before[name] != after[name]}
    while True:
        outputs: set[str] = set()
        for name in stale:
            outputs.update(paths(stages[name], "outs", "metrics"))
        dependent = {name for name, stage in stages.items() if outputs & set(paths(stage, "deps"))}
        if dependent <= stale:
            return stale
        stale |= dependent


def test_the_stages_of_dvc_are_those_of_the_command_line():
    stages = read("dvc.yaml")["stages"]
    assert list(stages) == list(Stage)
    assert all(f"${{stage}} {name}" in stage["cmd"] for name, stage in stages.items())


@pytest.mark.parametrize("section", [name for name in Recipe.model_fields if name != "runtime"])
def test_every_section_but_the_runtime_is_an_input_of_a_stage(section):
    overrides = [
        "federation.method=feddpo",
        "federation.options={objective: ppo}",
        "rewards={judge: {kind: judge}}",
    ]
    sections = set(recipe_sections(load_recipe("debug", overrides)))
    assert {"rewards", "evaluation"} <= sections, "the judge scores the pairs"
    sections.add("thoughts")  # grow-inputs.yaml
    for stage in read("dvc.yaml")["stages"].values():
        for entry in stage.get("params", []):
            for keys in entry.values():
                sections.update(key.partition(".")[0] for key in keys or [])
    assert section in sections


@pytest.mark.parametrize(
    ("recipe", "change", "rerun"),
    [
        ([], "evaluation.judge.steps=5", {"evaluate", "report"}),
        ([], "evaluation.questions={questions: [{set: csqa}]}", {"evaluate", "report"}),
        ([], "federation.rounds=4", AFTER_PREPARE),
        ([], "alignment.dpo.beta=0.5", LATER_STAGES),
        (TREES, "thoughts.depth=2", {"grow_trees", *AFTER_TREES}),
        (TREES, "data.min_margin=0.5", AFTER_TREES),
        ([], "data.options.papers_per_annotator=3", AFTER_TREES),
        ([], "data.align_prompts={source: alpaca_eval}", AFTER_TREES),
        (
            [],
            "evaluation.judge.selector.backbone.name=another",
            {"fetch_backbone", "grow_trees", *AFTER_TREES},
        ),
        ([], "policy.max_new_tokens=9", LATER_STAGES),
        ([], "runtime.retries=9", set()),
        ([], "seed=9", AFTER_TREES),
        (["federation.method=feddpo"], "policy.max_new_tokens=9", AFTER_PREPARE),
        (["federation.method=fedavg"], "selector.max_length=128", LATER_STAGES),
    ],
)
def test_a_change_repeats_the_stages_that_depend_on_it_and_no_others(tmp_path, recipe, change, rerun):
    assert stale_stages(tmp_path, recipe, change) == rerun


def test_the_dependencies_of_a_stage_exist_or_are_the_outputs_of_a_stage():
    outputs: set[str] = set()
    needed: set[str] = set()
    for stage in read("dvc.yaml")["stages"].values():
        outputs.update(paths(stage, "outs", "metrics"))
        needed.update(paths(stage, "deps"))
    assert [path for path in sorted(needed - outputs) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("stage", read("dvc.yaml")["stages"])
def test_the_lock_of_the_demo_has_the_outputs_of_each_stage(stage):
    """`dvc status` says what code has changed."""
    declared, locked = (read(name)["stages"][stage] for name in ("dvc.yaml", "dvc.lock"))
    cure = "run `dvc repro` with the parameters of the demo (params.yaml), and commit dvc.lock"
    assert {entry["path"] for entry in locked["outs"]} == set(paths(declared, "outs", "metrics")), cure


def test_the_plots_of_dvc_read_outputs_of_stages():
    outputs: set[str] = set()
    for stage in read("dvc.yaml")["stages"].values():
        outputs.update(paths(stage, "outs", "metrics"))
    plotted: set[str] = set()
    for plot in read("dvc.yaml")["plots"]:
        (settings,) = plot.values()
        for axis in ("x", "y"):
            if isinstance(settings[axis], dict):
                plotted.update(settings[axis])
    assert plotted
    assert plotted <= outputs


@pytest.mark.parametrize(
    ("configured", "expected"),
    [({}, "checkout"), ({"FED_RLHF_HOME": "elsewhere"}, "elsewhere")],
    ids=["by default", "set"],
)
def test_a_stage_logs_into_the_checkout_also_from_the_copy_of_an_experiment(tmp_path, configured, expected):
    program = tmp_path / "checkout" / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$FED_RLHF_HOME $FED_RLHF_BACKBONES"\n')
    program.chmod(0o755)
    copy = tmp_path / "checkout" / ".dvc" / "tmp" / "exps" / "temp"
    copy.mkdir(parents=True)
    variables = environment_without("FED_RLHF_") | {"DVC_ROOT": str(tmp_path / "checkout")}
    (stage,) = read("dvc.yaml")["vars"]
    done = subprocess.run(
        ["sh", "-c", stage["stage"]],
        cwd=copy,
        env=variables | {name: str(tmp_path / value) for name, value in configured.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / expected), str(copy / "data" / "backbone")]


def test_evaluation_depends_on_questions_templates_trees_and_everything_it_evaluates():
    dependencies = paths(read("dvc.yaml")["stages"]["evaluate"], "deps")
    for path in (
        "components/data/questions",
        "components/data/prompt_templates",
        "components/data/templates.py",
        "components/data/trees.py",
        "components/alignment/thoughts",
        "components/evaluation",
        "components/models",
        "data/pipeline/trees",
        "data/pipeline/alignment",
        "data/pipeline/backbones.json",
    ):
        assert any(folder in dependencies for folder in (path, *map(str, Path(path).parents))), path


def test_the_pipelines_recipe_exists_and_its_overrides_fit_it():
    parameters = read("params.yaml")
    assert set(parameters) == {"recipe", "overrides"}
    assert parameters["recipe"] in recipe_names()
    load_recipe(parameters["recipe"], parameters["overrides"].split())


def deployments() -> dict[str, dict]:
    """The deployments of prefect.yaml by name."""
    return {deployment["name"]: deployment for deployment in read("prefect.yaml")["deployments"]}


def flow_arguments(entrypoint: str) -> set[str]:
    """The arguments of a flow, read from its source."""
    module, function = re.fullmatch(r"(.+?)(?:\.py)?:(\w+)", entrypoint).groups()
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (node,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return {argument.arg for argument in node.args.args}


@pytest.mark.parametrize("deployment", deployments().values(), ids=deployments())
def test_a_deployment_names_what_exists_and_only_nightly_benchmarks_are_scheduled(deployment):
    parameters = deployment["parameters"]
    assert set(parameters) <= flow_arguments(deployment["entrypoint"])
    assert parameters.get("recipe", "debug") in recipe_names()
    assert parameters.get("benchmark", "summarization") in benchmark_names()
    assert deployment["work_pool"]["name"] == servers.WORK_POOL
    crons = [schedule["cron"] for schedule in deployment["schedules"]]
    assert len(crons) == (deployment["name"] in ("nightly", "performance"))
    assert all(len(cron.split()) == 5 for cron in crons)


def test_make_up_names_what_is_scheduled():
    assert servers.active_schedules() == ["nightly (0 2 * * * UTC)", "performance (0 1 * * * UTC)"]


@pytest.mark.pipeline
def test_a_prefect_command_in_the_checkout_uses_the_server_of_make_up():
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "config", "view", "--show-defaults"],
        cwd=ROOT,
        env=environment_without("PREFECT_"),
        capture_output=True,
        text=True,
        check=True,
    )
    settings = dict(re.findall(r"(PREFECT_\w+)='?([^\s']*)", done.stdout))
    assert settings["PREFECT_API_URL"] == f"http://{servers.HOST}:{servers.PREFECT_PORT}/api"
    assert (ROOT / settings["PREFECT_HOME"]).resolve() == servers.PACKAGE / ".prefect"
    assert settings["PREFECT_SERVER_ANALYTICS_ENABLED"] == "False"


def test_each_target_of_the_makefile_runs_whatever_files_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)", makefile, re.MULTILINE)[1].split()
    assert targets == set(phony)


@pytest.fixture
def clone(tmp_path):
    """A git repository with the scripts of .ci, and a `make` that writes down how it is called."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "make $*" >> "$CALLS"\n[ "make $1" != "$FAILS" ]\n')
    make.chmod(0o755)
    (tmp_path / ".gitignore").write_text("/bin\n/calls\n")
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=tmp_path, check=True
        )

    def call(script, *arguments, **variables):
        """Exit status, and what make was called with."""
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        identity = {
            f"GIT_{role}_{part}": "a" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")
        }
        path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls)}
        environment = environment_without("RESULTS_") | identity | path | variables
        done = subprocess.run(
            [str(tmp_path / ".ci" / script), *arguments], env=environment, capture_output=True, text=True
        )
        return done.returncode, calls.read_text().splitlines() if calls.is_file() else []

    call.folder = tmp_path
    return call


def test_continuous_integration_runs_the_linter_and_all_tests_but_the_long_ones(clone):
    options = "--reruns 1 --max-suite-reruns 5 --rerun-except Timeout --durations=10 --costs=print"
    lint, test = "make lint", f"make test PYTEST_ARGS={options}"
    assert clone("run") == (0, [lint, test])
    assert clone("run", FAILS="make lint") == (1, [lint])
    assert clone("run", FAILS="make test") == (1, [lint, test])


@pytest.fixture
def gate(tmp_path):
    """A function that runs `.ci/run` on tests of its own: exit status and last lines."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    command = f"PYTHONPATH={ROOT} {sys.executable} -m pytest -q -n 2 $(PYTEST_ARGS)"
    (tmp_path / "Makefile").write_text(f"lint:\n\t@true\ntest:\n\t@{command}\n")
    plugins = "pytest_plugins = ['tests.support.unstable']\n"
    (tmp_path / "conftest.py").write_text(
        f"{plugins}def pytest_addoption(parser): parser.addoption('--costs')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 2\n")

    def run(source):
        (tmp_path / "test_some.py").write_text("import os, pathlib, time, pytest\n" + source)
        environment = environment_without("PYTEST_", "MAKE")
        done = subprocess.run(
            [str(tmp_path / ".ci" / "run")], env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout.splitlines()[-30:]

    return run


EVERY_SECOND_TIME = """
def every_second_time(name):
    ran = pathlib.Path(name).exists()
    pathlib.Path(name).touch()
    assert ran, "the first time"
"""


def test_a_test_that_fails_twice_is_red_and_one_that_fails_once_is_named(gate):
    status, lines = gate(
        EVERY_SECOND_TIME
        + "def test_wrong(): assert 1 + 1 == 3\n"
        + "def test_unstable(): every_second_time('test')\n"
    )
    assert status == 2
    assert "FAILED test_some.py::test_wrong - assert (1 + 1) == 3" in lines
    assert "unstable: test_some.py::test_unstable - AssertionError: the first time" in lines
    assert lines[-1].endswith("make fix")


@pytest.mark.long
def test_tests_and_fixtures_that_fail_once_do_not_fail_continuous_integration(gate):
    status, lines = gate(
        EVERY_SECOND_TIME
        + """
def test_sound(): pass
def test_unstable(): every_second_time("test")
@pytest.fixture(scope="module")
def place(): every_second_time("fixture")
@pytest.mark.parametrize("n", range(9))
def test_of_a_fixture(place, n): pass
"""
    )
    assert status == 0, lines
    unstable = [line.split()[1].partition("::")[2] for line in lines if line.startswith("unstable: ")]
    assert sorted(unstable) == ["test_of_a_fixture[0]", "test_unstable"]
    assert re.fullmatch(r"11 passed, 2 rerun in \S+s", lines[-1]), lines


@pytest.mark.long
def test_a_test_that_hangs_or_ends_its_process_is_named(gate):
    status, lines = gate(
        "def test_endless(): time.sleep(60)\ndef test_that_ends_its_process(): os._exit(1)\n"
    )
    assert status == 2
    assert "FAILED test_some.py::test_endless - Failed: Timeout (>2.0s) from pytest-timeout." in lines
    assert any(line.startswith("FAILED test_some.py::test_that_ends_its_process - ") for line in lines), lines


@pytest.mark.long
def test_five_tests_run_once_more_and_the_sixth_that_fails_is_red(gate):
    status, lines = gate(
        EVERY_SECOND_TIME + "".join(f"def test_{n}(): every_second_time('{n}')\n" for n in range(6))
    )
    assert status == 2
    (summary,) = [line for line in lines if " rerun in " in line]
    assert summary.startswith("1 failed, 5 passed, 5 rerun")


def test_a_release_is_tagged_after_all_tests_and_a_comparison_of_results_only(clone):
    checks = ["make lint", "make test", "make test-long", "make golden BASE=HEAD"]
    for failing in ("lint", "test", "test-long", "golden"):
        assert clone("release", "1.0", "HEAD", FAILS=f"make {failing}")[0]
    assert tags(clone) == []
    assert clone("release", "1.0") == (2, []), "there is no tag to compare with"
    assert clone("release", "1.0", "HEAD") == (0, checks)
    assert tags(clone) == ["v1.0"]
    assert clone("release", "1.0") == (2, []), "there is such a tag"
    assert clone("release", "1.1") == (0, [*checks[:3], "make golden BASE=v1.0"])
    assert tags(clone) == ["v1.0", "v1.1"]
    (clone.folder / "uncommitted").touch()
    assert clone("release", "1.2") == (2, [])


def tags(clone):
    done = subprocess.run(["git", "tag"], cwd=clone.folder, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_an_old_python_is_refused_in_one_sentence(tmp_path):
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    done = subprocess.run(["make", "install", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert "error: Python 3.11 or newer" in done.stderr
    assert f"{old} is Python 3.9.2" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.fixture
def installation(monkeypatch):
    """A function that gives `make install` a program in place of pip, and programs in place of its steps."""

    def set_up(pip, generate="pass", compile="pass"):
        monkeypatch.setattr(install, "PIP", "pip>=1")
        monkeypatch.setattr(install, "_pip", lambda command: [sys.executable, "-c", pip, "pip"])
        monkeypatch.setattr(install, "GENERATE", generate)
        monkeypatch.setattr(install, "IMPORT", compile)
        monkeypatch.setattr(install, "LINE_SECONDS", 0.0)
        return install.main

    return set_up


@pytest.mark.parametrize(
    ("pip", "expected"),
    [
        (
            "print('Collecting one'); print('error: metadata-generation-failed'); print('x'); exit(1)",
            "failed\nx",
        ),
        ("print('Collecting one'); print('nothing more'); exit(2)", "nothing more"),
        ("import os; os.kill(os.getpid(), 9)", "ended by the signal 9"),
    ],
)
def test_an_installation_that_fails_ends_with_the_reasons_of_pip(installation, capfd, pip, expected):
    assert installation(pip, generate="print('generating')")() == 1
    output, errors = capfd.readouterr()
    assert expected in errors
    assert "generating" not in output


def test_each_step_of_an_installation_speaks_at_once(installation, monkeypatch, capfd):
    main = installation("import time; time.sleep(0.5)", generate="import time; time.sleep(0.5)")
    monkeypatch.setattr(install, "PIP", "pip>=999")
    monkeypatch.setattr(install, "LINE_SECONDS", 60.0)
    assert main() == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "updating pip",
        "resolving the dependencies",
        "generating the embedded model, and compiling what a run imports",
        "source .venv/bin/activate",
    ]


def test_an_installation_says_what_it_does_and_fails_without_the_embedded_model(installation, capfd):
    pip = "import time; print('Collecting one'); time.sleep(0.5)"
    assert installation(pip, generate="exit(3)")() == 1
    output = capfd.readouterr().out
    assert "1 packages found" in output
    assert "generating the embedded model" in output
    assert installation(pip, compile="exit(3)")() == 0, "a run compiles what it needs"


def test_constraints_pin_every_dependency_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert canonicalize_name(name) not in pins, name
            assert "+" not in version, line
            pins[canonicalize_name(name)] = Version(version)
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    for requirement in map(Requirement, requirements):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, str(requirement)


def test_the_folder_mlflow_does_not_hide_the_library():
    assert sorted(p.name for p in (ROOT / "mlflow").iterdir()) == ["server.env"]


def test_containers_publish_on_loopback_and_hold_no_password():
    compose = read("infra/compose.yaml")
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for name, value in service.get("environment", {}).items():
            if "PASSWORD" in name or "CONNECTION" in name:
                assert "${FED_RLHF_POSTGRES_PASSWORD" in value
    assert (ROOT / "infra" / compose["services"]["mlflow"]["env_file"]).is_file()


def test_the_wheel_contains_every_package_recipe_benchmark_and_template():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    expected = set()
    for top in ("components", "fed_rlhf", "flows", "infra", "tasks"):
        for file in (ROOT / top).rglob("*.py"):
            expected.add(".".join(file.parent.relative_to(ROOT).parts))
    assert set(find_packages(str(ROOT), include=include)) == expected, "each folder has an __init__.py"
    contained = set()
    for package, patterns in project["tool"]["setuptools"]["package-data"].items():
        folders = ROOT.glob("/".join(package.split(".")))  # "*" is every package
        contained.update(path for folder in folders for pattern in patterns for path in folder.glob(pattern))
    for path in [*(ROOT / "components").rglob("*"), *(ROOT / "flows").rglob("*")]:
        assert path.suffix in (".py", ".pyc") or path.is_dir() or path in contained, path
