"""Source `shp`, on small files of the hub set's schema written for these tests."""

import json
from itertools import chain, product

import pytest

from components.config import DataConfig
from components.data import partition, sources
from components.data.prepare import prepare
from components.data.records import DataError
from components.data.sources import shp
from components.recipes import load_recipe
from tasks.data import prepare_data
from tests.support.sources import read_jsonl, write_jsonl

UNCOUNTED = {"max_tokens": None}


def raw(fixtures, split):
    return read_jsonl(fixtures / "shp" / f"{split}.jsonl")


def all_raw(fixtures):
    return list(chain(*(raw(fixtures, split) for split in ("train", "validation", "test"))))


def written(folder, **splits):
    for split, rows in splits.items():
        write_jsonl(folder / f"{split}.jsonl", rows)
    return str(folder)


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


def test_label_1_means_that_answer_a_won_and_label_0_that_b_did(fixtures):
    """The paper's published code reads it the other way round."""
    rows = {(r["history"], r["human_ref_A"], r["human_ref_B"]): r for r in all_raw(fixtures)}
    assert {r["labels"] for r in rows.values()} == {0, 1}
    best = {frozenset((a, b)): (a if r["score_A"] > r["score_B"] else b) for (_, a, b), r in rows.items()}
    data = load(fixtures, align_share=0.0)
    pairs = [*data.pairs, *data.judge]
    assert len(pairs) == 49
    assert all(pair.chosen == best[frozenset((pair.chosen, pair.rejected))] for pair in pairs)
    assert sum("Check the temperature" in p.chosen or "Halve it" in p.chosen for p in pairs) == 48, (
        "the helpful answers won, in whichever column they stood"
    )


def test_a_label_that_contradicts_its_scores_is_dropped_and_counted(fixtures):
    pairs, dropped = shp.read_votes(raw(fixtures, "train"), "train", "train")
    assert dropped == {
        "label that the scores do not bear out": 1,
        "both answers the same": 1,
        "empty text": 1,
    }
    assert len(pairs) + sum(dropped.values()) == 29
    assert not any("label of this row lie" in vote.pair.prompt for vote in pairs)
    equal = raw(fixtures, "test")[0] | {"score_A": 8, "score_B": 8}
    _, dropped = shp.read_votes([*raw(fixtures, "test"), equal], "test", "test")
    assert dropped == {"label that the scores do not bear out": 1}


def test_a_file_whose_labels_are_exchanged_is_refused(fixtures):
    exchanged = [row | {"labels": 1 - row["labels"]} for row in raw(fixtures, "test")]
    with pytest.raises(
        DataError,
        match=r"test: in 12 of 12 rows .*; labels must be 1 where answer A has the higher score",
    ):
        shp.read_votes(exchanged, "test", "test")


def test_the_domain_is_the_subreddit_without_its_splits_name(fixtures):
    assert {row.domain for row in load(fixtures).pairs} == {"askbaking", "askphysics", "legaladvice"}


def test_the_hubs_splits_are_ours_and_rows_have_the_records_columns(fixtures):
    data = load(fixtures, align_share=0.0, judge_share=0.0)
    assert all(pair.group and pair.margin for pair in data.pairs)
    home = {row["history"].strip(): row["domain"].rpartition("_")[2] for row in all_raw(fixtures)}
    assert {(p.prompt, p.split) for p in data.pairs} == {(p.prompt, home[p.prompt]) for p in data.pairs}
    assert {p.split for p in data.pairs} == {"train", "validation", "test"}
    assert len(data.judge) == 0
    assert {p.margin for p in data.pairs} <= {row["score_ratio"] for row in all_raw(fixtures)}


def test_a_question_that_is_asked_in_two_posts_is_one_group_and_stays_held_out(fixtures, tmp_path):
    data = load(fixtures, align_share=0.0)
    assert (
        data.dropped["question also in a held-out split"] == 1
    )  # 'again' asks what askp6 asks, in other case and spacing
    assert not any("Ask the other post" in p.chosen for p in data.pairs)
    train = raw(fixtures, "train")
    twice = [row | {"post_id": "other", "human_ref_A": row["human_ref_A"] + " Really."} for row in train[:2]]
    path = written(
        tmp_path, train=[*train, *twice], validation=raw(fixtures, "validation"), test=raw(fixtures, "test")
    )
    pairs = sources.load(DataConfig(source="shp", path=path, options=UNCOUNTED), 0).pairs
    assert {p.group for p in pairs if p.prompt == twice[0]["history"]} == {"askb0"}


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


