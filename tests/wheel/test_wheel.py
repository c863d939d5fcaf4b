"""The wheel works outside of a checkout: its recipes are complete, and its runs are in the user's folder."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from components.recipes import recipe_names
from tests.support.pipeline import NOISE, ROOT, environment_without

pytestmark = pytest.mark.pipeline

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
SOURCES = ("components", "flows", "infra", "tasks")


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
        """Output of a program that succeeds in a folder, with the wheel on its path."""
        inherited = environment_without("FED_RLHF_", "MLFLOW_", "PREFECT_")
        backbones = {key: value for key, value in os.environ.items() if key == "FED_RLHF_BACKBONES"}
        path = {"PYTHONPATH": str(self.packages)}
        done = subprocess.run(
            command,
            cwd=folder,
            env=inherited | backbones | path | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def fed_rlhf(self, folder, *arguments, **variables):
        """Output of the command `fed-rlhf` in a folder."""
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


def test_commands_use_the_installed_packages(wheel, tmp_path):
    code = "import flows.cli, components; print(flows.cli.__file__, components.__file__, sep='\\n')"
    paths = wheel.run([sys.executable, "-c", code], tmp_path).splitlines()
    assert all(Path(path).is_relative_to(wheel.packages) for path in paths)


def test_the_wheel_has_all_recipes(wheel, tmp_path):
    lines = wheel.fed_rlhf(tmp_path, "recipes").splitlines()
    assert [line.split()[0] for line in lines[1:]] == recipe_names()


def test_the_script_is_the_command_line(wheel, tmp_path):
    (metadata,) = wheel.packages.glob("fed_rlhf-*.dist-info")
    (script,) = PathDistribution(metadata).entry_points.select(group="console_scripts")
    assert script.name == "fed-rlhf"
    assert script.value == "flows.cli:app"
    output = wheel.run([str(wheel.packages / "bin" / "fed-rlhf"), "check", "debug"], tmp_path)
    assert output.splitlines()[0] == "debug: the recipe is valid"


def test_runs_are_in_the_configured_home(wheel, tmp_path):
    home = tmp_path / "home"
    output = wheel.fed_rlhf(tmp_path, "runs", FED_RLHF_HOME=str(home))
    assert output == f"there are no runs under {home / 'runs'}\n"


@pytest.fixture(scope="module")
def first_run(wheel, fill_home, tmp_path_factory):
    """The folder in which a new user runs a recipe, with no server that the run could use, and the output."""
    folder = fill_home(tmp_path_factory.mktemp("first-run"))
    cache = {"XDG_CACHE_HOME": str(wheel.folder / "cache"), "FED_RLHF_BACKBONES": ""}
    return folder, wheel.fed_rlhf(folder, "run", "debug", "--verbose", "federation.rounds=1", **cache)


def test_a_run_is_written_under_the_working_folder(first_run, wheel):
    place, output = first_run
    (folder,) = place.glob("runs/debug-*")
    assert (folder / "report.done").is_file()
    assert (folder / "report" / "summary.txt").read_text().strip() in output
    assert list(place.glob("mlartifacts/debug/*"))
    allowed = {".prefect", ".state", "mlartifacts", "mlflow.db", "runs"}
    assert {path.name for path in place.iterdir()} <= allowed
    assert (wheel.folder / "cache" / "fed-rlhf" / "backbone" / "tiny-random" / "config.json").is_file()
    written = {path for path in wheel.packages.rglob("*") if path.suffix != ".pyc"} - wheel.installed
    assert {path.name for path in written} <= {"__pycache__"}
    assert "finished" in wheel.fed_rlhf(place, "runs")


def test_a_verbose_run_prints_the_log_of_prefect_and_no_live_line_and_no_warning(first_run):
    _, output = first_run
    assert "Finished in state Completed()" in output
    assert "round 1 of 1: 2 clients" in output
    assert "steps of DPO in " in output
    assert "\x1b" not in output
    assert not NOISE.findall(output)
