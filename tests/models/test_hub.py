"""Models of the hub: their commits, and a hub that does not answer."""

import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from components.config import BackboneConfig
from components.models import hub
from components.models.backbone import BackboneError, hub_commit, read_model_config, read_tokenizer


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A function that lets `main` of org/name be a commit in an empty cache of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--org--name"

    def move(commit):
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "snapshots" / commit / "config.json").write_text("{}")
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

    monkeypatch.setattr(hub, "_answers", {})
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


def test_a_hub_is_asked_again_after_a_while(cache, served, monkeypatch):
    answers, requests = served
    answers[CONFIG] = (503, "", {})
    config = BackboneConfig(name="org/name")
    with pytest.raises(BackboneError, match="the hub answers 503"):
        read_model_config(config)
    answers[CONFIG] = (200, json.dumps({"n": 1}), {})
    monkeypatch.setattr(hub, "REMEMBERED_SECONDS", 0.0)
    assert read_model_config(config) == {"n": 1}
    assert requests == {CONFIG: 2}


def test_a_cached_tokenizer_without_a_configuration_is_read_without_the_hub(
    cache, tmp_path, monkeypatch, hub_online
):
    cache("a" * 40)
    folder = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    (folder / "config.json").rename(folder / "tokenizer_config.json")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    hub.require_reachable("org/name", None)
