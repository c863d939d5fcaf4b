"""Results of phases: frozen models, files with a schema version, and metrics of all names."""

import json
import math

import pytest
from pydantic import ValidationError

from components import results
from components.config import UserError
from components.results import (
    AS_RUN,
    AccuracyReport,
    AlignmentResult,
    ClientRecord,
    EvaluationResult,
    FederationResult,
    Metrics,
    Result,
    RoundEvaluation,
    StepRecord,
    StoredResult,
    finite_or_none,
    jain_index,
    worst_tenth,
)
from components.versions import RESULTS
from tests.support.results import (
    alignment_result,
    client_record,
    evaluation_result,
    federation_result,
    step_record,
)


def make_evaluation(**changes):
    values = {
        "mean": 0.5,
        "worst": 0.25,
        "best": 0.75,
        "clients": {"ada": 0.25, "bea": 0.75},
        "domains": {},
        "pairs": 8,
        "margin": 0.1,
        "margins": {},
    }
    return RoundEvaluation(rounds_done=2, accuracy=AccuracyReport(**(values | changes)))


def make_step(clients, round=0, rounds_done=1):
    return StepRecord(
        step=1,
        round=round,
        phase="train",
        rounds_done=rounds_done,
        logged_at=1,
        clients={
            name: ClientRecord(adapter_name="policy", rows=1, metrics=Metrics(scalars=scalars))
            for name, scalars in clients.items()
        },
        failed={},
        refused={},
        adapters={},
        memory={},
        server=Metrics(),
        aggregation_seconds=0.0,
    )


def all_subclasses(model):
    models = set()
    for subclass in model.__subclasses__():
        models |= {subclass} | all_subclasses(subclass)
    return models


@pytest.mark.parametrize("model", sorted(all_subclasses(Result), key=lambda model: model.__name__))
def test_every_result_is_frozen_and_refuses_unknown_keys(model):
    assert model.model_config["frozen"]
    assert model.model_config["extra"] == "forbid"


def test_a_result_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        make_evaluation().rounds_done = 3


# --- files


def test_a_result_is_read_back_unchanged(tmp_path):
    written = make_evaluation().write(tmp_path / "result.json")
    assert RoundEvaluation.read(tmp_path / "result.json") == written


def test_repetitions_write_the_same_result_and_each_reads_its_own_seconds(tmp_path):
    results = {}
    for name, seconds in {"one": 0.25, "two": 0.5}.items():
        scalars = {"loss": 0.7, "seconds": seconds, "shared/seconds": seconds}
        record = step_record(clients={"seconds": client_record(scalars)}, aggregation_seconds=seconds)
        results[name] = federation_result(records=[record]).write(tmp_path / name / "result.json")
    assert (tmp_path / "one" / "result.json").read_bytes() == (tmp_path / "two" / "result.json").read_bytes()
    for name, result in results.items():
        assert FederationResult.read(tmp_path / name / "result.json") == result
    (tmp_path / "one" / AS_RUN).unlink()
    (pulled,) = FederationResult.read(tmp_path / "one" / "result.json").records
    assert pulled.aggregation_seconds is None
    assert pulled.clients["seconds"].metrics.scalars == {"loss": 0.7}


def test_the_seconds_of_another_result_are_not_read(tmp_path):
    path = tmp_path / "result.json"
    federation_result(records=[step_record(aggregation_seconds=0.5)], rounds=2).write(path)
    result = federation_result(records=[step_record(aggregation_seconds=None)], rounds=1)
    path.write_bytes(result.to_bytes())
    assert FederationResult.read(path) == result


def test_what_the_registry_and_the_judge_tell_of_a_run_is_no_part_of_the_result_file(tmp_path):
    path = tmp_path / "alignment" / "result.json"
    alignment = alignment_result(model_uri="models:/policy/7", model_version="7").write(path)
    assert AlignmentResult.read(path) == alignment
    assert "models:/" not in path.read_text()
    path = tmp_path / "evaluation" / "result.json"
    evaluation = evaluation_result(judge_figures={"judge_accuracy": 0.5, "judge_seconds": 3.0}).write(path)
    assert EvaluationResult.read(path) == evaluation
    assert "seconds" not in path.read_text()


def test_a_file_has_the_schema_version_of_the_table_and_nan_and_infinity_are_read_back(tmp_path):
    make_evaluation(mean=math.nan, worst=-math.inf).write(tmp_path / "result.json")
    accuracy = RoundEvaluation.read(tmp_path / "result.json").accuracy
    assert math.isnan(accuracy.mean)
    assert accuracy.worst == -math.inf
    make_evaluation().write(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["schema_version"] == RESULTS


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"schema_version": RESULTS + 1}, f"schema_version {RESULTS + 1}"),
        ({"rounds_done": "two"}, "result.json"),
        ({"unknown": 1}, "result.json"),
    ],
)
def test_a_file_of_another_version_is_refused_by_its_path_with_the_remedy(tmp_path, change, part):
    path = tmp_path / "result.json"
    make_evaluation().write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match="result.json") as error:
        RoundEvaluation.read(path)
    assert part in str(error.value)
    assert "start a new run" in str(error.value)


@pytest.mark.parametrize("content", [b"", b'{"rounds_done": 2, "acc', b"\x00"])
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"result\.json"):
        RoundEvaluation.read(path)


def test_every_phase_has_a_stored_result():
    names = {model.__name__ for model in all_subclasses(StoredResult)}
    expected = {"RoundEvaluation", "FederationResult", "AlignmentResult", "EvaluationResult"}
    assert expected <= names
    assert all(getattr(results, name).model_fields["schema_version"].default == RESULTS for name in expected)


# --- metrics


def test_merged_metrics_have_the_numbers_of_all_and_the_last_of_equal_names():
    first = Metrics(scalars={"loss": 1.0, "kl": 2.0}, series={"lambda": [1.0]})
    second = Metrics(scalars={"loss": 3.0}, series={"score": [4.0]})
    merged = first.merged(second, Metrics(scalars={"kl": 5.0}))
    assert merged.scalars == {"loss": 3.0, "kl": 5.0}
    assert merged.series == {"lambda": [1.0], "score": [4.0]}
    assert first.scalars == {"loss": 1.0, "kl": 2.0}


def test_a_step_has_the_means_of_every_scalar_and_ends_its_round_when_it_is_complete():
    step = make_step({"ada": {"loss": 1.0, "a/new/metric": 5.0}, "bea": {"loss": 3.0, "kl": 0.5}})
    assert step.client_means() == {"loss": 2.0, "a/new/metric": 5.0, "kl": 0.5}
    assert make_step({}, round=0, rounds_done=1).ends_round
    assert not make_step({}, round=1, rounds_done=1).ends_round


def test_numbers_that_are_not_finite_are_none_in_strict_json():
    tree = {"a": [1.0, math.nan, {"b": math.inf}], "c": "nan", "d": 2, "e": None}
    assert finite_or_none(tree) == {"a": [1.0, None, {"b": None}], "c": "nan", "d": 2, "e": None}


def test_the_worst_tenth_and_jains_index_by_hand():
    assert worst_tenth([0.9, 0.2, 0.5]) == 0.2
    assert worst_tenth([float(n) for n in range(20)]) == 0.5
    assert worst_tenth([float(n) for n in range(11)]) == 0.5, "a tenth is rounded up"
    assert math.isnan(worst_tenth([]))
    assert jain_index([0.5, 0.5, 0.5]) == 1.0
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([1.0, 3.0]) == 0.8
    assert all(math.isnan(jain_index(values)) for values in ([], [0.0], [-1.0, 2.0]))
