"""Source `shp`, on small files of the hub set's schema written for these tests."""

import json

import pytest

from components.config import DataConfig
from components.data import partition, sources
from components.data.prepare import prepare
from components.data.records import DataError
from components.data.sources import shp
from components.recipes import load_recipe
from tasks.data import prepare_data
from tests.support.sources import read_jsonl

UNCOUNTED = {"max_tokens": None}


def raw(fixtures, split):
    return read_jsonl(fixtures / "shp" / f"{split}.jsonl")


def load(fixtures, seed=0, **options):
    return sources.load(
        DataConfig(source="shp", path=str(fixtures / "shp"), options=UNCOUNTED | options), seed
    )


@pytest.fixture
def dirichlet(fixtures):
    """A recipe's data section: three clients over the fixture's three domains."""
    return {
        "source": "shp",
        "path": str(fixtures / "shp"),
        "partition": "dirichlet",
        "clients": 3,
        "alpha": 0.3,
        "options": UNCOUNTED | {"align_share": 0.0},
    }


def test_no_question_is_with_two_clients_or_in_two_splits(fixtures):
    data = load(fixtures, align_share=0.0)
    prompts, groups, splits = zip(*((row.prompt, row.group, row.split) for row in data.pairs), strict=True)
    posts = dict(zip(prompts, groups, strict=True))
    assert len(posts) == len(set(posts.values())) > 15
    for seed in range(5):
        owners = partition.dirichlet([row.domain for row in data.pairs], groups, 4, 0.3, seed)
        for keys in (prompts, groups):
            assert (
                len(set(zip(keys, owners, strict=True)))
                == len(set(zip(keys, splits, strict=True)))
                == len(posts)
            )


def test_every_raw_row_becomes_a_pair_or_is_counted(dirichlet, fixtures, tmp_path):
    report = prepare(
        DataConfig(**dirichlet | {"options": UNCOUNTED | {"align_share": 0.5}}), 0, tmp_path / "data"
    )
    rows = report.rows
    assert rows.pairs + rows.judge + sum(rows.dropped.values()) == sum(
        len(raw(fixtures, split)) for split in ("train", "validation", "test")
    )
    assert report.partition_train == partition.summarize(
        [row["train"] for row in json.loads((tmp_path / "data" / "clients.json").read_text()).values()]
    )
    assert {outcome.expectation: outcome.success for outcome in report.expectations.expectations}[
        "no group in two clients"
    ]
    assert rows.pairs > report.partition_train.samples == report.splits["train"] == 25


def test_pairs_of_more_tokens_than_allowed_are_left_out_in_every_split_and_counted(fixtures):
    longest = {"tokenizer": "tiny-random", "align_share": 0.0}  # a token is a byte, but for " A" and " B"
    assert load(fixtures, max_tokens=4000, **longest).dropped.get("over 4000 tokens") is None
    cut = load(fixtures, max_tokens=2000, **longest)
    assert cut.dropped["over 2000 tokens"] == 1
    assert not any("so long" in p.prompt for p in cut.pairs)

    def tokens(*texts):
        return sum(len(text) - text.count(" A") - text.count(" B") for text in texts)

    sizes = sorted(
        tokens(shp.FRAME, p.prompt, p.chosen, p.rejected)
        for p in load(fixtures, align_share=0.0, judge_share=0.0).pairs
    )
    limit = sizes[len(sizes) // 2]
    some = load(fixtures, max_tokens=limit, judge_share=0.0, **longest)
    assert len(some.pairs) == sum(size <= limit for size in sizes) < len(sizes)
    assert some.dropped[f"over {limit} tokens"] == sum(size > limit for size in sizes)


def test_an_unavailable_tokenizer_is_one_sentence_with_the_alternatives(fixtures, monkeypatch):
    import transformers

    def unreachable(*_, **__):
        raise OSError("We couldn't connect to the hub\nand a long tail")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(
        DataError,
        match=r"data.options.tokenizer: .*'google/flan-t5-xl' .*the hub.* 'embedded'.*; .*max_tokens to null",
    ):
        sources.load(DataConfig(source="shp", path=str(fixtures / "shp")), 0)


def test_the_shp_recipe_prepares_from_local_files(fixtures, tmp_path):
    recipe = load_recipe(
        "qa/shp",
        [
            f"data.path={fixtures / 'shp'}",
            "data.options={max_tokens: 2000, tokenizer: tiny-random, align_share: 0.0, judge_share: 1.0}",
            f"data.align_prompts.path={fixtures / 'prompts' / 'safe_rlhf.jsonl'}",
            f"data.test_prompts.path={fixtures / 'prompts' / 'alpaca_eval.json'}",
            "data.clients=3",
            "federation.clients_per_round=2",
            *(f"{model}.backbone.name=tiny-random" for model in ("selector", "evaluation.judge.selector")),
        ],
    )
    report = prepare_data.fn(recipe, tmp_path / "data", tmp_path / "trees")
    assert report.rows.prompts == {"align": 4, "test": 5}
    assert report.rows.dropped["over 2000 tokens"] == 1
    assert report.partition_train.samples == 24
    assert report.partition.clients == 3
