"""Fixtures of tests of alignment: references of DPO."""

import pytest

from tests.support.dpo import PAIRS, write_reference_adapter


@pytest.fixture(scope="session")
def reference_adapter(debug, tmp_path_factory):
    """An adapter of an earlier training, as a PEFT folder."""
    return write_reference_adapter(debug.policy, tmp_path_factory.mktemp("earlier") / "adapter")


@pytest.fixture
def config_with(debug, reference_adapter):
    """A function that gives DPO's configuration with a reference; a step takes all pairs."""

    def build(reference="base", folder=reference_adapter, **values):
        common = {
            "reference": reference,
            "reference_adapter": None if reference == "base" else str(folder),
            "epochs": 1,
            "batch_size": len(PAIRS),
            "micro_batch_size": len(PAIRS),
        }
        return debug.alignment.dpo.model_copy(update=common | values)

    return build
