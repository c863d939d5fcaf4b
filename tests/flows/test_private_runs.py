"""Whole runs with differential privacy: epsilon stands wherever figures do, and nothing is released twice."""

import pytest
from typer.testing import CliRunner

from components.data.records import DataError, pairs_digest, read_pairs
from components.recipes import load_recipe
from flows.cli import app
from tasks.export import training_of
from tasks.federation import check_secrets
from tests.support.variants import PROTECTED

SHORT = ["alignment.dpo.kl_prompts=1", "policy.max_new_tokens=4", "evaluation.preference_pairs=4"]


@pytest.fixture(scope="module")
def verdicts(new_workplace):
    """A run with protected verdicts, whose rounds ask all clients."""
    setting = "federation.privacy={unit: label, epsilon: 2}"
    return new_workplace("verdicts").run(setting, "federation.clients_per_round=4", *SHORT)


@pytest.fixture(scope="module")
def clients(new_workplace):
    """A run with protected clients."""
    secret = [setting.replace(", simulated: true", "") for setting in PROTECTED]
    return new_workplace("clients").run(*secret, "federation.options.aggregator=expected", *SHORT)


@pytest.mark.long
def test_epsilon_is_in_records_reports_and_tracking(verdicts):
    run = verdicts
    assert [record.privacy.epsilon for record in run.federation.records] == [2.0] * 3
    assert run.federation.privacy.epsilon == run.metrics["privacy/epsilon"] == 2.0
    assert "2 for a verdict; of a client with n pairs n times as much" in run.summary
    assert "which completion of a pair is preferred" in (run.folder / "report" / "report.html").read_text()
    assert run.history(run.phase_run("federate").info.run_id, "privacy/epsilon") == {1: 2.0, 2: 2.0, 3: 2.0}


@pytest.mark.long
def test_a_secret_of_each_client_is_its_own_and_its_loss_ends_the_run(verdicts):
    run = verdicts
    secrets = sorted(run.client_stores.glob("*/secret"))
    assert len(secrets) == 4 and len({path.read_bytes() for path in secrets}) == 4
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    recipe = load_recipe(str(run.folder / "recipe.yaml"))
    check_secrets(run.run, recipe, run.federation.records)
    secrets[0].unlink()
    with pytest.raises(DataError, match="has no secret any more, so that its verdicts would be released a"):
        check_secrets(run.run, recipe, run.federation.records)


@pytest.mark.long
def test_with_protected_clients_accuracy_is_that_of_owners_outside(clients):
    held_out = read_pairs(clients.folder / "prepared" / "judge.parquet", split="test")
    judges = {pair.client_id for pair in held_out}
    for measured in (clients.federation.before, clients.federation.after):
        assert set(measured.accuracy.clients) == judges
    assert set(clients.evaluation.implicit_reward.clients) <= judges
    epsilons = [record.privacy.epsilon for record in clients.federation.records]
    assert epsilons == sorted(epsilons) and epsilons[0] > 0
    assert clients.metrics["privacy/epsilon"] == epsilons[-1]
    assert clients.metrics["privacy/delta"] == 0.1
    assert "times its largest possible movement" in clients.output
    assert not (clients.folder / "federation-server").exists(), "with its secret all sums could be computed"


@pytest.mark.long
@pytest.mark.parametrize("run", ["verdicts", "clients"])
def test_no_hash_of_the_clients_pairs_is_published(run, request):
    """Whoever has a guess of all pairs could confirm it by one."""
    run = request.getfixturevalue(run)
    digest = pairs_digest(run.folder / "prepared")[:16].encode()
    files = [path for path in (*run.folder.rglob("*"), run.folder.parents[1] / "mlflow.db") if path.is_file()]
    assert len(files) > 50
    assert [path for path in files if digest in path.read_bytes()] == []
    model = run.run.recipe().policy
    assert digest not in training_of(run.run, model.backbone, is_aligned=True).encode()


@pytest.mark.long
def test_nothing_of_a_client_is_recorded_but_that_it_took_part(clients):
    for record in clients.federation.records:
        for one in record.clients.values():
            assert (one.rows, one.losses, one.metrics.scalars, one.metrics.series) == (0, [], {}, {})
    assert not [name for name in clients.phase_run("federate").data.metrics if name.startswith("train/")]


def test_the_check_of_a_recipe_says_what_all_rounds_cost():
    result = CliRunner().invoke(app, ["check", "debug", "federation.privacy={unit: label, epsilon: 2}"])
    assert result.exit_code == 0, result.output
    assert "privacy, unit label: epsilon 2 (randomised response); not covered: texts" in result.output
