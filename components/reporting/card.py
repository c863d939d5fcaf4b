"""How an exported model was trained, for its README: method, data, figures, and what left the clients."""

from __future__ import annotations

from collections.abc import Mapping

from components.config import BackboneConfig
from components.models.backbone import EMBEDDED, TINY
from components.reporting.metrics import RunResults
from components.reporting.page import PageSection, Table, sections_markdown
from components.reporting.run_page import headline_tables, sent_section


def training_card(
    results: RunResults,
    answers_author: str,
    backbone: BackboneConfig,
    origin: Mapping[str, str],
    is_aligned: bool,
) -> str:
    """Sections in Markdown.

    Args:
        results: of the run.
        answers_author: who wrote the human answers to the held-out prompts.
        backbone: of the exported model.
        is_aligned: whether it is the run's policy, rather than an adapter of its rounds.
        origin: what else the run and its data can be recognized by, e.g. their hashes.
    """
    recipe, federation = results.recipe, results.federation
    training = {
        "method": recipe.federation.method,
        "rounds": str(federation.rounds),
        "clients": str(len(federation.after.accuracy.clients)),
        "recipe": recipe.name,
        "seed": str(recipe.seed),
        "source of the data": recipe.data.source,
        **origin,
        "license of the backbone": backbone_license(backbone),
        "license of the data": "not recorded; ask the owners of the data",
    }
    figures_of = "On held-out data of this run."
    if not is_aligned:
        figures_of += " They are of the run as a whole, of which this adapter is a part."
    sections = [
        PageSection("Training", "It was trained by this run.", [Table.of_values("Run", training)]),
        sent_section(results),
        PageSection("Figures", figures_of, headline_tables(results, answers_author)),
    ]
    return sections_markdown(sections)


def backbone_license(backbone: BackboneConfig) -> str:
    """The license of a backbone, as far as the project knows it."""
    if backbone.name == EMBEDDED:
        return "Apache-2.0 (SmolLM2-135M-Instruct)"
    return "Apache-2.0 (made by fed-rlhf)" if backbone.name == TINY else f"that of {backbone.name}"
