"""8-bit settings without support are refused before data are prepared."""

import sys

import pytest

from components.config import UserError
from components.recipes import load_recipe
from flows import fed_rlhf
from tasks import data
from tasks.runs import Run

SELECTOR = "selector.backbone.quantization=8bit"
JUDGE = "evaluation.judge.optimizer.name=adamw_8bit"


@pytest.fixture
def without_bitsandbytes(monkeypatch):
    """bitsandbytes cannot be imported."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["policy.backbone.quantization=8bit"], "policy.backbone.quantization"),
        (["federation.optimizer.name=adamw_8bit"], "federation.optimizer.name"),
        ([SELECTOR], "selector.backbone.quantization"),
        ([JUDGE], "evaluation.judge.optimizer.name"),
        (
            ["evaluation.judge.selector.backbone.quantization=8bit"],
            "evaluation.judge.selector.backbone.quantization",
        ),
    ],
)
def test_a_recipe_with_8_bits_is_refused_without_bitsandbytes_and_names_the_key(
    without_bitsandbytes, overrides, key
):
    with pytest.raises(UserError, match=f"^{key} "):
        data.check_eight_bit(load_recipe("debug", overrides))


@pytest.mark.parametrize(
    "overrides",
    [[], [SELECTOR, "federation.method=fedavg"], ["evaluation.judge={kind: autoj, model: tiny-random}"]],
    ids=["no 8 bits", "a selector that is not trained", "another judge"],
)
def test_8_bit_settings_that_a_run_does_not_use_are_not_checked(without_bitsandbytes, overrides):
    data.check_eight_bit(load_recipe("debug", overrides))


def test_8_bit_settings_are_checked_before_backbones_are_fetched(without_bitsandbytes, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "fetch_backbone", lambda name: pytest.fail("a backbone was fetched"))
    with pytest.raises(UserError, match="selector.backbone.quantization"):
        fed_rlhf.prepare.fn(Run("run", tmp_path), load_recipe("debug", [SELECTOR]))
