"""What is protected leaves no trace: two runs, whose protected values differ, give the same bytes.

The noise is so large that the permitted path carries nothing. Any difference is another path.
"""

import shutil
from dataclasses import replace

import pyarrow.parquet
import pytest
import torch

from components.data.records import pairs_frame, read_pairs, write_table
from components.federation import private_sums
from components.federation.clients import context, worker
from components.federation.outcome import measure_jobs
from components.federation.rounds import ask_clients
from components.federation.transport import InProcessTransport
from components.privacy.labels import NoisedVerdicts
from components.privacy.secrets import digest
from components.recipes import load_recipe
from tests.support.bare_loop import open_loop
from tests.support.crashes import folder_content, without_timings
from tests.support.long_tier import with_examples
from tests.support.variants import PROTECTED, SMALL, VARIANTS

NO_VERDICT = "federation.privacy={unit: label, epsilon: 1.0e-3, debias: false, simulated: true}"
WITH_VERDICTS = [name for name in VARIANTS if not name.startswith(("firm", "fedcmoo", "fedbis-protected"))]


def exchanged_pair(pair):
    return replace(pair, chosen=pair.rejected, rejected=pair.chosen)


def exchange_verdicts(prepared, folder, client):
    """A copy of a prepared folder in which one client prefers the other completion of each of its pairs."""
    shutil.copytree(prepared, folder)
    pairs = [
        exchanged_pair(pair) if pair.client_id == client else pair
        for pair in read_pairs(folder / "pairs.parquet")
    ]
    frame = pairs_frame(pairs, "written").sort_values(["client_id", "pair_id"], ignore_index=True)
    (folder / "pairs.parquet").unlink()
    write_table(folder / "pairs.parquet", frame)
    return folder


@pytest.fixture(autouse=True)
def coins(monkeypatch):
    """Each verdict is replaced by a coin that depends on the texts alone."""

    def coin(self, texts, place, number):
        return bytes(8) + digest(self.secret, *texts, str(number))

    monkeypatch.setattr(NoisedVerdicts, "_draw", coin)


def content_of(recipe, prepared, folder):
    """What the rounds write, and what the clients answer when they are measured."""
    loop = open_loop(recipe, prepared, folder)
    state = loop.run()
    outcome = loop.bound.outcome(state)
    transport = InProcessTransport(recipe, loop.contexts, {"": loop.trainer})
    clients = outcome.clients or sorted(state.federation.names)
    answers = []
    for split, pairs in (("test", None), ("validation", 1)):
        jobs = measure_jobs(outcome, split, dict.fromkeys(clients, pairs), state.round)
        updates, _ = ask_clients(jobs, transport, recipe.federation, 1.0)
        answers += [without_timings(update.model_dump(mode="json")) for update in updates]
    return folder_content(folder), answers


@pytest.fixture(scope="module")
def exchanged(prepared, tmp_path_factory):
    """The prepared folder with other verdicts of ada, in another order of rows."""
    folder = exchange_verdicts(prepared, tmp_path_factory.mktemp("exchanged") / "prepared", "ada")
    tables = [pyarrow.parquet.read_table(one / "pairs.parquet") for one in (prepared, folder)]
    assert tables[0]["prompt"] != tables[1]["prompt"]
    return folder


@pytest.mark.parametrize("variant", with_examples(WITH_VERDICTS, ("fedbiscuit",)))
def test_with_coins_for_verdicts_no_byte_depends_on_a_verdict(variant, prepared, exchanged, tmp_path):
    recipe = load_recipe("debug", [*SMALL, *VARIANTS[variant], NO_VERDICT])
    one = content_of(recipe, prepared, tmp_path / "one")
    other = content_of(recipe, exchanged, tmp_path / "other")
    assert one == other
    assert any("safetensors" in name for name in one[0])


def exchanged_rows(self, split):
    """A planted fault: one split is read as it is."""
    rows = read_pairs(self.pairs, self.client, split)
    return rows if self.verdicts is None or split == "validation" else self.verdicts.apply(rows)


def naive_flips(self, pairs):
    """A planted fault: whether a verdict is exchanged, and the order, follow the ids of the pairs."""
    return [pair if int(pair.pair_id[-1], 16) % 2 else exchanged_pair(pair) for pair in pairs]


