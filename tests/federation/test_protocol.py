"""Jobs, updates and states as JSON: what goes to clients, comes back, and is stored."""

import json
import math
from pathlib import Path

import pytest

from components.federation.methods.fedbiscuit import GroupingMemory
from components.federation.protocol import (
    Client,
    GenerateJob,
    Generation,
    GradientJob,
    MeasureJob,
    ServerState,
    TrainJob,
    Update,
    sent_adapters,
)
from components.recipes import load_recipe
from components.results import Metrics, Traffic
from tests.support.bare_loop import open_loop

FIRST = "ab" * 32
SECOND = "cd" * 32
NUMBERS = [0.1 + 0.2, 1 / 3, 1e-320, 1.7976931348623157e308, -0.0, math.inf, -math.inf, math.nan]
JOBS = [
    TrainJob(
        client="é",
        round=1,
        seed=2**63 + 1,
        adapter_name="s",
        adapters=(FIRST,),
        objective_weights=(0.1 + 0.2, 1),
    ),
    GradientJob(client="ada", round=1, seed=2, adapters=(FIRST,), previous_job_key="0123"),
    MeasureJob(client="ada", round=1, seed=2, adapters=(FIRST, SECOND), split="validation", losses=True),
    MeasureJob(client="ada", round=1, seed=0, adapters=(FIRST, FIRST), split="test", pairs=2, assigned=1),
    MeasureJob(client="ada", round=0, seed=0, adapters=(FIRST,), split="test", is_aligned=True, batch_size=4),
    GenerateJob(
        client="ada",
        round=0,
        seed=0,
        adapters=(FIRST,),
        generations=(Generation(prompts=("é", "b"), seed=2**63, count=2),),
        kl=True,
    ),
]
UPDATE = Update(
    job="0123",
    client="ada",
    adapter_name="policy",
    adapter=FIRST,
    losses=NUMBERS,
    rows=3,
    metrics=Metrics(scalars={"loss": math.nan}, series={"steps": NUMBERS}),
    traffic=Traffic(received=1, sent=2, kept=3),
    output={"margin": 0.1 + 0.2, "domains": {"é": [1, 0.5]}},
)
STATE = ServerState[GroupingMemory](
    round=1,
    phase="grouping",
    step=2,
    seed=2**63 + 1,
    clients=(Client(name="ada", training_pairs=3, validation_pairs=0, weight=1 / 3),),
    initial=FIRST,
    adapters={"policy": SECOND},
    memory=GroupingMemory(job_keys={"ada": "0123"}, losses={"ada": NUMBERS}),
    metrics=Metrics(scalars={"loss": -math.inf}),
)
VALUES = [*JOBS, UPDATE, STATE]
IDS = [*(f"{job.kind}-{n}" for n, job in enumerate(JOBS)), "update", "state"]


@pytest.mark.parametrize("value", VALUES, ids=IDS)
def test_a_value_is_read_back_from_its_json_with_every_bit_of_its_numbers_and_a_job_with_its_key(value):
    read = type(value).model_validate_json(value.model_dump_json())
    assert repr(read) == repr(value)  # NaN is not equal to itself
    assert value not in JOBS or read.key() == value.key()


@pytest.mark.parametrize("value", VALUES, ids=IDS)
def test_the_json_schema_of_a_value_names_its_fields(value):
    schema = type(value).model_json_schema()
    fields = type(value).model_fields.items()
    left_out = {name for name, field in fields if field.exclude_if and field.exclude_if(getattr(value, name))}
    assert set(schema["properties"]) - left_out == set(json.loads(value.model_dump_json()))
    assert schema["additionalProperties"] is False


def test_a_state_without_a_memory_type_is_written_with_its_whole_memory():
    untyped = ServerState(**dict(STATE))
    assert untyped.model_dump_json() == STATE.model_dump_json()


def test_adapters_are_in_the_order_of_the_clients_names():
    updates = [UPDATE.model_copy(update={"client": name, "adapter": name * 64}) for name in "ba"]
    assert list(sent_adapters(updates).items()) == [("a", "a" * 64), ("b", "b" * 64)]


def test_losses_have_no_adapter_to_combine():
    with pytest.raises(TypeError, match="client ada has no adapter"):
        sent_adapters([UPDATE.model_copy(update={"adapter": None})])


def texts(value):
    """All strings of a JSON value, keys included."""
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in texts(item))]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("method", ["fedbiscuit", "fedpdpo"])
def test_jobs_and_updates_of_a_run_name_no_path_of_the_machine(method, prepared, tmp_path):
    options = "federation.options={selectors: 3, warmup_rounds: 1}" if method == "fedbiscuit" else "seed=0"
    overrides = [f"federation.method={method}", options, "federation.rounds=4", "federation.local_steps=2"]
    loop = open_loop(load_recipe("debug", overrides), prepared, tmp_path)
    jobs = list(loop.bound.plan(loop.initial_state()))
    if method == "fedbiscuit":
        initial = (loop.federation.initial,)
        jobs.append(
            MeasureJob(client="ada", round=0, seed=1, adapters=initial, split="validation", losses=True)
        )
    sent = [job.model_dump_json() for job in jobs]
    sent += [loop.run_job(job).model_dump_json() for job in jobs]
    sent += [path.read_text() for path in (loop.commits.folder / "updates").iterdir()]
    assert len(sent) == 3 * len(jobs) >= 6
    for message in sent:
        assert str(tmp_path) not in message
        assert not [text for text in texts(json.loads(message)) if Path(text).is_absolute()]
