"""Transports: chosen by the recipe's runtime.transport, and opened from what a federation consists of."""

import pytest

from components.config import RecipeError
from components.federation.protocol import Update
from components.federation.transport import InProcessTransport, Transport
from components.recipes import load_recipe
from tasks.prefect_transport import TRANSPORTS
from tests.support.bare_loop import open_loop


def test_jobs_are_mapped_to_prefect_tasks_by_default_and_an_unknown_transport_is_refused(debug):
    loaded = TRANSPORTS.load(debug.runtime.transport)
    assert issubclass(loaded, Transport)
    assert loaded.__name__ == "PrefectTransport"
    recipe = load_recipe("debug", ["runtime.transport=prefekt"])
    with pytest.raises(RecipeError, match=r"runtime\.transport.*'prefekt' is not known.*'prefect'"):
        TRANSPORTS.load(recipe.runtime.transport)


def test_an_installed_transport_is_opened_with_the_recipe_and_the_clients_contexts(
    monkeypatch, prepared, tmp_path
):
    module = "components.federation.transport"
    monkeypatch.setitem(TRANSPORTS.builtin, "here", f"{module}:InProcessTransport")
    overrides = ["federation.clients_per_round=2", "federation.local_steps=1", "runtime.transport=here"]
    loop = open_loop(load_recipe("debug", overrides), prepared, tmp_path)
    transport_type = TRANSPORTS.load(loop.recipe.runtime.transport)
    transport = transport_type.open(loop.recipe, loop.contexts)
    assert isinstance(transport, InProcessTransport)
    jobs = loop.bound.plan(loop.initial_state())
    answers = transport.run(jobs)
    assert all(isinstance(answer, Update) for answer in answers)
    assert [answer.job for answer in answers] == [job.key() for job in jobs]


def test_what_is_no_transport_is_refused(monkeypatch):
    monkeypatch.setitem(TRANSPORTS.builtin, "bare", "components.federation.rounds:run_rounds")
    with pytest.raises(RecipeError, match=r"'bare' registers run_rounds, which is no .*transport\.Transport"):
        TRANSPORTS.load("bare")
