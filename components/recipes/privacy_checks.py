"""Checks of federation.privacy: a recipe that it does not protect is refused."""

from __future__ import annotations

from components.config import PairPpoObjective, Recipe, RecipeError
from components.config.privacy import ClientPrivacy, LabelPrivacy


def check_privacy(recipe: Recipe) -> None:
    """Refuse what the mechanism of a recipe does not protect.

    Raises:
        RecipeError: naming the key, its value, and what to do.
    """
    privacy = recipe.federation.privacy
    if isinstance(privacy, LabelPrivacy):
        _check_method(recipe)
        if privacy.debias:
            _check_corrected_losses(recipe)
        _check_owners(recipe, privacy)
        _check_source(recipe)
    if isinstance(privacy, ClientPrivacy):
        _check_sums(recipe)
        _check_rounds(recipe, privacy)
        _check_measures(recipe)
    if privacy is not None:
        _check_prompts(recipe)


def prompts_needed(recipe: Recipe) -> tuple[str, ...]:
    """The keys of the section data that name the server's prompts which the recipe needs."""
    return ("align_prompts", "test_prompts") if recipe.aligns_a_policy else ("test_prompts",)


def _check_method(recipe: Recipe) -> None:
    config = recipe.federation
    method = config.options
    if isinstance(method.local().objective, PairPpoObjective) or method.sampling is not None:
        raise RecipeError(
            "federation.privacy.unit 'label' protects verdicts, and the clients of federation.method"
            f" '{config.method}' train by rewards ({', '.join(recipe.rewards)}), which read none: leave out"
            " federation.privacy."
        )


def _check_corrected_losses(recipe: Recipe) -> None:
    config = recipe.federation
    local = config.options.local()
    if getattr(local.objective, "exclusion", None) is not None:
        raise RecipeError(
            "federation.privacy.debias corrects the losses of all pairs, and"
            " federation.options.objective.exclusion leaves pairs out by their verdicts: set exclusion to"
            " null, or debias to false."
        )
    if local.adaptation is not None:
        raise RecipeError(
            "federation.privacy.debias corrects losses, which have no lower bound then, and the inner steps"
            f" of federation.method '{config.method}' are not clipped: set debias to false."
        )
    if config.optimizer.clip is None and local.trains:
        raise RecipeError(
            "federation.optimizer.clip is null, but the losses that federation.privacy.debias corrects have"
            " no lower bound: set a clip, such as 1.0, or debias to false."
        )


def _check_owners(recipe: Recipe, privacy: LabelPrivacy) -> None:
    from components.data.sources.owners import has_owners

    for key in ("simulated", "exact_measures"):
        if getattr(privacy, key) and has_owners(recipe):
            raise RecipeError(
                f"federation.privacy.{key} would give the verdicts of owners away, whose pairs are their own"
                " (data.source 'owners'): leave it out."
            )


def _check_source(recipe: Recipe) -> None:
    data = recipe.data
    for key, value in {"data.trees": data.trees, "thoughts": recipe.thoughts}.items():
        if value is not None:
            raise RecipeError(
                f"{key} adds pairs by the scores of a model, which are nobody's judgements, and"
                " federation.privacy.unit 'label' protects judgements: leave it out."
            )
    parts = [(data.source, data.options)]
    parts += [(part.source, part.options) for part in getattr(data.options, "sources", ())]
    for name, source in parts:
        if source.not_judgements:
            raise RecipeError(
                f"federation.privacy.unit 'label' protects judgements, and source '{name}'"
                f" {source.not_judgements}: leave out federation.privacy, or use other data."
            )


def _check_prompts(recipe: Recipe) -> None:
    data = recipe.data
    lent = [key for key in prompts_needed(recipe) if getattr(data, key) is None]
    if data.options.lends_verdicts and lent:
        raise RecipeError(
            f"data.{lent[0]} is missing: the server's prompts of source '{data.source}', and the answers to"
            " them, are from pairs of clients, which federation.privacy protects. Take the prompts from"
            " another data set."
        )


def _check_sums(recipe: Recipe) -> None:
    config = recipe.federation
    method = config.options
    by_rewards = isinstance(method.local().objective, PairPpoObjective)
    says_so = vars(type(method)).get("sums_protect_clients", False)  # a derived method says so itself
    if not says_so or method.has_own_models or by_rewards:
        which = ""
        if says_so:
            which = " with objective 'ppo'" if by_rewards else " with average_over or finetune_rounds"
        raise RecipeError(
            "federation.privacy.unit 'client' protects one sum of all clients' contributions, and"
            f" federation.method '{config.method}'{which} uses more: take unit 'label', or a method such as"
            " 'feddpo'."
        )
    if getattr(getattr(method, "aggregator", None), "kind", "") != "expected":
        raise RecipeError(
            "federation.options.aggregator divides by the clients that took part, so that one client"
            " changes the weight of all, and federation.privacy.unit 'client' would not protect them: set"
            " it to 'expected'."
        )


def _check_rounds(recipe: Recipe, privacy: ClientPrivacy) -> None:
    config = recipe.federation
    if config.sampling != "round-robin":
        raise RecipeError(
            f"federation.sampling is '{config.sampling}', for which no epsilon is known: set it to"
            " 'round-robin'."
        )
    if config.max_update_ratio is not None:
        raise RecipeError(
            "federation.max_update_ratio refuses a client by the norms of the others, which"
            " federation.privacy.unit 'client' does not account for: set it to null."
        )
    if recipe.data.clients is not None:
        check_delta(privacy, recipe.data.clients)


def check_delta(privacy: ClientPrivacy, clients: int) -> None:
    """Refuse a delta with which it is permitted to publish a client.

    Raises:
        RecipeError: naming the largest one.
    """
    if privacy.delta >= 1 / clients:
        raise RecipeError(
            f"federation.privacy.delta {privacy.delta:g} permits to publish one of {clients} clients: set it"
            f" below {1 / clients:.3g}."
        )


def _check_measures(recipe: Recipe) -> None:
    """Accuracy is measured on pairs of owners outside the federation, those of the judge."""
    if recipe.data.pooled:
        raise RecipeError(
            "data.pooled makes one client of all owners, whom federation.privacy.unit 'client' would not"
            " protect from each other: leave it out."
        )
    if recipe.federation.postprocessors:
        raise RecipeError(
            "federation.postprocessors change updates before they are clipped, and sums after their noise,"
            " which federation.privacy.unit 'client' does not account for: leave them out."
        )
    if recipe.data.unseen_clients:
        raise RecipeError(
            "data.unseen_clients would be measured on their own pairs, which federation.privacy.unit 'client'"
            " does not protect: set it to 0."
        )
    if recipe.federation.accuracy_split != "test":
        raise RecipeError(
            "federation.accuracy_split is 'validation', and with federation.privacy.unit 'client' accuracy is"
            " measured on the judge's held-out pairs, which have no such split: set it to 'test'."
        )
