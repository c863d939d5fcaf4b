"""What `check`, `recipes` and `methods` print with --json; runs are described in tasks/run_table.py."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, Field

from components.config.federation import METHODS
from components.recipes.load import read_settings, recipe_names
from components.results import PrivacySpent

if TYPE_CHECKING:
    from components.recipes.checked import Checked
    from components.recipes.estimates import Costs

SETTINGS = {
    "method": "federation.method",
    "source": "data.source",
    "rounds": "federation.rounds",
    "policy": "policy.backbone.name",
}
"""Keys of a recipe by the fields of RecipeRow."""


class RecipeRow(BaseModel):
    """A recipe of the package."""

    recipe: str = Field(description="its name")
    method: str = Field(description="federated method")
    source: str = Field(description="source of the data")
    rounds: int = Field(description="number of rounds")
    policy: str = Field(description="backbone of the policy")


class MethodRow(BaseModel):
    """A federated method."""

    method: str = Field(description="its name, for `federation.method`")
    trains: str = Field(description="what the clients train: `selector` or `policy`")
    description: str = Field(description="what it is")


class StageMemory(BaseModel):
    """Estimated peak memory of a stage."""

    stage: str = Field(description="stage of the run, such as `rounds`")
    model: str = Field(description="the backbone")
    rows: int = Field(description="rows that go through the model at once")
    tokens: int = Field(description="tokens per row")
    bytes: dict[str, int] = Field(description="`weights` of the models, the `rest`, and the `total`")


class RecipeCheck(BaseModel):
    """A recipe that is valid; one that is not is an error with exit status 2."""

    recipe: str = Field(description="its name or path")
    unread_models: list[str] = Field(description="models that cannot be read from here, and were not checked")
    data: dict[str, Any] | None = Field(
        description="`clients` that train, and numbers of `rows` as in report.json; null if not all were read"
    )
    templates: dict[str, str] = Field(description="prompt templates of selectors and policy, by section")
    clients_at_a_time: int | None = Field(
        description="that work at the same time in a round; null if the recipe's devices are not here"
    )
    clients_on: str = Field(
        description="where they work, and with how much of it each, or why it is not known"
    )
    place: str = Field(description="what the memory is of")
    memory: list[StageMemory] = Field(description="peak memory by stage")
    disk: int | None = Field(description="bytes on disk of the rounds' adapters; null if it is not known")
    privacy: PrivacySpent | None = Field(description="what all rounds cost; null without federation.privacy")
    not_estimated: dict[str, list[str]] = Field(description="what is not estimated, by reason")

    @classmethod
    def of(
        cls,
        recipe: str,
        checked: Checked,
        costs: Costs,
        places: tuple[int | None, str],
        privacy: PrivacySpent | None,
    ) -> Self:
        """The output of the check of a recipe with these data and estimates."""
        from components.recipes.model_checks import prompt_templates

        preview = checked.data
        rows = preview.rows and {"clients": preview.clients, "rows": preview.rows.model_dump(mode="json")}
        memory = [
            StageMemory(
                stage=peak.stage.name,
                model=peak.stage.backbone.name,
                rows=peak.stage.step.rows,
                tokens=peak.stage.step.tokens,
                bytes={"weights": peak.total - peak.rest, "rest": peak.rest, "total": peak.total},
            )
            for peak in costs.memory
        ]
        return cls(
            recipe=recipe,
            unread_models=list(checked.unread),
            data=rows,
            templates=prompt_templates(checked.recipe),
            clients_at_a_time=places[0],
            clients_on=places[1],
            place=costs.place,
            memory=memory,
            disk=costs.disk,
            privacy=privacy,
            not_estimated=costs.problems,
        )


def list_recipes() -> list[RecipeRow]:
    """The recipes of the package."""
    return [
        RecipeRow(recipe=name, **dict(zip(SETTINGS, read_settings(name, *SETTINGS.values()), strict=True)))
        for name in recipe_names()
    ]


def list_methods() -> list[MethodRow]:
    """The federated methods, including those of plug-ins."""
    rows = []
    for name in METHODS.names():
        options = METHODS.load(name)
        lines = (sys.modules[options.__module__].__doc__ or "").strip().splitlines()
        rows.append(
            MethodRow(method=name, trains=options.trained_model, description=lines[0] if lines else "")
        )
    return rows
