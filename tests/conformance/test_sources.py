"""Every source of pairs, source of prompts and question set, on a handful of rows.

A folder <kind>/<name>, or <kind>/<name>.<variant>, has:

    data.yaml       the section of a recipe that reads the rows
    rows/           the rows, as files of the hub or of the data set's own form; for embedded sources the
                    files of the package. A path to parquet stands for the JSON lines of that name. A variant
                    without rows has those of the name.
    pairs.json      what is made of them (prompts.json, questions.json), without empty values, and without
                    groups that are the prompt
    hub.yaml        what is asked of the hub where data.yaml has no path, and the rows that are its answer
    refusals.yaml   a list of changes, and what follows:
                        file      of the rows; the first one if it is not given
                        change    of a copy of the first row, which is appended; MISSING removes a value
                        content   of the file, in place of a change
                        section   change of data.yaml
                        error     regular expression of what follows the place of the row; with ^ of all
                        dropped   in place of an error, the reason by which the row is left out and counted
"""

import csv
import importlib.util
import json
import shutil
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import yaml

from components.config import DataConfig, PromptsConfig, QuestionsConfig, UserError, check_section
from components.config.data import PROMPT_SOURCES, SOURCES
from components.data.questions import load_section
from components.data.questions.question_set import QUESTION_SETS
from components.data.sources import load, load_prompts
from tests.support.hub_data import write_parquet

HERE = Path(__file__).parent
MISSING = "MISSING"


def pairs(section):
    data = load(check_section(DataConfig, section, "data.yaml", "data"), 0)
    return {
        "pairs": [pair_values(pair) for pair in data.pairs],
        "judge": [pair_values(pair) for pair in data.judge],
        "prompts": [prompt_values(prompt) for prompt in data.prompts],
        "groups": data.true_clusters,
        "dropped": data.dropped,
        "warnings": list(data.warnings),
    }


def pair_values(pair):
    values = {name: value for name, value in asdict(pair).items() if value not in ("", None)}
    return {name: value for name, value in values.items() if (name, value) != ("group", pair.prompt)}


def prompt_values(prompt):
    return {name: value for name, value in asdict(prompt).items() if name != "prompt_id"}


def prompts(section):
    data = load_prompts(check_section(PromptsConfig, section, "data.yaml", "data"), "data", 0)
    return {"prompts": data.prompts, "references": data.answers_author, "dropped": data.dropped}


def questions(section):
    made, dropped = load_section(check_section(QuestionsConfig, section, "data.yaml", "data"), 0, "data")
    return {
        "questions": [asdict(question) | {"options": dict(question.options)} for question in made],
        "dropped": dropped,
    }


KINDS = {
    "sources": (SOURCES, pairs, "pairs.json"),
    "prompts": (PROMPT_SOURCES, prompts, "prompts.json"),
    "questions": (QUESTION_SETS, questions, "questions.json"),
}
FOLDERS = sorted(path for kind in KINDS for path in (HERE / kind).iterdir())


def home(folder):
    """The folder with the rows of a folder."""
    return folder if (folder / "rows").is_dir() else folder.with_suffix("")


HUB_FOLDERS = [folder for folder in FOLDERS if (home(folder) / "hub.yaml").is_file()]


def from_yaml(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def name_of(folder):
    return f"{folder.parent.name}/{folder.name}"


def refusals():
    for folder in FOLDERS:
        path = folder / "refusals.yaml"
        for number, entry in enumerate(from_yaml(path) if path.is_file() else (), 1):
            on_hub = "section" not in entry and "content" not in entry and folder in HUB_FOLDERS
            for way in ("file", "hub") if on_hub else ("file",):
                yield pytest.param(folder, entry, way, id=f"{name_of(folder)}-{number}-{way}")


def without_empty(value):
    """JSON without empty values of objects."""
    if isinstance(value, dict):
        return {name: without_empty(item) for name, item in value.items() if item not in ("", [], {}, None)}
    return [without_empty(item) for item in value] if isinstance(value, list | tuple) else value


def merged(value, change):
    if not isinstance(value, dict) or not isinstance(change, dict):
        return change
    result = value | {name: merged(value.get(name), item) for name, item in change.items()}
    return {name: item for name, item in result.items() if item != MISSING}


def read(path):
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as lines:
            return list(csv.DictReader(lines))
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def append(path, row):
    """Append a row to a file; returns the number of rows."""
    rows = [*read(path), row]
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(lines)}]" if path.suffix == ".json" else "\n".join(lines) + "\n")
    return len(rows)


