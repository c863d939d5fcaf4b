"""Folders of shards, saved data sets, JSON lists, damaged files, and line ends, for all that reads files."""

import json

import datasets
import pytest

from components.config import DataConfig
from components.config.data import PromptsConfig
from components.data import sources
from components.data.questions import load_questions
from components.data.records import DataError
from components.data.rows import find_splits, normalize_line_ends, read_file
from components.data.sources.owners import file_source
from tests.support.hub_data import dialogues
from tests.support.layouts import LAYOUTS, own_rows, write_shards
from tests.support.sources import WHOLE, WHOLE_FILE, write_jsonl


def load(source, path, **values):
    options = WHOLE_FILE if source in ("jsonl", "parquet") else WHOLE
    return sources.load(DataConfig(source=source, path=str(path), options=options, **values), 0)


def prompts_of(loaded, split):
    return {row.prompt for row in loaded.pairs if row.split == split}


# --- layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_pairs_in_a_folder_keep_its_test_split_and_the_others_are_drawn(layout, tmp_path):
    LAYOUTS[layout](tmp_path / "pairs", {"train": own_rows(range(60)), "test": own_rows(range(58, 70))})
    loaded = load("parquet", tmp_path / "pairs")
    assert prompts_of(loaded, "test") == {f"Question {n}?" for n in range(58, 70)}
    assert prompts_of(loaded, "train") | prompts_of(loaded, "validation") == {
        f"Question {n}?" for n in range(58)
    }
    assert prompts_of(loaded, "validation")
    assert loaded.dropped == {"prompt also in a held-out split": 2}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_pairs_in_a_folder_of_one_split_are_those_of_one_file(layout, tmp_path):
    rows = own_rows(range(60))
    LAYOUTS[layout](tmp_path / "pairs", {"train": rows})
    file = write_jsonl(tmp_path / "pairs.jsonl", rows)
    loaded = load("parquet", tmp_path / "pairs")
    assert [row.split for row in loaded.pairs] == [row.split for row in load("jsonl", file).pairs]
    assert len(loaded.pairs) == 60


def test_a_split_for_validation_keeps_its_pairs_under_any_usual_name(tmp_path):
    splits = {"train": own_rows(range(50)), "dev": own_rows(range(50, 60)), "test": own_rows(range(60, 70))}
    LAYOUTS["save_to_disk"](tmp_path / "pairs", splits)
    loaded = load("parquet", tmp_path / "pairs")
    assert prompts_of(loaded, "validation") == {f"Question {n}?" for n in range(50, 60)}
    assert prompts_of(loaded, "train") == {f"Question {n}?" for n in range(50)}


def test_rows_without_splits_are_read_whole_from_saved_sets_lists_and_folders(tmp_path):
    rows = own_rows(range(60))
    datasets.Dataset.from_list(rows).select(range(59, -1, -1)).save_to_disk(tmp_path / "saved")
    write_shards(tmp_path / "files", "pairs", rows, count=3)
    assert read_file(tmp_path / "saved") == rows[::-1]
    assert read_file(tmp_path / "files") == rows
    assert len(load("parquet", tmp_path / "saved").pairs) == 60
    assert len(load("parquet", tmp_path / "files").pairs) == 60
    (tmp_path / "pairs.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines").mkdir()
    write_jsonl(tmp_path / "lines" / "train.jsonl", rows)
    assert len(load("jsonl", tmp_path / "pairs.json").pairs) == 60
    assert len(load("jsonl", tmp_path / "lines").pairs) == 60


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hub_source_reads_the_layouts_of_the_hub_and_of_datasets(layout, tmp_path):
    LAYOUTS[layout](tmp_path / "hh", {"train": dialogues(range(20)), "test": dialogues(range(20, 25))})
    loaded = load("hh-rlhf", tmp_path / "hh")
    assert [row.split for row in loaded.pairs].count("test") == 5
    assert len(loaded.pairs) == 25


