"""What all sources have in common, and what a handful of rows (tests/conformance) cannot show."""

import subprocess
import sys

import pytest

from components.config import DataConfig
from components.config.data import PROMPT_SOURCES, SOURCES
from components.data import sources
from components.data.data_report import PartitionSummary
from components.data.prepare import prepare
from components.data.records import DataError, pairs_frame
from components.data.rows import read_file
from tests.support.hub_data import comparisons, posts
from tests.support.sources import WHOLE_FILE, data_config, write_jsonl


@pytest.mark.pipeline
def test_checking_a_data_section_imports_no_heavy_library():
    heavy = "'torch', 'datasets', 'pandas', 'pyarrow', 'great_expectations', 'aclsum', 'chitchat_dataset'"
    code = (
        "import sys; from components.config import DataConfig; DataConfig(source='aclsum');"
        f" print([name for name in ({heavy}) if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", SOURCES.names())
def test_a_registered_source_is_a_source(name):
    assert issubclass(SOURCES.load(name), sources.Source)


@pytest.mark.parametrize("name", PROMPT_SOURCES.names())
def test_a_registered_prompt_source_is_a_prompt_source(name):
    assert issubclass(PROMPT_SOURCES.load(name), sources.PromptSource)


def test_every_registered_source_is_in_the_table_of_the_package():
    listed = {line.split()[0] for line in sources.__doc__.splitlines() if line.startswith("    ")}
    assert listed == {*SOURCES.builtin, *PROMPT_SOURCES.builtin}


def test_options_are_of_the_source_that_the_section_names():
    data = data_config(source="tldr", options={"judge_workers": 0})
    assert type(data.options) is SOURCES.load("tldr")
    assert data.options.judge_workers == 0
    assert data.options.align_share == 0.4


def test_a_section_with_its_defaults_is_the_same_section():
    data = data_config(source="mixture", options={"sources": [{"source": "shp"}, {"source": "webgpt"}]})
    assert data_config(**data.model_dump(mode="json")) == data


def write_tldr(folder, **parts):
    for name, rows in {"posts": posts(range(9)), "posts_test": posts(range(9, 12)), **parts}.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    return str(folder)


def test_sixty_percent_of_the_tldr_posts_are_reserved_for_supervised_fine_tuning(tmp_path):
    rows = posts(range(12, 1012))
    used = []
    for order in (rows, rows[::-1]):
        path = write_tldr(tmp_path, comparisons=comparisons(["w0", "w1"], 1), posts=order)
        data = sources.load(DataConfig(source="tldr", path=path, options={"judge_workers": 1}), 0)
        used.append({prompt.prompt for prompt in data.prompts if prompt.split == "align"})
        assert data.dropped["post reserved for supervised fine-tuning"] == 1000 - len(used[-1])
    assert abs(len(used[0]) - 400) < 50
    assert used[0] == used[1]


def test_all_53_tldr_workers_are_clients_if_the_judge_is_trained_on_the_validation_part(tmp_path):
    """Table 5: one of the workers has a single comparison, and is a client nevertheless."""
    train = comparisons([f"w{n:02d}" for n in range(1, 53)], 4) + comparisons(["w00"], 1, start=1000)
    validation = comparisons(["w01", "stranger", "guest"], 12, start=2000)
    path = write_tldr(tmp_path, comparisons=train, comparisons_validation=validation)
    options = {"judge_workers": 0, "align_share": 1.0}
    report = prepare(DataConfig(source="tldr", path=path, clients=53, options=options), 0, tmp_path / "data")
    assert report.partition == PartitionSummary(samples=209, clients=53, max=4, min=1, std=0.41)
    assert report.rows.left_out == {}
    assert report.rows.judge == 24


def test_an_unreachable_hub_is_one_sentence_with_the_remedy(monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nand a long tail")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DataError,
        match=r"Hugging Face hub: Couldn't reach the Hub\. Give a local copy as data.path",
    ):
        sources.load(DataConfig(source="hh-rlhf"), 0)


def test_own_pairs_of_three_columns_are_divided_among_clients_judge_and_server(fixtures):
    data = sources.load(DataConfig(source="jsonl", path=str(fixtures / "pairs.jsonl")), 0)
    assert len(data.pairs) + len(data.judge) + data.dropped["prompt given to the server"] == 60
    assert {row.client_id for row in data.judge} == {"judge"}
    assert {row.client_id for row in data.pairs} == {"ann", "bob", "cem"}
    tested = {r.prompt for r in data.pairs if r.split == "test"}
    by_split = {s: {r.prompt for r in data.prompts if r.split == s} for s in ("align", "test")}
    assert by_split["test"] == tested
    assert by_split["align"]
    assert not by_split["align"] & {row.prompt for row in (*data.pairs, *data.judge)}
    prompt = next(r for r in data.prompts if r.split == "test")
    assert set(prompt.references) == {r.chosen for r in data.pairs if r.prompt == prompt.prompt}


def test_a_repeated_judgment_is_a_row_with_its_own_id(tmp_path):
    rows = [{"prompt": f"q{i // 2}", "chosen": "This.", "rejected": "That."} for i in range(40)]
    data = sources.load(
        DataConfig(
            source="jsonl",
            path=write_jsonl(tmp_path / "p.jsonl", rows),
            options=WHOLE_FILE,
        ),
        0,
    )
    ids = pairs_frame(data.pairs, "jsonl")["pair_id"]
    assert len(data.pairs) == ids.nunique() == 40


def test_json_that_python_cannot_parse_is_named_with_file_and_line(tmp_path):
    value, reason = "7" * 5000, r"Exceeds the limit \(4300 digits\) .*"
    row = f'{{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {value}}}'
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a", "chosen": "b", "rejected": "c"}}\n{row}\n')
    with pytest.raises(
        DataError,
        match=rf"p.jsonl, line 2: this JSON cannot be read \({reason}\); expected one object a line",
    ):
        read_file(tmp_path / "p.jsonl")
    (tmp_path / "p.json").write_text(f"[{row}]")
    with pytest.raises(
        DataError, match=rf"p.json: this JSON cannot be read \({reason}\); expected a list of objects"
    ):
        read_file(tmp_path / "p.json")
