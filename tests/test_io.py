"""Files that are written whole or not at all, and where the project keeps them."""

import errno
import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from components import io, paths
from components.io import DamagedFileError, file_hash, read_json, read_mapping, write_atomically, write_json


def test_a_file_is_written_with_its_folders_and_can_be_read_by_others(tmp_path):
    path = tmp_path / "a" / "b" / "file.bin"
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    assert os.listdir(path.parent) == ["file.bin"]
    write_atomically(tmp_path / "file", b"x")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_earlier_content_and_no_scratch_file(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_atomically(path, b"earlier")

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(io, "os", SimpleNamespace(**vars(os) | {call: fail}))
    with pytest.raises(OSError, match="disk is full"):
        write_atomically(path, b"later")
    assert path.read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_the_file_and_what_to_do(tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, "full")

    monkeypatch.setattr(io, "os", SimpleNamespace(**vars(os) | {"fsync": fail}))
    with pytest.raises(OSError, match=rf"no space is left for {tmp_path}/file: free some, and resume"):
        write_atomically(tmp_path / "file", b"later")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", ["{", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), ""])
def test_a_file_that_is_no_json_is_named(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(DamagedFileError, match=rf"{path} is damaged: it is no JSON"):
        read_json(path)


def test_json_is_read_back_with_paths_as_text_and_ends_with_a_line_break(tmp_path):
    content = {"a": [1, 2.5, None], "b": {"c": "text"}}
    write_json(tmp_path / "file.json", content)
    assert read_json(tmp_path / "file.json") == content
    assert (tmp_path / "file.json").read_text().endswith("}\n")
    write_json(tmp_path / "file.json", {"folder": Path("a/b")})
    assert json.loads((tmp_path / "file.json").read_text()) == {"folder": "a/b"}


def test_the_hash_of_a_file_is_sha256_of_its_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    assert file_hash(tmp_path / "file") == hashlib.sha256(b"content").hexdigest()


def test_the_home_is_the_configured_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FED_RLHF_HOME", str(tmp_path / "home"))
    assert paths.home() == tmp_path / "home"


def test_the_home_is_the_checkout_where_none_is_configured(monkeypatch):
    monkeypatch.delenv("FED_RLHF_HOME", raising=False)
    assert paths.in_checkout()
    assert paths.home() == paths.PACKAGE


def test_the_home_of_an_installed_package_is_the_working_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("FED_RLHF_HOME", raising=False)
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "site-packages")
    monkeypatch.chdir(tmp_path)
    assert not paths.in_checkout()
    assert paths.home() == tmp_path


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, ".cache/fed-rlhf/backbone"),
        ({"XDG_CACHE_HOME": "{}/caches"}, "caches/fed-rlhf/backbone"),
        ({"FED_RLHF_HOME": "{}/home"}, "home/data/backbone"),
        ({"FED_RLHF_HOME": "{}/home", "FED_RLHF_BACKBONES": "{}/own"}, "own"),
    ],
)
def test_the_backbones_of_an_installed_package_are_in_the_users_cache(
    monkeypatch, tmp_path, variables, folder
):
    for name in ("FED_RLHF_HOME", "FED_RLHF_BACKBONES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "site-packages")
    assert paths.backbone_root() == tmp_path / folder


def test_the_backbones_of_a_checkout_are_in_it(monkeypatch):
    for name in ("FED_RLHF_HOME", "FED_RLHF_BACKBONES"):
        monkeypatch.delenv(name, raising=False)
    assert paths.backbone_root() == paths.PACKAGE / "data" / "backbone"


def test_the_folder_of_backbones_is_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FED_RLHF_BACKBONES", "data/backbone")
    assert paths.backbone_root() == tmp_path / "data" / "backbone"


@pytest.mark.parametrize("content", ["null", "[]", "{", ""])
def test_a_file_without_a_json_object_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DamagedFileError, match=rf"{tmp_path}/run.json is damaged"):
        read_mapping(tmp_path / "run.json")
