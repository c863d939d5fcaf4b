"""Files to start from: what `fed-rlhf new` writes, and what it refuses."""

import pytest

from components.recipes import load_recipe
from tests.support.command_line import fed_rlhf, refusal


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_recipe_is_a_recipe_for_pairs_of_a_file(folder):
    assert (
        fed_rlhf("new", "recipe", "tickets").stdout
        == "wrote tickets.yaml\nNext  fed-rlhf check tickets.yaml\n"
    )
    (folder / "pairs.jsonl").touch()
    recipe = load_recipe("tickets.yaml")
    assert (recipe.name, recipe.data.source, recipe.data.path.name) == ("tickets", "jsonl", "pairs.jsonl")


@pytest.mark.parametrize("kind", ["method", "source"])
def test_a_new_package_has_an_entry_point_a_module_and_a_test(folder, kind):
    said = fed_rlhf("new", kind, "fed-mine").stdout
    assert "pip install -e ./fed-mine && python -m pytest fed-mine/tests" in said
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    names = ["pyproject.toml", "fed_mine/__init__.py", f"fed_mine/{kind}.py", "tests/test_fed_mine.py"]
    assert files == {f"fed-mine/{name}" for name in names}
    project = (folder / "fed-mine" / "pyproject.toml").read_text()
    assert (
        f'[project.entry-points."fed_rlhf.{kind}s"]\nfed-mine = "fed_mine.{kind}:FedMine{kind.capitalize()}"'
        in project
    )
    assert "$" not in "".join((folder / name).read_text() for name in files)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("recipe", "My Recipe"), "the name 'My Recipe' cannot be used"),
        (("method", "feddpo"), "there is a method 'feddpo' already"),
        (("source", "jsonl"), "there is a source 'jsonl' already"),
        (("method", "there"), "there is there already"),
        (("method", "class"), "a word 'class' already"),
        (("source", "json"), "a module or a word 'json' already"),
        (("method", "torch"), "a module or a word 'torch' already"),
    ],
)
def test_a_name_that_is_taken_or_none_is_refused(folder, arguments, words):
    (folder / "there").mkdir()
    assert words in refusal("new", *arguments)
    assert [path.name for path in folder.iterdir()] == ["there"]
