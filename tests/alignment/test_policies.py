"""Stored policies: one for all clients, or an adapter for each client; answers and implicit rewards."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from components.alignment.policies import (
    ClientStoredPolicies,
    SingleStoredPolicy,
    StoredPolicyError,
    base_adapter,
    kl_to_base,
    load_policy,
    open_base_policy,
    score_folders,
)
from components.config import InputFile
from components.federation.outcome import Workspace
from components.models.adapters import AdapterSlot, attach_lora, export_adapter
from components.models.backbone import load_backbone
from components.models.policy import Policy, PolicyError, Sampling, save_client_adapters
from components.recipes import load_recipe
from components.results import PolicyRecord
from tests.support.adapters import random_tensors
from tests.support.recipes import with_section

PROMPTS = ["a paper", "another paper", "a third one"]
PAIRS = [
    {"prompt": f"paper {n}", "chosen": "it shows it", "rejected": "no " * (n + 1), "client_id": client}
    for n, client in enumerate(["bea", "ada", "bea", "ada"])
]


@pytest.fixture(scope="module")
def recipe(debug):
    policy = debug.policy.model_copy(update={"max_new_tokens": 4})
    return debug.model_copy(update={"policy": policy})


@pytest.fixture(scope="module")
def workspace(recipe):
    """A federation whose clients keep nothing; a device is lent, a trainer is not."""
    return Workspace(recipe, contexts=None, lend_trainer=None, lend_device=lambda: nullcontext("cpu"))


@pytest.fixture(scope="module")
def alignment(recipe, tmp_path_factory):
    """An alignment's folder with a single policy, and with the adapters of two clients."""
    folder = tmp_path_factory.mktemp("alignment")
    slot = AdapterSlot(attach_lora(load_backbone(recipe.policy.backbone, "cpu"), recipe.policy.lora))
    adapters = {name: random_tensors(slot, seed, 0.3) for seed, name in enumerate(["ada", "bea"])}
    export_adapter(adapters["ada"], recipe.policy.lora, recipe.policy.backbone, folder / "single")
    save_client_adapters(adapters, recipe.policy, folder / "clients")
    return folder


@pytest.fixture(scope="module")
def single(alignment):
    return load_policy(PolicyRecord(kind="single", folder="single"), alignment)


@pytest.fixture(scope="module")
def per_client(alignment):
    return load_policy(PolicyRecord(kind="client-adapters", folder="clients"), alignment)


@pytest.fixture(scope="module")
def single_policies(single, workspace):
    return single.open("cpu", workspace)


@pytest.fixture(scope="module")
def client_policies(per_client, workspace):
    return per_client.open("cpu", workspace)


def texts(answers):
    """The only answer to each prompt."""
    return [answer.completion.text for (answer,) in answers]


# --- Records


def test_a_record_is_opened_by_its_kind(single, per_client):
    assert isinstance(single, SingleStoredPolicy)
    assert isinstance(per_client, ClientStoredPolicies)


def test_an_unknown_kind_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(StoredPolicyError, match="'other' .*single, client-adapters"):
        load_policy(PolicyRecord(kind="other", folder="x"), tmp_path)


def test_the_clients_whose_pairs_can_be_scored_are_those_with_an_adapter(single, per_client):
    assert single.clients is None
    assert per_client.clients == ["ada", "bea"]


# --- Answers


def test_a_single_policy_answers_all_prompts_for_no_client(single_policies, alignment, recipe):
    answers = single_policies.answer(PROMPTS, 0)
    policy = Policy(recipe.policy, "cpu", alignment / "single")
    assert texts(answers) == [completion.text for (completion,) in policy.generate(PROMPTS, 0)]
    assert [answer.client for (answer,) in answers] == ["", "", ""]
    assert single_policies.clients == []


def test_the_base_policy_is_the_backbone_without_an_adapter(recipe):
    policies = open_base_policy(recipe, "cpu")
    policy = Policy(recipe.policy, "cpu")
    assert texts(policies.answer(PROMPTS, 0)) == [
        completion.text for (completion,) in policy.generate(PROMPTS, 0)
    ]
    assert policies.tokenizer.name_or_path == policy.tokenizer.name_or_path


@pytest.fixture(params=["sft", "round_start"])
def after_sft(request, recipe, alignment):
    """A recipe whose policy is aligned from an adapter on."""
    reference = {"reference": request.param, "reference_adapter": InputFile(str(alignment / "single"))}
    dpo = recipe.alignment.dpo.model_copy(update=reference)
    return with_section(recipe, "alignment", dpo=dpo)


def test_the_base_policy_has_the_reference_adapter_where_the_alignment_starts_from_one(
    after_sft, single_policies, recipe
):
    answers = texts(open_base_policy(after_sft, "cpu").answer(PROMPTS, 0))
    assert answers == texts(single_policies.answer(PROMPTS, 0))
    assert answers != texts(open_base_policy(recipe, "cpu").answer(PROMPTS, 0))


def test_the_base_policy_of_a_method_that_trains_the_policy_is_the_backbone(after_sft):
    trained = load_recipe("debug", ["federation.method=feddpo"]).federation
    assert base_adapter(after_sft) is not None
    assert base_adapter(after_sft.model_copy(update={"federation": trained})) is None


