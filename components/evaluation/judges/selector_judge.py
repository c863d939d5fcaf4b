"""The judge `selector`: a deep selector, trained centrally on owners outside the federation.

It is a proxy for a gold model: it represents the preferences that can be learned from those owners,
not human judgment.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from components.config import BackboneConfig, OptimizerConfig, Recipe, SelectorConfig
from components.config.optimizer import check_warmup
from components.data.records import read_judges_rows
from components.data.templates import load as load_template
from components.evaluation.judges.judge import Judge, JudgeResources, JudgeSection
from components.evaluation.winrate import Verdict
from components.io import file_hash, stored
from components.models.selector import Comparison
from components.models.store import AdapterStore
from components.progress import Work, report_work
from components.versions import SELECTOR_JUDGE

if TYPE_CHECKING:
    from components.models.selector_model import Selector
    from components.models.store import Adapter

log = logging.getLogger(__name__)
PURPOSE = "a 'selector' judge"


class SelectorJudgeSection(JudgeSection):
    """A selector that is trained centrally, on owners outside the federation."""

    kind: Literal["selector"] = Field("selector", description="Kind of the judge.")
    selector: SelectorConfig = Field(default_factory=SelectorConfig, description="Its model.")
    steps: int = Field(200, ge=1, description="Optimizer steps.")
    batch_size: int = Field(32, ge=1, description="Rows per step.")
    micro_batch_size: int | None = Field(
        None, ge=1, description="Rows that go through the model at once; null: all rows of a step."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Its optimizer.")

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        check_warmup(self.optimizer, self.steps, "steps")
        return self

    def check(self, recipe: Recipe) -> None:
        """Refuse a template that cannot be read."""
        load_template(self.selector.template, "selector")

    def required_backbones(self) -> list[BackboneConfig]:
        return [self.selector.backbone]

    def eight_bit_settings(self) -> dict[str, str]:
        return {
            "evaluation.judge.selector.backbone.quantization": self.selector.backbone.quantization,
            "evaluation.judge.optimizer.name": self.optimizer.name,
        }

    def check_data(self, prepared: Path) -> None:
        read_judges_rows(prepared, PURPOSE)

    @property
    def uses_judge_pairs(self) -> bool:
        return True

    def build(self, resources: JudgeResources) -> SelectorJudge:
        return SelectorJudge(self, resources)


class SelectorJudge(Judge):
    """The trained selector on a device.

    Its figures are its accuracy on held-out pairs, over all and by domain, and their number.
    """

    def __init__(self, section: SelectorJudgeSection, resources: JudgeResources) -> None:
        """Load the trained judge from the cache, or train it and store it there."""
        from components.models.selector_model import Selector

        self.selector = Selector(section.selector, resources.device)
        store = AdapterStore(resources.cache / "adapters")
        content = {  # what the judge depends on, so that one serves all runs that agree in it
            "judge": section.model_dump(mode="json"),
            "version": SELECTOR_JUDGE,
            "seed": resources.seed,
            "rows": file_hash(resources.prepared / "judge.parquet"),
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

        def train() -> dict[str, Any]:
            adapter, figures = train_judge(self.selector, section, resources)
            return {"adapter": store.put(adapter), "figures": figures, **content}

        record: dict[str, Any] = stored(resources.cache / f"{key}.json", train)
        self.selector.slot.load(store.get(record["adapter"]))
        layers = section.selector.backbone.layers
        depth = f"first {layers} layers" if layers else "all layers"
        super().__init__(
            f"{section.selector.backbone.name}, {depth}, trained centrally on owners outside the federation",
            record["figures"],
        )

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """The completion with the larger logit, in the order of each comparison."""
        report_work(log, Work("comparisons by the judge", 0, len(comparisons)))
        margins = self.selector.margins_as_shown(comparisons)
        return [Verdict.of_margin(margin) for margin in margins]


def train_judge(
    selector: Selector, section: SelectorJudgeSection, resources: JudgeResources
) -> tuple[Adapter, dict[str, float]]:
    """Train a selector on the judge's training pairs, and measure it on its held-out pairs."""
    from components.learning.loop import StepFigures, Training
    from components.learning.selector_training import accuracy, score_pairs, train_selector

    def progress(trained: StepFigures) -> None:
        step, loss = trained.step, trained.loss
        report_work(log, Work("judge's training step", step + 1, section.steps, loss))
        if resources.progress is not None:
            resources.progress(step, loss)

    rows, held_out = read_judges_rows(resources.prepared, PURPOSE)
    training = Training(
        section.steps,
        section.batch_size,
        section.optimizer,
        resources.seed,
        progress=progress,
        micro_batch_size=section.micro_batch_size,
    )
    initial = selector.slot.initial_adapter(resources.seed)
    adapter, metrics = train_selector(selector, rows, initial, training)
    selector.slot.load(adapter)
    margins = score_pairs(selector, held_out)
    figures: dict[str, float] = {
        "judge_accuracy": accuracy(margins),
        "judge_pairs": len(rows),
        "judge_held_out_pairs": len(held_out),
        "judge_seconds": metrics.seconds,
    }
    for domain in sorted({row.domain for row in held_out}):
        in_domain = [row.domain == domain for row in held_out]
        figures[f"judge_accuracy/{domain}"] = accuracy(margins[:, in_domain])
    return adapter, figures
