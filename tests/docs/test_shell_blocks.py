"""Every command in the shell blocks of the README and the tutorials works, or is listed with a reason.

Commands that train are checked, and called as the page shows them, in this process. A command that
differs from another in its partition alone is prepared and not trained.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from components.data.prepare import prepare
from components.recipes import load_recipe
from tests.support.command_line import fed_rlhf
from tests.support.tutorials import write_titled_files

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
NOT_RUN = {
    "make": "installs, runs the demo or all tests, or serves until Ctrl-C; .ci/run calls make",
    "source": "the tests' environment is activated",
    "fed-rlhf run summarization/demo": "minutes; the demo",
    "fed-rlhf benchmark summarization": "hours; tests/flows/test_benchmark.py runs a small one",
    "fed-rlhf up": "starts servers on fixed ports; tests/infra starts them on others",
    "fed-rlhf show latest": "needs the demo's run, and opens a browser",
    "fed-rlhf owner check": "needs an owner's home; tests/owners",
    "fed-rlhf owner start": "waits for requests; tests/flows/test_owners_with_data.py runs this tutorial",
    "fed-rlhf owners": "needs these owners",
    "fed-rlhf run support.yaml": "needs these owners",
    "fed-rlhf owner log": "needs that run",
    "fed-rlhf owner replay": "needs that run",
    "fed-rlhf delete RUN": "needs that run",
    "fed-rlhf compare": "needs two runs; tests/cli",
    "sudo": "administers a machine",
    "prefect deployment": "needs these servers; tests/infra",
    "dvc repro": "writes data/pipeline of the checkout; tests/flows runs the stages",
    "pip install -q -e ./fed-support": "changes the environment; tests/plugin installs the package elsewhere",
    "cd fed-support": "is in the folder of that package; tests/plugin runs its test",
    "fed-rlhf run debug federation.method=feddpo-": "needs that package; tests/plugin",
    "fed-rlhf check debug federation.method=feddpo": "needs that package; tests/plugin",
}
"""Beginnings of commands, and why they are not run here."""
FIRST_RUN = "fed-rlhf run debug"


class Command(NamedTuple):
    """A command of a page, on one line, and what the page says of its pairs below the block."""

    page: Path
    line: str
    pairs: str

    @property
    def overrides(self):
        """The settings after the recipe."""
        return shlex.split(self.line)[3:]

    @property
    def only_splits(self):
        """Whether it differs from others in how pairs are split among clients."""
        keys = {setting.partition("=")[0] for setting in self.overrides}
        return "data.clients" in keys and not keys & {"policy.template", "federation.method"}


def shell_commands():
    """The commands of all pages."""
    commands = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        block = r"^ *```sh\n(.*?)^ *```\n\s*(\d+ pairs of \d+ clients)?"
        for lines, pairs in re.findall(block, text, re.MULTILINE | re.DOTALL):
            for line in re.sub(r"\\\n\s*", "", lines).splitlines():
                if line.strip():
                    commands.append(Command(page, line.partition(" # ")[0].strip(), pairs))
    return commands


def reason(command):
    """Why a command is not run; None if it is."""
    return next((text for beginning, text in NOT_RUN.items() if command.line.startswith(beginning)), None)


RUN = [command for command in shell_commands() if reason(command) is None]
SPLIT = [command for command in RUN if command.only_splits]
TRAINED = [command.line for command in RUN if " run " in command.line and command not in SPLIT]
NAME_OF_A_RUN = r"\bRUN\b|summarization-demo-[\w-]+$"
OF_A_RUN = [command for command in RUN if re.search(NAME_OF_A_RUN, command.line)]
QUICK = [command for command in RUN if " run " not in command.line and command not in OF_A_RUN]


def named(commands):
    return [f"{command.page.stem}: {command.line}" for command in commands]


@pytest.fixture(scope="module")
def place(new_workplace):
    return new_workplace("pages")


@pytest.fixture(scope="module")
def working_folder(tmp_path_factory):
    """A folder with the titled files of the tutorials about data, and with what their scripts write."""
    folder = tmp_path_factory.mktemp("working")
    for page, script in (("own-data", "make_pairs.py"), ("owners", "make_owners.py")):
        write_titled_files(page, folder)
        subprocess.run([sys.executable, script], cwd=folder, check=True)
    return folder


@pytest.fixture(autouse=True)
def in_working_folder(working_folder, monkeypatch):
    monkeypatch.chdir(working_folder)


def call(place, command):
    """Output of a command that succeeds."""
    arguments = shlex.split(command)[1:]
    result, _ = place.call(lambda: fed_rlhf(*arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def finished(place, working_folder):
    """What the first run of the tutorial prints, and the run's id."""
    printed = call(place, FIRST_RUN)
    return printed, place.newest().folder.name


def test_each_reason_belongs_to_a_command():
    lines = [command.line for command in shell_commands()]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []


@pytest.mark.long
def test_the_first_run_ends_with_its_table(finished):
    assert FIRST_RUN in TRAINED
    assert "Adapters\n" in finished[0]


@pytest.mark.parametrize("line", [line for line in TRAINED if line != FIRST_RUN])
def test_a_command_that_trains_is_accepted(line, place):
    assert "the recipe is valid" in call(place, line.replace(" run ", " check ", 1))


@pytest.mark.long
@pytest.mark.parametrize("line", [line for line in TRAINED if line != FIRST_RUN])
def test_a_command_that_trains_ends_with_its_table(line, place):
    assert "Adapters\n" in call(place, line)


@pytest.mark.parametrize("command", SPLIT, ids=named(SPLIT))
def test_the_data_of_a_command_are_split_as_the_page_says(command, tmp_path):
    recipe = load_recipe(shlex.split(command.line)[2], command.overrides)
    partition = prepare(recipe.data, recipe.seed, tmp_path / "prepared").partition
    pairs = f"{partition.samples} pairs of {partition.clients} clients"
    assert command.pairs in ("", pairs)
    assert partition.clients == recipe.data.clients


def test_the_tutorial_says_how_many_pairs_each_partition_has():
    kinds = [command.line.partition("data.partition=")[2].split()[0] for command in SPLIT if command.pairs]
    assert kinds == ["natural", "iid", "dirichlet", "margin", "column"]


@pytest.mark.long
@pytest.mark.parametrize("command", OF_A_RUN, ids=named(OF_A_RUN))
def test_a_quick_command_on_a_run_succeeds(command, place, finished, tmp_path):
    line = re.sub(NAME_OF_A_RUN, finished[1], command.line)
    call(place, line.replace("FOLDER", str(tmp_path / "exported")))


@pytest.mark.parametrize("command", QUICK, ids=named(QUICK))
def test_a_quick_command_succeeds(command, place):
    line = command.line
    if line.startswith("python "):
        assert subprocess.run([sys.executable, *shlex.split(line)[1:]]).returncode == 0
    else:
        call(place, line)
