"""A user's own pairs in three columns, with clients that adapt the shared adapter (Per-FedAvg)."""

import json

import pytest

from tests.support.mlflow_store import global_store
from tests.support.pipeline import NOISE


def own_pair(n):
    if n % 2:
        return {
            "prompt": f"Question number {n}?",
            "chosen": f"Answer {n}, in full.",
            "rejected": f"No {n}.",
        }
    return {
        "prompt": f"Question number {n}?",
        "chosen": f"Yes, {n}.",
        "rejected": f"No, and not {n} either.",
    }


@pytest.fixture(scope="module")
def complete(new_workplace, tmp_path_factory):
    """A run on the files of a working folder, which are deleted afterwards."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = folder / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps(own_pair(n)) for n in range(80)), encoding="utf-8")
    template = folder / "policy.txt"
    template.write_text("A customer wrote:\n{prompt}\n\nOur answer:\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = run_own_files(new_workplace("own-pairs"))
    pairs.unlink()
    template.unlink()
    return run


def run_own_files(place):
    return place.run(
        "data.source=jsonl",
        "data.path=pairs.jsonl",
        "policy.template=policy.txt",
        "data.options={}",
        "data.partition=iid",
        "data.clients=4",
        "federation.method=perfedavg",
        "federation.options={inner_steps: 1}",
        "federation.rounds=1",
        "runtime.data_docs=true",
    )


def test_the_run_ends_without_a_warning_and_shows_the_accuracy_on_all_pairs(complete):
    assert "all pairs" in complete.summary
    assert not NOISE.findall(complete.output)


def test_the_data_docs_are_written_and_logged(complete):
    assert (complete.folder / "prepared" / "docs" / "index.html").is_file()
    prepare = complete.phase_run("prepare").info.run_id
    assert "data/docs/index.html" in complete.artifacts(prepare, "data/docs")


def test_each_client_adapts_the_servers_adapter_to_be_measured_and_answer_and_stores_nothing(complete):
    result = complete.federation
    assert (result.outcome.own, result.outcome.has_client_policies) == ("modules", False)
    assert list(result.outcome.adapters) == ["policy"]
    assert "by log-likelihood, summed" in complete.summary
    assert result.after.accuracy.pairs > 0
    answering = {row["aligned"]["client_id"] for row in complete.answers}
    assert answering <= set(complete.federation.outcome.job_keys)
    assert len(answering) > 1
    assert not complete.client_stores.exists()


def test_the_registered_policy_has_the_words_of_its_template_in_every_folder(complete, tmp_path, monkeypatch):
    import mlflow

    (tmp_path / "policy.txt").write_text("Translate to French: {prompt}\nFR:\n")
    monkeypatch.chdir(tmp_path)
    with global_store(complete.tracking):
        model = mlflow.pyfunc.load_model(complete.alignment.model_uri).unwrap_python_model()
    assert model.policy.template.render(prompt="P") == "A customer wrote:\nP\n\nOur answer:"
