"""The loss curves of every method are those of the golden file, up to what processors differ in.

    python -m tests.golden.test_loss_curves --update

rewrites the golden file. A change of it means that a method computes something else, and needs a
reason.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import pytest
import yaml

from components.recipes import load_recipe
from tests.support.bare_loop import loss_curve, prepare_rewards, run_bare_loop
from tests.support.long_tier import with_examples

pytestmark = pytest.mark.pipeline

GOLDEN = Path(__file__).with_name("loss_curves.json")
VARIANTS: dict[str, list[str]] = {
    name: overrides
    for name, overrides in yaml.safe_load(Path(__file__).with_name("variants.yaml").read_text()).items()
    if not name.startswith("_")
}
ABSOLUTE = 1e-4
RELATIVE = 1e-3
RELATIVE_OF = {"fedcmoo": 1e-2, "firm-preference": 1e-2}
"""Tolerances.

With other instruction sets of the processor the figures differ by less than 3e-5, those of FedCMOO-A by up to
2e-3 and those of FIRM with a preference by up to 4e-3: weights are solved for with gradients that are almost
collinear, so that a change of their products by 1e-7 changes the loss of the next round by 2e-5.
"""


def prepare_debug(folder: Path) -> Path:
    """Prepare the data of the recipe `debug`.

    Judges that are trained on them lie in the same folder.
    """
    from components.data.prepare import prepare

    recipe = load_recipe("debug")
    prepare(recipe.data, recipe.seed, folder / "prepared")
    return folder


def run_variant(name: str, data: Path, folder: Path) -> list[dict[str, float]]:
    """The loss curve of a variant, by the bare loop: of two rounds unless the variant sets its own."""
    recipe = load_recipe("debug", ["federation.rounds=2", *VARIANTS[name]])
    prepare_rewards(recipe, data / "prepared", folder, data / "judges")
    return loss_curve(run_bare_loop(recipe, data / "prepared", folder).records)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_debug(tmp_path_factory.mktemp("debug"))


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


CURE = "where results change on purpose: make fix LOSS_CURVES=1, with the reason in the commit"


EXAMPLES = ("fedavg", "fedbis-paper", "fedbiscuit-paper", "feddpo", "fedprox", "fedopt", "fedamp", "fedcda")
EXAMPLES += ("fedper", "fedrep", "fedpdpo", "perfedavg", "drift-mst", "fednova", "scaffold", "ffa-lora")
EXAMPLES += ("firm-mgda", "fedcmoo")
"""One of each method."""


@pytest.mark.parametrize("variant", with_examples(VARIANTS, EXAMPLES))
def test_the_loss_curve_of_a_method_is_that_of_the_golden_file(variant, golden, data, tmp_path):
    curve = run_variant(variant, data, tmp_path)
    assert len(curve) == len(golden[variant]), CURE
    relative = RELATIVE_OF.get(variant, RELATIVE)
    for step, (figures, expected) in enumerate(zip(curve, golden[variant], strict=True)):
        assert figures == pytest.approx(expected, rel=relative, abs=ABSOLUTE), f"step {step}; {CURE}"


def test_the_golden_file_has_the_variants_that_are_compared_bit_by_bit(golden):
    assert list(golden) == list(VARIANTS), CURE


def test_every_figure_of_the_golden_file_is_larger_than_the_absolute_tolerance(golden):
    for variant, curve in golden.items():
        for figures in curve:
            assert max(abs(value) for value in figures.values()) > 10 * ABSOLUTE, variant


def update() -> None:
    """Write the golden file."""
    curves = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare_debug(Path(scratch))
        for name in VARIANTS:
            curve = run_variant(name, data, Path(scratch) / name)
            curves[name] = [{key: float(f"{value:.8g}") for key, value in step.items()} for step in curve]
            print(name, len(curve), "steps", flush=True)
    lines = []
    for name, curve in curves.items():
        steps = ",\n  ".join(json.dumps(step) for step in curve)
        lines.append(f" {json.dumps(name)}: [\n  {steps}\n ]")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    from components.environment import configure_libraries

    parser = argparse.ArgumentParser(prog="python -m tests.golden.test_loss_curves")
    parser.add_argument("--update", action="store_true", required=True, help="rewrite the golden file")
    parser.parse_args()
    configure_libraries()
    update()
