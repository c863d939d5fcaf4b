"""Fixtures of tests of learning: the tiny policy with a random adapter, and with private modules."""

import pytest

from components.learning.pair_scores import pair_logprobs
from components.models.resident import ResidentPolicy
from tests.support.adapters import random_tensors
from tests.support.pairs import PAIRS
from tests.support.training import open_personal_policy


@pytest.fixture(scope="session")
def adapter(resident_policy):
    """Random values of the adapter."""
    return random_tensors(resident_policy.slot, seed=1, scale=0.2)


@pytest.fixture
def resident(resident_policy, adapter):
    """The tiny policy with a random adapter in its slot."""
    resident_policy.slot.load(adapter)
    return resident_policy


@pytest.fixture(scope="session")
def reference(resident_policy):
    """Log-probabilities of PAIRS under the frozen backbone."""
    return pair_logprobs(resident_policy, PAIRS, 4, reference=True)


@pytest.fixture(scope="session")
def opened_short(debug, resident_policy):
    return ResidentPolicy(debug.policy.model_copy(update={"max_new_tokens": 12}), "cpu")


@pytest.fixture
def short_policy(opened_short, adapter):
    """A policy of completions of up to 12 tokens, with a random adapter in its slot."""
    opened_short.slot.load(adapter)
    return opened_short


@pytest.fixture(scope="session")
def opened_personal(debug, resident_policy):
    return open_personal_policy(debug.policy)


@pytest.fixture
def personal_policy(opened_personal, adapter):
    """A policy without dropout, with a random adapter and initial private modules."""
    opened_personal.slot.load(adapter)
    opened_personal.personal.load(opened_personal.personal.initial_modules(0))
    return opened_personal


@pytest.fixture(scope="session")
def contradicted(reference):
    """A maker of references under which the policy contradicts one pair by a distance."""

    def make(distance):
        changed = reference.copy()
        changed[2] += [distance, -distance]
        return changed

    return make