class Place:
    """A working folder with the rows of a source, and the requests to a hub that has them."""

    def __init__(self, folder):
        self.folder = folder
        self.registry, self.read, self.expected_file = KINDS[folder.parent.name]
        self.section = from_yaml(folder / "data.yaml")
        self.hub = from_yaml(home(folder) / "hub.yaml") if folder in HUB_FOLDERS else []
        self.requests = []
        shutil.copytree(home(folder) / "rows", "rows")

    def load(self, change=None):
        section = merged(self.section, change or {})
        path = Path(str(section.get("path") or ""))
        if path.suffix == ".parquet":
            write_parquet(path, read(path.with_suffix(".jsonl")))
        return without_empty(self.read(section))

    def expected(self):
        return json.loads((self.folder / self.expected_file).read_text(encoding="utf-8"))

    def ask(self, **request):
        self.requests.append({key: value for key, value in request.items() if value is not None})
        same = ("name", "split", "file")
        answer = next(one for one in self.hub if all(one.get(key) == request.get(key) for key in same))
        return Path("rows", answer["rows"])


@pytest.fixture
def place(request, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    place = Place(request.param)

    def load_dataset(name, config=None, **more):
        return read(place.ask(name=name, config=config, **more))

    def hf_hub_download(name, file, **more):
        assert more.pop("repo_type") == "dataset"
        return str(place.ask(name=name, file=file, **more))

    find_spec = importlib.util.find_spec

    def spec(name, *more):
        if name in ("aclsum", "chitchat_dataset"):
            return ModuleSpec(name, None, origin=str(tmp_path / "rows" / "__init__.py"))
        return find_spec(name, *more)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(importlib.util, "find_spec", spec)
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_every_registered_name_has_a_folder(kind):
    assert {folder.name.partition(".")[0] for folder in (HERE / kind).iterdir()} == {*KINDS[kind][0].builtin}


@pytest.mark.parametrize("place", FOLDERS, indirect=True, ids=name_of)
def test_rows_become_what_is_expected(place):
    assert place.load() == place.expected()
    assert place.requests == []


@pytest.mark.parametrize("place", HUB_FOLDERS, indirect=True, ids=name_of)
def test_the_hub_is_asked_for_these_rows_without_remote_code(place):
    asked = [{key: value for key, value in one.items() if key != "rows"} for one in place.hub]
    assert place.load({"path": MISSING}) == place.expected()
    assert place.requests == asked
    place.requests = []
    place.load({"path": MISSING, "revision": "abc"})
    first = asked[0]["name"]
    assert place.requests == [one | {"revision": "abc"} if one["name"] == first else one for one in asked]


@pytest.mark.parametrize(("place", "entry", "way"), refusals(), indirect=["place"])
def test_a_changed_row_is_refused_or_counted(place, entry, way):
    file = Path("rows", entry.get("file") or min(path.name for path in Path("rows").iterdir()))
    where = ""
    if "content" in entry:
        file.parent.mkdir(exist_ok=True)
        file.write_text(entry["content"], encoding="utf-8")
    elif "change" in entry:
        number = append(file, merged(read(file)[0], entry["change"]))
        where = rf"{file.stem}\.\w+, (row|line) {number}: " if way == "file" else rf"\(.*\), row {number}: "
    section = entry.get("section", {}) | ({"path": MISSING} if way == "hub" else {})
    if "dropped" in entry:
        expected = place.expected()
        reason = entry["dropped"]
        counts = expected.get("dropped", {})
        expected["dropped"] = counts | {reason: counts.get(reason, 0) + 1}
        assert place.load(section) == expected
        return
    error = entry["error"]
    with pytest.raises(UserError, match=error if error.startswith("^") else where + error) as caught:
        place.load(section)
    assert len(str(caught.value).splitlines()) == 1
