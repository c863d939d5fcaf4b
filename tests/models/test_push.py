"""An export is uploaded to the hub, in whose place a server here answers the requests of its library."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from components.config import UserError
from components.models.export import open_repository, push_folder

TOKEN = "hf_of_a_test"


class Hub(BaseHTTPRequestHandler):
    """What the hub answers to a commit of files that need no other store; `team/other` is not found."""

    def do_GET(self):
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        files = [{"rfilename": file} for file in self.server.found]
        return self.answer(200, {"id": name, "private": self.server.private, "siblings": files})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            options = json.loads(body)
            self.server.created.append(options)
            name = f"{options['organization'] or 'me'}/{options['name']}"
            self.answer(200, {"url": f"{self.server.url}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif self.path.startswith("/api/models/") and self.path.endswith("/preupload/main"):
            if "team/other" in self.path:
                return self.answer(404, {"error": "Repository not found"})
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
            self.answer(200, {"files": modes})
        elif self.path.startswith("/api/models/") and self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            name = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
            url = f"{self.server.url}/{name}/commit/abc"
            self.answer(200, {"success": True, "commitOid": "abc", "commitUrl": url, "hookOutput": ""})
        else:
            self.answer(404, {"error": f"no {self.path}"})
        return None

    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.created, server.files, server.found, server.private = [], {}, [], True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A policy\n")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/model"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x00weights")
    return tmp_path


@pytest.mark.parametrize(("name", "whole"), [("team/policy", "team/policy"), ("policy", "me/policy")])
def test_all_files_of_an_export_are_uploaded_to_a_private_repository(hub, folder, name, whole):
    repository = open_repository(name)
    assert repository == whole
    assert push_folder(folder, repository) == f"{hub.url}/{whole}/commit/abc"
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    (created,) = hub.created
    assert created.get("private") is True or created.get("visibility") == "private"


def test_a_public_repository_is_refused(hub):
    hub.private = False
    with pytest.raises(UserError, match="team/policy is public.*make it private"):
        open_repository("team/policy")


@pytest.mark.parametrize(
    ("repository", "token", "words"),
    [("team/policy", "hf_wrong", "401"), ("no such name/at all", TOKEN, "Repo id")],
)
def test_a_repository_that_cannot_be_used_is_a_sentence(hub, monkeypatch, repository, token, words):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=f"{repository} of the hub.*{words}.*hf auth login") as caught:
        open_repository(repository)
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_an_upload_that_fails_is_a_sentence(hub, folder):
    with pytest.raises(UserError, match="is written, but not uploaded to team/other.*404.*hf auth login"):
        push_folder(folder, "team/other")


def test_an_adapter_is_not_put_beside_a_merged_model(hub, folder):
    hub.found = ["README.md", "config.json"]
    with pytest.raises(UserError, match="files of the other kind"):
        push_folder(folder, "team/policy")
    hub.found = ["README.md", "adapter_config.json"]
    assert push_folder(folder, "team/policy")


def test_an_adapter_of_a_model_of_this_machine_is_not_uploaded(hub, folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    with pytest.raises(UserError, match=r"with --merge\.$"):
        push_folder(folder, "team/policy")
    assert hub.files == {}


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://127.0.0.1:1/"])
def test_a_hub_that_does_not_answer_is_a_sentence(hub, folder, monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UserError, match="of the hub cannot be used .*hub can be reached"):
        open_repository("team/policy")
