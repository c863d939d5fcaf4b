"""Files of recipes: what YAML may hold, recipes that extend others, and where values come from."""

import time
from itertools import pairwise

import pytest
import yaml

from components.config import RecipeError
from components.config.loading import annotated_yaml, dump_yaml, merge, origin_of, read_yaml
from components.recipes import load_recipe
from components.recipes.load import RECIPES, dump_recipe, find_recipe, load_with_origins, name_and_method

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in pairwise("abcdefghij")
)
DEBUG = str(RECIPES / "debug.yaml")


@pytest.fixture
def write(tmp_path):
    """A function that writes a file, and gives its path as text."""

    def to_file(content, name="recipe.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return str(path)

    return to_file


# --- YAML


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("a: !!int x", "line 1: this is not valid YAML ('x' is no int)"),
        ("a: !!bool x", "'x' is no bool"),
        ("b: 1\na: !!timestamp x", "line 2: this is not valid YAML (the tag !!timestamp is not used here"),
        ("a: !!binary aGk=", "the tag !!binary is not used here"),
        ("a: !!set {b}", "the tag !!set is not used here"),
        ("a: !!python/object:os.system x", "the tag !!python/object:os.system is not used here"),
        ("a: " + "9" * 5000, "is no int"),
        ("a: 1\nb: 2\na: 3", "the key 'a' is named twice, in lines 1 and 3"),
        ("a: \x00", "not valid YAML"),
        ("[1]: 2\n? {a: 1}\n: 2", "unhashable key"),
        ("2026-11-25", "this file holds text"),
    ],
    ids=lambda value: value[:30],
)
def test_a_file_that_is_no_plain_mapping_is_refused_within_seconds(write, content, part):
    path = write(content)
    start = time.process_time()
    with pytest.raises(RecipeError) as refused:
        load_recipe(path)
    assert str(refused.value).startswith(path)
    assert part in str(refused.value)
    assert len(str(refused.value)) < len(path) + 300
    assert time.process_time() - start < 3


@pytest.mark.parametrize("value", ["010", "1:30", "2026-11-25", "yes", "0o17", "0b1"])
def test_what_yaml_1_1_takes_for_another_number_is_a_text_which_a_number_refuses(value):
    with pytest.raises(
        RecipeError, match=f"'federation.rounds' is '{value}': input should be a valid integer"
    ):
        load_recipe("debug", [f"federation.rounds={value}"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1.", 1.0), ("-.5", -0.5), ("+3", 3), ("10_000", 10_000), ("0x1F", 31), ("True", True)],
)
def test_plain_numbers_are_read(write, text, value):
    read = read_yaml(find_recipe(write(f"a: {text}")), "a mapping")["a"]
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("federation.rounds=99999999999999", "'federation': rounds is 99999999999999, at most 2,147,483,647"),
        ("federation.optimizer.lr=1e300", "'federation.optimizer': lr is 1"),
        ("data.max_characters=" + "9" * 4000, "'data': max_characters is 99999999999999999999, at most"),
        ("selector.lora.r=100000", "less than or equal to 65536"),
        ("runtime.torch_threads=100000", "less than or equal to 4096"),
        ("runtime.cpu_workers=1000", "less than or equal to 256"),
        ("evaluation.bootstrap=10000000", "less than or equal to 1000000"),
        ("evaluation.answers_per_prompt=100000", "less than or equal to 10000"),
    ],
    ids=lambda text: text[:30],
)
def test_numbers_that_no_machine_could_serve_are_refused(override, part):
    with pytest.raises(RecipeError) as refused:
        load_recipe("debug", [override])
    assert part in str(refused.value)


def test_a_name_that_no_file_can_have_is_not_known():
    with pytest.raises(RecipeError, match="is not known"):
        load_recipe("x" * 5000)


# --- extends


def test_a_recipe_has_what_it_leaves_out_from_the_one_that_it_extends(write):
    base = write("extends: debug\nfederation: {rounds: 9}\nselector: {lora: {r: 2}}\n", "base.yaml")
    path = write("extends: base.yaml\nname: mine\nfederation: {batch_size: 3}\n")
    recipe, debug = load_recipe(path), load_recipe("debug")
    assert recipe.name == "mine"
    assert (recipe.federation.rounds, recipe.federation.batch_size) == (9, 3)
    assert recipe.federation.optimizer == debug.federation.optimizer
    assert (recipe.selector.lora.r, recipe.selector.lora.alpha) == (2, debug.selector.lora.alpha)
    assert load_recipe(base).name == "debug"


def test_the_default_of_a_choice_and_the_name_of_a_kind_are_merged_with_what_they_stand_for(write):
    write("extends: debug\nfederation: {options: {aggregator: paper}}\n", "base.yaml")
    path = write("extends: base.yaml\nfederation: {options: {aggregator: {}}}\n")
    assert load_recipe(path).federation.options.aggregator.kind == "paper"
    assert merge({"options": {"x": 1}}, {"method": "fedbis"}) == {"options": {"x": 1}, "method": "fedbis"}


