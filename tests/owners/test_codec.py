"""What a server and an owner send each other, as JSON and back."""

import json
import math

import pytest

from components.federation.protocol import (
    Failure,
    GenerateJob,
    Generation,
    GradientJob,
    Job,
    MeasureJob,
    ScorePairsJob,
    TrainJob,
    Update,
)
from components.owners.codec import (
    JOBS,
    CodecError,
    OwnerRequest,
    decode,
    decode_answer,
    encode,
    encode_answer,
)
from components.owners.jobs import ForgetJob, PublishJob
from components.results import Metrics, Traffic

COMMON = {"client": "ada", "round": 3, "seed": 2**40, "adapters": ("a" * 64, "b" * 64)}
ONE_OF_EACH = {
    "train": TrainJob(
        **COMMON,
        adapter_name="selector-0",
        previous_job_key="abc",
        processing="clip",
        participants=("ada", "bea"),
        weight=0.1 + 0.2,
        objective_weights=(0.1, 0.9),
        attached={"control": "c" * 64},
    ),
    "gradients": GradientJob(**COMMON),
    "measure": MeasureJob(**COMMON, split="test", pairs=3, assigned=1, batch_size=2, is_aligned=True),
    "score-pairs": ScorePairsJob(client="ada", round=0, seed=1, reward="preference", fingerprint="f"),
    "publish": PublishJob(client="ada", seed=1, prompts=("e" * 64,)),
    "forget": ForgetJob(client="ada", seed=1),
    "generate": GenerateJob(
        **COMMON, generations=(Generation(prompts=("a\nb\u2028", "é"), seed=1, temperature=0.7, count=2),)
    ),
}


def request(*jobs: Job, **changes):
    values = {
        "run": "run-1",
        "recipe": {"name": "debug"},
        "exchange": "federation",
        "pairs": "prepared/pairs.parquet",
        "jobs": jobs,
        "files": {"prepared/pairs.parquet": "d" * 64},
    }
    return OwnerRequest(**values | changes)


def test_every_kind_of_job_is_here():
    assert sorted(ONE_OF_EACH) == JOBS.names()


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_job_comes_back_as_it_was_with_its_key(kind):
    job = ONE_OF_EACH[kind]
    (back,) = decode(encode(request(job))).jobs
    assert type(back) is type(job)
    assert (back, back.key()) == (job, job.key())


class MyJob(Job):
    kind: str = "mine"
    own: float = math.inf


def test_a_kind_of_an_installed_package_comes_back_too(monkeypatch):
    monkeypatch.setitem(JOBS.builtin, "mine", f"{__name__}:MyJob")
    (back,) = decode(encode(request(MyJob(**COMMON)))).jobs
    assert back == MyJob(**COMMON)


def test_an_update_comes_back_with_numbers_that_are_not_finite():
    update = Update(
        job="k",
        client="ada",
        adapter="a" * 64,
        losses=[0.1, math.inf, -math.inf],
        rows=3,
        metrics=Metrics(scalars={"loss": 1 / 3, "none": math.nan}),
        traffic=Traffic(received=1, sent=2, kept=3),
        output={"votes": [1, None, 0.5]},
    )
    back = decode_answer(encode_answer(update))
    assert isinstance(back, Update)
    assert back.model_dump_json() == update.model_dump_json()
    assert math.isnan(back.metrics.scalars["none"])


def test_a_failure_comes_back():
    failure = Failure("ada", "RuntimeError (errors/1.txt of its private store)")
    assert decode_answer(encode_answer(failure)) == failure


def changed(**values):
    return json.dumps(json.loads(encode(request(ONE_OF_EACH["train"]))) | values).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04", "no JSON with a schema_version"),
        (b"[1]", "no JSON with a schema_version"),
        (changed(schema_version=2), "schema version 2, and this owner reads 1: install the same version"),
        (changed(jobs=[{"kind": "steal", "client": "ada"}]), "cannot be read at: jobs"),
        (changed(jobs=[{**COMMON, "kind": "train", "path": "/etc"}]), "cannot be read at: jobs"),
        (changed(files={"prepared/x": "../../secret"}), "cannot be read at: files"),
        (changed(files={"files/x": "d" * 64}), "cannot be read at: files"),
        (changed(jobs=[{**COMMON, "kind": "train", "adapters": ["../x"]}]), "cannot be read at: jobs"),
        (changed(jobs=[{**COMMON, "kind": "train", "previous_job_key": "../x"}]), "cannot be read at: jobs"),
        (changed(files={"../other/pairs.parquet": "d" * 64}), "cannot be read at: files"),
        (changed(pairs="/home/pairs.parquet"), "cannot be read at: pairs"),
        (changed(run="../run-2"), "cannot be read at: run"),
    ],
)
def test_a_request_that_an_owner_cannot_read_is_refused_without_a_quotation(data, message):
    with pytest.raises(CodecError, match=message) as error:
        decode(data)
    assert "steal" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"null", b"{}", b'{"client": "ada"}', b"[]"])
def test_what_is_no_answer_is_refused(data):
    with pytest.raises(CodecError, match="neither an update nor a failure"):
        decode_answer(data)