@pytest.mark.slow
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


def test_a_share_of_the_test_questions_are_the_servers_and_the_rest_are_evaluated_on(fixtures):
    data = load(fixtures, align_share=0.5)
    align, test = ({p.prompt for p in data.prompts if p.split == split} for split in ("align", "test"))
    held_out = {row["history"] for row in raw(fixtures, "test")}
    assert align
    assert test
    assert align | test == held_out
    assert not align & test
    assert {p.prompt for p in data.pairs if p.split == "test"} == test
    assert data.dropped["question given to the server"] == 2 * len(align)
    every = load(fixtures, align_share=1.0)
    assert {row.split for row in every.prompts} == {"align"}
    assert len(every.prompts) == 6
    assert "test" not in [row.split for row in every.pairs]


def test_the_first_reference_of_a_prompt_is_the_answer_with_the_highest_score(fixtures):
    data = load(fixtures, align_share=0.0)
    rows = raw(fixtures, "test")
    for prompt in data.prompts:
        scores = {
            r[f"human_ref_{x}"]: r[f"score_{x}"]
            for r, x in product(rows, "AB")
            if r["history"] == prompt.prompt
        }
        assert len(prompt.references) == 2
        assert prompt.references[0] == max(scores, key=scores.get)


def test_the_judges_pairs_are_of_validation_questions_that_no_client_has(fixtures):
    data = load(fixtures, judge_share=0.5)
    validation = {row["history"] for row in raw(fixtures, "validation")}
    judged = {p.prompt for p in data.judge}
    theirs = {p.prompt for p in data.pairs}
    assert judged
    assert judged < validation
    assert not judged & theirs
    assert validation - judged <= theirs
    assert {row.client_id for row in data.judge} == {"judge"}
    assert {row.split for row in load(fixtures, judge_share=1.0).judge} == {"train", "test"}


@pytest.mark.slow
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


def test_the_three_splits_are_loaded_from_the_hub_without_remote_code(fixtures, monkeypatch):
    import datasets

    requests = []

    def load_dataset(name, config=None, **more):
        requests.append((name, config, more))
        return raw(fixtures, more["split"])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = sources.load(DataConfig(source="shp", revision="abc", options=UNCOUNTED), 0)
    assert hub.pairs == load(fixtures).pairs
    assert requests == [
        ("stanfordnlp/SHP", None, {"split": split, "revision": "abc", "data_dir": None})
        for split in ("train", "validation", "test")
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"labels": 2}, r"here, row 1: column 'labels' must be 1 \(answer A won\) or 0 .*, but is 2"),
        ({"score_A": "many"}, r"row 1: column 'score_A' must be a number, but is 'many'"),
        ({"post_id": ""}, r"row 1: column 'post_id' is empty"),
        ({"history": 7}, r"row 1: column 'history' must be text, but is 7"),
    ],
)
def test_an_error_of_a_row_names_its_place_and_column(fixtures, change, sentence):
    with pytest.raises(DataError, match=sentence):
        shp.read_votes([raw(fixtures, "test")[0] | change], "here", "test")


def test_a_missing_column_or_file_is_named(fixtures, tmp_path):
    row = raw(fixtures, "test")[0]
    del row["labels"]
    with pytest.raises(
        DataError, match=r"here, row 1: column 'labels' is missing; there are: post_id, domain"
    ):
        shp.read_votes([row], "here", "test")
    with pytest.raises(DataError, match=r"the file train .* is missing in this folder"):
        sources.load(DataConfig(source="shp", path=str(tmp_path)), 0)
    with pytest.raises(DataError, match=r"expected a folder with files train, validation, test"):
        sources.load(DataConfig(source="shp", path=str(fixtures / "pairs.jsonl")), 0)


@pytest.mark.slow
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
