"""Judges: who says which of two responses is better. Every judge is asked in both orders.

A judge is registered by its `kind` and built from the recipe. `autoj` is a large language model that compares in
words, the paper's judge (components/evaluation/autoj.py). `reward` is a reward model that scores each response by
itself (components/evaluation/reward_judge.py). The embedded one, `selector`, is a deeper selector of the same
family, trained once, centrally, on owners that never take part in the federation. It is a gold-model proxy: it stands
for the population's taste as far as that can be learnt from those owners, not for human judgement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config import JudgeConfig, RecipeError, Section, check_section, unknown_name
from components.data.records import read_judges_rows
from components.data.templates import Template
from components.evaluation.autoj import AutoJ, parse_autoj
from components.evaluation.judge_protocol import Judge, JudgeError
from components.evaluation.reward_judge import RewardJudge
from components.evaluation.winrate import Verdict, WinRate, combine_orders, orders_agree, win_rate
from components.models.selector import Comparison

__all__ = ["JUDGES", "Judge", "JudgeError", "JudgedPairs", "build_judge", "check_judge", "judge_pairs", "options_model", "parse_autoj"]


@dataclass(frozen=True)
class JudgedPairs:
    """Verdicts on pairs of responses, from both orders.

    Attributes:
        verdicts: one a pair: what both orders say, a tie where they disagree or where the responses are the same.
        given, exchanged: the judge's words on each order; same responses are not put to the judge and are ties.
        consistency: share of the pairs put to the judge, and parsed in both orders, on which the orders agree.
        rate: the win rate of the first responses.
    """

    verdicts: list[Verdict]
    given: list[Verdict]
    exchanged: list[Verdict]
    consistency: float
    rate: WinRate


def judge_pairs(judge: Judge, prompts: Sequence[str], ours: Sequence[str], theirs: Sequence[str], resamples: int, seed: int) -> JudgedPairs:
    """Put each pair of responses to the judge in both orders.

    Args:
        judge: who says.
        prompts, ours, theirs: texts, row by row.
        resamples, seed: of the bootstrap interval.
    """
    asked = [i for i in range(len(prompts)) if ours[i].strip() != theirs[i].strip()]
    first = judge.compare([Comparison(prompts[i], ours[i], theirs[i]) for i in asked])
    second = judge.compare([Comparison(prompts[i], theirs[i], ours[i]) for i in asked])
    given, exchanged = [Verdict.TIE] * len(prompts), [Verdict.TIE] * len(prompts)
    for i, one, other in zip(asked, first, second, strict=True):
        given[i], exchanged[i] = one, other
    verdicts = [combine_orders(one, other) for one, other in zip(given, exchanged, strict=True)]
    agreed = orders_agree(first, second)
    consistency = sum(agreed) / len(agreed) if agreed else float("nan")
    return JudgedPairs(verdicts, given, exchanged, consistency, win_rate(verdicts, resamples, seed))


A_SELECTOR = "a 'selector' judge"


class SelectorJudge:
    """A selector used as a judge, in each single order; see the module's docstring."""

    def __init__(
        self, config: JudgeConfig, prepared: Path, cache: Path, seed: int, device: str, progress: Callable[[int, float], None] | None = None, policy: Template | None = None,
    ) -> None:
        """Load the trained judge from the cache, or train it and put it there.

        The cache's key is the hash of the judge's recipe, the seed and the judge's own rows, so a judge serves every
        run that asks for the same one.

        Args:
            config: the recipe's judge.
            prepared: folder of prepared data; its judge.parquet is read and nothing else.
            cache: folder of judges.
            seed: the judge's first adapter and the order of its rows are functions of it.
            device: where it runs.
            progress: called with (step, loss) during training.
            policy: not used; a selector reads the prompt in a template of its own.
        """
        from components.learning.selector import accuracy, score_pairs, train_selector
        from components.models.adapters import AdapterStore, write_atomically
        from components.models.selector import Selector

        table = prepared / "judge.parquet"
        content = {"judge": config.model_dump(mode="json", exclude={"options"}), "seed": seed, "rows": hashlib.sha256(table.read_bytes()).hexdigest()}
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        self.selector = Selector(config.selector, device)
        store, record = AdapterStore(cache / "adapters"), cache / f"{key}.json"
        if not record.is_file():
            rows, held_out = read_judges_rows(prepared, A_SELECTOR)
            initial = self.selector.slot.initial_adapter(seed)
            adapter, curve = train_selector(self.selector, rows, initial, config.steps, config.batch_size, config.optimizer, seed, progress)
            self.selector.slot.load(adapter)
            margins = score_pairs(self.selector, held_out)
            figures = {"judge_accuracy": accuracy(margins), "judge_pairs": len(rows), "judge_held_out_pairs": len(held_out), "judge_seconds": curve.seconds}
            for domain in sorted({row["domain"] for row in held_out}):
                figures[f"judge_accuracy/{domain}"] = accuracy(margins[[row["domain"] == domain for row in held_out]])
            write_atomically(record, json.dumps({"adapter": store.put(adapter).hash, "figures": figures, "losses": curve.losses, **content}).encode())
        saved = json.loads(record.read_text(encoding="utf-8"))
        self.selector.slot.load(store.get(store.ref(saved["adapter"])))
        self.figures: dict[str, float] = saved["figures"]
        layers = config.selector.backbone.layers
        self.description = f"{config.selector.backbone.name}, {f'first {layers} layers' if layers else 'all layers'}, trained centrally on owners outside the federation"

    @staticmethod
    def check(config: JudgeConfig, prepared: Path) -> None:
        """Refuse prepared data that it could not be trained or measured on.

        Raises:
            DataError: there are no pairs to learn from, or none to be measured on.
        """
        read_judges_rows(prepared, A_SELECTOR)

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict]:
        """The completion with the larger logit, each comparison in its one given order."""
        margins, _ = self.selector.margins_by_order(comparisons)
        return [Verdict.FIRST if margin > 0 else Verdict.SECOND if margin < 0 else Verdict.TIE for margin in margins]


