"""While transformers loads a model, torch's default dtype is that of the model, for all threads."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from components.recipes import load_recipe
from tests.conftest import ROOT
from tests.support.bare_loop import prepare_rewards, run_bare_loop
from tests.support.long_tier import with_examples

pytestmark = pytest.mark.pipeline

VARIANTS = yaml.safe_load((Path(ROOT) / "tests" / "golden" / "variants.yaml").read_text(encoding="utf-8"))


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


EXAMPLES = ("fedbis", "feddpo")
"""A selector, and a policy: each loads a model in its own way.

The variant fedbis-groups is left out: the prepared data have no groups.
"""


@pytest.mark.parametrize(
    "name",
    with_examples((n for n in VARIANTS if not n.startswith("_") and n != "fedbis-groups"), EXAMPLES),
)
def test_clients_train_the_same_adapters_while_another_model_is_loaded_in_bf16(name, prepared, tmp_path):
    recipe = load_recipe("debug", VARIANTS[name])
    expected, found = tmp_path / "alone", tmp_path / "beside"
    for folder in (expected, found):
        prepare_rewards(recipe, prepared, folder, tmp_path / "judges")
    alone = run_bare_loop(recipe, prepared, expected)
    with default_dtype(torch.bfloat16):
        beside = run_bare_loop(recipe, prepared, found)
    assert beside.hashes == alone.hashes
    records = [[record.without_seconds() for record in run.records] for run in (alone, beside)]
    assert records[0] == records[1]