def exact_measures(self, job):
    """A planted fault: what is measured has no noise."""
    return read_pairs(self.pairs, self.client, job.split)


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "name", "fault"),
    [
        (context.ClientContext, "rows", exchanged_rows),
        (NoisedVerdicts, "apply", naive_flips),
        (
            context.ClientContext,
            "drawn_rows",
            lambda self, job: read_pairs(self.pairs, self.client, job.split),
        ),
    ],
    ids=["a split without noise", "noise by the ids of pairs", "measures without noise"],
)
def test_planted_faults_are_found(target, name, fault, prepared, exchanged, tmp_path, monkeypatch):
    monkeypatch.setattr(target, name, fault)
    recipe = load_recipe("debug", [*SMALL, *VARIANTS["fedbiscuit"], NO_VERDICT])
    one = content_of(recipe, prepared, tmp_path / "one")
    assert one != content_of(recipe, exchanged, tmp_path / "other")


@pytest.mark.long
def test_measures_by_true_verdicts_depend_on_them_and_rounds_do_not(prepared, exchanged, tmp_path):
    exact = NO_VERDICT.replace("}", ", exact_measures: true}")
    recipe = load_recipe("debug", [*SMALL, *VARIANTS["fedbis"], exact])
    one = content_of(recipe, prepared, tmp_path / "one")
    other = content_of(recipe, exchanged, tmp_path / "other")
    assert one[0].keys() == other[0].keys()
    assert one[0]["federation/commits/00002.json"] == other[0]["federation/commits/00002.json"]
    for mine, theirs in zip(one[1][:4], other[1][:4], strict=True):  # all held-out pairs of each client
        assert (mine == theirs) == (mine["client"] != "ada")


# --- clients


def other_pairs(prepared, folder, client):
    """A copy of a prepared folder in which one client has other pairs, as many as before."""
    shutil.copytree(prepared, folder)
    pairs = [
        replace(pair, prompt=f"other {n}", chosen=f"of {n} others", rejected=f"none of {n}")
        if pair.client_id == client
        else pair
        for n, pair in enumerate(read_pairs(folder / "pairs.parquet"))
    ]
    (folder / "pairs.parquet").unlink()
    write_table(folder / "pairs.parquet", pairs_frame(pairs, "written"))
    return folder


def rounds_of(recipe, prepared, folder):
    """What the rounds write at the server; the clients' stores are their own."""
    open_loop(recipe, prepared, folder).run()
    return {
        name: own for name, own in folder_content(folder).items() if not name.startswith("federation-clients")
    }


def no_movement(movement, bound):
    """A clip that lets nothing pass."""
    return {name: torch.zeros_like(tensor) for name, tensor in movement.items()}


@pytest.mark.parametrize("method", ["fedbis", "feddpo"])
def test_without_contributions_no_byte_of_the_server_depends_on_a_clients_pairs(
    method, prepared, tmp_path, monkeypatch
):
    monkeypatch.setattr(private_sums, "clip_to_grid", no_movement)
    options = ["federation.options={aggregator: expected}", f"federation.method={method}"]
    recipe = load_recipe("debug", [*SMALL, *PROTECTED, *options])
    changed = other_pairs(prepared, tmp_path / "changed", "ada")
    one = rounds_of(recipe, prepared, tmp_path / "one")
    assert one == rounds_of(recipe, changed, tmp_path / "other")
    assert any("npz" in name for name in one), "noise of the server"


def with_its_loss(result, origin, config):
    """A planted fault: a number beside the contribution."""
    return replace(PROTECT(result, origin, config), metrics=result.metrics)


def signs(movement, bound):
    """A planted fault: the direction of a movement passes."""
    return {name: tensor.sign() for name, tensor in movement.items()}


PROTECT = worker.protected


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "name", "fault"),
    [(worker, "protected", with_its_loss), (private_sums, "clip_to_grid", signs)],
    ids=["a metric beside the sum", "directions"],
)
def test_planted_faults_of_sums_are_found(target, name, fault, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(private_sums, "clip_to_grid", no_movement)
    monkeypatch.setattr(target, name, fault)
    recipe = load_recipe("debug", [*SMALL, *VARIANTS["fedbis-protected"]])
    changed = other_pairs(prepared, tmp_path / "changed", "ada")
    one = rounds_of(recipe, prepared, tmp_path / "one")
    assert one != rounds_of(recipe, changed, tmp_path / "other")
