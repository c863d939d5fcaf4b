"""References of federated training through the whole pipeline."""

import pytest

pytestmark = pytest.mark.long

ALONE = ["federation.method=fedbis", "federation.options.average_over=self", "federation.clients_per_round=4"]


@pytest.fixture(scope="module")
def place(new_workplace):
    return new_workplace("references")


def test_the_votes_of_selectors_that_train_alone_label_pairs_and_each_measures_its_own_client(place):
    run = place.run(*ALONE)
    result = run.federation
    assert not result.outcome.votes
    assert len(result.adapters) == len(result.after.accuracy.clients) == 4
    assert result.after.accuracy.assigned is None
    assert run.alignment.labelling.pairs > 0
    assert "each client's own selector, on its own pairs" in run.summary


def test_a_policy_with_examples_has_no_rounds_and_is_measured_and_answers(place):
    run = place.run("federation.method=few_shot", "federation.options.shots=1")
    result = run.federation
    assert (result.rounds, len(result.records), len(result.evaluations)) == (0, 0, 1)
    assert result.outcome.own == run.alignment.policy.own == "examples"
    assert {row["aligned"]["client_id"] for row in run.answers} == set(result.outcome.job_keys)
    assert "with each client's own examples, on its own pairs" in run.summary
