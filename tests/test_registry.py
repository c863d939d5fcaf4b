"""Registries: built-in names, names of installed packages, and refusals that name the nearest one."""

from importlib.metadata import EntryPoint

import pytest
from pydantic import BaseModel, Field

from components.config import RecipeError, Registry
from components.config.data import PROMPT_SOURCES, SOURCES
from components.config.evaluation import JUDGES, REWARDS
from components.config.federation import AGGREGATORS, METHODS, POSTPROCESSORS
from components.config.registry import one_of, registered_section
from components.config.section import NestedSectionError
from components.recipes import load_recipe


class Circle(BaseModel):
    """A section of the kind 'circle'."""

    kind: str = "circle"
    radius: int = 1


class Square(BaseModel):
    """A section of the kind 'square', which an installed package adds."""

    kind: str = "square"
    side: int = Field(2, ge=1)


GROUP = "fed_rlhf.shapes"


@pytest.fixture
def registry(monkeypatch):
    """A registry with a built-in name, and with a name of an installed package."""
    shapes = Registry("shape", GROUP, {"circle": f"{__name__}:Circle"})
    entries = {
        "square": EntryPoint("square", f"{__name__}:Square", GROUP),
        "circle": EntryPoint("circle", f"{__name__}:Square", GROUP),
        "broken": EntryPoint("broken", "no_such_package.shapes:Broken", GROUP),
        "missing": EntryPoint("missing", f"{__name__}:Missing", GROUP),
    }
    monkeypatch.setitem(shapes.__dict__, "_entry_points", entries)
    return shapes


def test_names_are_those_of_the_package_and_of_installed_ones_that_do_not_replace_them(registry):
    assert registry.names() == ["broken", "circle", "missing", "square"]
    assert "square" in registry
    assert "triangle" not in registry
    assert registry.load("circle") is Circle
    assert registry.load("square") is Square


def test_an_unknown_name_is_refused_under_its_key_with_all_names_and_the_nearest(registry):
    with pytest.raises(RecipeError, match=r"shape 'sqare' is not known.*circle.*Did you mean 'square'\?"):
        registry.load("sqare")
    with pytest.raises(RecipeError, match=r"drawing\.shape 'x' is not known"):
        registry.load("x", "drawing.shape")


@pytest.mark.parametrize("name", ["broken", "missing"])
def test_a_package_that_cannot_be_imported_is_refused_by_name_with_the_remedy(registry, name):
    with pytest.raises(RecipeError, match=f"shape '{name}' of the package .*repair.*uninstall"):
        registry.load(name)


@pytest.mark.parametrize("registered", ["Circle", "GROUP"])
def test_what_does_not_derive_from_the_base_is_refused_with_the_name_of_both(registered):
    shapes = Registry("shape", GROUP, {"odd": f"{__name__}:{registered}"}, f"{__name__}:Square")
    with pytest.raises(RecipeError, match=r"shape 'odd' registers .*, which is no .*\.Square: derive it"):
        shapes.load("odd")


@pytest.mark.parametrize(
    "registry", [METHODS, POSTPROCESSORS, AGGREGATORS, JUDGES, REWARDS, SOURCES, PROMPT_SOURCES]
)
def test_each_registry_of_sections_refuses_a_section_without_behaviour(registry, monkeypatch):
    monkeypatch.setitem(registry.builtin, "odd", f"{__name__}:Circle")
    with pytest.raises(RecipeError, match=f"{registry.key} 'odd' registers Circle, which is no components"):
        registry.load("odd")


def test_names_are_registered_without_an_import_and_a_registry_without_names_says_so():
    with pytest.raises(RecipeError, match=r"'x' is not known; there are: none"):
        Registry("shape", GROUP, {}).load("x")
    # A check of a recipe imports only what the recipe names.
    lazy = Registry("shape", GROUP, {"far": "no_such_module:Far"})
    assert lazy.names() == ["far"]
    with pytest.raises(ModuleNotFoundError):
        lazy.load("far")


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_of_the_package_can_be_loaded(name):
    from components.federation.method import Method

    assert issubclass(METHODS.load(name), Method)


def test_the_groups_of_entry_points_are_named_after_the_package():
    from components.federation.clients import TRAINERS

    registries = (METHODS, AGGREGATORS, POSTPROCESSORS, JUDGES, REWARDS, TRAINERS)
    groups = {registry.group for registry in registries}
    assert groups == {
        "fed_rlhf.methods",
        "fed_rlhf.aggregators",
        "fed_rlhf.postprocessors",
        "fed_rlhf.judges",
        "fed_rlhf.rewards",
        "fed_rlhf.trainers",
    }


# --- sections of a registered kind


@pytest.fixture
def parse(registry):
    """The validator of a section whose default kind is 'circle'."""
    return registered_section(registry, "circle").func


@pytest.mark.parametrize(
    ("values", "section"),
    [
        ("square", Square()),
        ({"kind": "square", "side": 3}, Square(side=3)),
        ({"radius": 4}, Circle(radius=4)),
        ({}, Circle()),
        (Square(side=5), Square(side=5)),
    ],
)
def test_a_section_is_that_of_its_kind_and_a_bare_name_has_the_defaults(parse, values, section):
    assert parse(values) == section


def test_a_section_without_a_kind_is_refused_where_there_is_no_default(registry):
    with pytest.raises(ValueError, match="key kind must be one of: .*circle"):
        registered_section(registry).func({"radius": 4})


@pytest.mark.parametrize("values", [3, ["circle"], None])
def test_what_is_neither_a_name_nor_a_mapping_is_refused(parse, values):
    with pytest.raises(ValueError, match="the name of a kind"):
        parse(values)


@pytest.mark.parametrize(
    ("values", "section"),
    [("square", Square()), ({"side": 3}, Square(side=3)), ({"kind": "circle"}, Circle())],
)
def test_of_listed_sections_the_first_is_the_default(values, section):
    assert one_of(Square, Circle).func(values) == section


@pytest.mark.parametrize("kind", [3, [1], None])
def test_a_kind_that_is_no_text_is_refused_with_the_known_kinds(kind):
    with pytest.raises(ValueError, match="key kind must be one of: square, circle"):
        one_of(Square, Circle).func({"kind": kind})


def test_errors_of_a_section_are_those_of_its_kinds_model(parse):
    with pytest.raises(NestedSectionError) as error:
        parse({"kind": "square", "side": 0})
    assert error.value.model is Square


def test_text_that_cannot_be_a_kind_is_not_repeated_in_the_error():
    with pytest.raises(RecipeError) as raised:
        load_recipe("debug", ["evaluation.judge=api_key:sk-123"])
    assert "evaluation.judge" in str(raised.value)
    assert "sk-123" not in str(raised.value)


def test_a_class_that_lacks_a_function_of_its_base_is_refused_by_its_name(monkeypatch):
    monkeypatch.setitem(METHODS.builtin, "unfinished", "components.federation.pair_training:PairTraining")
    with pytest.raises(
        RecipeError, match=r"'unfinished' registers PairTraining, which does not define aggregate"
    ):
        METHODS.load("unfinished")


def test_a_section_of_another_registry_is_refused():
    recipe = load_recipe("debug")
    judge = recipe.evaluation.judge
    config = type(recipe.evaluation)
    assert config(judge=judge).judge == judge
    with pytest.raises(ValueError, match=r"FedBis is no components.evaluation.judges.judge:JudgeSection"):
        config(judge=recipe.federation.options)