JUDGES: dict[str, Callable[..., Judge]] = {"autoj": AutoJ, "reward": RewardJudge, "selector": SelectorJudge}
"""Judges by kind; each is called with (config, prepared, cache, seed, device, progress, policy)."""


class NoOptions(Section):
    """A judge that takes no options."""


def options_model(kind: str, where: str) -> type[Section]:
    """The model that the options of a judge must fit.

    Args:
        kind: evaluation.judge.kind of a recipe.
        where: the file or command it comes from, for the error.

    Raises:
        RecipeError: there is no judge of that kind; the nearest one is named.
    """
    if kind not in JUDGES:
        raise RecipeError(f"{where}: {unknown_name('evaluation.judge.kind', kind, JUDGES)}")
    return getattr(JUDGES[kind], "Options", NoOptions)


def check_judge(config: JudgeConfig, prepared: Path) -> None:
    """Refuse, before anything is trained, a judge that could not be had at the end.

    Raises:
        RecipeError: there is no judge of that kind, or its options are not right.
        JudgeError: what the judge's own `check` refuses.
    """
    check_section(options_model(config.kind, "recipe"), config.options, "recipe", "evaluation.judge.options")
    check: Callable[[JudgeConfig, Path], Any] | None = getattr(JUDGES[config.kind], "check", None)
    if check is not None:
        check(config, prepared)


def build_judge(
    config: JudgeConfig, prepared: Path, cache: Path, seed: int, device: str, progress: Callable[[int, float], None] | None = None, policy: Template | None = None,
) -> Judge:
    """The judge of a recipe.

    Args:
        config, prepared, cache, seed, device, progress: as the judge takes them.
        policy: template that the policy was asked by; a judge in words is told its instruction with each prompt.

    Raises:
        RecipeError: there is no judge of that kind.
        JudgeError: it cannot be had.
    """
    check_judge(config, prepared)
    return JUDGES[config.kind](config, prepared, cache, seed, device, progress, policy)
