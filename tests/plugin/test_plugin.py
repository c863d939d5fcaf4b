"""A package outside of the project adds methods, an aggregator and a source by entry points.

The package is tests/plugin/example, which the tutorial docs/tutorials/own-method.md explains.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from components.config.data import SOURCES
from components.config.federation import AGGREGATORS, METHODS
from components.models.store import AdapterStore
from components.results import FederationResult
from flows.scaffold import write_scaffold
from tests.support.pipeline import ROOT

pytestmark = pytest.mark.pipeline

EXAMPLE = Path(__file__).parent / "example"
TUTORIAL = ROOT / "docs" / "tutorials" / "own-method.md"
METHOD = ["federation.method=feddpo-step", "federation.rounds=1"]
MOMENTUM = ["federation.method=feddpo-momentum", "federation.rounds=2"]
TICKETS = ["data.source=tickets", "data.options={agents: 8}", "data.partition=natural", "data.clients=null"]


class Installed:
    """A package, installed into a folder.

    Args:
        folder: where it is built and installed.
        example: the folder of the package.
    """

    def __init__(self, folder, example=EXAMPLE):
        source = shutil.copytree(example, folder / "source")
        self.packages = folder / "packages"
        self.tests = source / "tests"
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target"]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, self.packages, source],
            check=True,
            capture_output=True,
        )

    def run(self, *arguments, variables=None):
        """A finished Python process that has the package on its path."""
        path = os.pathsep.join([str(self.packages), str(ROOT)])
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | {"PYTHONPATH": path} | (variables or {}),
            cwd=self.packages,
            capture_output=True,
            text=True,
        )

    def fed_rlhf(self, *arguments, variables=None):
        """Output of a command that succeeds."""
        done = self.run("-m", "flows.cli", *arguments, variables=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("plugin"))


def tutorial_files():
    """The files of the package by their path, as the tutorial shows them."""
    blocks = re.findall(
        r'^```\w+ title="([^"]+)"\n(.*?)^```$', TUTORIAL.read_text(), re.MULTILINE | re.DOTALL
    )
    return dict(blocks)


def test_the_tutorial_shows_the_files_of_the_example():
    files = {
        path.relative_to(EXAMPLE).as_posix(): path.read_text()
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml") and path.name != "__init__.py"
    }
    assert tutorial_files() == files


def test_an_installed_method_is_listed_with_its_description(installed):
    (line,) = [line for line in installed.fed_rlhf("methods").splitlines() if "feddpo-step" in line]
    assert line.split()[1] == "policy"
    assert line.endswith("FedDPO whose server takes partial steps.")


def test_options_of_an_installed_aggregator_and_of_an_installed_source_are_checked(installed):
    aggregator = "federation.options={aggregator: {kind: server-step, lr: %s}}"
    arguments = ["-m", "flows.cli", "check", "debug", "federation.method=feddpo", "--print-recipe"]
    assert installed.run(*arguments, aggregator % 0.2).returncode == 0
    refused = installed.run(*arguments, aggregator % 2)
    assert refused.returncode == 2
    assert "federation.options.aggregator.lr" in refused.stderr
    assert refused.stderr.count("\n") == 1
    refused = installed.run("-m", "flows.cli", "check", "debug", *TICKETS, "data.options.agent=3")
    assert refused.returncode == 2
    assert "data.options.agents" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.long
def test_the_packages_own_tests_pass(installed):
    done = installed.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(installed.tests))
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.fixture(scope="module")
def on_the_path(installed):
    """The package is on the path of this process, as if it had been started with it."""

    def forget_entry_points():
        for registry in (METHODS, AGGREGATORS, SOURCES):
            vars(registry).pop("_entry_points", None)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(installed.packages))
        forget_entry_points()
        yield
    forget_entry_points()
    for name in [name for name in sys.modules if name.partition(".")[0] == "fed_support"]:
        del sys.modules[name]


def test_a_run_uses_an_installed_method_and_an_installed_source(on_the_path, new_workplace):
    folder = new_workplace("plugin").run(*METHOD, *TICKETS).folder
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert recipe["federation"]["options"]["aggregator"] == {"kind": "server-step", "lr": 0.5}
    assert recipe["data"]["options"]["agents"] == 8
    result = FederationResult.read(folder / "federation" / "result.json")
    (record,) = result.records
    assert all(name.startswith("agent-") for name in record.clients)
    assert list(result.adapters) == ["policy"]
    assert "feddpo-step" in (folder / "report" / "summary.txt").read_text()
    assert json.loads((folder / "run.json").read_text())["versions"]["fed-support"] == ["0.1.0"]


@pytest.fixture(scope="module")
def momentum(on_the_path, new_workplace):
    """A workplace, and a run of the example's method with a memory in it."""
    place = new_workplace("momentum")
    return place, place.run(*MOMENTUM)


@pytest.mark.long
def test_each_step_of_the_server_is_the_velocity_that_the_commit_remembers(momentum):
    _, run = momentum
    commits = sorted((run.folder / "federation" / "commits").glob("*.json"))
    states = [json.loads(path.read_text())["state"] for path in commits]
    assert [state["round"] for state in states] == [0, 1, 2]
    assert states[0]["memory"]["velocity"] is None
    store = AdapterStore(run.folder / "federation" / "adapters")
    for before, after in itertools.pairwise(states):
        old, new = (store.get(state["adapters"]["policy"]) for state in (before, after))
        velocity = store.get(after["memory"]["velocity"])
        assert any(tensor.any() for tensor in velocity.values())
        for name, tensor in velocity.items():
            assert torch.equal(new[name], old[name] + tensor)


@pytest.mark.long
def test_a_resumed_run_warns_of_another_version_of_a_package_that_it_uses(momentum):
    place, run = momentum
    assert "fed-support" not in run.output
    assert "fed-support" not in place.resume(run).output
    versions = run.run.metadata()["versions"]
    run.run.update_metadata(versions=versions | {"fed-support": ["0.0.9"]})
    assert (
        "WARNING the run was started with fed-support 0.0.9, but fed-support 0.1.0"
        in place.resume(run).output
    )
    assert run.run.metadata()["versions"] == versions | {"fed-support": ["0.0.9", "0.1.0"]}


def test_without_the_package_its_method_is_refused_with_the_installed_ones(installed):
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "check", "debug", *METHOD],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "'feddpo-step'" in done.stderr
    assert "feddpo" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("method", ["federation.method=fed-mine"]),
        ("source", ["data.source=fed-mine", "data.options={}", "data.partition=natural"]),
    ],
)
def test_a_new_package_is_installed_and_its_tests_pass(tmp_path, monkeypatch, kind, settings):
    monkeypatch.chdir(tmp_path)
    write_scaffold(kind, "fed-mine")
    package = Installed(tmp_path / "installed", tmp_path / "fed-mine")
    done = package.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(package.tests))
    assert done.returncode == 0, done.stdout
    assert "the recipe is valid" in package.fed_rlhf("check", "debug", *settings)
