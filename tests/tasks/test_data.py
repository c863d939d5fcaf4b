"""What is refused before data are prepared."""

import sys
from types import SimpleNamespace

import pytest

from components.models.eight_bit import EightBitError
from components.recipes import load_recipe
from tasks.data import check_eight_bit

SELECTOR, JUDGE = "selector.backbone.quantization=8bit", "evaluation.judge.optimizer.name=adamw_8bit"


@pytest.fixture
def missing(monkeypatch):
    """bitsandbytes cannot be imported."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)


@pytest.mark.parametrize(("overrides", "key"), [
    (["policy.backbone.quantization=8bit"], "policy.backbone.quantization"), (["federation.optimizer.name=adamw_8bit"], "federation.optimizer.name"), ([SELECTOR], "selector.backbone.quantization"),
    ([JUDGE], "evaluation.judge.optimizer.name"), (["evaluation.judge.selector.backbone.quantization=8bit"], "evaluation.judge.selector.backbone.quantization")])
def test_a_run_whose_recipe_asks_for_8_bits_anywhere_is_refused_before_it_prepares_data(missing, overrides, key):
    with pytest.raises(EightBitError, match=f"^{key} is '"):
        check_eight_bit.fn(load_recipe("debug", overrides))


@pytest.mark.parametrize("overrides", [[], [SELECTOR, "federation.method=fedavg"], [JUDGE, "evaluation.judge.kind=autoj"]])
def test_what_a_run_does_not_use_is_not_asked_for(missing, overrides):
    check_eight_bit.fn(load_recipe("debug", overrides))


def test_a_run_asks_for_it_before_anything_else(monkeypatch):
    from flows import fed_rlhf

    def refuse(recipe):
        raise EightBitError("no")

    monkeypatch.setattr(fed_rlhf, "data", SimpleNamespace(check_eight_bit=refuse))
    with pytest.raises(EightBitError, match="no"):
        fed_rlhf.prepare.fn(None, load_recipe("debug"))
