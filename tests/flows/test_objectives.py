"""Methods with several objectives, FIRM and FedCMOO, through the whole pipeline."""

import json
import shutil
from pathlib import Path

import pytest

from components.data.records import choose_prompts
from components.learning.kl import kl_to_reference
from components.models.policy import Policy
from components.recipes import load_recipe
from components.results import Metrics
from components.seeding import derive
from tasks.tracking.federate import step_points
from tests.support.bare_loop import run_bare_loop

pytestmark = pytest.mark.long

OPTIONS = (
    "{objectives: {helpful: [helpful], clean: [clean]},"
    " ppo: {minibatch: 2, epochs: 1, temperature: 0.6}, reward_prompts: 3}"
)
TRAINED = (
    "{kind: trained, template: '{prompt}|{response}', max_length: 96,"
    " training: {backbone: {name: tiny-random}, steps: 4}}"
)
REWARDS = f"rewards={{helpful: {TRAINED}, clean: {{kind: function, name: clean}}}}"
OVERRIDES = [
    "federation.method=firm",
    f"federation.options={OPTIONS}",
    REWARDS,
    "federation.clients_per_round=3",
    "federation.batch_size=4",
    "federation.local_steps=1",
    "federation.rounds=3",
    "federation.evaluate_every=2",
    "policy.max_new_tokens=8",
    "policy.lora={r: 2, alpha: 4, dropout: 0.0}",
    "runtime={cpu_workers: 2, torch_threads: 2, data_docs: false}",
    "seed=3",
    "evaluation.judge={kind: reward, reward: helpful}",
]
ONE_AFTER_THE_OTHER = "runtime={cpu_workers: 1, torch_threads: 1}"


@pytest.fixture(scope="module")
def complete(new_workplace):
    """A complete run of FIRM."""
    return new_workplace("objectives").run(*OVERRIDES)


@pytest.fixture
def bare_folder(complete, tmp_path):
    """A folder for a bare loop with the run's rewards."""
    rewards = complete.folder / "federation" / "rewards"
    copied = tmp_path / "federation" / "rewards"
    shutil.copytree(rewards, copied)
    for path in copied.glob("*.trained.json"):  # it is relative, and the copy has another place
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"folder": str((rewards / content["folder"]).resolve())}))
    return tmp_path


def test_the_rewards_are_measured_before_and_after_the_rounds(complete):
    result = complete.federation
    for evaluation in (result.before, result.after):
        measure = evaluation.measures["rewards"]
        name = f"rewards-{evaluation.rounds_done:05d}.json"
        stored = (complete.folder / "federation" / name).read_text()
        assert Metrics.model_validate_json(stored) == measure
        assert measure.scalars["prompts"] == 3
        assert {"helpful", "clean", "kl"} <= set(measure.scalars)
    assert result.before.measures["rewards"].scalars["kl"] == pytest.approx(0, abs=1e-5)
    assert result.after.measures != result.before.measures


def test_a_trained_reward_is_trained_before_the_rounds_and_stored_relative_to_the_run(complete):
    assert complete.output.index("reward helpful: accuracy") < complete.output.index("round 1 of 3")
    rewards = complete.folder / "federation" / "rewards"
    folder = json.loads((rewards / "helpful.trained.json").read_text())["folder"]
    assert not Path(folder).is_absolute()
    assert (rewards / folder / "config.json").is_file()


def test_the_table_shows_the_rewards_their_kl_and_that_the_judge_is_the_trained_one(complete):
    lines = complete.summary.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("Rewards"))
    labels = {line.split()[0] for line in lines[start + 1 : start + 6] if line}
    assert {"helpful", "clean", "KL"} <= labels
    assert "judge: reward model, tiny-random, all layers, trained centrally" in complete.summary
    assert "judge: training step" not in complete.output


def test_the_rounds_end_with_one_policy_for_all_clients(complete):
    outcome = complete.federation.outcome
    assert (outcome.clients, outcome.labels_pairs) == ([], False)
    assert list(outcome.adapters) == ["policy"]
    assert outcome.job_keys == {}


def test_weights_of_each_round_rewards_and_disagreement_are_metrics(complete):
    federate = complete.phase_run("federate")
    names = {
        "server/lambda_drift",
        "server/update_drift",
        "rewards/helpful",
        "rewards/clean",
        "rewards/kl",
        "round/bytes_kept",
        "train/lambda/helpful_min",
    }
    assert names <= federate.data.metrics.keys()
    federate = complete.phase_run("federate").info.run_id
    low, mean, high = (
        complete.history(federate, f"train/lambda/helpful{end}") for end in ("_min", "", "_max")
    )
    assert len(mean) == len(complete.federation.round_ends())
    assert all(0 <= low[n] <= mean[n] <= high[n] <= 1 for n in mean)
    assert list(complete.history(federate, "rewards/clean")) == [0, 2, 3]


def test_concurrent_clients_give_the_bytes_of_clients_one_after_the_other(complete, bare_folder):
    recipe = load_recipe("debug", [*OVERRIDES, ONE_AFTER_THE_OTHER])
    hashes = run_bare_loop(recipe, complete.folder / "prepared", bare_folder).hashes
    assert hashes == complete.hashes


def test_the_kl_of_the_aligned_policy_is_at_the_temperature_of_training(complete):
    recipe = load_recipe("debug", OVERRIDES)
    rows = choose_prompts(complete.folder / "prepared", "test", recipe.alignment.dpo.kl_prompts, recipe.seed)
    prompts = [row.prompt for row in rows]
    policy = Policy(recipe.policy, "cpu", complete.folder / "alignment" / "final")

    def kl(temperature):
        return kl_to_reference(policy, prompts, derive(recipe.seed, "dpo"), temperature)["kl_sequence"]

    measured = complete.alignment.metrics["kl_sequence"]
    assert measured == pytest.approx(kl(0.6), rel=1e-3)
    assert measured != pytest.approx(kl(1.0), rel=1e-2)


def test_prompts_that_leave_no_room_are_refused_before_a_reward_is_trained(new_workplace):
    state, output = new_workplace("no-room").fail(*OVERRIDES, "policy.max_prompt_tokens=8")
    assert "max_prompt_tokens" in str(state.result(raise_on_failure=False))
    assert "reward helpful: accuracy" not in output


def test_the_bytes_of_a_round_of_fedcmoo_are_those_of_its_gradients_and_of_its_adapters(
    complete, bare_folder
):
    """A round has two steps: the clients send gradients, and then adapters."""
    overrides = [setting.replace("method=firm", "method=fedcmoo") for setting in OVERRIDES]
    recipe = load_recipe("debug", [*overrides, "federation.rounds=2", ONE_AFTER_THE_OTHER])
    records = run_bare_loop(recipe, complete.folder / "prepared", bare_folder).records
    sent = [sum(client.traffic.sent for client in record.clients.values()) for record in records]
    assert len(sent) == 4
    assert min(sent) > 0
    for n in (1, 3):
        (logged,) = [value for name, value, _ in step_points(records[: n + 1]) if name == "round/bytes_sent"]
        assert logged == sent[n - 1] + sent[n]
