"""The documentation names only what exists, and the generated pages are current."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from components.config import Recipe
from components.config.benchmark import Benchmark
from components.config.data import SOURCES
from components.config.evaluation import JUDGES, REWARDS
from components.config.federation import METHODS
from components.recipes import load_recipe
from components.recipes.benchmarks import benchmark_names, load_benchmark
from components.recipes.load import recipe_names
from components.reporting.metrics import ALIASES
from tests.support.registries import config_registries

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
CODE = sorted(
    path
    for folder in ("components", "fed_rlhf", "tasks", "flows", "infra", "perf")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".yaml")
)
FOLDERS = "components|tasks|flows|infra|perf|tests|docs|mlflow"


def names_of(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def shell_commands(page):
    """Lines of the shell examples of a page, without comments; a continued command is one line."""
    blocks = re.findall(
        r"^\s*```sh\n(.*?)^\s*```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition(" # ")[0].strip() for line in lines]


def expand_braces(path):
    """The paths that a pattern such as methods/{fedavg,feddpo}.py stands for."""
    match = re.search(r"\{([^}]*)\}", path)
    if match is None:
        return [path]
    return [path.replace(match.group(), name) for name in match.group(1).split(",")]


@pytest.fixture(scope="module")
def generated_pages():
    """The text of each reference page by file name."""
    from docs.generate_reference import pages

    return pages()


def test_each_section_of_a_recipe_has_a_page_with_its_keys_and_the_defaults_within_it(generated_pages):
    stored = {page.stem for page in (ROOT / "docs" / "reference" / "recipe").glob("*.md")}
    assert stored == {*Recipe.model_fields, "index"} - {"name", "seed"}
    assert "| `federation.optimizer.lr` | number, > 0 | `1e-05` |" in generated_pages["recipe/federation.md"]
    assert "| `data.align_prompts` | section or null | `null` |" in generated_pages["recipe/data.md"]
    assert "| `thoughts.questions[].set` | text | required |" in generated_pages["recipe/thoughts.md"]
    # A trained reward has 8 layers, a backbone elsewhere all.
    assert (
        "| `training.backbone.layers` | integer or null, >= 1 | `8` |" in generated_pages["recipe/rewards.md"]
    )
    assert (
        "| `policy.backbone.layers` | integer or null, >= 1 | `null` |" in generated_pages["recipe/policy.md"]
    )


@pytest.mark.parametrize(
    ("registry", "page", "heading"),
    [
        (SOURCES, "data", "Source"),
        (METHODS, "federation", "Method"),
        (JUDGES, "evaluation", "Judge"),
        (REWARDS, "rewards", "Reward"),
    ],
)
def test_each_registered_section_is_on_the_page_of_its_section(registry, page, heading, generated_pages):
    text = generated_pages[f"recipe/{page}.md"]
    assert [name for name in registry.builtin if f"### {heading} `{name}`\n" not in text] == []


def test_options_that_a_method_refuses_are_not_listed(generated_pages):
    parts = generated_pages["recipe/federation.md"].split("### ")
    with_rows = {part.split("`")[1] for part in parts if "| `average_over` |" in part}
    assert {"fedbis", "firm"} <= with_rows
    assert not {"fedbiscuit", "fedcmoo"} & with_rows


def test_the_tables_in_written_pages_have_each_key_and_short_name(generated_pages):
    rows = {
        "metrics.md": [*ALIASES],
        "benchmark.md": [*ALIASES, *Benchmark.model_fields, "choices.NAME.figure"],
    }
    for page, names in rows.items():
        assert [name for name in names if f"\n| `{name}" not in generated_pages[page]] == []


def test_the_example_of_the_page_of_benchmark_files_is_a_benchmark(tmp_path):
    page = (ROOT / "docs" / "reference" / "benchmark.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text(example)
    assert set(load_benchmark(str(path)).arms) == {"FedBis", "FedDPO"}


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_table_of_methods_stands_once_and_has_a_row_for_each():
    rows = {str(page.relative_to(ROOT)): set() for page in PAGES if "reference" not in page.parts}
    for name in rows:
        text = (ROOT / name).read_text(encoding="utf-8")
        rows[name] = {method for method in METHODS.builtin if f"\n| `{method}` |" in text}
    assert rows.pop("docs/methods/index.md") == set(METHODS.builtin)
    assert [name for name, methods in rows.items() if len(methods) > len(METHODS.builtin) / 2] == []


def test_every_recipe_and_every_benchmark_is_described():
    text = (ROOT / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in recipe_names() if f"`{name}`" not in text] == []
    text = (ROOT / "docs" / "guides" / "benchmarks.md").read_text(encoding="utf-8")
    assert [name for name in benchmark_names() if f"`{name}`" not in text] == []


HISTORY = {"docs/changelog.md", "docs/results/corrections.md"}
"""Beside the pages of docs/results/log, pages that name files as they were."""
PRESENT = [page for page in PAGES if page.parent.name != "log" and str(page.relative_to(ROOT)) not in HISTORY]


@pytest.mark.parametrize("page", PRESENT, ids=names_of(PRESENT))
def test_the_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{FOLDERS})/[\w{{}},./-]*)`", text)
    paths = [path for pattern in named for path in expand_braces(pattern)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "data/README.md", "infra/README.md"])
def test_the_links_of_pages_outside_the_site_lead_to_files(name):
    """The strict build of the site checks the links of its own pages."""
    page = ROOT / name
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).is_file()] == []


def test_the_files_that_code_and_recipes_name_exist():
    missing = []
    for path in CODE:
        text = path.read_text(encoding="utf-8")
        named = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/-]+\.(?:md|py|yaml|txt)\b", text)
        missing += [(path.name, name) for name in named if not (ROOT / name).is_file()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_the_commands_that_a_page_shows_exist(page):
    import typer

    from flows.cli import app

    subcommands = set(typer.main.get_command(app).commands)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    unknown = []
    for line in shell_commands(page):
        words = line.split()
        if words[:1] == ["fed-rlhf"] and words[1] not in subcommands:
            unknown.append(line)
        if words[:1] == ["make"] and words[1] not in targets:
            unknown.append(line)
        if words[:2] == ["python", "-m"] and importlib.util.find_spec(words[2]) is None:
            unknown.append(line)
    assert unknown == []


def test_the_recipes_and_benchmarks_that_pages_run_exist():
    known = {*recipe_names(), *benchmark_names(), "NAME", "RECIPE"}
    unknown = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"fed-rlhf (?:run|check|benchmark) ([\w/.-]+)", text)
        own = set(re.findall(r'^```yaml title="([^"]+)"', text, re.MULTILINE))
        unknown += [(page.name, name) for name in named if name not in known | own and name[0] != "-"]
    assert unknown == []


def test_the_overrides_that_guides_and_pages_of_methods_show_are_accepted():
    """Those of tutorials and of README are run by test_shell_blocks.py."""
    checked = 0
    for page in PAGES:
        if page.parent.name not in ("guides", "methods"):
            continue
        for line in shell_commands(page):
            if line.count("'") % 2 or "my-template.txt" in line:  # of several lines; a file of the user's own
                continue
            command, verb, recipe, *overrides = [*shlex.split(line), "", "", ""]
            if command == "fed-rlhf" and verb in ("run", "check") and recipe in recipe_names():
                load_recipe(recipe, [word for word in overrides if "=" in word])
                checked += 1
    assert checked >= 8


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_results_opens_with_one_sentence(page):
    text = re.sub(r"<!-- results: .* -->\n\n", "", page.read_text(encoding="utf-8"))
    _, opening, _ = text.split("\n\n", 2)
    assert opening[0].isupper()
    assert re.findall(r"[.:!?](?=\s|$)", opening) == ["."]


def test_the_navigation_contains_every_page():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if str(page) not in text] == []


def test_the_search_from_disk_loads_no_script_from_the_network():
    """Without a file whose name contains 'iframe-worker', the plugin offline adds a script of unpkg.com."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    scripts = config["extra"]["polyfills"]
    assert "offline" in config["plugins"]
    assert any("iframe-worker" in script for script in scripts)
    assert [script for script in scripts if not (ROOT / "docs" / script).is_file()] == []


def test_the_entry_points_of_the_tutorial_are_those_of_the_registries():
    text = (ROOT / "docs" / "tutorials" / "own-method.md").read_text(encoding="utf-8")
    groups = {registry.group for registry in config_registries()}
    assert [group for group in sorted(groups) if f"`{group}`" not in text] == []


def literal_texts():
    """The texts in the code, each on one line; a value in a text is a space."""
    texts = []
    for path in CODE:
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = [value.value if isinstance(value, ast.Constant) else " " for value in node.values]
                texts.append("".join(parts))
    return "\n".join(" ".join(text.replace("'", " ").split()) for text in texts)


def test_the_sentences_of_the_page_of_troubleshooting_are_those_of_the_code():
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    sentences = re.findall(r"^(?:\| |\*\*)`([^`|]+)`", page, re.MULTILINE)
    known = literal_texts()
    missing = []
    for sentence in sentences:
        fixed = re.split(r"\.\.\.|\b[A-Z]+\b|4200", sentence.replace("'", " "))
        pieces = [" ".join(piece.split()).strip(" ;:()") for piece in fixed]
        missing += [piece for piece in pieces if piece and piece not in known]
    assert len(sentences) > 20
    assert missing == []