def test_the_implicit_reward_is_relative_to_the_reference_adapter(after_sft, workspace, alignment):
    aligned = replace(workspace, recipe=after_sft)
    parts = [(alignment / "single", [0, 1, 2, 3])]
    assert score_folders(parts, PAIRS, aligned) == pytest.approx(0, abs=1e-4)
    assert abs(score_folders(parts, PAIRS, workspace)).max() > 1e-2


def test_clients_with_own_policies_answer_round_robin_each_by_its_own(client_policies):
    answers = client_policies.answer(PROMPTS, 0)
    assert [answer.client for (answer,) in answers] == ["ada", "bea", "ada"]
    expected = client_policies.select("ada").generate([PROMPTS[0], PROMPTS[2]], 0)
    assert [answers[0][0].completion, answers[2][0].completion] == [own for (own,) in expected]


def test_several_answers_of_a_single_policy_are_samples_of_it(single_policies, alignment, recipe):
    answers = single_policies.answer(PROMPTS, 0, sampling=Sampling(3, 0.7))
    policy = Policy(recipe.policy, "cpu", alignment / "single")
    expected = policy.generate(PROMPTS, 0, temperature=0.7, count=3)
    assert [[answer.completion for answer in samples] for samples in answers] == expected
    assert len({answer.completion.text for answer in answers[0]}) > 1


def test_several_answers_of_clients_with_own_policies_are_samples_of_the_prompts_client(client_policies):
    answers = client_policies.answer(PROMPTS, 0, sampling=Sampling(2, 0.7))
    assert [[answer.client for answer in samples] for samples in answers] == [
        ["ada", "ada"],
        ["bea", "bea"],
        ["ada", "ada"],
    ]
    (expected,) = client_policies.select("bea").generate([PROMPTS[1]], 0, temperature=0.7, count=2)
    assert [answer.completion for answer in answers[1]] == expected


def test_progress_of_answers_ends_with_all_prompts(client_policies):
    calls = []
    client_policies.answer(PROMPTS, 0, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (3, 3)


def test_a_client_without_a_policy_is_refused_by_name(client_policies):
    with pytest.raises(PolicyError, match="'cyd' has no policy"):
        client_policies.select("cyd")


def test_the_shared_policy_is_every_clients(single_policies):
    assert single_policies.select("ada") is single_policies.select("")


# --- Questions


def test_questions_are_assigned_to_the_shared_policy(single_policies):
    assert single_policies.assign_questions(2, "csqa") == ["", ""]


def test_questions_of_a_clients_own_set_are_assigned_to_it_and_others_round_robin(client_policies):
    assert client_policies.assign_questions(3, "bea") == ["bea", "bea", "bea"]
    assert client_policies.assign_questions(3, "csqa") == ["ada", "bea", "ada"]


def test_clients_that_share_a_set_answer_its_questions_in_turn(client_policies, monkeypatch):
    monkeypatch.setattr(client_policies, "clients", ["aqua-0", "csqa-0", "csqa-1", "csqa-x"])
    assert client_policies.assign_questions(3, "csqa") == ["csqa-0", "csqa-1", "csqa-0"]
    assert client_policies.assign_questions(1, "aqua") == ["aqua-0"]


# --- Implicit rewards


def test_margins_of_a_single_policy_are_those_of_its_adapter(single, alignment, workspace):
    margins = single.score_margins(PAIRS, workspace)
    expected = score_folders([(alignment / "single", [0, 1, 2, 3])], PAIRS, workspace)
    np.testing.assert_array_equal(margins, expected)
    assert len(set(margins.tolist())) == 4


def test_margins_of_client_policies_are_those_of_each_clients_own_adapter(single, per_client, workspace):
    margins = per_client.score_margins(PAIRS, workspace)
    by_adas = single.score_margins(PAIRS, workspace)
    np.testing.assert_allclose(margins[[1, 3]], by_adas[[1, 3]], atol=1e-5)
    assert not np.isclose(margins[[0, 2]], by_adas[[0, 2]], atol=1e-3).any()


def test_without_parts_there_are_no_margins(workspace):
    assert score_folders([], [], workspace).shape == (0,)


# --- The KL


def test_the_kl_of_a_single_policy_is_per_completion_and_per_token(single_policies):
    kl = kl_to_base(single_policies, PROMPTS, 0, 1.0)
    assert kl["kl_sequence"] > kl["kl_token"] > 0


def test_the_kl_of_client_policies_is_the_mean_over_the_prompts(client_policies):
    both = kl_to_base(client_policies, PROMPTS[:2], 0, 1.0)["kl_sequence"]
    first = kl_to_base(client_policies, PROMPTS[:1], 0, 1.0)["kl_sequence"]
    assert first > 0
    assert both > first / 2


def test_without_prompts_there_is_no_kl(client_policies, single_policies):
    assert kl_to_base(client_policies, [], 0, 1.0) == {}
    assert kl_to_base(single_policies, [], 0, 1.0) == {}