@pytest.mark.parametrize("text", ["7e12345", "1e5", "1.5e3", "010", "yes", "0x1F", "1:30"])
def test_a_text_that_looks_like_a_number_is_written_so_that_it_is_read_as_a_text(write, text):
    assert read_yaml(find_recipe(write(dump_yaml({"a": text}))), "a mapping") == {"a": text}


def test_lists_are_replaced_and_options_belong_to_one_method(write):
    first = write(
        "extends: debug\nfederation: {method: fedbiscuit, rounds: 9,"
        " options: {selectors: 3, warmup_rounds: 1}}\n"
        "evaluation: {contests: [aligned_vs_base, aligned_vs_human]}\n",
        "first.yaml",
    )
    path = write(
        "extends: first.yaml\nfederation: {method: fedbis}\nevaluation: {contests: [aligned_vs_base]}\n"
    )
    assert load_recipe(first).federation.options.selectors == 3
    recipe = load_recipe(path)
    assert recipe.evaluation.contests == ["aligned_vs_base"]
    assert not hasattr(recipe.federation.options, "selectors")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("extends: recipe.yaml\n", "a recipe extends itself"),
        ("extends: other.yaml\n", "a recipe extends itself"),
        ("extends: [debug]\n", "extends is a list"),
        ("extends: debugg\n", "Did you mean 'debug'?"),
    ],
)
def test_what_cannot_be_extended_is_refused(write, content, part):
    write("extends: recipe.yaml\n", "other.yaml")
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(content))
    assert part in str(refused.value)


# --- where values come from


@pytest.mark.parametrize(
    ("override", "origin"),
    [
        ("federation.round=2", "override 'federation.round'"),
        ("federation={round: 2}", "override 'federation'"),
        ("polcy.x=2", "override 'polcy.x'"),
        ("federation.clients_per_round=100", "override 'federation.clients_per_round'"),
        ("data.clients=1", "FILE"),
    ],
)
def test_an_error_names_the_file_or_the_override_that_sets_the_value(write, override, origin):
    path = write("extends: debug\nfederation: {clients_per_round: 2}\n")
    with pytest.raises(RecipeError) as refused:
        load_recipe(path, [override])
    assert str(refused.value).startswith(f"{origin.replace('FILE', path)}: ")


def test_options_that_are_left_over_from_another_source_are_named_together_with_the_cure():
    with pytest.raises(RecipeError) as refused:
        load_recipe("debug", ["data.source=jsonl"])
    (line,) = str(refused.value).splitlines()
    assert "source jsonl has no judge_annotators, papers_per_annotator," in line
    assert line.endswith("begin with options={} and set its own, which are: align_share, judge_clients.")


def test_the_printed_recipe_is_the_recipe_and_says_where_each_value_comes_from(write):
    path = write("extends: debug\nname: mine\npolicy: {max_new_tokens: 7}\n")
    recipe, origins = load_with_origins(path, ["federation.rounds=5"])
    text = annotated_yaml(recipe.model_dump(mode="json"), origins)
    assert yaml.safe_load(text) == recipe.model_dump(mode="json")
    for line in (
        f'name: "mine"  # {path}',
        "  rounds: 5  # override 'federation.rounds'",
        f"  max_new_tokens: 7  # {path}",
        "  keep_every: 1  # default",
    ):
        assert line in text.splitlines()
    assert f"# {DEBUG}" in text


@pytest.mark.parametrize("name", ["true", "null", "O'Brien: x", "7e5", "# a", "plain", "", "Größe"])
def test_printed_keys_are_read_as_they_were(name, tmp_path):
    tree = {"column_clients": {name: ["a"]}}
    (tmp_path / "printed.yaml").write_text(annotated_yaml(tree, {}), encoding="utf-8")
    assert read_yaml(tmp_path / "printed.yaml", "") == tree


def test_the_origin_of_a_section_is_that_of_all_its_values():
    origins = {"a.b": "one", "a.c.d": "one", "e.f": "one", "e.g": "two"}
    assert [origin_of(key, origins) for key in ("a", "a.c", "a.b[0].x", "e", "z")] == [
        "one",
        "one",
        "one",
        None,
        None,
    ]


def test_an_override_of_several_lines_is_refused_on_one_line():
    for override in ("=null\n", "seed\n=1", "federation.rounds=[\n"):
        with pytest.raises(RecipeError, match=r"^override '.*\\n.*: (expected key|the value)"):
            load_recipe("debug", [override])


@pytest.mark.parametrize("name", ["summarization/demo", "007", "2026-11-27", "no", "1e5", "O'Brien"])
def test_the_name_and_the_method_of_a_stored_recipe_are_read_without_its_check(name, tmp_path):
    stored = tmp_path / "recipe.yaml"
    stored.write_text(dump_recipe(load_recipe("debug").model_copy(update={"name": name})), encoding="utf-8")
    assert name_and_method(stored) == (name, "fedbis")


def test_a_stored_recipe_that_is_missing_or_names_no_method_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        name_and_method(tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        name_and_method(tmp_path)
    (tmp_path / "other.yaml").write_text("name: a\n")
    with pytest.raises(RecipeError, match="names no method"):
        name_and_method(tmp_path / "other.yaml")
