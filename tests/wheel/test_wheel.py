"""The wheel works outside of a checkout: its recipes are complete, and its runs are in the user's folder."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from components.recipes.load import recipe_names
from tests.support.pipeline import NOISE, ROOT, environment_without

pytestmark = pytest.mark.pipeline

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
KNOWN_LINES = re.compile(
    r"checking debug \.\.\.|starting \.\.\.|run debug-[\w-]+: recipe debug, folder \S+"
    r"|warning: .* two completions that are equal .*"
    r"|prepare: 80 pairs of 4 clients in .*|round \d+ of 3: 2 clients, training loss .*"
    r"|federate: 3 rounds in .*, accuracy 0\.\d{3} -> 0\.\d{3}"
    r"|align: 4 steps of DPO in .*, KL to the reference .* nats per completion"
    r"|evaluate: 3 contests judged in .*, \d wins, \d ties, \d losses against the base policy"
)
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
SOURCES = ("components", "fed_rlhf", "flows", "infra", "tasks")


class InstalledWheel:
    """The wheel of this checkout, installed into a folder of its own.

    Args:
        folder: where it is built and installed.
    """

    def __init__(self, folder):
        self.folder = folder
        self.packages = folder / "packages"
        (wheel,) = build_wheel(folder).glob("fed_rlhf-*.whl")
        options = ["--no-deps", "--no-index", "--target", str(self.packages)]
        subprocess.run([*PIP, "install", *options, str(wheel)], check=True, capture_output=True)
        self.installed = set(self.packages.rglob("*"))

    def run(self, command, folder, **variables):
        """A program that has succeeded in a folder, with the wheel on its path."""
        inherited = environment_without("FED_RLHF_", "MLFLOW_", "PREFECT_", "COLUMNS")
        backbones = {key: value for key, value in os.environ.items() if key == "FED_RLHF_BACKBONES"}
        path = {"PYTHONPATH": str(self.packages)}
        done = subprocess.run(
            command,
            cwd=folder,
            env=inherited | backbones | path | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def fed_rlhf(self, folder, *arguments, **variables):
        """The command `fed-rlhf` that has succeeded in a folder."""
        return self.run([sys.executable, "-m", "flows.cli", *arguments], folder, **variables)


def build_wheel(folder):
    """The folder of a wheel, built from a copy of the sources, so that the checkout stays clean."""
    copy = folder / "sources"
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder / "wheels")]
    subprocess.run([*PIP, "wheel", *options, str(copy)], check=True, capture_output=True)
    return folder / "wheels"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return InstalledWheel(tmp_path_factory.mktemp("wheel"))


def test_commands_use_the_installed_packages_and_the_script_has_all_recipes(wheel, tmp_path):
    modules = ("components", "fed_rlhf", "flows.cli")
    code = f"import {', '.join(modules)}; print({'.__file__, '.join(modules)}.__file__, sep='\\n')"
    paths = wheel.run([sys.executable, "-c", code], tmp_path).stdout.splitlines()
    assert all(Path(path).is_relative_to(wheel.packages) for path in paths)
    assert all((wheel.packages / name / "py.typed").is_file() for name in SOURCES), "type checkers need it"
    (metadata,) = wheel.packages.glob("fed_rlhf-*.dist-info")
    (script,) = PathDistribution(metadata).entry_points.select(group="console_scripts")
    assert script.name == "fed-rlhf"
    assert script.value == "flows.cli:app"
    lines = wheel.run([str(wheel.packages / "bin" / "fed-rlhf"), "recipes"], tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == recipe_names()


def test_runs_are_in_the_configured_home(wheel, tmp_path):
    home = tmp_path / "home"
    done = wheel.fed_rlhf(tmp_path, "runs", FED_RLHF_HOME=str(home))
    assert done.stdout == f"there are no runs under {home / 'runs'}\n"


@pytest.fixture(scope="module")
def first_run(wheel, fill_home, tmp_path_factory):
    """The folder in which a new user runs a recipe, with no server to use, and the process."""
    folder = fill_home(tmp_path_factory.mktemp("first-run"))
    cache = {"XDG_CACHE_HOME": str(wheel.folder / "cache"), "FED_RLHF_BACKBONES": ""}
    return folder, wheel.fed_rlhf(folder, "run", "debug", **cache)


@pytest.mark.long
def test_a_run_is_written_under_the_working_folder(first_run, wheel):
    place, run = first_run
    (folder,) = place.glob("runs/debug-*")
    assert (folder / "report.done").is_file()
    assert (folder / "report" / "summary.txt").read_text().strip() in run.stdout
    assert list(place.glob("mlartifacts/debug/*"))
    allowed = {".prefect", ".state", "mlartifacts", "mlflow.db", "runs"}
    assert {path.name for path in place.iterdir()} <= allowed
    assert (wheel.folder / "cache" / "fed-rlhf" / "backbone" / "tiny-random" / "config.json").is_file()
    written = {path for path in wheel.packages.rglob("*") if path.suffix != ".pyc"} - wheel.installed
    assert {path.name for path in written} <= {"__pycache__"}
    assert "finished" in wheel.fed_rlhf(place, "runs").stdout


@pytest.mark.long
def test_a_run_without_a_terminal_prints_known_lines_its_table_and_where_to_look_next(first_run):
    _, run = first_run
    assert [text for text in run.stderr.splitlines() if not KNOWN_LINES.fullmatch(text)] == []
    assert not CONTROL.search(run.stderr + run.stdout)
    assert sum(text.startswith("round ") for text in run.stderr.splitlines()) == 3
    assert not NOISE.findall(run.stdout)
    assert run.stdout.lstrip().startswith("debug, seed 0: fedbis, 3 rounds")
    assert re.search(r"Next\n  open the report +fed-rlhf show debug-\S+ --open\n", run.stdout)
