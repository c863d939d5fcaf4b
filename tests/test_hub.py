"""The hub: commits of its models, and a hub that does not answer."""

import json
import shutil
import socket
import time
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import datasets
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from components import hub
from components.config import BackboneConfig
from components.data.records import DataError
from components.data.rows import from_hub, from_hub_file
from components.evaluation.judges.autoj import AutoJSection
from components.evaluation.judges.autoj import read_model_config as read_judge_config
from components.models.backbone import (
    BackboneError,
    fetch_backbone,
    hub_commit,
    read_model_config,
    read_tokenizer,
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A function that lets `main` of org/name be a commit in an empty cache of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--org--name"

    def move(commit, model=None):
        if model is None:
            (root / "snapshots" / commit).mkdir(parents=True)
            (root / "snapshots" / commit / "config.json").write_text("{}")
        else:
            shutil.copytree(model, root / "snapshots" / commit)
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(commit)

    return move


@pytest.fixture
def served(monkeypatch, hub_online):
    """A hub in this process: paths and their answers (status, body, headers), and a count of requests."""
    answers, requests = {}, Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests[self.path] += 1
            status, body, headers = answers.get(self.path, (404, "", {}))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield answers, requests
        server.shutdown()


CONFIG = "/org/name/resolve/main/config.json"


def test_the_commit_of_a_model_is_that_of_the_cache_where_the_hub_is_not_asked(cache):
    for commit in ("a" * 40, "b" * 40):
        cache(commit)
        assert hub_commit("org/name", None) == commit
    assert hub_commit("org/name", "a" * 40) == "a" * 40
    assert hub_commit("org/other", None) is None


def test_the_commit_is_the_one_of_the_hub_before_that_of_the_cache(cache, served):
    answers, requests = served
    cache("a" * 40)
    answers[CONFIG] = (200, '{"n": 1}', {"X-Repo-Commit": "b" * 40})
    assert hub_commit("org/name", None) == "b" * 40
    assert hub_commit("org/name", "main") == "b" * 40
    assert requests == {CONFIG: 1}, "a commit is not asked for again and again"
    assert hub_commit("org/name", "c" * 40) == "c" * 40
    assert requests == {CONFIG: 1}, "a commit names itself"


@pytest.mark.parametrize("name", ["./gone", "/gone", "~/m", "a/b/c", "../m", "tiny-random", "embedded"])
def test_a_name_that_is_no_hub_id_has_no_commit(name):
    assert hub_commit(name, None) is None


@pytest.mark.parametrize("answer", ["unreachable", (503, "", {})])
def test_a_hub_that_does_not_answer_is_asked_once_and_for_nothing_but_the_configuration(
    cache, served, monkeypatch, answer, caplog
):
    answers, requests = served
    if answer == "unreachable":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    else:
        answers[CONFIG] = answer
    config = BackboneConfig(name="org/name")
    for _ in range(2):
        with pytest.raises(BackboneError, match="'org/name' cannot be read: the hub"):
            read_tokenizer(config)
        with pytest.raises(BackboneError, match="'org/name' cannot be read: the hub"):
            read_model_config(config)
        assert hub_commit("org/name", None) is None
    assert set(requests) <= {CONFIG}
    assert sum(requests.values()) <= 1
    assert len(hub._answers) == 1
    assert "Retrying" not in caplog.text


@pytest.fixture
def silent(monkeypatch, hub_online):
    """A hub that accepts connections and never answers; gives its socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "DEFAULT_LIMIT", 0.3)
        yield server


def test_a_silent_hub_is_asked_once_for_all_models_and_data_sets(cache, silent, caplog):
    cache("a" * 40, fetch_backbone("tiny-random"))
    start = time.monotonic()
    assert read_tokenizer(BackboneConfig(name="org/name")).vocab_size
    for name in ("org/one", "other/two"):
        with pytest.raises(BackboneError, match=f"'{name}' cannot be read: the hub .*no answer within 0.3 s"):
            read_tokenizer(BackboneConfig(name=name))
    for read in (partial(from_hub, split="train"), partial(from_hub_file, file="x.json")):
        with pytest.raises(DataError, match="no answer within 0.3 s; HF_HUB_ETAG_TIMEOUT sets another limit"):
            read("org/rows")
    assert time.monotonic() - start < 10  # the library alone takes 25 s for each of five files
    assert len(hub._answers) == 1
    assert "Retrying" not in caplog.text
    silent.accept()[0].close()
    silent.settimeout(0.1)
    with pytest.raises(TimeoutError):
        silent.accept()


def test_a_slow_hub_is_waited_for_and_named(served, monkeypatch, caplog):
    monkeypatch.setattr(hub, "QUIET_SECONDS", 0.0)
    answers, _ = served
    answers[CONFIG] = (200, '{"n": 1}', {})
    assert read_model_config(BackboneConfig(name="org/name")) == {"n": 1}
    assert "waiting for the hub (127.0.0.1)" in caplog.text


def test_a_hub_that_does_not_answer_is_asked_again_after_a_while(cache, served, monkeypatch, caplog):
    answers, requests = served
    answers[CONFIG] = (200, json.dumps({"n": 1}), {})
    config = BackboneConfig(name="org/name")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_request", lambda *_: hub.Answer(0.0, failure="away", is_reached=False))
        with pytest.raises(BackboneError, match="cannot be read: away, and its cache has no copy"):
            read_model_config(config)
        assert constants.HF_HUB_OFFLINE
        assert datasets.config.HF_HUB_OFFLINE, "the libraries do not ask either"
        assert "away: models and data sets come from its cache alone" in caplog.text
    assert read_model_config(config) == {"n": 1}
    assert requests == {CONFIG: 1}
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_lost_connection_is_tried_again(served, monkeypatch):
    answers, _ = served
    answers[CONFIG] = (200, json.dumps({"n": 1}), {})
    monkeypatch.setattr(hub, "RETRY_SECONDS", 0.3)
    session = get_session()
    tries = iter([OSError("reset by peer")])

    class Unsteady:
        def request(self, *arguments, **options):
            for error in tries:
                raise error
            return session.request(*arguments, **options)

    monkeypatch.setattr("huggingface_hub.utils.get_session", Unsteady)
    assert read_model_config(BackboneConfig(name="org/name")) == {"n": 1}


def test_an_error_of_the_hub_is_no_silence_and_leaves_the_cache_to_the_libraries(cache, served):
    answers, _ = served
    answers[CONFIG] = (503, "", {})
    with pytest.raises(OSError, match="the hub answers 503 .*, and its cache has no copy"):
        hub.require_reachable("org/name", None)
    assert not constants.HF_HUB_OFFLINE
    cache("a" * 40)
    hub.require_reachable("org/name", None)


def test_a_generated_model_is_not_asked_for(served):
    _, requests = served
    options = AutoJSection(kind="autoj", model="tiny-random", max_prompt_tokens=100, max_new_tokens=20)
    assert read_judge_config(options).model_type == "llama"
    assert requests == {}


def test_a_wrong_split_is_no_silence(silent, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", raising(ValueError('Unknown split "tset"')))
    with pytest.raises(DataError, match='Unknown split "tset"'):
        from_hub("org/rows", split="tset")


def raising(error):
    def function(*_, **__):
        raise error

    return function


def test_a_cached_tokenizer_without_a_configuration_is_read_without_the_hub(
    cache, tmp_path, monkeypatch, hub_online
):
    cache("a" * 40)
    folder = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    (folder / "config.json").rename(folder / "tokenizer_config.json")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    hub.require_reachable("org/name", None)
    with pytest.raises(OSError, match="its cache has no copy"):
        hub.require_reachable("org/other", None)