def test_a_hub_source_reads_one_saved_data_set_as_its_training_split(tmp_path):
    datasets.Dataset.from_list(dialogues(range(40))).save_to_disk(tmp_path / "hh")
    loaded = load("hh-rlhf", tmp_path / "hh")
    assert len(loaded.pairs) == 40
    assert {row.split for row in loaded.pairs} == {"train", "validation", "test"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shp_reads_its_splits_in_any_layout(layout, tmp_path, fixtures):
    splits = {name: read_file(fixtures / "shp" / f"{name}.jsonl") for name in ("train", "validation", "test")}
    LAYOUTS[layout](tmp_path / "shp", splits)
    options = {"max_tokens": None}
    loaded = sources.load(DataConfig(source="shp", path=str(tmp_path / "shp"), options=options), 0)
    local = sources.load(DataConfig(source="shp", path=str(fixtures / "shp"), options=options), 0)
    assert loaded.pairs == local.pairs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_server_prompts_and_questions_are_read_in_any_layout(layout, tmp_path):
    prompts = [{"prompt": f"Is {n} prime?"} for n in range(6)]
    LAYOUTS[layout](tmp_path / "prompts", {"train": prompts, "test": prompts[:1]})
    section = PromptsConfig(source="safe-rlhf", path=str(tmp_path / "prompts"))
    assert len(sources.load_prompts(section, "data.align_prompts", 0).prompts) == 6
    chats = [
        {"id": f"c{n}", "context": f"Say {n}.", "options": [f"{n}", "no"], "answer": "A"} for n in range(6)
    ]
    LAYOUTS[layout](tmp_path / "questions", {"chitchat": chats})
    questions, _ = load_questions("chitchat", str(tmp_path / "questions"))
    assert len(questions) == 6


# --- what cannot be read


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path / "pairs", "train", own_rows(range(60)), count=3)
    (tmp_path / "pairs" / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(DataError, match=r"1 of 3 shards are missing, such as train-00001"):
        load("parquet", tmp_path / "pairs")


def test_saved_splits_of_other_names_are_refused_and_one_of_them_can_be_named(tmp_path):
    LAYOUTS["save_to_disk"](tmp_path / "pairs", {"train_prefs": own_rows(range(60)), "train_sft": [{"a": 1}]})
    with pytest.raises(DataError, match=r"are train_prefs, train_sft.*give the folder of one.*train_prefs"):
        load("parquet", tmp_path / "pairs")
    assert len(load("parquet", tmp_path / "pairs" / "train_prefs").pairs) == 60


def test_a_file_beside_those_of_the_splits_is_named(tmp_path):
    write_shards(tmp_path, "train", own_rows(range(10)))
    write_shards(tmp_path, "extra", own_rows(range(10, 20)))
    with pytest.raises(DataError, match=r"extra lies beside train, but is the name of no split"):
        find_splits(tmp_path)


@pytest.mark.parametrize(
    "names", [["a.jsonl", "b.jsonl.zst"], ["a.jsonl", "b.NDJSON"], ["train.csv", "train.tsv"]]
)
def test_rows_beside_others_whose_ending_is_not_read_are_named(names, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(
        DataError, match=f"{names[1]} has rows that would not be read, since its name ends with"
    ):
        read_file(tmp_path)
    with pytest.raises(DataError, match=f"{names[1]} has rows that would not be read"):
        [read_file(path) for path in find_splits(tmp_path).values()]


TWICE = {
    "two kinds": ["train.csv", "train.jsonl"],
    "plain and packed": ["train.jsonl", "train.jsonl.gz"],
    "shards": ["train-00000-of-00001.jsonl", "train.jsonl"],
    "a folder": ["train/more.jsonl", "train.jsonl"],
    "the folder data": ["train.jsonl", "data/train.jsonl"],
    "two names": ["train.jsonl", "training.jsonl"],
    "two names of validation": ["valid.jsonl", "dev.jsonl"],
}


@pytest.mark.parametrize("layout", TWICE)
def test_a_split_that_is_there_twice_is_named(layout, tmp_path):
    for name in [*TWICE[layout], "test.jsonl"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(
        DataError, match=r"the split \w+ is there twice, as .* and as .*of which one would be"
    ):
        find_splits(tmp_path)


def test_a_second_part_of_a_split_with_a_name_of_its_own_is_named(tmp_path):
    for name in ("train.jsonl", "train.part2.jsonl", "test.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"train\.part2 lies beside train, test, but is the name of no split"):
        find_splits(tmp_path)


HARMLESS = [
    *[
        "README.md",
        "LICENSE",
        ".gitattributes",
        "dataset_infos.json",
        "checksums.sha256",
        "train.parquet.md5",
    ],
    *[
        "notes.txt",
        "train.meta.json",
        "stats.tsv",
        "cache-0123abcd.arrow",
        "figure.png",
        "images.zip",
        "load.py",
        "data/README.md",
        ".cache/huggingface/train.jsonl.zst",
    ],
    *["_temporary/train.parquet", ".train.csv.swp", "train.jsonl.bak", "data.parquet.dvc", "images/1.jpg"],
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_files_beside_rows_change_nothing(layout, tmp_path):
    splits = {"train": own_rows(range(60)), "test": own_rows(range(60, 70))}
    for folder in ("alone", "beside"):
        LAYOUTS[layout](tmp_path / folder, splits)
    for name in HARMLESS:
        (tmp_path / "beside" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "beside" / name).write_text("x")
    assert load("parquet", tmp_path / "beside") == load("parquet", tmp_path / "alone")
    assert file_source(tmp_path / "beside").name == "parquet"


def test_endings_in_capitals_are_read(tmp_path):
    write_shards(tmp_path, "pairs", own_rows(range(60)), count=1)
    (tmp_path / "pairs-00000-of-00001.parquet").rename(tmp_path / "PAIRS.PARQUET")
    write_jsonl(tmp_path / "p.JSONL", own_rows(range(60)))
    assert len(load("jsonl", tmp_path / "p.JSONL").pairs) == 60
    (tmp_path / "p.JSONL").unlink()
    assert len(load("parquet", tmp_path).pairs) == 60
    (tmp_path / "PAIRS.PARQUET").rename(tmp_path / "train.PARQUET")
    assert list(find_splits(tmp_path)) == ["train"]


@pytest.mark.parametrize(
    ("names", "warned"),
    [
        (["pairs_train.jsonl", "pairs_test.jsonl"], True),
        (["train-1.jsonl", "test-1.jsonl"], True),
        (["TRAIN.jsonl", "TEST.jsonl"], True),
        (["train_pairs/a.jsonl", "test_pairs/a.jsonl"], True),
        (["train-1.jsonl", "train-2.jsonl"], False),
        (["latest.jsonl", "devices.jsonl"], False),
        (["train.jsonl", "test.jsonl"], False),
    ],
)
def test_names_that_hold_that_of_a_split_are_a_warning(names, warned, tmp_path):
    for n, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, own_rows(range(30 * n, 30 * n + 30)))
    found = load("jsonl", tmp_path).warnings
    assert (
        any("and their splits are drawn, although a split is in their names" in text for text in found)
        == warned
    )


def test_a_folder_without_rows_and_one_of_several_kinds_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no file of rows.*save_to_disk"):
        load("parquet", tmp_path / "empty")
    write_shards(tmp_path / "both", "a", own_rows(range(10)))
    write_jsonl(tmp_path / "both" / "b.jsonl", own_rows(range(10)))
    with pytest.raises(DataError, match=r"files of several kinds \(\.jsonl, \.parquet\)"):
        load("parquet", tmp_path / "both")


def test_a_folder_of_another_kind_of_files_names_the_source(tmp_path):
    write_shards(tmp_path, "train", own_rows(range(10)))
    with pytest.raises(DataError, match=r"source jsonl reads .* here are \.parquet.*another data\.source"):
        load("jsonl", tmp_path)


def whole_parquet(path):
    datasets.Dataset.from_list(own_rows(range(300))).to_parquet(path)
    return path.read_bytes()


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "wrong magic": lambda content: b"XXXX" + content[4:-4] + b"XXXX",
    "empty": lambda content: b"",
    "pages overwritten": lambda content: content[:8] + b"\xff" * 200 + content[208:],
    "a page in the middle overwritten": lambda content: content[:900] + b"\x00" * 400 + content[1300:],
    "footer overwritten": lambda content: content[:-300] + b"\x07" * 292 + content[-8:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_parquet_file_is_named_in_one_sentence(damage, tmp_path):
    path = tmp_path / "damaged.parquet"
    path.write_bytes(DAMAGES[damage](whole_parquet(path)))
    with pytest.raises(DataError, match=r"damaged\.parquet: this cannot be read as a parquet file") as error:
        load("parquet", path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_damaged_saved_data_set_is_named_in_one_sentence(name, tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(own_rows(range(60))).save_to_disk(folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 3])
    with pytest.raises(DataError, match=r"saved: this cannot be read as a data set that save_to_disk wrote"):
        load("parquet", folder)


def test_an_arrow_file_of_a_saved_data_set_names_its_folder(tmp_path):
    datasets.Dataset.from_list(own_rows(range(60))).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"of a saved data set, give the folder"):
        load("parquet", tmp_path / "saved" / "data-00000-of-00001.arrow")


# --- line ends


def test_carriage_returns_become_line_feeds_in_all_texts_of_a_row():
    row = {"a": "1\r\n\r\n2\r3\n4", "b": [{"c": "x\r\ny"}], "d": None, "e": 1.5, "f": "\u2028\u2029\x85"}
    assert normalize_line_ends(row) == {
        "a": "1\n\n2\n3\n4",
        "b": [{"c": "x\ny"}],
        "d": None,
        "e": 1.5,
        "f": "\u2028\u2029\x85",
    }


WINDOWS = {"prompt": "One.\r\nTwo.\rThree.", "chosen": "Yes.\r\n\r\nIndeed.", "rejected": "No.\rNever."}


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json", "pairs.parquet", "saved"])
def test_files_of_any_kind_are_read_with_one_line_end(name, tmp_path):
    path = tmp_path / name
    if name == "pairs.parquet":
        datasets.Dataset.from_list([WINDOWS]).to_parquet(path)
    elif name == "saved":
        datasets.Dataset.from_list([WINDOWS]).save_to_disk(path)
    else:
        path.write_bytes(json.dumps([WINDOWS] if name.endswith(".json") else WINDOWS).encode() + b"\r\n")
    assert read_file(path) == [
        {"prompt": "One.\nTwo.\nThree.", "chosen": "Yes.\n\nIndeed.", "rejected": "No.\nNever."}
    ]


def test_dialogues_with_windows_line_ends_are_split_like_others(tmp_path):
    rows = [{name: text.replace("\n", "\r\n") for name, text in row.items()} for row in dialogues(range(20))]
    loaded = load("hh-rlhf", write_jsonl(tmp_path / "windows.jsonl", rows))
    local = load("hh-rlhf", write_jsonl(tmp_path / "unix.jsonl", dialogues(range(20))))
    assert loaded.pairs == local.pairs


def test_rows_of_the_hub_are_read_with_one_line_end(tmp_path, monkeypatch):
    from components.data.rows import from_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_shards(tmp_path / "me" / "mine" / "data", "train", [WINDOWS] * 2, count=1)
    rows, where = from_hub("me/mine", split="train")
    assert [row["rejected"] for row in rows] == ["No.\nNever."] * 2
    assert where == "me/mine (split train)"


# --- own groups


def test_own_groups_with_a_repeated_prompt_are_in_one_split(tmp_path):
    rows = [row | {"group": f"ticket-{n}"} for n, row in enumerate(own_rows(range(200)))]
    for n in range(0, 200, 10):
        rows[n]["prompt"] = ("Hi", " hi ", "Thanks")[n % 3]
    loaded = load("jsonl", write_jsonl(tmp_path / "tickets.jsonl", rows))
    splits = {}
    for row in loaded.pairs:
        splits.setdefault(" ".join(row.prompt.split()).casefold(), set()).add(row.split)
    assert len(loaded.pairs) == 200
    assert set(map(len, splits.values())) == {1}
    assert set.union(*splits.values()) == {"train", "validation", "test"}
